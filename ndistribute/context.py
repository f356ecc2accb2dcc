"""The context of a thread: its current strategy, replica and gradient tape.

A thread has a stack of frames. The bottom frame is the default: no strategy, one replica. A scope
and a `merge_call` push a cross-replica frame, and `run` pushes a replica frame. This file describes
strategies by a protocol, so the module that defines them can import it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any, ClassVar, Protocol

import numpy as np

from ndistribute import tree
from ndistribute.devices import Device
from ndistribute.stream import random_generator
from ndistribute.values import PerReplica


class StrategyLike(Protocol):
    """The part of a strategy that contexts and callers of `get_strategy` use."""

    is_default: bool
    serial: int
    running_on: int | None
    session: Any

    replica_contexts: tuple[ReplicaContext, ...]

    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def devices(self) -> tuple[Device, ...]: ...
    @property
    def cluster_resolver(self) -> Any: ...
    @property
    def is_chief(self) -> bool: ...
    @property
    def batch_scale(self) -> float: ...
    def note_state(self, holder: Any) -> None: ...
    def elastic(self, batches: Any) -> Any: ...
    def scope(self) -> AbstractContextManager[Any]: ...
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any: ...
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any: ...
    def gather(self, value: Any, axis: int) -> Any: ...
    def local_results(self, value: Any) -> tuple[Any, ...]: ...
    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any: ...
    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any: ...
    def distribute_values_from_function(self, value_fn: Any) -> Any: ...
    def experimental_distribute_dataset(self, *args: Any, **kwargs: Any) -> Any: ...
    def experimental_distribute_values_from_function(self, *args: Any, **kwargs: Any) -> Any: ...
    def experimental_local_results(self, *args: Any, **kwargs: Any) -> Any: ...
    def experimental_run_v2(self, *args: Any, **kwargs: Any) -> Any: ...
    def close(self) -> None: ...


Generators = dict[int, tuple[np.random.SeedSequence, Any]]
"""For each replica, the seed and the generator."""


@dataclass(slots=True)
class Frame:
    """An entry of a thread's context stack."""

    strategy: StrategyLike | None  # None for the default strategy, see `chosen`.
    replica: ReplicaContext | None  # None in a cross-replica context.
    recorder: Any = None  # The graph of the tape that records in this frame, see `autodiff`.
    merging: bool = False  # Whether replicas wait for this frame, as in a `merge_call`.
    args: Any = ()  # What was passed to `run`, for all replicas of this process.


class _State(threading.local):
    """The frames of a thread; class attributes are shared by all threads."""

    default: ClassVar[StrategyLike]
    seed: ClassVar = np.random.SeedSequence()

    def __init__(self) -> None:
        self.frames = [Frame(None, None)]
        self.trace: Any = None  # The trace of a compiled step.


_thread = _State()

open_traces: list[None] = []
"""One entry for each open `tracing` of any thread: where it is empty, nobody looks for a trace."""

guests: list[Any] = []
"""Modules with the collectives of other libraries' tensors, and ``takes``, which knows these."""

seed_sources: list[Callable[[], np.random.SeedSequence | None]] = []
"""Functions that return a seed for new weights, as of a graph that has one, or None."""

_of_several: set[weakref.ref[Any]] = set()


class ReplicaContext:
    """A replica's index among all replicas, its collectives and its random generator.

    The strategy creates it; `get_replica_context` returns it.

    Attributes:
        strategy: the strategy that runs this replica.
        communicator: the object that performs the collectives, for code that builds on them.
        device: the device on which this replica computes.
        replica_id_in_sync_group: the index of this replica among all replicas, from 0.
        num_replicas_in_sync: the number of replicas that take part in every collective.
        local_replica_id: the index of this replica among those of this process, from 0.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step():
    ...     context = nd.get_replica_context()
    ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1.0)
    >>> [float(total) for total in strategy.run(step).values]
    [3.0, 3.0]
    >>> strategy.close()
    """

    def __init__(
        self, strategy: StrategyLike, communicator: Any, device: Device, generators: Generators
    ) -> None:
        self.strategy = strategy
        self.communicator = communicator
        self.device = device
        self.replica_id_in_sync_group: int = communicator.rank
        self.num_replicas_in_sync: int = communicator.size
        self.local_replica_id: int = communicator.local_rank
        self._generators = generators

    @property
    def rng(self) -> Any:
        """This replica's own random generator; after `set_seed`, all runs draw the same numbers."""
        self._frame("rng")
        return self.generator() if _thread.trace is None else _thread.trace.rng

    def generator(self) -> Any:
        """Return this replica's own random generator; any thread may call this."""
        replica, seed = self.replica_id_in_sync_group, _State.seed
        known, generator = self._generators.get(replica, (None, None))
        if known is not seed:
            sequence = np.random.SeedSequence(seed.entropy, spawn_key=(replica,))
            generator = random_generator(self.device, sequence)
            self._generators[replica] = seed, generator
        return generator

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return a value reduced over all replicas.

        Args:
            reduce_op: a `ReduceOp`, or its name in any case.
            value: a nest of arrays or numbers, with the same shapes and dtypes on every replica.
            options: `CommunicationOptions`.

        Returns:
            The same nest of reduced arrays; each replica owns its own.

        Raises:
            CollectiveMismatchError: replicas passed different shapes, dtypes or ops, or one made a
                different call or returned without the call.
            CollectiveTimeoutError: a replica did not make the call in time.
        """
        recorder = self._frame("all_reduce").recorder
        for guest in guests:
            if guest.takes(value):
                return guest.all_reduce(reduce_op, value, options)
        if recorder is not None:
            return recorder.all_reduce(self.communicator, reduce_op, value, options)
        return self.communicator.all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return the values of all replicas, concatenated in replica order.

        Args:
            value: a nest of arrays; their lengths along `axis` may differ between replicas.
            axis: the axis along which to concatenate.
            options: `CommunicationOptions`.

        Returns:
            The same nest of concatenated arrays; each replica owns its own.

        Raises:
            CollectiveMismatchError: dtypes, numbers of axes or lengths of other axes differ.
        """
        recorder = self._frame("all_gather").recorder
        for guest in guests:
            if guest.takes(value):
                return guest.all_gather(value, axis, options)
        if recorder is not None:
            return recorder.all_gather(self.communicator, value, axis, options)
        return self.communicator.all_gather(value, axis, options)

    def merge_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function once for the replicas, in a cross-replica context.

        Args:
            fn: called as ``fn(strategy, *args, **kwargs)``. Each leaf of its arguments is a
                `PerReplica` of the replicas' leaves. An object that all replicas of this process
                pass, such as a variable, is passed unchanged. Numbers, and arrays of a single
                replica, always become a `PerReplica`.
            args: this replica's positional arguments.
            kwargs: this replica's keyword arguments.

        Returns:
            The result of `fn`, with this replica's component in place of each `PerReplica`.

        Raises:
            CollectiveMismatchError: not every replica called `merge_call`.
        """
        self._frame("merge_call")

        def merged(calls: Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> Any:
            joined_args = tree.regroup([call[1] for call in calls], _shared_or_joined)
            joined_kwargs = tree.regroup([call[2] for call in calls], _shared_or_joined)
            with entered(Frame(chosen(self.strategy), None, merging=True)):
                return calls[0][0](self.strategy, *joined_args, **joined_kwargs)

        call = (fn, tuple(args), dict(kwargs or {}))
        # The function may write variables, unless it only creates what other processes may have.
        self.communicator.has_written |= self.communicator.part_of is None
        result = self.communicator.merge("merge_call", call, merged)
        return tree.select(result, self.local_replica_id, self.communicator.local_size)

    def _frame(self, method: str) -> Frame:
        """Return this thread's frame, after a check that it belongs to this replica."""
        frame = _thread.frames[-1]
        if frame.replica is self:
            return frame
        if frame.replica is None and get_replica_context() is self:
            if method != "rng":  # Any thread may prepare data.
                refuse_beside_a_step(method)
            return frame
        if frame.merging:
            raise RuntimeError(
                f"{method} was called inside merge_call, where one function acts for all "
                "replicas: use the strategy that this function gets as its first argument, for "
                "example strategy.reduce(op, value)."
            )
        raise RuntimeError(
            f"{method} of the context of replica {self.replica_id_in_sync_group} was used outside "
            "that replica. Call get_replica_context() inside the function that "
            "strategy.run executes, and do not keep it."
        )

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "generator"]

    def __repr__(self) -> str:
        where = f"{self.replica_id_in_sync_group} of {self.num_replicas_in_sync}, {self.device}"
        return f"ReplicaContext({where})"


def part_of(length: int, rank: Any, count: int) -> Any:
    """Return the index of a replica's part of an axis; a compiled step needs equal parts."""
    if not hasattr(rank, "on_device"):
        return slice(length * rank // count, length * (rank + 1) // count)
    part = rank * (length // count) + np.arange(length // count)
    part.is_checked = True
    return part


def current_frame() -> Frame:
    """Return the innermost frame of this thread."""
    return _thread.frames[-1]


def current_trace() -> Any:
    """Return the trace of the step that this thread compiles now, or None."""
    return _thread.trace


@contextmanager
def tracing(trace: Any) -> Iterator[None]:
    """Make a trace the current one for a ``with`` block; None: compute plainly."""
    outer, _thread.trace = _thread.trace, trace
    open_traces.append(None)
    try:
        yield
    finally:
        open_traces.pop()
        _thread.trace = outer


@contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
    """Push a frame for a ``with`` block."""
    frames = _thread.frames
    depth = len(frames)
    try:
        frames.append(frame)
        yield frame
    finally:
        if frames[depth:] and frames[depth] is frame:
            del frames[depth:]


def frame_stack() -> list[Frame]:
    """Return this thread's stack of frames, for callers that find `entered` too slow."""
    return _thread.frames


def chosen(strategy: StrategyLike | None) -> StrategyLike | None:
    """Return a strategy as a frame stores it: None for the default strategy."""
    return None if strategy is None or strategy.is_default else strategy


def register_default_strategy(strategy: StrategyLike) -> None:
    """Set the strategy that is current outside any scope."""
    _State.default = strategy


def register_strategy_of_several(strategy: StrategyLike) -> None:
    """Record a strategy; during its steps, other threads belong to no replica."""
    _of_several.add(weakref.ref(strategy, _of_several.discard))


def strategies_of_several() -> list[Any]:
    """Return the strategies of several replicas; other threads may add more meanwhile."""
    # `copy` is atomic; building a tuple is not: the garbage collector may run and remove members.
    return [strategy for known in _of_several.copy() if (strategy := known()) is not None]


def refuse_beside_a_step(what: str, used: StrategyLike | None = None) -> None:
    """Raise RuntimeError if a strategy (None: any) runs a step that this thread is not part of."""
    for strategy in strategies_of_several():
        if strategy.running_on is not None and used in (None, strategy):
            raise RuntimeError(
                f"{what} was called on thread {threading.current_thread().name!r}, which is not a "
                f"replica, while {strategy!r} runs a step. If the step started this thread, call "
                f"{what} in the function that strategy.run executes instead."
            )


def told_apart(strategy: StrategyLike, current: StrategyLike) -> str:
    """Return the name of a strategy for messages that also name the current strategy."""
    if repr(strategy) != repr(current):
        return f"{strategy!r}"
    when = "an earlier" if strategy.serial < current.serial else "a later"
    return f"{when} strategy {strategy!r}"


def get_strategy() -> StrategyLike:
    """Return the strategy of the current scope or replica, or the default strategy.

    >>> import ndistribute as nd
    >>> nd.get_strategy().num_replicas_in_sync
    1
    """
    return _thread.frames[-1].strategy or _State.default


def has_strategy() -> bool:
    """Return True if the current strategy is not the default one.

    >>> import ndistribute as nd
    >>> with nd.OneDeviceStrategy("cpu:0").scope():
    ...     inside = has_strategy()
    >>> inside, has_strategy()
    (True, False)
    """
    return _thread.frames[-1].strategy is not None


def in_cross_replica_context() -> bool:
    """Return True inside a strategy's scope or a `merge_call`, but outside replicas.

    >>> import ndistribute as nd
    >>> with nd.OneDeviceStrategy("cpu:0").scope() as strategy:
    ...     print(in_cross_replica_context())
    ...     print(strategy.run(in_cross_replica_context).values)
    True
    (False,)
    """
    frame = _thread.frames[-1]
    return frame.replica is None and (frame.strategy is not None or frame.merging)


def get_replica_context() -> ReplicaContext | None:
    """Return the context of this thread's replica, or None in a cross-replica context.

    >>> import ndistribute as nd
    >>> nd.get_replica_context().replica_id_in_sync_group
    0
    """
    frame = _thread.frames[-1]
    if frame.replica is not None:
        return frame.replica
    return None if in_cross_replica_context() else _State.default.replica_contexts[0]


def set_strategy(strategy: StrategyLike | None) -> None:
    """Make a strategy the current one of this thread, until the next call.

    Args:
        strategy: the strategy; None makes the default strategy current again.

    Raises:
        RuntimeError: called inside a scope or a replica.

    >>> import ndistribute as nd
    >>> set_strategy(nd.OneDeviceStrategy("cpu:0"))
    >>> nd.get_strategy()
    OneDeviceStrategy('cpu:0')
    >>> set_strategy(None)
    """
    frames = _thread.frames
    if len(frames) > 1:
        raise RuntimeError(
            "set_strategy was called inside a strategy's scope, replica or merge_call: call it "
            "at the top level of the program."
        )
    frames[0] = Frame(chosen(strategy), None)


def set_seed(seed: int) -> None:
    """Seed and reset the random generators of all replicas, ``ReplicaContext.rng``.

    Args:
        seed: an integer, 0 or more. Each replica's generator is seeded by it and the replica's id.

    >>> import ndistribute as nd
    >>> nd.set_seed(7)
    >>> first = nd.get_replica_context().rng.random()
    >>> nd.set_seed(7)
    >>> first == nd.get_replica_context().rng.random()
    True
    """
    _State.seed = np.random.SeedSequence(seed)


def current_seed() -> np.random.SeedSequence:
    """Return the current seed, which is a new object after each `set_seed`."""
    return _State.seed


def weight_seed() -> np.random.SeedSequence:
    """Return the seed from which those of new weights are derived, in the order of creation."""
    seeds = (source() for source in seed_sources)
    return next((seed for seed in seeds if seed is not None), _State.seed)


def restore_seed(entropy: int, children: int) -> None:
    """Restore a seed from its entropy and the number of seeds that were derived from it."""
    _State.seed = np.random.SeedSequence(entropy, n_children_spawned=children)


def join_leaf(column: Sequence[Any]) -> Any:
    """Return the leaf if it is None or a variable on all replicas, otherwise a `PerReplica`."""
    first = column[0]
    shared = first is None or getattr(first, "is_distributed_variable", False)
    return first if shared and all(item is first for item in column) else PerReplica(column)


def _shared_or_joined(column: Sequence[Any]) -> Any:
    """Return the leaf if all replicas have the same object, otherwise a `PerReplica`.

    Equal numbers may be one object by chance, so they are joined.
    """
    first = column[0]
    is_array = hasattr(first, "dtype") and not getattr(first, "is_distributed_variable", False)
    by_chance = isinstance(first, Number) or (is_array and len(column) == 1)
    same = not by_chance and all(item is first for item in column)
    return first if same else PerReplica(column)
