"""Where a thread is: under which strategy, in which replica, and under which gradient tape.

A thread has a stack of frames: the bottom one is the default (no strategy, one replica), a scope
and a `merge_call` push a cross-replica frame, `run` pushes a replica's. What is needed here of
strategies, communicators and tapes is said by protocols, so everything above may import this file.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from ndistribute import tree
from ndistribute.device import Device
from ndistribute.stream import random_generator
from ndistribute.values import PerReplica


class CommunicatorLike(Protocol):
    """What replicas and tapes call of a communicator."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def all_reduce(self, op: Any, value: Any, options: Any = None) -> Any: ...
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any: ...
    def merge(self, kind: str, value: Any, combine: Callable[[Sequence[Any]], Any]) -> Any: ...


class StrategyLike(Protocol):
    """What a frame needs of a strategy, and what users of the current one call."""

    is_default: bool
    serial: int
    running_on: int | None

    @property
    def replica_contexts(self) -> tuple[ReplicaContext, ...]: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def devices(self) -> tuple[Device, ...]: ...
    @property
    def cluster_resolver(self) -> Any: ...
    @property
    def is_chief(self) -> bool: ...
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


class Recorder(Protocol):
    """What the graph of a gradient tape offers to the layers below it."""

    def read(self, variable: Any, value: Any) -> Any: ...
    def read_part(self, variable: Any, index: Any, value: Any) -> Any: ...
    def all_reduce(self, communicator: Any, op: Any, value: Any, options: Any) -> Any: ...
    def all_gather(self, communicator: Any, value: Any, axis: int, options: Any) -> Any: ...


@dataclass(slots=True)
class Frame:
    """Say where a thread is: in a replica, or across the replicas of a strategy.

    Args:
        strategy: None for the default strategy, which nobody chose; see `chosen`.
        replica: None in a cross-replica context.
        recorder: the tape that records in this frame.
        merging: whether replicas wait for this frame, as they do in a `merge_call`.
    """

    strategy: StrategyLike | None
    replica: ReplicaContext | None
    recorder: Recorder | None = None
    merging: bool = False


class _State(threading.local):
    """Hold a thread's frames, and on the class what all threads share."""

    default: ClassVar[StrategyLike]
    seed: ClassVar = np.random.SeedSequence()

    def __init__(self) -> None:
        self.frames = [Frame(None, None)]


_thread = _State()

_of_several: set[weakref.ref[Any]] = set()


class ReplicaContext:
    """Give a replica its place among the others, and the calls by which they meet.

    Made by the strategy; `get_replica_context` returns it.

    Attributes:
        strategy: the strategy that runs this replica.
        communicator: carries the replica's calls, for code that builds on collectives.
        device: where this replica computes.
        replica_id_in_sync_group: this replica's number, from 0.
        num_replicas_in_sync: how many replicas take part in every collective.
        local_replica_id: which of the replicas of this process this one is, from 0.

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
        self,
        strategy: StrategyLike,
        communicator: CommunicatorLike,
        device: Device,
        generators: dict[int, tuple[np.random.SeedSequence, Any]],
    ) -> None:
        self.strategy = strategy
        self.communicator: Any = communicator
        self.device = device
        self.replica_id_in_sync_group = communicator.rank
        self.num_replicas_in_sync = communicator.size
        self.local_replica_id = communicator.local_rank
        self._generators = generators  # By replica, with the seed that each was made from.

    @property
    def rng(self) -> Any:
        """Return this replica's random generator: its own, the same in every run of a seed."""
        self._frame("rng")
        replica, seed = self.replica_id_in_sync_group, _State.seed
        known, generator = self._generators.get(replica, (None, None))
        if known is not seed:
            own = np.random.SeedSequence(seed.entropy, spawn_key=(replica,))
            generator = random_generator(self.device, own)
            self._generators[replica] = seed, generator
        return generator

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduce a value over all replicas; every replica gets the result.

        Args:
            reduce_op: a `ReduceOp` or its name in any case.
            value: a nest of arrays or numbers, the same shapes and dtypes on every replica.
            options: `CommunicationOptions`.

        Returns:
            The same nest; each replica owns its arrays.

        Raises:
            CollectiveMismatchError: replicas passed different shapes, dtypes or ops, or one made
                another call or none.
            CollectiveTimeoutError: a replica did not come in time.
        """
        recorder = self._frame("all_reduce").recorder
        if recorder is not None:
            return recorder.all_reduce(self.communicator, reduce_op, value, options)
        return self.communicator.all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate a value over all replicas, in replica order.

        Args:
            value: a nest of arrays; lengths along `axis` may differ between replicas.
            axis: the axis along which they are joined.
            options: `CommunicationOptions`.

        Returns:
            The same nest of joined arrays, on every replica.

        Raises:
            CollectiveMismatchError: ranks, dtypes or other axes' lengths differ.
        """
        recorder = self._frame("all_gather").recorder
        if recorder is not None:
            return recorder.all_gather(self.communicator, value, axis, options)
        return self.communicator.all_gather(value, axis, options)

    def merge_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function once for all replicas, in the cross-replica context.

        Args:
            fn: called as ``fn(strategy, *args, **kwargs)``; the leaves of its arguments are
                `PerReplica`, variables pass as themselves.
            args: this replica's arguments.
            kwargs: this replica's keyword arguments.

        Returns:
            What `fn` returned; of a `PerReplica` leaf, this replica's component.

        Raises:
            CollectiveMismatchError: not every replica called `merge_call`.
        """
        self._frame("merge_call")

        def merged(calls: Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> Any:
            joined_args = tree.regroup([call[1] for call in calls], join_leaf)
            joined_kwargs = tree.regroup([call[2] for call in calls], join_leaf)
            with entered(Frame(chosen(self.strategy), None, merging=True)):
                return calls[0][0](self.strategy, *joined_args, **joined_kwargs)

        call = (fn, tuple(args), dict(kwargs or {}))
        result = self.communicator.merge("merge_call", call, merged)
        return tree.select(result, self.local_replica_id, self.communicator.local_size)

    def _frame(self, method: str) -> Frame:
        """Return the thread's frame, having checked that it is this replica's own."""
        frame = _thread.frames[-1]
        if frame.replica is self:
            return frame
        if frame.replica is None and get_replica_context() is self:
            if method != "rng":  # Which is of use wherever data is made.
                refuse_beside_a_step(method)
            return frame
        if frame.merging:
            raise RuntimeError(
                f"{method} was called inside merge_call, where one function acts for all replicas: "
                "use the strategy that it is given, for example strategy.reduce(op, value)."
            )
        raise RuntimeError(
            f"{method} of the context of replica {self.replica_id_in_sync_group} was used outside "
            "that replica. Call get_replica_context() inside the function that "
            "strategy.run executes, and do not keep it."
        )

    def __repr__(self) -> str:
        return (
            f"ReplicaContext({self.replica_id_in_sync_group} of {self.num_replicas_in_sync}, "
            f"{self.device})"
        )


def current_frame() -> Frame:
    """Return the innermost frame of this thread."""
    return _thread.frames[-1]


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
    """Return this thread's stack of frames, the innermost last.

    Who pushes a frame cuts the stack back to the length that it had, so that nothing stays behind
    wherever an interrupt strikes. `entered` does both, but costs a microsecond.
    """
    return _thread.frames


def chosen(strategy: StrategyLike | None) -> StrategyLike | None:
    """Return what a frame names as its strategy: nothing for the default one."""
    return None if strategy is None or strategy.is_default else strategy


def register_default_strategy(strategy: StrategyLike) -> None:
    """Say which strategy is current outside any scope."""
    _State.default = strategy


def register_strategy_of_several(strategy: StrategyLike) -> None:
    """Say that there is a strategy of several replicas: in its steps other threads are no replica.

    It is forgotten when nobody holds it.
    """
    _of_several.add(weakref.ref(strategy, _of_several.discard))


def strategies_of_several() -> list[Any]:
    """Return the strategies of several replicas, whatever other threads create meanwhile."""
    return [strategy for known in tuple(_of_several) if (strategy := known()) is not None]


def refuse_beside_a_step(what: str, used: StrategyLike | None = None) -> None:
    """Raise RuntimeError while a step of a strategy, or of any, runs: this thread is no replica."""
    for strategy in strategies_of_several():
        if strategy.running_on is not None and used in (None, strategy):
            raise RuntimeError(
                f"{what} was called on thread {threading.current_thread().name!r}, which is no "
                f"replica, while {strategy!r} runs a step. If the step started this thread: let it "
                "compute, and call this in the function that strategy.run executes."
            )


def told_apart(strategy: StrategyLike, current: StrategyLike) -> str:
    """Return how messages name a strategy beside another one, which may look the same."""
    if repr(strategy) != repr(current):
        return f"{strategy!r}"
    when = "an earlier" if strategy.serial < current.serial else "a later"
    return f"{when} strategy {strategy!r}"


def get_strategy() -> StrategyLike:
    """Return the strategy of the current scope or replica, else the default one.

    >>> import ndistribute as nd
    >>> nd.get_strategy().num_replicas_in_sync
    1
    """
    return _thread.frames[-1].strategy or _State.default


def has_strategy() -> bool:
    """Return True if a strategy other than the default one is current.

    >>> import ndistribute as nd
    >>> with nd.OneDeviceStrategy("cpu:0").scope():
    ...     inside = has_strategy()
    >>> inside, has_strategy()
    (True, False)
    """
    return _thread.frames[-1].strategy is not None


def in_cross_replica_context() -> bool:
    """Return True if the thread is in a scope, or in a function that `merge_call` runs.

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
    """Return this thread's replica, or None in a cross-replica context.

    >>> import ndistribute as nd
    >>> nd.get_replica_context().replica_id_in_sync_group
    0
    """
    frame = _thread.frames[-1]
    if frame.replica is not None:
        return frame.replica
    if in_cross_replica_context():
        return None
    return _State.default.replica_contexts[0]


def set_strategy(strategy: StrategyLike | None) -> None:
    """Make a strategy current for the rest of this thread, as if its scope were never left.

    Args:
        strategy: None goes back to the default strategy.

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
    """Seed the generators of all replicas, which start anew.

    Args:
        seed: 0 or more; with the replica's number it decides what ``ReplicaContext.rng`` yields.

    >>> import ndistribute as nd
    >>> nd.set_seed(7)
    >>> first = nd.get_replica_context().rng.random()
    >>> nd.set_seed(7)
    >>> first == nd.get_replica_context().rng.random()
    True
    """
    _State.seed = np.random.SeedSequence(seed)


def current_seed() -> np.random.SeedSequence:
    """Return the seed in force, a new object after each `set_seed`."""
    return _State.seed


def join_leaf(column: Sequence[Any]) -> Any:
    """Join what the replicas passed or returned at one place into one leaf.

    None everywhere stays None and one variable seen by all stays itself; anything else becomes a
    `PerReplica`.
    """
    first = column[0]
    shared = first is None or getattr(first, "is_distributed_variable", False)
    if shared and all(item is first for item in column):
        return first
    return PerReplica(column)
