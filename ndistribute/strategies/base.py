"""`Strategy`: who runs what where.

The base class holds everything that users call. A strategy says which devices it has, how their
replicas meet, and which kind of variable a policy means.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from ndistribute import context, tree
from ndistribute.autodiff import untrack
from ndistribute.cluster import ClusterResolver
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.select import make_group
from ndistribute.collective.workers import ReplicaGroup, Workers
from ndistribute.context import Frame, ReplicaContext, chosen, current_frame, entered
from ndistribute.data import Topology, distribute, distribute_from_function
from ndistribute.device import Array, Device, copy_to, device_of, to_host
from ndistribute.strategies.reductions import (
    components_of_workers,
    gather_value,
    local_components,
    reduce_value,
)
from ndistribute.strategies.replicas import ReplicaPool
from ndistribute.values import PerReplica
from ndistribute.variables.mirrored import MirroredVariable, SyncOnReadVariable
from ndistribute.variables.policy import VariablePolicy, VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["Strategy", "ValueContext"]

# How long `run` waits for another thread's `run` of the same strategy.
TURN_SECONDS = 600.0
_serials = itertools.count()

S = TypeVar("S", bound="Strategy")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ValueContext:
    """Tell a value function which replica it makes a value for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def _alias(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of this name, a subclass's where that overrides it."""

    def call(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__doc__ = f"Call `{name}`, the same under the name that it has in TensorFlow."
    return call


class Strategy:
    """Run a step on every replica of a set of devices, and bring their values together.

    ``with strategy:`` enters its scope, and closes it at the end.

    Args:
        devices: one for each replica.
        cluster_resolver: who is in the job; None for a strategy of one process.
        workers: the other processes that replicas reduce with, where there are any.

    >>> import ndistribute as nd
    >>> isinstance(nd.MirroredStrategy(["cpu:0"]), nd.Strategy)
    True
    """

    _internal = frozenset(
        "across_workers agree_on input_topology is_default make_group "
        "make_variable numbers replica_contexts running_on serial variable_kinds".split()
    )
    """What `dir` and completion leave out: called by the package and by extensions of it."""
    is_default = False
    variable_kinds: ClassVar[Mapping[VariableSynchronization, type[Variable]]] = {
        VariableSynchronization.ON_WRITE: MirroredVariable,
        VariableSynchronization.ON_READ: SyncOnReadVariable,
    }
    """The class of variables by their synchronization."""

    def __init__(
        self,
        devices: Sequence[Device],
        cluster_resolver: ClusterResolver | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._devices = tuple(devices)
        self._resolver = cluster_resolver
        self._workers = workers
        self.serial = next(_serials)  # Those of strategies that were made later are higher.
        self._process = os.getpid()
        self._refusal = ""  # Why it runs no steps any more.
        self._turn = threading.RLock()  # Knows its owner, and refuses to be released by others.
        self.running_on: int | None = None  # The thread that runs a step or closes.
        self._generators: dict[int, Any] = {}
        # Of variables that were given none: the same on all processes.
        self.numbers = itertools.count()
        self._scopes: dict[int, list[contextlib.AbstractContextManager[Any]]] = defaultdict(list)
        self._build()
        if self.num_replicas_in_sync > 1:
            context.register_strategy_of_several(self)

    # What a strategy may override.

    def make_group(self) -> ReplicaGroup:
        """Make the communicators of the replicas."""
        return make_group(self._devices, workers=self._workers)

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Make the variable that a policy means, with an initial value."""
        return self.variable_kinds[policy.synchronization].make(self, array, policy)

    def _on_close(self) -> None:
        """Give back what the strategy holds besides its replicas."""

    # What variables and input ask.

    def across_workers(self, value: Any) -> Any:
        """Return a nest with the components of all processes' replicas in each `PerReplica`."""
        return value if self._workers is None else components_of_workers(value, self._workers)

    def agree_on(self, initial_value: Any, what: str) -> Any:
        """Return the array with which a new variable starts, the chief's on all processes.

        `what` describes the variable, in the same words everywhere.
        """
        if self._workers is None:
            return initial_value
        chiefs = self._workers.agree(np.asarray(to_host(initial_value)), what)
        return copy_to(np.asarray(chiefs), device_of(initial_value))

    @property
    def input_topology(self) -> Topology:
        """Return where input goes: this process's replicas among those of all."""
        workers = self._workers
        if workers is None:
            return Topology(self._devices, (len(self._devices),))
        return Topology(self._devices, workers.replica_counts, workers.rank, workers)

    # What users call.

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the device of each replica of this process."""
        return self._devices

    @property
    def num_replicas_in_sync(self) -> int:
        """Return the number of replicas that reduce together."""
        return self._contexts[0].num_replicas_in_sync

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Return who is in the job; None for a strategy that is of one process by its kind."""
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """Return True on the process that does what is done once, such as writing a checkpoint.

        That is the chief, else worker 0; and every process that works alone, as an evaluator does.
        """
        me = self._resolver
        return me is None or me.task_type == "evaluator" or me.is_chief

    @property
    def replica_contexts(self) -> tuple[ReplicaContext, ...]:
        """Return the contexts of this process's replicas."""
        return self._contexts

    @contextlib.contextmanager
    def scope(self: S) -> Iterator[S]:
        """Make this strategy current for a ``with`` block: variables created there are its own.

        Raises:
            RuntimeError: inside a replica, or in the scope of another strategy.
        """
        frame = self._cross_replica_frame("scope")
        with entered(Frame(chosen(self), None, frame.recorder, frame.merging)):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call a function on every replica, all at once.

        Args:
            fn: the step. Inside it `get_replica_context` gives the replica.
            args: a list or tuple; of a `PerReplica` anywhere in it each replica gets its own
                component, everything else passes as it is.
            kwargs: likewise.
            options: taken for compatibility; there is nothing to choose.

        Returns:
            What `fn` returned, with a `PerReplica` at each leaf; None where every replica
            returned None.

        Raises:
            ValueError: `args` is neither list nor tuple, a `PerReplica` has another number of
                components, or the replicas returned different structures.
            TypeError: `fn` is no function, or `kwargs` no dict.
            RuntimeError: called inside a replica or a merge_call.
            BaseException: whatever a replica raised, with a note that names the replica.
        """
        if not callable(fn):
            raise TypeError(f"fn must be a function, got {fn!r}: write run(step, args=(x,)).")
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"args must be a list or tuple, got {type(args).__name__}: write "
                "strategy.run(step, args=(x,))."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a dict, got {kwargs!r}: write args=(x, y).")
        if self._cross_replica_frame("run").merging:
            raise RuntimeError(
                "run was called inside merge_call: the replicas are waiting there. Return the "
                "value and call run outside."
            )
        size = len(self._devices)
        named = dict(kwargs or {})
        calls = [
            (args and tree.select(args, rank, size), named and tree.select(named, rank, size))
            for rank in range(size)
        ]

        def step(rank: int) -> Any:
            own_args, own_named = calls[rank]
            return untrack(fn(*own_args, **own_named))

        results = self._exclusively(functools.partial(self._run_on_all, step))
        return tree.regroup(results, context.join_leaf)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Combine a value over replicas.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of `PerReplica`; a plain leaf counts as the same on every replica.
            axis: None, or the axes that are reduced inside each replica too; a mean then divides
                by the true number of elements.

        Returns:
            The nest, with one combined array or number at each leaf.

        Raises:
            ValueError: the op is unknown, shapes differ, or an axis is out of range.
            TypeError: a leaf is no number, array or `IndexedSlices`.
            RuntimeError: called inside a replica.
        """
        self._cross_replica_frame("reduce", "merge_call or all_reduce")
        op = ReduceOp.parse(reduce_op)
        value = self.across_workers(value)
        return reduce_value(op, value, axis, self._devices[0], self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value over replicas, in replica order.

        Args:
            value: a nest of `PerReplica`; lengths along `axis` may differ.
            axis: the axis to join along.

        Raises:
            ValueError: a component has no such axis, or other lengths differ.
            RuntimeError: called inside a replica.
        """
        self._cross_replica_frame("gather", "all_gather")
        value = self.across_workers(value)
        return gather_value(value, axis, self._devices[0], self.num_replicas_in_sync)

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Cut each global batch of a dataset into one piece per replica, of all workers.

        Args:
            dataset: batched by the global batch size, the same on every worker.
            options: `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`, with the pieces of this process's replicas.
        """
        return distribute(dataset, self.input_topology, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Feed this process's replicas from a dataset of per-replica batches.

        Args:
            dataset_fn: called with an `InputContext` that says which worker this is; returns the
                dataset.
            options: `InputOptions`.
        """
        return distribute_from_function(dataset_fn, self.input_topology, options)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make a value for each replica.

        Args:
            value_fn: called with a `ValueContext` for each replica.

        Returns:
            A `PerReplica`, or a nest of them.
        """
        size = self.num_replicas_in_sync
        made = [value_fn(ValueContext(c.replica_id_in_sync_group, size)) for c in self._contexts]
        return tree.regroup(made, PerReplica)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return this process's components of a value, ``(value,)`` for a plain one.

        Args:
            value: a `DistributedValues` or variable, a nest that holds some, or something plain.

        Returns:
            One entry per replica: a component, or a nest of them.

        Raises:
            ValueError: the leaves of a nest have different numbers of components.

        >>> import ndistribute as nd
        >>> nd.get_strategy().local_results({"x": nd.PerReplica([1])})
        ({'x': 1},)
        """
        return local_components(value)

    def close(self) -> None:
        """End the replica threads; variables stay readable, `run` does not work any more.

        It says good-bye to servers and workers. A forked child closes nothing.

        Raises:
            RuntimeError: called inside a replica or a merge_call of this strategy.
        """
        if os.getpid() != self._process:
            return
        frame = current_frame()
        if frame.strategy is self and (frame.replica is not None or frame.merging):
            raise RuntimeError(f"close of {self!r} was called inside a step that it runs.")

        def end() -> None:
            self._refusal = "was closed: make a new strategy to run steps."
            self._pool.close()

        try:
            self._exclusively(end)
        finally:
            if self.running_on != threading.get_ident():  # Else a step of this thread goes on.
                self._on_close()

    experimental_distribute_dataset = _alias("distribute_dataset")
    experimental_distribute_values_from_function = _alias("distribute_values_from_function")
    experimental_local_results = _alias("local_results")
    experimental_run_v2 = _alias("run")

    def __enter__(self: S) -> S:
        scope = self.scope()
        scope.__enter__()
        self._scopes[threading.get_ident()].append(scope)
        return self

    def __exit__(self, *error: Any) -> None:
        scopes = self._scopes[threading.get_ident()]
        if not scopes:
            raise RuntimeError(f"this thread is in no `with` block of {self!r} that could end.")
        try:
            scopes.pop().__exit__(*error)
        finally:
            self.close()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._internal]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can not be copied or pickled, for its replicas are threads of this process: "
            "make a strategy in each process."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, map(str, self._devices)))})"

    def _build(self) -> None:
        """Make the replicas' communicators, contexts and threads."""
        group = self.make_group()
        self._contexts = tuple(
            ReplicaContext(self, communicator, device, self._generators)
            for communicator, device in zip(group.communicators, self._devices, strict=True)
        )
        self._pool = ReplicaPool(group, self._contexts, repr(self))

    def _run_on_all(self, step: Callable[[int], Any]) -> list[Any]:
        if self._refusal:
            raise RuntimeError(f"{self!r} {self._refusal}")
        if self._pool.abandoned:  # Nothing could be made in its place at once.
            self._build()
        pool = self._pool
        try:
            return pool.run(step)
        finally:
            if pool.abandoned:
                try:
                    self._build()
                finally:
                    pool.close()

    def _let_go(self) -> None:
        """Refuse steps in a forked child, where the other replicas do not exist."""
        self._turn, self.running_on = threading.RLock(), None  # Who held it may not exist either.
        self._refusal = (
            f"was made by process {self._process}, of which this one is a fork without its replica "
            "threads and connections: make a strategy here, or start processes by "
            "multiprocessing's method 'spawn'."
        )
        self._pool.refuse_in_fork(RuntimeError(f"{self!r} {self._refusal}"))

    def _exclusively(self, use: Callable[[], T]) -> T:
        """Call a function that uses the replicas, while no other one does.

        Raises:
            RuntimeError: another thread uses them too long; or this one does, and was interrupted.
        """
        me = threading.get_ident()
        if self.running_on == me:
            raise RuntimeError(
                f"{self!r} was used in the middle of a step by the thread that runs it, as signal "
                "handlers are: let the handler set a flag or raise, and go on outside of run."
            )
        try:
            if not self._turn.acquire(timeout=TURN_SECONDS):
                raise RuntimeError(
                    f"another thread has been running a step of {self!r} for {TURN_SECONDS:g} s."
                )
            self.running_on = me
            return use()
        finally:
            if self.running_on == me:
                self.running_on = None
            try:  # noqa: SIM105 - a call before the release would let an interrupt in.
                self._turn.release()
            except RuntimeError:
                pass  # It was not acquired.

    def _cross_replica_frame(self, method: str, instead: str = "merge_call") -> Frame:
        """Return the thread's frame, having checked that a method makes sense there.

        Raises:
            RuntimeError: the thread is in a replica, or in the scope of another strategy.
        """
        frame = current_frame()
        if frame.replica is not None:
            raise RuntimeError(
                f"{method} was called inside a replica, where each replica runs on its own. Call "
                f"it outside run, or use get_replica_context().{instead} instead."
            )
        if frame.strategy is not None and frame.strategy is not self:
            raise RuntimeError(
                f"Mixing different strategies: {method} of "
                f"{context.told_apart(self, frame.strategy)} was called in the scope of "
                f"{frame.strategy!r}. Leave that scope first."
            )
        return frame


def _refuse_in_fork() -> None:
    for strategy in context.strategies_of_several():
        strategy._let_go()


os.register_at_fork(after_in_child=_refuse_in_fork)
