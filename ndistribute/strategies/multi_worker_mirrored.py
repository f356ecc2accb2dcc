"""Replicas in several processes, on one host or many, each with every variable at hand."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ndistribute.cluster import ClusterResolver, resolver_of_job
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.select import join_workers
from ndistribute.collective.workers import Workers
from ndistribute.device import Device, resolve_devices
from ndistribute.strategies.base import Strategy

__all__ = ["MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """Run on the devices of every worker of a job, with variables mirrored on each.

    Every worker runs the same program. Making the strategy waits until all of them do. A process
    that nothing says is one of several, or an evaluator, works alone.

    Args:
        cluster_resolver: who is in the job; None finds out from `TF_CONFIG`, or from the
            environment of MPI, Slurm or torchrun.
        communication_options: how the workers communicate, and how long they wait for each other.
        devices: of this worker's replicas; None means all visible GPUs, else ``cpu:0`` alone.
            Workers may have different numbers of them.

    Raises:
        CollectiveTimeoutError: not all workers started in time.
        AuthenticationError: the workers do not share a secret.
        ValueError: the cluster is described wrongly, or a device does not exist.

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
            # The others wait for it, also where the program ends without closing anything.
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
    """Meet the other workers, if there are any for this process to meet."""
    if resolver.task_type == "evaluator" or resolver.num_workers < 2:
        return None
    rank = resolver.worker_index
    if rank is None:
        raise ValueError(
            f"a {resolver.task_type} takes no part in MultiWorkerMirroredStrategy: the cluster's "
            "workers are its chief and workers."
        )
    try:
        return join_workers(resolver.worker_addresses, rank, devices, options)
    except OSError as error:
        if resolver.address_hint:
            error.add_note(resolver.address_hint)
        raise
