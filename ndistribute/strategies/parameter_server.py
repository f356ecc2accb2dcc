"""The strategy of workers that keep their variables on parameter servers.

In a cluster without a chief, each worker creates the strategy and runs its own loop. A chief, or a
process that is no task of the cluster, creates it and sends functions to the workers through a
`ClusterCoordinator`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ndistribute import tree
from ndistribute.blas import shared_blas
from ndistribute.cluster import ClusterResolver, resolver_of_job
from ndistribute.cluster.resolvers import check_jobs, current_task
from ndistribute.cluster.spec import ClusterSpec, num_sharing_host, task_names
from ndistribute.coordinator.closures import keep_until_run
from ndistribute.coordinator.coordinator import forget
from ndistribute.coordinator.worker import keep
from ndistribute.data import Dataset, InputContext, as_dataset
from ndistribute.devices import Array, Device, resolve_devices
from ndistribute.mistakes import count_of
from ndistribute.parameter_server.client import Outcomes, ServerClient, Servers, current_closure
from ndistribute.parameter_server.copies import serve_witness
from ndistribute.parameter_server.messages import Accumulated, Apply, Delete, Done, Reply, Status
from ndistribute.parameter_server.pair import PairClient
from ndistribute.parameter_server.store_service import LocalServer
from ndistribute.strategies.base import Strategy, T
from ndistribute.strategies.update_mode import UpdateMode, update_mode_of
from ndistribute.timeline import identify, span
from ndistribute.transport.failure_detector import detector
from ndistribute.transport.rpc import Client, RpcServer
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

_LIVES_APART = 1 << 29  # After a server's restart, versions differ by more than this.


@dataclass(frozen=True, slots=True)
class _Role:
    """The role of this process in the cluster."""

    task: str = "worker:0"
    num_workers: int = 1  # The processes that train, each on its shard of the data.
    share: tuple[int, int] = (1, 0)  # The number of shards, and the index of this process's.
    coordinated: bool = False  # Whether a chief sends functions to workers.

    @classmethod
    def of(cls, resolver: ClusterResolver) -> _Role:
        if not resolver.cluster_spec():
            return cls()
        job = resolver.task_type or "chief"
        cluster, index = resolver.cluster_spec(), resolver.task_id or 0
        check_jobs(cluster)
        if job == "ps":
            what = "this process is a parameter server, which has no strategy:"
            raise ValueError(f"{what} call nd.Server(cluster, 'ps', index).join() instead.")
        if "ps" not in cluster.jobs:
            problem = f"the cluster has {', '.join(cluster.jobs)} and no parameter server:"
            how = "give it tasks of the job 'ps', or use MultiWorkerMirroredStrategy."
            raise ValueError(f"{problem} {how}")
        workers = list(cluster.task_indices("worker")) if "worker" in cluster.jobs else []
        count = max(1, len(workers))
        share = (count, workers.index(index)) if job == "worker" else (1, 0)
        return cls(f"{job}:{index}", count, share, job == "chief" or "chief" in cluster.jobs)


class _Process:
    """The strategies of this process and their count on each cluster; reset in a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.counts: Counter[str] = Counter()  # By cluster, and by witness.
        self.witnesses: dict[str, RpcServer | None] = {}

    def hold_witness(self, cluster: ClusterSpec, job: str, index: int) -> Callable[[], None]:
        """Serve as the witness if the task is it; return a function that stops serving."""
        place = f"{job}:{index} of {cluster.as_dict()}"
        with self.lock:
            server = self.witnesses.get(place) or serve_witness(cluster, job, index)
            self.witnesses[place] = server
            self.counts[place] += 1

        def leave() -> None:
            with self.lock:
                self.counts[place] -= 1
                last = None if self.counts[place] else self.witnesses.pop(place)
            if last is not None:
                last.close()

        return leave


_process = _Process()
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


def _own_strategy(token: str, namespace: str, how: dict[str, Any]) -> ParameterServerStrategy:
    """Return this process's strategy in place of an unpickled one; a worker creates it once."""
    made: ParameterServerStrategy | None = _process.made.get(token)
    if made is not None:
        return made
    task = current_task()
    if task is None:
        raise RuntimeError(
            "a ParameterServerStrategy, or a variable of one, was sent to a process that is not a "
            "worker of its cluster: only functions that a ClusterCoordinator schedules can use "
            "them in other processes."
        )
    make = functools.partial(ParameterServerStrategy, task, _sent=(token, namespace), **how)
    kept: ParameterServerStrategy = keep(token, make, ParameterServerStrategy.close)
    return kept


class ParameterServerStrategy(Strategy):
    """A strategy with the replicas of one worker, and variables on parameter servers.

    The constructor waits until all servers run. Without a cluster, the server is part of this
    process, which trains alone.

    A forked child cannot use the strategy; its exit and its `close` do not affect the parent's
    strategy. After the strategy is closed or dropped, workers that received it drop their copy
    before they run their next function. The variables stay on the servers, for snapshots and other
    workers, until `delete`.

    Args:
        cluster_resolver: describes the job; None reads `TF_CONFIG`.
        variable_partitioner: called with the shape and dtype of each new variable; returns the
            number of shards for each axis, see `nd.partitioners`. None: variables are not sharded.
        devices: one for each replica of this worker; None means all visible GPUs, or ``cpu:0``.
        replicas_to_aggregate: the number of workers whose gradients are combined in a step; all
            workers wait for the step. None: each worker's gradients make a step, and none waits.
        total_num_replicas: the number of workers that contribute gradients; if it exceeds
            `replicas_to_aggregate`, late gradients are dropped. None: `replicas_to_aggregate`.
        max_staleness: how many steps a worker may be ahead of the slowest one; None: no limit.
        timeout_seconds: how long to wait for servers and workers, in seconds; None means 600.
        durability: ``"snapshot"``, or ``"log"``: each server appends every update to a log in its
            snapshot directory before it acknowledges the update, so that none is lost.
        restore: True: reuse the variables of the strategy that this process created before on the
            same cluster, and the slots of optimizers with the same names. False: create new ones.

        replicas: the number of servers that keep each variable or shard, 1 or 2. With 2, the job
            continues and loses no update when a server is lost, but each update costs a second
            round trip.

    Raises:
        DistributeError: `durability` is ``"log"``, and a server has no snapshot directory.
        ValueError: the cluster has no servers, this process is one, or an argument is out of range.
        WorkerLostError: a server could not be reached in time.

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
        replicas: int = 1,
        _sent: tuple[str, str] | None = None,
    ) -> None:
        resolver = resolver_of_job(cluster_resolver)
        self._role = _Role.of(resolver)
        if _sent is not None:  # A function on a worker reads all batches.
            self._role = replace(self._role, share=(1, 0), coordinated=True)
        self._cluster = resolver.cluster_spec() or None
        #: Seconds to wait for servers, and for its coordinator to wait for workers.
        self.timeout_seconds = 600.0 if timeout_seconds is None else float(timeout_seconds)
        if self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}.")
        limits = replicas_to_aggregate, total_num_replicas, max_staleness
        role, most = self._role, self.timeout_seconds
        self._mode = update_mode_of(role.num_workers, *limits, role.coordinated, most)
        self._replicas = _checked_replicas(replicas, self._cluster, self._mode)
        self._partitioner = variable_partitioner
        self._named_devices = None if devices is None else tuple(map(str, devices))
        self._staleness: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}  # The number of further variables of each name.
        self.handles: weakref.WeakValueDictionary[str, ServedVariable]
        #: The variables of this process, by their names on the servers.
        self.handles = weakref.WeakValueDictionary()
        super().__init__(resolve_devices(devices), resolver)
        held = contextlib.ExitStack()
        self._give_cores_back = weakref.finalize(self, held.close)
        self._give_cores_back.atexit = False
        if self._cluster is not None:
            identify(self._role.task, task_names(self._cluster))
            job, _, index = self._role.task.partition(":")
            held.enter_context(shared_blas(num_sharing_host(self._cluster, job, int(index))))
        self._servers = Servers(self.connect())
        self._copies = VariableCache(self._servers)
        weakref.finalize(self, detector.close_soon, self._servers.close).atexit = False
        job, _, index = self._role.task.partition(":")
        self._witness = contextlib.ExitStack()
        if self._replicas > 1 and self._cluster is not None and not self._role.coordinated:
            # In a coordinated job, the server of a task is the witness.
            self._witness.callback(_process.hold_witness(self._cluster, job, int(index)))
            weakref.finalize(self, detector.close_soon, self._witness.close).atexit = False
        self._await_servers(durability)
        #: The prefix of all names of this strategy on the servers.
        self._token, self.namespace = _sent or (secrets.token_hex(8), self._new_namespace(restore))
        self._mode.namespace = self.namespace
        if _sent is None:
            _process.made[self._token] = self
        self._forgotten = weakref.finalize(self, forget, self._token)

    @property
    def servers(self) -> Servers:
        """The client of the parameter servers; raises in a fork of this process."""
        self._check_process()
        return self._servers

    @property
    def copies(self) -> VariableCache:
        """The cached values of variables in this process; raises like `servers`."""
        self._check_process()
        return self._copies

    def connect(self) -> list[ServerClient]:
        """Return a new client for each server; called once."""
        if self._cluster is None:
            local = LocalServer().connect(self._role.task, self.timeout_seconds)
            return [ServerClient(local, "the server in this process")]
        task, wait = self._role.task, self.timeout_seconds
        credentials = credentials_of(self._cluster.addresses())
        connect = functools.partial(
            Client, credentials=credentials, name=task, replies=Reply, timeout=wait
        )
        clients = []
        for index in self._cluster.task_indices("ps"):
            address, name = self._cluster.task_address("ps", index), f"ps:{index}"
            if self._replicas == 1:
                caller: Any = connect(address, purpose="ps", audience=name)
            else:
                caller = PairClient.of(self._cluster, index, connect, wait)
            clients.append(ServerClient(caller, name))
        return clients

    def _await_servers(self, durability: Literal["snapshot", "log"]) -> None:
        if self._cluster is not None:
            try:
                self.servers.ask_all(Status("log" if durability == "log" else "memory"))
            except BaseException:  # The traceback may keep this object for long.
                self._give_cores_back()
                self._witness.close()
                self._servers.close()
                raise
        elif durability == "log":
            raise ValueError(
                'durability="log" needs the servers of a cluster, with a snapshot directory, and '
                "this process has no cluster."
            )

    def _new_namespace(self, restore: bool) -> str:
        """Return the prefix of this strategy's names on the servers of its cluster."""
        # It is empty for the first strategy of each process, so that workers share their variables
        # and a restarted worker finds them again. Later ones get new names unless they restore.
        key = "" if self._cluster is None else str(self._cluster.as_dict())
        with _process.lock:
            _process.counts[key] += not restore or not _process.counts[key]
            count = _process.counts[key]
        return "" if count == 1 or self._cluster is None else f"strategy_{count}/"

    def _check_process(self) -> None:
        if os.getpid() != self._process and self._cluster is not None:
            raise RuntimeError(
                f"this process is a fork of process {self._process}, which made {self!r} and owns "
                "its connections to servers. Make a strategy here, or start processes with "
                "multiprocessing's method 'spawn'."
            )

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Return a new variable: on the servers, unless it is ON_READ and there is no chief."""
        if policy.shard_axis is not None:
            raise ValueError(
                f"variable {policy.name!r} cannot have a shard for each replica, because this "
                "strategy keeps variables on servers: pass a variable_partitioner to the "
                "strategy, or use another strategy."
            )
        if policy.synchronization is not VariableSynchronization.ON_READ:
            shards = number_of_shards(self._partitioner, array.shape, array.dtype)
            return ServedVariable.make(self, array, policy, shards)
        if not self._role.coordinated:
            return SyncOnReadVariable.make(self, array, policy)
        if policy.aggregation is VariableAggregation.MEAN:
            raise ValueError(
                f"variable {policy.name!r}: MEAN is undefined on read for workers that run a "
                "chief's functions. Keep a sum and a count, each with aggregation='sum'."
            )
        return ServedVariable.make(self, array, policy)  # All workers add to one value.

    def place(self, name: str) -> tuple[str, int]:
        """Return the name of a new variable on the servers, and the index of its server."""
        if current_closure() is not None:
            raise RuntimeError(
                f"variable {name!r} was created in a function that the chief sent. Such functions "
                "may run on any worker, and more than once: create variables on the chief."
            )
        with self._lock:
            unique, server = name, len(self._names) % len(self.servers)
            while unique in self._names:
                self._names[name] += 1
                unique = f"{name}_{self._names[name]}"
            self._names[unique] = 0
        return self.namespace + unique, server

    def push(
        self, name: str, applies: Mapping[int, Apply], copies: Mapping[int, Sequence[CachedShard]]
    ) -> None:
        """Send gradients to the servers; `copies` are the cached shards that the update changes."""
        seen = {server: [copy.seen for copy in some] for server, some in copies.items()}
        with span("push", name):
            count = functools.partial(self._count_staleness, seen)
            self._mode.push(self.servers, name, applies, count)
        self.copies.changed(copy for some in copies.values() for copy in some)

    def staleness(self) -> dict[int, int]:
        """Return the number of this process's updates for each staleness.

        An update's staleness is the number of other workers' updates that the servers applied
        after this process read the variables and before its own update.

        >>> ParameterServerStrategy().staleness()
        {}
        """
        with self._lock:
            return dict(sorted(self._staleness.items()))

    @property
    def lost_updates(self) -> int:
        """The number of updates that are known to be lost because servers were killed.

        A restarted server continues from its last snapshot, without the later updates. This counts
        the losses that this process knows of, among its own updates and those of functions that it
        scheduled; there may be more.

        >>> ParameterServerStrategy().lost_updates
        0
        """
        return self._servers.lost_updates

    def save_snapshots(self) -> None:
        """Make every server write a snapshot of its variables to disk, and wait for all of them.

        Raises:
            DistributeError: a server has no snapshot directory.
        """
        self.servers.ask_all(Status("snapshot"))

    def delete(self, variables: Iterable[Variable]) -> None:
        """Delete variables from the servers, for all workers.

        Args:
            variables: variables of this strategy, or of an optimizer: `Optimizer.variables`.

        Raises:
            ValueError: a variable is not on servers.
        """
        names: dict[int, list[str]] = defaultdict(list)
        for variable in variables:
            if not isinstance(variable, ServedVariable):
                name = getattr(variable, "name", variable)
                raise ValueError(f"variable {name!r} is not on servers.")
            for place in variable.places:
                for server in place.servers:
                    names[server].append(place.name)
        self.servers.ask({i: Delete(tuple(some)) for i, some in names.items()})
        gone = set(itertools.chain(*names.values()))
        for key, handle in list(self.handles.items()):
            if not gone.isdisjoint(place.name for place in handle.places):
                del self.handles[key]

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return a dataset of this worker's batches, each split over its replicas.

        Args:
            dataset: batches for the replicas of one worker, the same on every worker: worker w of W
                takes batches w, w + W, and so on. In a function that a coordinator runs on
                workers, each takes all batches. With `replicas_to_aggregate`, all workers get the
                same number of batches; the last batch of some may have no examples.
            options: `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`.
        """
        share = _share_of(dataset, *self._role.share, evenly=self._mode.together)
        return super().distribute_dataset(share, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Return a dataset for this worker's replicas; see `Strategy`."""
        context = InputContext(*self._role.share, self.num_replicas_in_sync)
        return super().distribute_datasets_from_function(lambda _: dataset_fn(context), options)

    def _on_close(self) -> None:
        try:
            if self._cluster is None:
                held = itertools.chain(*(variable.cached for variable in self.handles.values()))
                self._copies.pull(dict.fromkeys(held))
        finally:
            self._give_cores_back()
            self._witness.close()
            self._copies.is_final = True  # Without its lock, which a waiting thread may hold.
            self._servers.close()
            self._forgotten()

    def _exclusively(self, use: Callable[[], T]) -> T:
        self._check_process()
        return super()._exclusively(use)

    def _run_on_all(self, step: Callable[[int], Any]) -> list[Any]:
        self._copies.begin_step()
        return super()._run_on_all(step)

    def _count_staleness(self, seen: Mapping[int, Sequence[int]], outcomes: Outcomes) -> None:
        """Count an update under the staleness of its most stale variable."""
        ages = []
        for server, (outcome, *_) in outcomes.items():
            if isinstance(outcome, Accumulated):
                ages.append(0 if outcome.accepted else 1)
            elif isinstance(outcome, Done):
                between = zip(seen[server], outcome.versions, strict=True)
                ages += [now - 1 - then for then, now in between if 0 < then < now]
        ages = [updates for updates in ages if updates < _LIVES_APART]
        if ages:
            with self._lock:
                self._staleness[max(ages)] += 1

    def __reduce__(self) -> Any:
        keep_until_run(self)
        how = {
            "variable_partitioner": self._partitioner,
            "devices": self._named_devices,
            "timeout_seconds": self.timeout_seconds,
            "replicas": self._replicas,
        }
        return _own_strategy, (self._token, self.namespace, how)

    def __repr__(self) -> str:
        return f"{super().__repr__()} of {self._role.task}"


def _checked_replicas(replicas: int, cluster: ClusterSpec | None, mode: UpdateMode) -> int:
    """Return the number of copies of each shard; refuse what cannot work."""
    if replicas not in (1, 2):
        raise ValueError(f"replicas must be 1 or 2 servers for each shard, got {replicas!r}.")
    servers = 0 if cluster is None else cluster.num_tasks("ps")
    if replicas == 2 and servers < 2:
        raise ValueError(
            "replicas=2 keeps each variable on two servers, and the cluster has "
            f"{count_of(servers, 'server')}: start another server, or use replicas=1."
        )
    if replicas == 2 and type(mode) is not UpdateMode:
        raise ValueError(
            "replicas=2 needs asynchronous updates, but replicas_to_aggregate and max_staleness "
            "make workers wait at one server: leave them out, or use replicas=1."
        )
    return replicas


def _share_of(dataset: Any, workers: int, index: int, *, evenly: bool) -> Any:
    """Return a worker's batches: every `workers`-th one, from the batch with number `index` on."""
    if workers == 1:
        return dataset
    batches = as_dataset(dataset)
    known = batches.cardinality()
    # No worker may wait for a step that another one does not make.
    if evenly and known > 0 and known % workers:
        # The zip keeps a tuple batch in one argument; alone, map would pass its parts separately.
        empty = Dataset.zip((batches.take(1), Dataset.range(1))).map(_without_examples)
        batches = batches.concatenate(empty.repeat(workers - known % workers))
    return batches.shard(workers, index)


def _without_examples(batch: Any, _: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf[:0], batch)
