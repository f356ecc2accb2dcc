"""Replicas in several processes, on one host or many, each with every variable at hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.cluster import ClusterResolver, resolve
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.select import join_workers, make_group
from ndistribute.collective.workers import ReplicaGroup, Workers
from ndistribute.data import Place
from ndistribute.device import Device, copy_to, device_of, resolve_devices, to_host
from ndistribute.strategies.base import Strategy
from ndistribute.strategies.reductions import components_of_workers

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
        resolver = resolve() if cluster_resolver is None else cluster_resolver
        options = communication_options or CommunicationOptions()
        own = resolve_devices(devices)
        self._workers = _join(resolver, own, options)
        # The others wait for a good-bye, also where the program ends without closing anything.
        self._farewell: Callable[[], Any] = lambda: None
        if self._workers is not None:
            self._farewell = weakref.finalize(self, self._workers.close)
        super().__init__(own, resolver)

    def make_group(self) -> ReplicaGroup:
        """Make communicators that meet those of the other workers."""
        return make_group(self._devices, workers=self._workers)

    def across_workers(self, value: Any) -> Any:
        """Return a nest with the components of all workers' replicas in each `PerReplica`."""
        return value if self._workers is None else components_of_workers(value, self._workers)

    def agree_on(self, initial_value: Any, what: str) -> Any:
        """Return the chief's initial value of a variable, which is the same one on all workers."""
        if self._workers is None:
            return initial_value
        chiefs = self._workers.agree(np.asarray(to_host(initial_value)), what)
        return copy_to(np.asarray(chiefs), device_of(initial_value))

    @property
    def input_place(self) -> Place:
        """Return where input goes: this worker's replicas among those of all."""
        workers = self._workers
        if workers is None:
            return super().input_place
        return Place(self._devices, workers.replica_counts, workers.rank, workers)

    def close(self) -> None:
        """End the replica threads and say good-bye to the other workers."""
        self._check_may_close()
        try:
            super().close()
        finally:
            self._farewell()

    def __repr__(self) -> str:
        if self._workers is None:
            return super().__repr__()
        return f"{super().__repr__()} of worker {self._workers.rank} of {self._workers.size}"


def _join(
    resolver: ClusterResolver | None, devices: Sequence[Device], options: CommunicationOptions
) -> Workers | None:
    """Meet the other workers, if there are any for this process to meet."""
    if resolver is None or resolver.task_type == "evaluator" or resolver.num_workers < 2:
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
