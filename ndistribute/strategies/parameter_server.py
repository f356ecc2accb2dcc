"""Variables on servers, computation on workers that do not wait for each other.

Every worker has this strategy. In a cluster without a chief each runs its own loop; with one, the
chief sends functions to the workers through a `ClusterCoordinator`.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ndistribute import tree
from ndistribute.cluster import ClusterResolver, resolver_of_job
from ndistribute.cluster.resolvers import current_task
from ndistribute.cluster.spec import task_names
from ndistribute.coordinator.coordinator import forget
from ndistribute.coordinator.remote_value import keep_until_run
from ndistribute.coordinator.worker import keep
from ndistribute.data import Dataset, InputContext, as_dataset
from ndistribute.device import Array, Device, resolve_devices
from ndistribute.parameter_server.client import Outcomes, ServerClient, Servers, current_closure
from ndistribute.parameter_server.messages import Accumulated, Apply, Delete, Done, Reply, Status
from ndistribute.parameter_server.server import LocalServer
from ndistribute.strategies.base import Strategy, T
from ndistribute.strategies.update_mode import update_mode_of
from ndistribute.timeline import identify, span
from ndistribute.transport.failure_detector import detector
from ndistribute.transport.rpc import Client
from ndistribute.transport.secret import credentials_of
from ndistribute.variables.mirrored import SyncOnReadVariable
from ndistribute.variables.partitioners import number_of_shards
from ndistribute.variables.policy import (
    VariableAggregation,
    VariablePolicy,
    VariableSynchronization,
)
from ndistribute.variables.served import CachedShard, ServedVariable, VariableCache
from ndistribute.variables.variable import Variable

__all__ = ["ParameterServerStrategy"]

_LIVES_APART = 1 << 29  # Versions of two lives of a server differ by more.


@dataclass(frozen=True, slots=True)
class _Role:
    """What this process is among those that use the servers."""

    task: str = "worker:0"
    num_workers: int = 1  # So many processes train, each with a share of the data.
    share: tuple[int, int] = (1, 0)  # Into how many it is divided, and which of them is this one's.
    coordinated: bool = False  # Whether a chief sends functions to the workers.

    @classmethod
    def of(cls, resolver: ClusterResolver) -> _Role:
        if not resolver.cluster_spec():
            return cls()
        cluster, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id or 0
        if job == "ps":
            raise ValueError(
                "this process is a parameter server: it runs nd.Server(cluster, 'ps', "
                "index).join() and no strategy."
            )
        if "ps" not in cluster.jobs:
            raise ValueError(
                f"the cluster has {', '.join(cluster.jobs)} and no parameter server: give it tasks "
                "of the job 'ps', or use MultiWorkerMirroredStrategy."
            )
        workers = list(cluster.task_indices("worker")) if "worker" in cluster.jobs else []
        count = max(1, len(workers))
        share = (count, workers.index(index)) if job == "worker" else (1, 0)
        return cls(f"{job}:{index}", count, share, "chief" in cluster.jobs)


class _Process:
    """The strategies that this process made, and how many on each cluster; none in a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.counts: Counter[str] = Counter()


_process = _Process()
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


def _own_strategy(
    token: str,
    namespace: str,
    partitioner: Callable[..., Sequence[int]] | None,
    devices: tuple[str, ...] | None,
    timeout_seconds: float,
) -> ParameterServerStrategy:
    """Return this process's own strategy for one that was pickled.

    A worker makes it once for a coordinator, so that all variables and functions which were sent
    there meet in the same strategy; it is dropped with the coordinator's own.
    """
    with _process.lock:
        found: ParameterServerStrategy | None = _process.made.get(token)
    if found is not None:
        return found
    task = current_task()
    if task is None:
        raise RuntimeError(
            "a ParameterServerStrategy, or a variable of one, was sent to a process that is no "
            "worker of its cluster: only functions that a ClusterCoordinator schedules can "
            "use them elsewhere."
        )
    make = functools.partial(
        ParameterServerStrategy,
        task,
        partitioner,
        devices=devices,
        timeout_seconds=timeout_seconds,
        _sent=(token, namespace),
    )
    kept: ParameterServerStrategy = keep(token, make, ParameterServerStrategy.close)
    return kept


class ParameterServerStrategy(Strategy):
    """Run on the devices of one worker, with variables on parameter servers.

    Making the strategy waits until all servers are up. Without a cluster the server is in this
    process, which trains alone.

    A process that is forked from this one can not use the strategy, and changes nothing about it by
    closing it or by ending. When the strategy is closed or dropped, workers that were sent it drop
    theirs before their next function; the variables stay on the servers, for snapshots and for
    other workers, until `delete`.

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
        durability: ``"snapshot"``; or ``"log"``: the servers put each update into a log in their
            snapshot folder before they acknowledge it, so that none is lost with a server.
        restore: go on with the variables of the strategy that this process made before on the same
            cluster, and what optimizers kept that have the same names; else a second strategy
            starts with variables of its own.

    Raises:
        DistributeError: `durability` is ``"log"``, and a server was given no directory.
        ValueError: the cluster has no servers, this process is one, or numbers do not fit.
        WorkerLostError: a server was not reached in time.

    >>> import ndistribute as nd
    >>> with ParameterServerStrategy() as strategy:
    ...     with strategy.scope():
    ...         v = nd.Variable([1.0, 2.0])
    ...     v.assign_add([1.0, 1.0]).numpy()
    array([2., 3.])
    """

    _internal = Strategy._internal | set(
        "connect copies handles namespace place push servers".split()
    )

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
        durability: Literal["snapshot", "log"] = "snapshot",
        restore: bool = False,
        _sent: tuple[str, str] | None = None,
    ) -> None:
        resolver = resolver_of_job(cluster_resolver)
        self._role = _Role.of(resolver)
        self._cluster = resolver.cluster_spec() or None
        self.timeout_seconds = 600.0 if timeout_seconds is None else float(timeout_seconds)
        """For how long it waits for servers, and its coordinator for workers."""
        if self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}.")
        self._mode = update_mode_of(
            self._role.num_workers,
            replicas_to_aggregate,
            total_num_replicas,
            max_staleness,
            coordinated=self._role.coordinated,
            timeout=self.timeout_seconds,
        )
        self._partitioner = variable_partitioner
        self._named_devices = None if devices is None else tuple(map(str, devices))
        self._staleness: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}  # How many more variables asked for each.
        self.handles: weakref.WeakValueDictionary[str, ServedVariable]
        self.handles = weakref.WeakValueDictionary()
        """The variables of this process by their names on the servers."""
        super().__init__(resolve_devices(devices), resolver)
        if self._cluster is not None:
            identify(self._role.task, task_names(self._cluster))
        self._servers = Servers(self.connect())
        self._copies = VariableCache(self._servers)
        weakref.finalize(self, detector.close_soon, self._servers.close).atexit = False
        self._await_servers(durability)
        self._token, self.namespace = _sent or (secrets.token_hex(8), self._new_namespace(restore))
        """What stands before all names of this strategy on the servers."""
        self._mode.namespace = self.namespace
        if _sent is None:
            with _process.lock:
                _process.made[self._token] = self
        self._forgotten = weakref.finalize(self, forget, self._token)

    @property
    def servers(self) -> Servers:
        """Return the parameter servers.

        Raises:
            RuntimeError: this process is a fork of the one that made the strategy.
        """
        self._check_process()
        return self._servers

    @property
    def copies(self) -> VariableCache:
        """Return what this process holds of the variables; see `servers`."""
        self._check_process()
        return self._copies

    def connect(self) -> list[ServerClient]:
        """Return a client of each server; called once."""
        if self._cluster is None:
            caller = LocalServer().connect(self._role.task, self.timeout_seconds)
            return [ServerClient(caller, "the server in this process")]
        credentials = credentials_of(self._cluster.addresses())
        return [
            ServerClient(
                Client(
                    self._cluster.task_address("ps", index),
                    credentials,
                    name=self._role.task,
                    purpose="ps",
                    audience=f"ps:{index}",
                    replies=Reply,
                    timeout=self.timeout_seconds,
                ),
                f"ps:{index}",
            )
            for index in self._cluster.task_indices("ps")
        ]

    def _await_servers(self, durability: Literal["snapshot", "log"]) -> None:
        if self._cluster is not None:
            try:
                self.servers.ask_all(Status("log" if durability == "log" else "memory"))
            except BaseException:
                self._servers.close()
                raise
        elif durability == "log":
            raise ValueError(
                'durability="log" is kept by the servers of a cluster that have a snapshot '
                "directory, and this process has no cluster."
            )

    def _new_namespace(self, restore: bool) -> str:
        """Return what stands before this strategy's names on the servers of its cluster.

        The first strategy of each process has an empty one, so that workers share their variables,
        and a worker that is started again finds them. A second one of a process starts afresh.
        """
        key = "" if self._cluster is None else str(self._cluster.as_dict())
        with _process.lock:
            _process.counts[key] += not restore or not _process.counts[key]
            count = _process.counts[key]
        return "" if count == 1 or self._cluster is None else f"strategy_{count}/"

    def _check_process(self) -> None:
        if os.getpid() != self._process and self._cluster is not None:
            raise RuntimeError(
                f"this process is a fork of process {self._process}, which made {self!r}: its "
                "connections to servers are that process's. Make a strategy here, or start "
                "processes by multiprocessing's method 'spawn'."
            )

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Make the variable that a policy means, on the servers or, to be read, here."""
        if policy.synchronization is not VariableSynchronization.ON_READ:
            shards = number_of_shards(self._partitioner, array.shape, array.dtype)
            return ServedVariable.make(self, array, policy, shards)
        if not self._role.coordinated:
            return SyncOnReadVariable.make(self, array, policy)
        if policy.aggregation is VariableAggregation.MEAN:
            raise ValueError(
                f"variable {policy.name!r}: workers that a chief sends functions to have no mean "
                "of values of their own. Keep a sum and a count, each with aggregation='sum'."
            )
        return ServedVariable.make(self, array, policy)  # All workers add to one value.

    def place(self, name: str) -> tuple[str, int]:
        """Return a new variable's name on the servers, and the server whose turn it is.

        Raises:
            RuntimeError: a worker asks in a function that a chief sent.
        """
        if current_closure() is not None:
            raise RuntimeError(
                f"variable {name!r} was created in a function that the chief sent, which may run "
                "on any worker, and again: create variables on the chief."
            )
        with self._lock:
            given, server = name, len(self._names) % len(self.servers)
            while given in self._names:
                self._names[name] += 1
                given = f"{name}_{self._names[name]}"
            self._names[given] = 0
        return self.namespace + given, server

    def push(
        self, name: str, applies: Mapping[int, Apply], copies: Mapping[int, Sequence[CachedShard]]
    ) -> None:
        """Let each server apply gradients of an optimizer, in the update mode that was asked for.

        `copies` are this process's of the variables that change.
        """
        seen = {server: [copy.seen for copy in some] for server, some in copies.items()}
        with span("push", name):
            count = functools.partial(self._count_staleness, seen)
            self._mode.push(self.servers, name, applies, count)
        self.copies.changed(copy for some in copies.values() for copy in some)

    def staleness(self) -> dict[int, int]:
        """Return how many updates of this process were how stale.

        An update's staleness is the number of updates of others that were made between the read of
        its variables and itself.

        >>> ParameterServerStrategy().staleness()
        {}
        """
        with self._lock:
            return dict(sorted(self._staleness.items()))

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with servers that were killed.

        A server that is started again goes on from its last snapshot; what was changed after that
        is lost. This is what this process has heard of so far, of its own updates and of those in
        functions that it scheduled; there may be more.

        >>> ParameterServerStrategy().lost_updates
        0
        """
        return self._servers.lost_updates

    def save_snapshots(self) -> None:
        """Let every server write its variables to its disk, and wait until that is done.

        Raises:
            DistributeError: a server was given no directory for them.
        """
        self.servers.ask_all(Status("snapshot"))

    def delete(self, variables: Iterable[Variable]) -> None:
        """Delete variables from the servers, for all workers: a new strategy makes others beside.

        Args:
            variables: of this strategy; `variables` of an optimizer are what it keeps.

        Raises:
            ValueError: one does not lie on servers.
        """
        names: dict[int, list[str]] = defaultdict(list)
        for variable in variables:
            if not isinstance(variable, ServedVariable):
                name = getattr(variable, "name", variable)
                raise ValueError(f"variable {name!r} does not lie on servers.")
            for place in variable.places:
                for server in place.servers:
                    names[server].append(place.name)
        self.servers.ask({i: Delete(tuple(some)) for i, some in names.items()})
        gone = set(itertools.chain(*names.values()))
        for key, handle in list(self.handles.items()):
            if not gone.isdisjoint(place.name for place in handle.places):
                del self.handles[key]

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Divide the batches of a dataset among the workers, and each over a worker's replicas.

        Args:
            dataset: of batches for one worker's replicas, the same on every worker: worker w of W
                takes batches w, w + W, and so on. If workers make steps together, all get as many:
                the last of some may be without examples.
            options: `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`.
        """
        own = _share_of(dataset, *self._role.share, evenly=self._mode.together)
        return super().distribute_dataset(own, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Feed this worker's replicas from a dataset of per-replica batches; see `Strategy`."""
        own = InputContext(*self._role.share, self.num_replicas_in_sync)
        return super().distribute_datasets_from_function(lambda _: dataset_fn(own), options)

    def _on_close(self) -> None:
        try:
            if self._cluster is None:
                held = itertools.chain(*(variable.cached for variable in self.handles.values()))
                self._copies.pull(dict.fromkeys(held))
        finally:
            self._copies.stay()
            self._servers.close()
            self._forgotten()

    def _exclusively(self, use: Callable[[], T]) -> T:
        self._check_process()
        return super()._exclusively(use)

    def _run_on_all(self, step: Callable[[int], Any]) -> list[Any]:
        self._copies.begin_step()
        return super()._run_on_all(step)

    def _count_staleness(self, seen: Mapping[int, Sequence[int]], outcomes: Outcomes) -> None:
        """Count an update by the variable that others had changed most since it was read."""
        found = []
        for server, (outcome, *_) in outcomes.items():
            if isinstance(outcome, Accumulated):
                found.append(0 if outcome.accepted else 1)
            elif isinstance(outcome, Done):
                between = zip(seen[server], outcome.versions, strict=True)
                found += [now - 1 - then for then, now in between if 0 < then < now]
        found = [updates for updates in found if updates < _LIVES_APART]
        if found:
            with self._lock:
                self._staleness[max(found)] += 1

    def __reduce__(self) -> Any:
        keep_until_run(self)
        how = (self._partitioner, self._named_devices, self.timeout_seconds)
        return _own_strategy, (self._token, self.namespace, *how)

    def __repr__(self) -> str:
        return f"{super().__repr__()} of {self._role.task}"


def _share_of(dataset: Any, workers: int, index: int, *, evenly: bool) -> Any:
    """Return a worker's batches: every `workers`-th, from number `index` on.

    If `evenly`, all get as many, so that nobody waits for one that has none left: to those that
    have one less a batch without examples is added.

    >>> batches = Dataset.range(5).batch(2)
    >>> [batch.tolist() for batch in _share_of(batches, 2, 1, evenly=True)]
    [[2, 3], []]
    """
    if workers == 1:
        return dataset
    batches = as_dataset(dataset)
    known = batches.cardinality()
    if evenly and known > 0 and known % workers:
        # A batch in a tuple of its own comes as it is; alone its parts would come one by one.
        empty = Dataset.zip((batches.take(1), Dataset.range(1))).map(_without_examples)
        batches = batches.concatenate(empty.repeat(workers - known % workers))
    return batches.shard(workers, index)


def _without_examples(batch: Any, _: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf[:0], batch)
