"""Steps: what each replica of a worker gets when the consumer asks for the next batch.

Either a worker takes its slices of every global batch, or it goes through shards of its own and
deals pieces of their batches to its replicas. Which rows belong to whom is computed from numbers
alone. Each step comes with the positions that it reaches, so what is made ahead never enters the
state of whoever consumes it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from ndistribute import tree
from ndistribute.data.elements import Element, leading_length
from ndistribute.data.options import Sharding, Topology
from ndistribute.data.pipeline import Epoch, Node, ShuffleSeed, upstream
from ndistribute.device import Device, copy_to, to_host
from ndistribute.values import PerReplica

BATCH_IT = (
    "Elements are batches of the global batch size, cut over the replicas: call "
    "dataset.batch(global_batch_size) before distribute_dataset."
)

COMPLETE_IT = (
    "The last step is completed with empty batches, so elements must be batches: call "
    "dataset.batch(per_replica_batch_size)."
)


class Position(NamedTuple):
    """How much of a shard has been consumed."""

    batches: int = 0
    rows: int = 0  # Of the next batch.
    left: int = 0  # Into how many pieces the other rows of that batch are still to be cut.
    of: int = 0  # How many pieces that batch had.


class Step(NamedTuple):
    """What the replicas get, and the position that each shard which was touched is at then."""

    value: Any
    reached: Mapping[int, Position]
    rows: int = 0  # Of the global batch that was cut.
    first: dict[str, Any] | None = None  # Of the first one, what workers that share it compare.


@dataclass
class Progress:
    """Hold the shards of an epoch, and for each the seeds of its shuffles and its position."""

    sharding: Sharding
    files: int  # How many the pipeline reads.
    seeds: list[list[ShuffleSeed]]
    positions: list[Position]

    def shards_of(self, topology: Topology) -> Sequence[int]:
        """Return the shards that this worker goes through, in order."""
        if self.sharding is Sharding.DATA:
            return (0,)
        return range(topology.worker_index, len(self.positions), topology.num_workers)

    def advance(self, reached: Mapping[int, Position]) -> None:
        """Move shards to the positions that a step reaches."""
        for shard, position in reached.items():
            self.positions[shard] = position

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "sharding": self.sharding.value,
            "files": self.files,
            "shards": [
                {**position._asdict(), "shuffles": [list(seed) for seed in seeds]}
                for position, seeds in zip(self.positions, self.seeds, strict=True)
            ],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Progress:
        """Return what a state holds.

        Raises:
            ValueError: it is no state.
        """
        if not {"sharding", "files", "shards"} <= state.keys():
            raise ValueError(
                "load_state_dict needs what state_dict returned, with 'sharding', 'files' and "
                f"'shards'; got {sorted(state)}."
            )
        shards = state["shards"]
        return cls(
            Sharding(state["sharding"]),
            int(state["files"]),
            [[ShuffleSeed(int(e), int(i)) for e, i in shard["shuffles"]] for shard in shards],
            [Position(*(int(shard[name]) for name in Position._fields)) for shard in shards],
        )

    def fit(self, own: Progress) -> Progress:
        """Return this progress as an iterator takes it over whose `own` has just begun.

        Raises:
            ValueError: it is of another pipeline, or divided in a way that can not be gone on with.
        """
        by_worker = {Sharding.OFF, Sharding.FUNCTION}
        saved, now = len(self.positions), len(own.positions)
        fitted = self._for_workers(now) if self.sharding is Sharding.OFF else self
        have, want = ([len(seeds) for seeds in each.seeds] for each in (fitted, own))
        refused = (
            (
                self.files != own.files,
                f"a pipeline of {self.files} file(s), this one reads {own.files}. Give it the same "
                "files in the same order.",
            ),
            (
                self.sharding is not own.sharding and by_worker & {self.sharding, own.sharding},
                f"input that workers share by {self.sharding.name}, this one by "
                f"{own.sharding.name}. Distribute the dataset as it was when the state was saved.",
            ),
            (
                self.sharding is Sharding.FUNCTION and saved != now,
                f"{saved} worker(s), each with the dataset that its function made, and there are "
                f"{now} now. What they have left can not be dealt anew: go on with {saved}, or use "
                "distribute_dataset.",
            ),
            (
                have != want[:1] * len(have) and have != want,
                f"a pipeline with {have[0]} shuffle(s), this one has {want[0]}. Build the pipeline "
                "as it was when the state was saved.",
            ),
        )
        for wrong, what in refused:
            if wrong:
                raise ValueError(f"load_state_dict: the state is of {what}")
        return fitted

    def _for_workers(self, count: int) -> Progress:
        """Return the progress of workers of which each goes through everything."""
        chosen = [worker % len(self.positions) for worker in range(count)]
        return Progress(
            self.sharding,
            self.files,
            [self.seeds[number] for number in chosen],
            [self.positions[number] for number in chosen],
        )


def count_steps(topology: Topology, sharding: Sharding, batches: int) -> int:
    """Return how many steps there are, if this worker goes through that many batches."""
    if sharding is Sharding.DATA:
        return batches
    pieces = 1 if sharding is Sharding.FUNCTION else topology.num_replicas
    return -(-batches * pieces // len(topology.devices))


def steps_of(
    node: Node,
    topology: Topology,
    sharding: Sharding,
    epochs: Mapping[int, tuple[Epoch, Position]],
) -> Iterator[Step]:
    """Yield the steps of this worker over shards, each with its epoch and where to begin in it."""
    if sharding is Sharding.DATA:
        return _cut(node, topology, epochs)
    return _deal(topology.devices, _dealt(node, topology, sharding, epochs))


def _cut(
    node: Node, topology: Topology, epochs: Mapping[int, tuple[Epoch, Position]]
) -> Iterator[Step]:
    """Yield steps that are this worker's slices of every global batch."""
    compares = topology.num_workers > 1
    loads = any(step.loader is not None for step in upstream(node))
    for shard, (epoch, position) in epochs.items():
        source = node.iterate(epoch, position.batches)
        for number, batch in enumerate(source, position.batches + 1):
            leaves = tree.flatten(batch)
            length = leading_length(leaves, "distribute_dataset", BATCH_IT)
            pieces = replica_slices(length, topology.replica_counts, topology.worker_index)
            value = tree.unflatten(batch, _spread(leaves, pieces, topology.devices))
            begins = compares and number == position.batches + 1
            first = _note_of(leaves, digest=loads) if begins else None
            yield Step(value, {shard: Position(number)}, length, first)


def _note_of(leaves: Sequence[Any], *, digest: bool) -> dict[str, Any]:
    """Return what tells a batch from others: dtypes and shapes, and a digest of the values."""
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    values = 0
    for array in _telling_order([to_host(leaf) for leaf in leaves]) if digest else ():
        as_text = array.dtype.hasobject
        data = repr(array.tolist()).encode() if as_text else array.tobytes()
        values = zlib.crc32(data, values)
    return {"first batch": shapes, "digest of the first batch": values}


def _telling_order(arrays: Sequence[Any]) -> Sequence[Any]:
    """Return the arrays of a batch whose values tell which rows it has, and in which order.

    Those are labels, if there are any: what is beside them may be augmented at random on each
    worker. Of other objects than text and numbers the text tells their address.
    """
    plain = [
        array
        for array in arrays
        if not array.dtype.hasobject
        or all(isinstance(item, str | bytes | Number) for item in array.flat)
    ]
    labels = [array for array in plain if array.ndim == 1 and array.dtype.kind in "biuSUO"]
    return labels or plain


def _deal(
    devices: Sequence[Device], source: Iterator[tuple[int, Position, Element]]
) -> Iterator[Step]:
    """Yield steps in which each replica takes the next piece of this worker's own shards."""
    while dealt := list(islice(source, len(devices))):
        reached = {shard: position for shard, position, _ in dealt}
        pieces = [piece for *_, piece in dealt]
        missing = len(devices) - len(pieces)
        pieces += [_no_rows(pieces[0])] * missing if missing else []
        placed = [
            tree.map_leaves(lambda leaf, device=device: copy_to(leaf, device), piece)
            for piece, device in zip(pieces, devices, strict=True)
        ]
        yield Step(tree.regroup(placed, PerReplica), reached)


def _dealt(
    node: Node,
    topology: Topology,
    sharding: Sharding,
    epochs: Mapping[int, tuple[Epoch, Position]],
) -> Iterator[tuple[int, Position, Element]]:
    """Yield the pieces of this worker's batches, each with its shard and the position after it.

    Global batches are cut into as many pieces as there are replicas over all workers. Of files, a
    short batch fills pieces of the usual size, so that it takes fewer steps.
    """
    count = 1 if sharding is Sharding.FUNCTION else topology.num_replicas
    full = node.spec.batch_size if sharding is Sharding.FILE else None
    for shard, (epoch, position) in epochs.items():
        done = position
        for batch in node.iterate(epoch, position.batches):
            for after, piece in _pieces(batch, done, count, full):
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
    """Return the step of a worker that has run out, of batches that have no rows."""
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


@functools.lru_cache(maxsize=256)
def balanced_slices(length: int, parts: int) -> tuple[slice, ...]:
    """Cut ``length`` rows into contiguous pieces, the first ``length % parts`` one row longer.

    >>> [piece.stop - piece.start for piece in balanced_slices(4, 3)]
    [2, 1, 1]
    """
    size, longer = divmod(length, parts)
    bounds = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))


def replica_slices(
    length: int, replica_counts: Sequence[int], worker_index: int
) -> tuple[slice, ...]:
    """Return the pieces of a global batch for the replicas of one worker.

    The batch is cut for all replicas of all workers at once, so the result of a step does not
    depend on how the replicas are spread over processes.

    Args:
        length: rows of the global batch.
        replica_counts: replicas of each worker.
        worker_index: this worker.

    >>> replica_slices(5, replica_counts=(1, 3), worker_index=1)
    (slice(2, 3, None), slice(3, 4, None), slice(4, 5, None))
    """
    first = sum(replica_counts[:worker_index])
    pieces = balanced_slices(length, sum(replica_counts))
    return pieces[first : first + replica_counts[worker_index]]
