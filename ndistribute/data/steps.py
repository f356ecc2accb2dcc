"""Steps: what each replica of a worker gets when the consumer asks for the next batch.

Either a worker takes its slices of every global batch, or it goes through shards of its own and
deals pieces of their batches to its replicas. Each step comes with the positions that it reaches,
so what is made ahead never enters the state of whoever consumes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ndistribute import tree
from ndistribute.data.elements import Element, leading_length
from ndistribute.data.pipeline import Node, Pass
from ndistribute.data.sharding import balanced_slices, replica_slices
from ndistribute.device import Device, copy_to
from ndistribute.values import PerReplica

__all__ = [
    "BATCH_IT",
    "COMPLETE_IT",
    "CutBatches",
    "DealPieces",
    "Position",
    "Step",
    "empty_step",
    "template_of",
]

BATCH_IT = (
    "Elements are batches of the global batch size, cut over the replicas: call "
    "dataset.batch(global_batch_size) before distribute_dataset."
)

COMPLETE_IT = (
    "The last step is completed with empty batches, so elements must be batches: call "
    "dataset.batch(per_replica_batch_size)."
)


class Position(NamedTuple):
    """How much of a shard has been consumed.

    Args:
        batches: whole batches.
        rows: rows of the next batch.
        left: into how many pieces the other rows of that batch are still to be cut.
        of: how many pieces the batch had.
    """

    batches: int = 0
    rows: int = 0
    left: int = 0
    of: int = 0


class Step(NamedTuple):
    """What the replicas get, and the position that each shard which was touched is at then."""

    value: Any
    reached: Mapping[int, Position]


@dataclass(frozen=True)
class CutBatches:
    """Steps that are this worker's slices of every global batch.

    Args:
        devices: of this worker's replicas.
        replica_counts: replicas of each worker.
        worker_index: this worker.
    """

    devices: tuple[Device, ...]
    replica_counts: tuple[int, ...]
    worker_index: int = 0

    def count(self, batches: int) -> int:
        """Return how many steps there are."""
        return batches

    def iterate(self, node: Node, passes: Mapping[int, tuple[Pass, Position]]) -> Iterator[Step]:
        """Yield the steps from a position on."""
        for shard, (current, position) in passes.items():
            source = node.iterate(current, position.batches)
            for number, batch in enumerate(source, position.batches + 1):
                leaves = tree.flatten(batch)
                length = leading_length(leaves, "distribute_dataset", BATCH_IT)
                pieces = replica_slices(length, self.replica_counts, self.worker_index)
                value = tree.unflatten(batch, _spread(leaves, pieces, self.devices))
                yield Step(value, {shard: Position(number)})


@dataclass(frozen=True)
class DealPieces:
    """Steps in which each replica takes the next piece of this worker's own shards.

    Args:
        devices: of this worker's replicas.
        pieces: into how many each batch is cut: as many as there are replicas over all workers for
            global batches; 1 for batches that are one replica's.
        fills: whether a short batch fills pieces of the usual size, so that it takes fewer steps;
            how many there are is not known before.
    """

    devices: tuple[Device, ...]
    pieces: int = 1
    fills: bool = False

    def count(self, batches: int) -> int:
        """Return how many steps there are, if this worker goes through that many batches."""
        return -(-batches * self.pieces // len(self.devices))

    def iterate(self, node: Node, passes: Mapping[int, tuple[Pass, Position]]) -> Iterator[Step]:
        """Yield the steps over some shards, one after another, each from its position on."""
        source = self._dealt(node, passes)
        while dealt := list(islice(source, len(self.devices))):
            reached = {shard: position for shard, position, _ in dealt}
            pieces = [piece for *_, piece in dealt]
            missing = len(self.devices) - len(pieces)
            pieces += [_no_rows(pieces[0])] * missing if missing else []
            placed = [
                tree.map_leaves(lambda leaf, device=device: copy_to(leaf, device), piece)
                for piece, device in zip(pieces, self.devices, strict=True)
            ]
            yield Step(tree.regroup(placed, PerReplica), reached)

    def _dealt(
        self, node: Node, passes: Mapping[int, tuple[Pass, Position]]
    ) -> Iterator[tuple[int, Position, Element]]:
        full = node.batch_size if self.fills else None
        for shard, (current, position) in passes.items():
            done = position
            for batch in node.iterate(current, position.batches):
                for after, piece in _pieces(batch, done, self.pieces, full):
                    yield shard, after, piece
                    done = after


def _pieces(
    batch: Element, done: Position, count: int, full: int | None
) -> Iterator[tuple[Position, Element]]:
    """Cut what is left of a batch into pieces, each with the position after it.

    The suffix of a balanced cut is the balanced cut of its rows. Where the number of replicas is
    another than when the cut was begun, the rest is cut so that pieces keep about their size.
    """
    if count == 1 and not done.rows:
        yield Position(done.batches + 1), batch
        return
    length = leading_length(tree.flatten(batch), "distribute_dataset", BATCH_IT)
    left = -(-done.left * count // done.of) if done.left else count
    rest = balanced_slices(max(length, full or 0) - done.rows, left)
    used = [piece for piece in rest if full is None or piece.start < length - done.rows] or rest[:1]
    for number, piece in enumerate(used, 1):
        part = slice(piece.start + done.rows, min(piece.stop + done.rows, length))
        within = Position(done.batches, part.stop, left - number, count)
        after = within if number < len(used) else Position(done.batches + 1)
        yield after, tree.map_leaves(lambda leaf, part=part: leaf[part], batch)


def empty_step(like: Element, devices: Sequence[Device]) -> Any:
    """Return the step of a worker that has run out.

    Args:
        like: a batch of no rows, on the host.
        devices: of this worker's replicas.
    """
    return tree.map_leaves(
        lambda leaf: PerReplica([copy_to(leaf, device) for device in devices]), like
    )


def template_of(step: Any) -> Element | None:
    """Return a batch of no rows, on the host, like the pieces of a step; None if they have none."""
    leaves = [leaf.values[0] for leaf in tree.flatten(step)]
    if not all(leaf.ndim for leaf in leaves):
        return None
    return tree.unflatten(step, [np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in leaves])


def _spread(
    leaves: Sequence[Any], pieces: Sequence[slice], devices: Sequence[Device]
) -> list[PerReplica]:
    """Put each device's rows of a batch into its memory; on the CPU they are views."""
    placed = list(zip(pieces, devices, strict=True))
    return [
        PerReplica([copy_to(leaf[piece], device) for piece, device in placed]) for leaf in leaves
    ]


def _no_rows(batch: Element) -> Element:
    leading_length(tree.flatten(batch), "distribute_datasets_from_function", COMPLETE_IT)
    return tree.map_leaves(lambda leaf: leaf[:0], batch)
