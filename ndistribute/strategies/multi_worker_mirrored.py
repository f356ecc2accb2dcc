"""The strategy of replicas in several processes, each with a copy of every variable."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ndistribute.cluster import ClusterResolver, resolver_of_job
from ndistribute.collective.communicator import CommunicationOptions
from ndistribute.collective.select import join_workers
from ndistribute.collective.workers import Workers
from ndistribute.device import Device, resolve_devices
from ndistribute.strategies.base import Strategy

__all__ = ["MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """A strategy with the replicas of all workers of a job, and variables mirrored on each worker.

    Every worker runs the same program. The constructor waits until all workers have called it. An
    evaluator, and a process whose cluster has no other worker, works alone.

    Args:
        cluster_resolver: describes the job; None reads `TF_CONFIG`, or the environment of MPI,
            Slurm or torchrun.
        communication_options: how the workers communicate, and how long they wait for each other.
        devices: one for each replica of this worker; None means all visible GPUs, or ``cpu:0`` if
            there are none. Workers may have different numbers of devices.

    Raises:
        CollectiveTimeoutError: not all workers started in time.
        AuthenticationError: the workers do not share a secret.
        ValueError: the cluster's description is invalid, or a device does not exist.

    >>> with MultiWorkerMirroredStrategy() as strategy:  # This process is its only worker.
    ...     strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        devices: Sequence[str | Device] | None = None,
    ) -> None:
        resolver = resolver_of_job(cluster_resolver)
        if not isinstance(communication_options, CommunicationOptions | None):
            raise TypeError(
                "communication_options must be nd.CommunicationOptions(...), got "
                f"{communication_options!r}."
            )
        own = resolve_devices(devices)
        workers = _join(resolver, own, communication_options or CommunicationOptions())
        if workers is not None:
            # The other workers wait for this, so it also runs if the program never calls close.
            self._good_bye = weakref.finalize(self, workers.close)
        super().__init__(own, resolver, workers)

    def _on_close(self) -> None:
        if self._workers is not None:
            self._good_bye()

    def __repr__(self) -> str:
        if self._workers is None:
            return super().__repr__()
        return f"{super().__repr__()} of worker {self._workers.rank} of {self._workers.size}"


def _join(
    resolver: ClusterResolver, devices: Sequence[Device], options: CommunicationOptions
) -> Workers | None:
    """Return this process's connections to the other workers, or None if it works alone."""
    if resolver.task_type == "evaluator" or resolver.num_workers < 2:
        return None
    rank = resolver.worker_index
    if rank is None:
        raise ValueError(
            f"a task of job {resolver.task_type!r} cannot use MultiWorkerMirroredStrategy: only "
            "the cluster's chief and workers can."
        )
    try:
        return join_workers(resolver.worker_addresses, rank, devices, options)
    except OSError as error:
        if resolver.address_hint:
            error.add_note(resolver.address_hint)
        raise
