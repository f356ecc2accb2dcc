"""Variables on servers, computation on workers that do not wait for each other.

Every worker has this strategy. In a cluster without a chief each runs its own loop; with one, the
chief sends functions to the workers through a `ClusterCoordinator`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ndistribute.cluster import ClusterResolver, resolve
from ndistribute.cluster.links.servers import Outcomes, Servers
from ndistribute.cluster.protocol.requests import Apply
from ndistribute.data import InputContext
from ndistribute.device import Array, Device, resolve_devices
from ndistribute.strategies.base import Strategy
from ndistribute.strategies.dealing import dealt
from ndistribute.strategies.handles import Handle, handle_of, strategy_of
from ndistribute.strategies.linking import Links, role_of
from ndistribute.strategies.pace import pace_of
from ndistribute.strategies.placement import Placement
from ndistribute.strategies.staleness import StalenessCounts
from ndistribute.timeline import span
from ndistribute.variables.copies import Copies, LocalCopy
from ndistribute.variables.partitioners import number_of_shards
from ndistribute.variables.policy import (
    VariableAggregation,
    VariablePolicy,
    VariableSynchronization,
)
from ndistribute.variables.remote import RemoteVariable
from ndistribute.variables.sync_on_read import SyncOnReadVariable
from ndistribute.variables.variable import Variable

__all__ = ["ParameterServerStrategy"]

TIMEOUT_SECONDS = 600.0


class ParameterServerStrategy(Strategy):
    """Run on the devices of one worker, with variables on parameter servers.

    Making the strategy waits until all servers are up. Without a cluster the server is in this
    process, which trains alone.

    Args:
        cluster_resolver: who is in the job; None finds out from `TF_CONFIG`.
        variable_partitioner: called with shape and dtype of each new variable, returns into how
            many parts it is cut along each axis; see `nd.partitioners`. None: none is cut.
        devices: of this worker's replicas; None means all visible GPUs, else ``cpu:0`` alone.
        replicas_to_aggregate: so many workers' gradients make one step, for which all wait; None:
            each worker's gradients are a step of their own, and nobody waits.
        total_num_replicas: how many workers give gradients; those above `replicas_to_aggregate`
            are spare, and gradients that come late are dropped. None: as many as needed.
        max_staleness: how many steps a worker may be ahead of the slowest one; None: any number.
        timeout_seconds: how long to wait for servers and workers; None means 600.

    Raises:
        ValueError: the cluster has no servers, this process is one, or numbers do not fit.
        WorkerLostError: a server was not reached in time.

    >>> import ndistribute as nd
    >>> with ParameterServerStrategy() as strategy:
    ...     with strategy.scope():
    ...         v = nd.Variable([1.0, 2.0])
    ...     v.assign_add([1.0, 1.0]).numpy()
    array([2., 3.])
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        devices: Sequence[str | Device] | None = None,
        replicas_to_aggregate: int | None = None,
        total_num_replicas: int | None = None,
        max_staleness: int | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self._resolver = resolve() if cluster_resolver is None else cluster_resolver
        self._role = role_of(self._resolver)
        self._timeout = TIMEOUT_SECONDS if timeout_seconds is None else float(timeout_seconds)
        if self._timeout <= 0:
            raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}.")
        self._pace = pace_of(
            self._role.num_workers,
            replicas_to_aggregate,
            total_num_replicas,
            max_staleness,
            coordinated=self._role.coordinated,
            timeout=self._timeout,
        )
        self._partitioner = variable_partitioner
        self._placement = Placement()
        self._staleness = StalenessCounts()
        self._linking = threading.Lock()
        self._links: Links | None = None
        self.handles: weakref.WeakValueDictionary[str, Variable] = weakref.WeakValueDictionary()
        """The variables of this process by their names on the servers."""
        super().__init__(resolve_devices(devices))
        self._handle = handle_of(self, devices, variable_partitioner, timeout_seconds)
        if self._resolver is not None and self._resolver.cluster_spec():
            try:
                self.servers.greet()
            except BaseException:
                self.close()
                raise

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Return who is in the job: None where this process works alone."""
        return self._resolver

    @property
    def servers(self) -> Servers:
        """Return the parameter servers."""
        return self._linked().servers

    @property
    def timeout_seconds(self) -> float:
        """Return for how long it waits for servers, and its coordinator for workers."""
        return self._timeout

    @property
    def copies(self) -> Copies:
        """Return what this process holds of the variables."""
        return self._linked().copies

    def known_by(self, handle: Handle) -> None:
        """Be the one that a handle means, wherever its variables are sent, or sent back."""
        self._handle = handle

    def connect(self) -> Links:
        """Connect to the servers; called once, when they are needed first."""
        return Links.open(self, self._resolver, self._role, self._timeout)

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Make the variable that a policy means, on the servers or, to be read, here."""
        if policy.synchronization is VariableSynchronization.ON_READ:
            return self._make_on_read(array, policy)
        shards = number_of_shards(self._partitioner, array.shape, array.dtype)
        if shards > 1:
            from ndistribute.variables.sharded import ShardedVariable

            return ShardedVariable.make_sharded(self, array, policy, shards)
        return RemoteVariable.make(self, array, policy)

    def place(self, name: str) -> tuple[str, int]:
        """Return a new variable's name on the servers, and the server whose turn it is.

        Raises:
            RuntimeError: a worker asks in a function that a chief sent.
        """
        return self._placement.name(name), self._placement.turn(len(self.servers))

    def push(
        self, name: str, applies: Mapping[int, Apply], copies: Mapping[int, Sequence[LocalCopy]]
    ) -> None:
        """Let the servers apply gradients, at the pace that was asked for.

        Args:
            name: of the optimizer.
            applies: what is done on which server.
            copies: for each server, of the variables that it changes.
        """
        trained = [copy for some in copies.values() for copy in some]
        seen = {server: [copy.seen for copy in some] for server, some in copies.items()}

        def count(outcomes: Outcomes) -> None:
            self._staleness.add_update(seen, outcomes, self.servers.restarts)

        with span("push", name):
            self._pace.push(self.servers, name, applies, count)
        self.copies.changed(trained)

    def staleness(self) -> dict[int, int]:
        """Return how many updates of this process were how stale.

        An update's staleness is the number of updates of others that were made between the read of
        its variables and itself.

        >>> ParameterServerStrategy().staleness()
        {}
        """
        return self._staleness.as_dict()

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with servers that were killed.

        A server that is started again goes on from its last snapshot; what was changed after that
        is lost. This is what this process has heard of so far, of its own updates and of those in
        functions that it scheduled; there may be more.

        >>> ParameterServerStrategy().lost_updates
        0
        """
        links = self._links
        return 0 if links is None else links.servers.lost_updates

    def save_snapshots(self) -> None:
        """Let every server write its variables to its disk, and wait until that is done.

        Raises:
            DistributeError: a server was given no directory for them.
        """
        self.servers.save_snapshots()

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Deal the batches of a dataset to the workers, and cut each over a worker's replicas.

        Args:
            dataset: of batches for one worker's replicas, the same on every worker: worker w of W
                takes batches w, w + W, and so on. If workers make steps together, all get as many:
                the last of some may be without examples.
            options: `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`.
        """
        own = dealt(dataset, *self._role.share, evenly=self._pace.together)
        return super().distribute_dataset(own, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Feed this worker's replicas from a dataset of per-replica batches.

        Args:
            dataset_fn: called with an `InputContext` that says which worker this is.
            options: `InputOptions`.
        """
        own = InputContext(*self._role.share, self.num_replicas_in_sync)
        return super().distribute_datasets_from_function(lambda _: dataset_fn(own), options)

    def close(self) -> None:
        """End the replica threads and say good-bye to the servers.

        What was read last from a variable stays readable.
        """
        links = self._links
        if links is not None and links.local is not None and not self._closed:
            variables = [v for v in self.handles.values() if isinstance(v, RemoteVariable)]
            links.copies.pull(variable.local_copy for variable in variables)
        super().close()
        if links is not None:
            links.copies.stay()
            links.farewell()

    experimental_distribute_dataset = distribute_dataset

    def _run_on_all(self, step: Callable[[int], Any]) -> list[Any]:
        with self._turn.taken(self):
            if self._links is not None:
                self._links.copies.begin_step()
            return super()._run_on_all(step)

    def _make_on_read(self, array: Array, policy: VariablePolicy) -> Variable:
        """Make a variable of a value for each replica; with a chief, one that all add to."""
        if not self._role.coordinated:
            return SyncOnReadVariable.make(self, array, policy)
        if policy.aggregation is VariableAggregation.MEAN:
            raise ValueError(
                f"variable {policy.name!r}: workers that a chief sends functions to have no mean "
                "of values of their own. Keep a sum and a count, each with aggregation='sum'."
            )
        return RemoteVariable.make(self, array, policy)

    def _linked(self) -> Links:
        """Return the connections, made when they are needed first."""
        with self._linking:
            if self._links is None:
                self._links = self.connect()
            return self._links

    def __reduce__(self) -> Any:
        return strategy_of, (self._handle,)

    def __repr__(self) -> str:
        return f"{super().__repr__()} of {self._role.task}"
