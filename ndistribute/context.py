"""Which strategy and which replica the current thread is in.

A thread has a stack of frames: the bottom one is the default (no strategy, one replica), a scope
and a `merge_call` push a cross-replica frame, `run` pushes a replica's. This module knows
strategies, communicators and tapes by their protocols alone, so everything above may import it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ndistribute.values import PerReplica

if TYPE_CHECKING:
    from ndistribute.collective.communicator import Communicator
    from ndistribute.replica_context import ReplicaContext
    from ndistribute.strategies.base import Strategy

__all__ = [
    "Frame",
    "Recorder",
    "chosen",
    "current_frame",
    "current_seed",
    "entered",
    "frame_stack",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "join_leaf",
    "register_default_strategy",
    "set_seed",
    "set_strategy",
]


class Recorder(Protocol):
    """What a gradient tape offers to the layers below it."""

    def read(self, variable: Any, value: Any) -> Any:
        """Return a variable's value, tracked where the tape watches the variable."""

    def read_part(self, variable: Any, index: Any, value: Any) -> Any:
        """Return ``variable[index]``, read without the rest, tracked like a whole value."""

    def all_reduce(self, communicator: Communicator, op: Any, value: Any, options: Any) -> Any:
        """Reduce over replicas so that gradients flow back through the reduction."""

    def all_gather(self, communicator: Communicator, value: Any, axis: int, options: Any) -> Any:
        """Concatenate over replicas so that gradients flow back through the concatenation."""


@dataclass(slots=True)
class Frame:
    """Say where a thread is: in a replica, or across the replicas of a strategy.

    Args:
        strategy: None for the default strategy, which nobody chose; see `chosen`.
        replica: None in a cross-replica context.
        recorder: the tape that records in this frame.
        merging: whether replicas wait for this frame, as they do in a `merge_call`.
    """

    strategy: Strategy | None
    replica: ReplicaContext | None
    recorder: Recorder | None = None
    merging: bool = False


@dataclass(slots=True)
class _Process:
    """What all threads share: the strategy outside any scope, and the seed."""

    make_default: Callable[[], Strategy] | None = None
    default: Strategy | None = None
    seed: np.random.SeedSequence = field(default_factory=np.random.SeedSequence)
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames = [Frame(None, None)]


_thread = _Thread()
_process = _Process()


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


def chosen(strategy: Strategy | None) -> Strategy | None:
    """Return what a frame names as its strategy: nothing for the default one."""
    return None if strategy is None or strategy.is_default else strategy


def register_default_strategy(make: Callable[[], Strategy]) -> None:
    """Name the maker of the strategy that is current outside any scope."""
    _process.make_default = make


def get_strategy() -> Strategy:
    """Return the strategy of the current scope or replica, else the default one.

    >>> import ndistribute as nd
    >>> nd.get_strategy().num_replicas_in_sync
    1
    """
    return _thread.frames[-1].strategy or _default_strategy()


def has_strategy() -> bool:
    """Say whether a strategy other than the default one is current.

    >>> import ndistribute as nd
    >>> with nd.OneDeviceStrategy("cpu:0").scope():
    ...     inside = has_strategy()
    >>> inside, has_strategy()
    (True, False)
    """
    return _thread.frames[-1].strategy is not None


def in_cross_replica_context() -> bool:
    """Say whether the thread is in a scope, or in a function that `merge_call` runs.

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
    return _default_strategy().replica_contexts[0]


def set_strategy(strategy: Strategy | None) -> None:
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


def _default_strategy() -> Strategy:
    if _process.default is None:
        if _process.make_default is None:
            raise RuntimeError("no default strategy is registered: import ndistribute first.")
        with _process.lock:
            _process.default = _process.default or _process.make_default()
    return _process.default


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
    _process.seed = np.random.SeedSequence(seed)


def current_seed() -> np.random.SeedSequence:
    """Return the seed in force, a new object after each `set_seed`."""
    return _process.seed


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
