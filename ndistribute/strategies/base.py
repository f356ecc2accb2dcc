"""`Strategy`, the base class with every method that users call.

A subclass determines the devices, the communicators of their replicas, and the class of variable
for each policy.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from ndistribute import context, tree
from ndistribute.autodiff import untrack
from ndistribute.cluster import ClusterResolver, resolve
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.select import make_group
from ndistribute.collective.workers import ReplicaGroup, Workers
from ndistribute.context import Frame, ReplicaContext, chosen, current_frame, entered
from ndistribute.data import DistributedDataset, Topology, distribute, distribute_from_function
from ndistribute.devices import Array, Device, copy_to, device_of, to_host
from ndistribute.strategies import reductions
from ndistribute.strategies.replicas import ReplicaPool
from ndistribute.transport.failure_detector import not_for_forks
from ndistribute.values import PerReplica
from ndistribute.variables.mirrored import MirroredVariable, ShardedVariable, SyncOnReadVariable
from ndistribute.variables.policy import VariablePolicy, VariableSynchronization
from ndistribute.variables.variable import Variable

# How long `run` waits for another thread's `run` of the same strategy.
TURN_SECONDS = 600.0
_CLOSED = "cannot be used any more: make a new strategy, and create or load models in its scope."
_serials = itertools.count()

S = TypeVar("S", bound="Strategy")
T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, with the same fields as TensorFlow's `RunOptions`.

    Args:
        experimental_enable_dynamic_batch_size: has no effect: batches may have any size.
        experimental_bucketizing_dynamic_shape: has no effect: a step is compiled for each shape.
        experimental_xla_options: must be None; set XLA's options by `XLA_FLAGS`.

    Raises:
        ValueError: `experimental_xla_options` is not None.

    >>> import ndistribute as nd
    >>> nd.get_strategy().run(lambda: 1, options=RunOptions())
    PerReplica:{
      0: 1
    }
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        if self.experimental_xla_options is not None:
            raise ValueError(
                "RunOptions: experimental_xla_options have no effect: set XLA_FLAGS instead."
            )


def _alias(name: str) -> Callable[..., Any]:
    def call(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__doc__ = f"Call `{name}`; this is its name in TensorFlow."
    return call


class Strategy:
    """The base class of strategies, which run a step on every replica and combine the results.

    ``with strategy:`` enters the strategy's scope, and closes the strategy at the end of the block.

    Args:
        devices: the device of each replica of this process.
        cluster_resolver: describes the job; None for a strategy of one process.
        workers: the group of processes that reduce together; None for a strategy of one process.
        leave: called at the end to leave the job; None closes `workers`.

    >>> import ndistribute as nd
    >>> isinstance(nd.MirroredStrategy(["cpu:0"]), nd.Strategy)
    True
    """

    #: Names that `dir` and completion omit: only the package and its extensions use them.
    _internal = frozenset(
        "across_workers agree_on attempt batch_scale input_topology is_default let_go make_group "
        "make_variable needs_equal_parts note_state note_variable numbers regroup "
        "replica_contexts running_on serial session "
        "variable_kinds".split()
    )
    is_default = False
    session: Any = None  # The session of an elastic job.
    needs_equal_parts = False  # Whether all replicas must get the same number of rows.
    _refusal = ""  # The reason why `run` raises; empty: it runs.
    _good_bye: Callable[[], Any] | None = None
    #: The class of variable for each synchronization.
    variable_kinds: ClassVar[Mapping[VariableSynchronization, type[Variable]]] = {
        VariableSynchronization.ON_WRITE: MirroredVariable,
        VariableSynchronization.ON_READ: SyncOnReadVariable,
    }

    def __init__(
        self,
        devices: Sequence[Device],
        cluster_resolver: ClusterResolver | None = None,
        workers: Workers | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._devices = tuple(devices)
        self._resolver = cluster_resolver
        self._workers = workers
        if workers is not None or leave is not None:
            # The other workers wait for this, so it also runs if the program never calls close.
            self._good_bye = weakref.finalize(self, leave or workers.close)  # type: ignore[union-attr]
        self.serial = next(_serials)  # Strategies made later have higher numbers.
        self._process = os.getpid()
        self._turn = threading.RLock()  # Reentrant: only its owner can release it.
        self.running_on: int | None = None  # The thread that runs a step or `close`.
        self._generators: dict[int, Any] = {}
        # Numbers for the names of variables without one: the same on all processes.
        self.numbers = itertools.count()
        self._entered: _Scope[Any] = _Scope(self)  # The scope of `with strategy:`.
        self._build()
        if cluster_resolver is None and not self.is_default:
            _warn_if_alone(type(self).__name__)
        if self.num_replicas_in_sync > 1:
            context.register_strategy_of_several(self)
            not_for_forks.add(self)

    # Methods that a subclass may override.

    def make_group(self) -> ReplicaGroup:
        """Return new communicators and streams for the replicas."""
        return make_group(self.devices, workers=self._workers)

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Return a new variable of the kind that a policy asks for, with an initial value."""
        if policy.shard_axis is not None:
            return ShardedVariable.make(self, array, policy)
        return self.variable_kinds[policy.synchronization].make(self, array, policy)

    def _on_close(self) -> None:
        """Release the resources that the strategy has besides its replicas."""
        if self._good_bye is not None:
            self._good_bye()

    # Methods that variables and input pipelines call.

    def across_workers(self, value: Any, *, whole: bool = False) -> Any:
        """Return a nest in which each `PerReplica` has the components of all processes.

        Args:
            value: the nest, with the components of this process.
            whole: whether to raise an error if components of lost workers are missing.
        """
        workers = self._workers
        return value if workers is None else reductions.components_of_workers(value, workers)

    def agree_on(self, initial_value: Any, policy: VariablePolicy) -> Any:
        """Return rank 0's initial value of a new variable."""
        if self._workers is None:
            return initial_value
        what = f"variable {policy.name!r} ({policy})"
        chiefs = self._workers.agree(np.asarray(to_host(initial_value)), what)
        return copy_to(np.asarray(chiefs), device_of(initial_value))

    def attempt(self, call: Callable[[], T], what: str = "") -> T:
        """Return the result of a function that may involve other workers.

        In an elastic job, the function is called again until all workers have completed it. `what`
        names a result that is the same on all workers; newcomers to a later loop receive it.
        """
        return call()

    def note_variable(self, variable: Variable) -> None:
        """Register a new variable of this strategy."""

    def note_state(self, holder: Any) -> None:
        """Register an object whose state of plain values is changed by steps."""

    @property
    def input_topology(self) -> Topology:
        """The replicas of this process and of all processes, for input pipelines."""
        workers = self._workers
        if workers is None:
            return Topology(self.devices, (len(self.devices),))
        return Topology(self.devices, workers.replica_counts, workers.rank, workers)

    # Methods that users call.

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each replica of this process."""
        return self._devices

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that describes the job; None for kinds of strategies with one process."""
        return self._resolver

    @property
    def batch_scale(self) -> float:
        """The ratio of the batch size to that at the first start; 1 unless workers scale it."""
        return 1.0

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all processes that reduce together."""
        return self.replica_contexts[0].num_replicas_in_sync

    @property
    def is_chief(self) -> bool:
        """True in the one process of a job that should print or write files, such as checkpoints.

        This is the chief or, in a job without a chief, worker 0. It is also True in a process that
        works alone, such as an evaluator.
        """
        me = self.cluster_resolver
        return me is None or me.task_type == "evaluator" or me.is_chief

    def scope(self: S) -> contextlib.AbstractContextManager[S]:
        """Make this strategy current for a ``with`` block; it owns the variables created there.

        The returned context manager may be entered any number of times.

        Raises:
            RuntimeError: entered inside a replica, or in the scope of another strategy.
        """
        return _Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call a function once on every replica, in parallel, and return the results.

        Args:
            fn: the step. Inside it, `get_replica_context` returns the context of the replica.
            args: a list or tuple. Each replica gets its own component of every `PerReplica`
                anywhere in it; all other values are passed unchanged.
            kwargs: a dict of keyword arguments, treated in the same way.
            options: `RunOptions` or None.

        Returns:
            The structure that `fn` returned, with a `PerReplica` at each leaf, or None where every
            replica returned None.

        Raises:
            ValueError: `args` is not a list or tuple, a `PerReplica` does not have one component
                for each replica of this process, or the replicas returned different structures.
            TypeError: `fn` is not callable, `kwargs` is not a dict, or `options` not `RunOptions`.
            RuntimeError: called inside a replica or a merge_call.
            BaseException: the exception that a replica raised, with a note that names the replica.
        """
        if not isinstance(options, RunOptions | None):
            raise TypeError(f"run: options must be nd.RunOptions(...) or None, got {options!r}.")
        if not callable(fn):
            raise TypeError(f"fn must be a function, got {fn!r}: write run(step, args=(x,)).")
        if not isinstance(args, list | tuple):
            what = f"args must be a list or tuple, got {type(args).__name__}:"
            raise ValueError(f"{what} write strategy.run(step, args=(x,)).")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a dict, got {kwargs!r}: write args=(x, y).")
        if self._cross_replica_frame("run").merging:
            what = "run was called inside merge_call, while the replicas wait for it."
            raise RuntimeError(f"{what} Return the value and call run outside.")
        return self._run_step(fn, args, dict(kwargs or {}))

    def _run_step(self, fn: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return the results of this process's replicas; the caller has checked the arguments."""
        size = len(self.devices)
        calls = [
            (args and tree.select(args, rank, size), named and tree.select(named, rank, size))
            for rank in range(size)
        ]

        def step(rank: int) -> Any:
            own_args, own_named = calls[rank]
            context.current_frame().args = args, named
            return untrack(fn(*own_args, **own_named))

        return tree.regroup(self._exclusively(lambda: self._run_on_all(step)), context.join_leaf)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Return a value reduced over all replicas.

        Args:
            reduce_op: a `ReduceOp`, or its name in any case.
            value: a nest of `PerReplica`; any other leaf counts as equal on every replica.
            axis: None, or axes to reduce inside each component as well; MEAN then divides by the
                number of elements over all replicas.

        Returns:
            The same nest, with one reduced array or number at each leaf.

        Raises:
            ValueError: the op is unknown, shapes differ, or an axis is out of range.
            TypeError: a leaf is not a number, an array or `IndexedSlices`.
            RuntimeError: called inside a replica.
        """
        self._cross_replica_frame("reduce", "merge_call or all_reduce")
        op = ReduceOp.parse(reduce_op)

        def reduced() -> Any:
            everyone = self.across_workers(value)
            count = self.num_replicas_in_sync
            return reductions.reduce_value(op, everyone, axis, self.devices[0], count)

        return self.attempt(reduced, "a reduction")

    def gather(self, value: Any, axis: int) -> Any:
        """Return the components of all replicas, concatenated in replica order.

        Args:
            value: a nest of `PerReplica`; the components' lengths along `axis` may differ.
            axis: the axis along which to concatenate.

        Raises:
            ValueError: a component lacks the axis, or lengths along other axes differ.
            RuntimeError: called inside a replica.
        """
        self._cross_replica_frame("gather", "all_gather")

        def gathered() -> Any:
            everyone = self.across_workers(value, whole=True)
            count = self.num_replicas_in_sync
            return reductions.gather_value(everyone, axis, self.devices[0], count)

        return self.attempt(gathered, "a gathered value")

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return a dataset that splits each global batch into one part per replica.

        Args:
            dataset: batched by the global batch size, the same on every worker.
            options: `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`, with the parts for this process's replicas.
        """
        self._refuse_if_closed()
        return distribute(dataset, self.input_topology, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Return a dataset for this process's replicas, made of per-replica batches.

        Args:
            dataset_fn: called with the `InputContext` of this worker; returns the dataset.
            options: `InputOptions`.
        """
        self._refuse_if_closed()
        return distribute_from_function(dataset_fn, self.input_topology, options)

    def elastic(self, batches: Any) -> Any:
        """Return batches for a training loop which, in an elastic job, workers may join or leave.

        The workers of this strategy do not change, so it only distributes the batches.

        Args:
            batches: a dataset, as for `distribute_dataset`, or a distributed one.
        """
        is_divided = isinstance(batches, DistributedDataset)
        return batches if is_divided else self.distribute_dataset(batches)

    def distribute_values_from_function(self, value_fn: Callable[[ReplicaContext], Any]) -> Any:
        """Return a value for each replica of this process, made by a function.

        Args:
            value_fn: called with the context of each replica of this process, which has
                `replica_id_in_sync_group` and `num_replicas_in_sync`.

        Returns:
            A `PerReplica`, or a nest of them if `value_fn` returns nests.

        Raises:
            RuntimeError: called inside a replica.
        """
        self._cross_replica_frame("distribute_values_from_function")
        return tree.regroup(list(map(value_fn, self.replica_contexts)), PerReplica)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of this process's components of a value.

        Args:
            value: a `DistributedValues`, a variable, a nest of them, or any other value.

        Returns:
            One component, or nest of components, per replica of this process; ``(value,)`` if
            `value` contains none.

        Raises:
            ValueError: the leaves of a nest have different numbers of components.

        >>> import ndistribute as nd
        >>> nd.get_strategy().local_results({"x": nd.PerReplica([1])})
        ({'x': 1},)
        """
        return reductions.local_components(value)

    def close(self) -> None:
        """End the strategy's threads and its connections to servers and workers.

        Variables stay readable; `run` raises from then on. In a forked child, nothing is closed.

        Raises:
            RuntimeError: called inside a replica or a merge_call of this strategy.
        """
        if os.getpid() != self._process:
            return
        frame = current_frame()
        if frame.strategy is self and (frame.replica is not None or frame.merging):
            raise RuntimeError(f"{self!r}.close() was called inside a step: call it after run.")

        def end() -> None:
            self._refusal = _CLOSED
            self._pool.close()

        try:
            self._exclusively(end)
        finally:
            if self.running_on != threading.get_ident():  # Otherwise this thread is in a step.
                self._on_close()

    experimental_distribute_dataset = _alias("distribute_dataset")
    experimental_distribute_values_from_function = _alias("distribute_values_from_function")
    experimental_local_results = _alias("local_results")
    experimental_run_v2 = _alias("run")

    def __enter__(self: S) -> S:
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._entered.of_thread():
            raise RuntimeError(f"this thread is not in a `with` block of {self!r}.")
        try:
            self._entered.__exit__(*error)
        finally:
            self.close()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._internal]

    def __reduce__(self) -> Any:
        what = f"{self!r} cannot be copied or pickled: its replicas are threads of this process."
        raise TypeError(f"{what} Create a strategy in each process.")

    def __repr__(self) -> str:
        closed = "closed " if self._refusal == _CLOSED else ""
        shown = f"{closed}{type(self).__name__}({', '.join(map(repr, map(str, self.devices)))})"
        if self._workers is None:
            return shown
        return f"{shown} of worker {self._workers.rank} of {self._workers.size}"

    def _build(self) -> None:
        """Make the replicas' communicators, contexts and thread pool."""
        group = self.make_group()
        self.replica_contexts = tuple(
            ReplicaContext(self, communicator, device, self._generators)
            for communicator, device in zip(group.communicators, self.devices, strict=True)
        )
        self._pool: ReplicaPool = ReplicaPool(group, self.replica_contexts, repr(self))

    def _run_on_all(self, step: Callable[[int], Any]) -> list[Any]:
        if self._refusal:
            raise RuntimeError(f"{self!r} {self._refusal}")
        if self._pool.abandoned:  # A previous rebuild failed.
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

    def let_go(self) -> None:
        """Make `run` raise in a forked child, which has no threads of other replicas."""
        self._turn, self.running_on = threading.RLock(), None  # Its owner may not exist here.
        self._refusal = (
            f"was made by process {self._process}. This process is a fork of it, without its "
            "replica threads and connections: make a strategy here, or start processes with "
            "multiprocessing's method 'spawn'."
        )
        self._pool.refuse_in_fork(RuntimeError(f"{self!r} {self._refusal}"))

    def _exclusively(self, use: Callable[[], T]) -> T:
        """Call a function that needs exclusive use of the replicas, and return its result."""
        me = threading.get_ident()
        if self.running_on == me:
            raise RuntimeError(
                f"{self!r} was used inside its own step, by the thread that runs the step, as a "
                "signal handler does. Let the handler set a flag or raise, and use the strategy "
                "after run."
            )
        try:
            if not self._turn.acquire(timeout=TURN_SECONDS):
                what = (
                    f"another thread has been running a step of {self!r} for {TURN_SECONDS:g} s. "
                    "Call run from one thread at a time."
                )
                raise RuntimeError(what)
            self.running_on = me
            return use()
        finally:
            if self.running_on == me:
                self.running_on = None
            try:  # noqa: SIM105 - a call before the release would let an interrupt in.
                self._turn.release()
            except RuntimeError:
                pass  # It was not acquired.

    def _refuse_if_closed(self) -> None:
        if self._refusal == _CLOSED:
            raise RuntimeError(f"{self!r} {_CLOSED}")

    def _cross_replica_frame(self, method: str, instead: str = "merge_call") -> Frame:
        """Return this thread's frame, after a check that the method may be called there."""
        self._refuse_if_closed()
        frame = current_frame()
        if frame.replica is not None:
            what = f"{method} was called inside a replica, which acts for itself alone."
            how = f"Call it outside run, or use get_replica_context().{instead} instead."
            raise RuntimeError(f"{what} {how}")
        if frame.strategy is not None and frame.strategy is not self:
            raise RuntimeError(
                f"Mixing different strategies: {method} of "
                f"{context.told_apart(self, frame.strategy)} was called in the scope of "
                f"{frame.strategy!r}. Leave that scope first."
            )
        return frame


class _Scope(contextlib.AbstractContextManager[S]):
    """The scope of a strategy; it may be entered repeatedly, also inside itself."""

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._entered: dict[int, list[contextlib.AbstractContextManager[Frame]]] = defaultdict(list)

    def __enter__(self) -> S:
        frame = self._strategy._cross_replica_frame("scope")
        within = Frame(chosen(self._strategy), None, frame.recorder, frame.merging)
        frame_of_scope = entered(within)
        frame_of_scope.__enter__()
        self.of_thread().append(frame_of_scope)
        return self._strategy

    def __exit__(self, *error: Any) -> None:
        self.of_thread().pop().__exit__(*error)

    def of_thread(self) -> list[contextlib.AbstractContextManager[Frame]]:
        """Return the frames that this thread has entered and not left."""
        return self._entered[threading.get_ident()]


def _warn_if_alone(what: str) -> None:
    """Log a warning if this process is a worker of a job, but computes without the others."""
    with contextlib.suppress(ValueError):  # A strategy of several workers raises it.
        job = resolve()
        if job is not None and job.worker_index is not None and job.num_workers > 1:
            logging.getLogger("ndistribute").warning(
                "%s uses only this process, which is worker %d of a job of %d. Each worker trains "
                "a separate model. To train one model together, use MultiWorkerMirroredStrategy().",
                *(what, job.worker_index, job.num_workers),
            )
