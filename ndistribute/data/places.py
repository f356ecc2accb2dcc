"""Where input goes: the replicas of this worker, among those of all workers of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ndistribute.data.arguments import at_least, index_below
from ndistribute.device import Device

__all__ = ["Place", "WorkerGroup", "place_of"]


class WorkerGroup(Protocol):
    """How the workers of a job meet, outside any replica: a `Communicator` of them will do."""

    @property
    def rank(self) -> int:
        """Return which worker this is."""

    @property
    def size(self) -> int:
        """Return how many workers there are."""

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate a nest over workers, in their order."""


@dataclass(frozen=True)
class Place:
    """Say which replicas a worker feeds.

    Args:
        devices: of this worker's replicas.
        replica_counts: replicas of each worker of the job.
        worker_index: this worker.
        workers: how the workers meet; None where there is one, or where they can not.
    """

    devices: tuple[Device, ...]
    replica_counts: tuple[int, ...]
    worker_index: int = 0
    workers: WorkerGroup | None = None

    @property
    def num_workers(self) -> int:
        """Return the number of workers of the job."""
        return len(self.replica_counts)

    @property
    def num_replicas(self) -> int:
        """Return the replicas of all of them."""
        return sum(self.replica_counts)


def place_of(
    devices: Sequence[Device],
    num_workers: int = 1,
    worker_index: int = 0,
    workers: WorkerGroup | None = None,
    replica_counts: Sequence[int] | None = None,
) -> Place:
    """Return the place that the arguments of `distribute` say.

    Raises:
        ValueError: the numbers do not fit together.

    >>> place_of([Device("cpu:0")], replica_counts=(1, 3)).num_replicas
    4
    """
    if workers is not None:
        num_workers, worker_index = workers.size, workers.rank
    elif replica_counts is not None:
        num_workers = len(replica_counts)
    total = at_least(1, num_workers, "num_workers")
    index = index_below(total, worker_index, "worker_index")
    counts = (len(devices),) * total if replica_counts is None else tuple(replica_counts)
    if len(counts) != total or counts[index] != len(devices) or min(counts) < 1:
        raise ValueError(
            f"replica_counts is {counts} for {total} worker(s), of which this one, number {index}, "
            f"has {len(devices)} device(s). Give the number of devices of every worker, in order."
        )
    return Place(tuple(devices), counts, index, workers if total > 1 else None)
