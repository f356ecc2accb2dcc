"""Replicas in several processes, on one host or many, each with every variable at hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.cluster import ClusterResolver, resolve
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.replica_group import ReplicaGroup
from ndistribute.collective.select import join_workers, make_group, make_worker_group
from ndistribute.collective.workers import Workers
from ndistribute.data import distribute, distribute_from_function
from ndistribute.device import Device, copy_to, device_of, resolve_devices, to_host
from ndistribute.strategies.across_workers import gather_components
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
        self._resolver = resolve() if cluster_resolver is None else cluster_resolver
        self._options = communication_options or CommunicationOptions()
        own = resolve_devices(devices)
        self._workers = _join(self._resolver, own, self._options)
        # The others wait for a good-bye, also where the program ends without closing anything.
        self._farewell: Callable[[], Any] = lambda: None
        if self._workers is not None:
            self._farewell = weakref.finalize(self, self._workers.close)
        super().__init__(own)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Return who is in the job: None where this process works alone."""
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """Say whether this worker writes what is written once."""
        return self._workers is None or self._workers.rank == 0

    def make_group(self) -> ReplicaGroup:
        """Make communicators that meet those of the other workers."""
        if self._workers is None:
            return make_group(self._devices)
        return make_worker_group(self._devices, self._workers, self._options)

    def across_workers(self, value: Any) -> Any:
        """Return a nest with the components of all workers' replicas in each `PerReplica`."""
        return value if self._workers is None else gather_components(value, self._workers)

    def agree_on(self, initial_value: Any, what: str) -> Any:
        """Return the chief's initial value of a variable, which is the same one on all workers."""
        if self._workers is None:
            return initial_value
        chiefs = self._workers.agree(np.asarray(to_host(initial_value)), what)
        return copy_to(np.asarray(chiefs), device_of(initial_value))

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Cut each global batch into one piece per replica of all workers.

        Args:
            dataset: batched by the global batch size, the same on every worker.
            options: `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica` with the pieces of this worker's replicas.
        """
        if self._workers is None:
            return super().distribute_dataset(dataset, options)
        return distribute(
            dataset,
            self._devices,
            options,
            num_workers=self._workers.size,
            worker_index=self._workers.rank,
            replica_counts=self._workers.replica_counts,
            workers=self._workers,
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Feed this worker's replicas from a dataset of per-replica batches.

        Args:
            dataset_fn: called with an `InputContext` that says which worker this is.
            options: `InputOptions`.
        """
        if self._workers is None:
            return super().distribute_datasets_from_function(dataset_fn, options)
        return distribute_from_function(
            dataset_fn,
            self._devices,
            options,
            num_workers=self._workers.size,
            worker_index=self._workers.rank,
            replica_counts=self._workers.replica_counts,
            workers=self._workers,
        )

    def close(self) -> None:
        """End the replica threads and say good-bye to the other workers."""
        super().close()
        self._farewell()

    experimental_distribute_dataset = distribute_dataset

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
