"""Steps: what each replica gets when the consumer asks for the next batch.

A step is a function of the pipeline, its draws and the number of batches before it. Whether a batch
is cut over the replicas or each replica takes its own is the one difference between the two ways to
distribute a dataset, and it is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ndistribute import tree
from ndistribute.data.elements import Element, leading_length
from ndistribute.data.pipeline import Node, Pass
from ndistribute.data.sharding import worker_slices
from ndistribute.device import Device, copy_to
from ndistribute.values import PerReplica

__all__ = ["BATCH_IT", "CutBatches", "DealBatches"]

BATCH_IT = (
    "Elements are batches of the global batch size, cut over the replicas: call "
    "dataset.batch(global_batch_size) before distribute_dataset."
)


@dataclass(frozen=True)
class CutBatches:
    """Steps that are pieces of global batches.

    Args:
        devices: of this worker's replicas.
        num_workers: workers of the job, each with as many replicas.
        worker_index: this worker.
        spread: into how many successive steps a batch is spread: 1, or the number of workers under
            policy OFF, by which each of them goes through all the data.
    """

    devices: tuple[Device, ...]
    num_workers: int = 1
    worker_index: int = 0
    spread: int = 1

    @property
    def per_step(self) -> int:
        """Return by how much a step moves the count of batches."""
        return 1

    def count(self, batches: int) -> int:
        """Return how many steps there are."""
        return batches * self.spread

    def iterate(self, node: Node, current: Pass, start: int) -> Iterator[Any]:
        """Yield the steps from number `start` on."""
        first, done = divmod(start, self.spread)
        for batch in node.iterate(current, first):
            leaves = tree.flatten(batch)
            length = leading_length(leaves, "distribute_dataset", BATCH_IT)
            for pieces in self._cuts(length)[done:]:
                yield tree.unflatten(batch, _spread(leaves, pieces, self.devices))
            done = 0

    def _cuts(self, length: int) -> list[tuple[slice, ...]]:
        replicas = len(self.devices)
        if self.spread == 1:
            return [worker_slices(length, replicas, self.num_workers, self.worker_index)]
        return [worker_slices(length, replicas, self.spread, part) for part in range(self.spread)]


@dataclass(frozen=True)
class DealBatches:
    """Steps in which each replica takes the next batch.

    Args:
        devices: of this worker's replicas.
    """

    devices: tuple[Device, ...]

    @property
    def per_step(self) -> int:
        """Return by how much a step moves the count of batches."""
        return len(self.devices)

    def count(self, batches: int) -> int:
        """Return how many steps there are."""
        return -(-batches // len(self.devices))

    def iterate(self, node: Node, current: Pass, start: int) -> Iterator[Any]:
        """Yield the steps after the first `start` batches."""
        source = node.iterate(current, start)
        while batches := list(islice(source, len(self.devices))):
            missing = len(self.devices) - len(batches)
            batches += [_no_rows(batches[0])] * missing if missing else []
            placed = [
                tree.map_leaves(lambda leaf, device=device: copy_to(leaf, device), batch)
                for batch, device in zip(batches, self.devices, strict=True)
            ]
            yield tree.regroup(placed, PerReplica)


def _spread(
    leaves: Sequence[Any], pieces: Sequence[slice], devices: Sequence[Device]
) -> list[PerReplica]:
    """Put each device's rows of a batch into its memory; on the CPU they are views."""
    placed = list(zip(pieces, devices, strict=True))
    return [
        PerReplica([copy_to(leaf[piece], device) for piece, device in placed]) for leaf in leaves
    ]


def _no_rows(batch: Element) -> Element:
    leading_length(
        tree.flatten(batch),
        "distribute_datasets_from_function",
        "The last step is completed with empty batches, so elements must be batches: call "
        "dataset.batch(per_replica_batch_size).",
    )
    return tree.map_leaves(lambda leaf: leaf[:0], batch)
