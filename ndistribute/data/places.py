"""Where input goes: the replicas of this worker, among those of all workers of the job."""

from __future__ import annotations

from dataclasses import dataclass

from ndistribute.collective.objects import ProcessGroup
from ndistribute.data.arguments import index_below
from ndistribute.device import Device

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """Say which replicas a worker feeds.

    Args:
        devices: of this worker's replicas.
        replica_counts: replicas of each worker of the job.
        worker_index: this worker.
        workers: how the workers meet, so that an iteration may begin with a collective of all of
            them, and under the policies FILE and OFF each step; None where there is one worker,
            or where they can not.

    Raises:
        ValueError: the numbers do not fit together.

    >>> Place((Device("cpu:0"),), (1, 3)).num_replicas
    4
    """

    devices: tuple[Device, ...]
    replica_counts: tuple[int, ...]
    worker_index: int = 0
    workers: ProcessGroup | None = None

    def __post_init__(self) -> None:
        counts = self.replica_counts
        index = index_below(len(counts), self.worker_index, "worker_index")
        if counts[index] != len(self.devices) or min(counts) < 1:
            raise ValueError(
                f"replica_counts is {counts} for {len(counts)} worker(s), of which this one, "
                f"number {index}, has {len(self.devices)} device(s). Give the number of devices "
                "of every worker, in order."
            )

    @property
    def num_workers(self) -> int:
        """Return the number of workers of the job."""
        return len(self.replica_counts)

    @property
    def num_replicas(self) -> int:
        """Return the replicas of all of them."""
        return sum(self.replica_counts)
