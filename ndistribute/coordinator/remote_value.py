"""A scheduled function with its arguments, and the handle to its result: `RemoteValue`.

Results of other functions, and datasets that each worker creates for itself, are pickled as
references, which the worker resolves. The closure records these references.
"""

from __future__ import annotations

import functools
import secrets
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ndistribute.coordinator.pickling import Pickled, dump, key_of, load
from ndistribute.coordinator.worker import input_value, keep, kept_dataset
from ndistribute.errors import CollectiveTimeoutError

_EMPTY = Pickled(b"")


@dataclass(eq=False, slots=True)
class Closure:
    """A scheduled function with its arguments."""

    result: RemoteValue
    functions: dict[str, Pickled]  # By key: the function, and those that create datasets.
    kept: list[Any]  # Objects to keep alive until it has run.
    inputs: list[RemoteValue] = field(default_factory=list)  # Results among the arguments.
    arguments: Pickled = _EMPTY
    number: int = 0  # From 1, in the order in which closures were scheduled.
    missing: int = 0  # The number of unfinished inputs.
    lost_on: list[str] = field(default_factory=list)  # The workers that were lost while running it.

    def __str__(self) -> str:
        return f"closure {self.number} ({self.result.name})"


_pickled_for: ContextVar[Closure | None] = ContextVar("_pickled_for", default=None)


def dump_for(closure: Closure, arguments: Any) -> Pickled:
    """Return pickled arguments; record in the closure what they refer to."""
    before = _pickled_for.set(closure)
    try:
        return dump(arguments)
    finally:
        _pickled_for.reset(before)


def keep_until_run(thing: object) -> None:
    """Keep an object alive until the function whose arguments are being pickled has run."""
    # For `__reduce__` of objects that workers create themselves, and drop with this one.
    if (closure := _pickled_for.get()) is not None:
        closure.kept.append(thing)


class RemoteValue:
    """The result of a function that `ClusterCoordinator.schedule` has scheduled.

    It may be an argument of another scheduled function, which then gets the value. Such a value is
    not unpickled in this process.

    >>> import ndistribute as nd
    >>> strategy = nd.ParameterServerStrategy()
    >>> with strategy, nd.ClusterCoordinator(strategy) as coordinator:
    ...     three = coordinator.schedule(lambda: 3)
    ...     four = coordinator.schedule(lambda x: x + 1, args=(three,))
    ...     four.fetch()
    4
    """

    __slots__ = ("_arrived", "_value", "error", "name", "owner", "payload")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner  # The queue of its coordinator.
        self.name = name  # The function's name, for messages.
        self._arrived: threading.Event | None = None  # Created by the first wait.
        self._value: list[Any] = []  # Empty until the first `fetch`.
        self.payload: Pickled | None = None  # The pickled result.
        self.error: Exception | None = None  # The error instead of a result.

    def done(self) -> bool:
        """Return True if the function has returned, raised or been cancelled."""
        return self.payload is not None or self.error is not None

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, the same object in every call.

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            CollectiveTimeoutError: there was no result within `timeout`.
            concurrent.futures.CancelledError: an earlier function raised before this one ran.
            Exception: the exception of the function.
        """
        if not self.done():
            self.owner.check_process()
            with self.owner.lock:
                arrived = self._arrived = self._arrived or threading.Event()
                if self.done():
                    arrived.set()
            if not arrived.wait(timeout=timeout):
                raise CollectiveTimeoutError(
                    f"The result of {self.name} was not there after {timeout} s. It may still "
                    "come; join() says if its workers are gone."
                )
        if self.error is not None:
            raise self.error
        if not self._value and self.payload is not None:
            self._value.append(load(self.payload))
        return self._value[0]  # If two threads loaded it, the first object.

    get = fetch

    def settle(self, outcome: Pickled | Exception) -> None:
        """Set the result or the error; the caller holds the lock of the owner."""
        if isinstance(outcome, Exception):
            self.error = outcome
        else:
            self.payload = outcome
        if self._arrived is not None:
            self._arrived.set()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        closure = _taker_of("A RemoteValue")
        closure.inputs.append(self)
        return input_value, (len(closure.inputs) - 1,)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done() else "pending"
        return f"<RemoteValue of {self.name}, {state}>"


class PerWorkerDataset:
    """A dataset that each worker creates for itself at its first use.

    As an argument of a scheduled function it becomes the worker's own dataset, and its iterator
    becomes the worker's iterator, at its current position. A restarted worker creates new ones.
    """

    def __init__(self, function: Pickled, forget: Callable[[str], None]) -> None:
        self.function, self.forget = function, forget
        self._function_key, self._key = key_of(function), _key_of_life(self, forget)

    def __iter__(self) -> _PerWorkerIterator:
        return _PerWorkerIterator(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        closure = _taker_of("A per-worker dataset, or its iterator,")
        closure.functions[self._function_key] = self.function
        closure.kept.append(self)
        return kept_dataset, (self._function_key, self._key)


class _PerWorkerIterator:
    """The iterators of a `PerWorkerDataset`, one on each worker."""

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self._dataset = dataset  # Keeps the dataset alive.
        self._key = _key_of_life(self, dataset.forget)

    def __iter__(self) -> _PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "The iterator of a per-worker dataset has elements on the workers alone: give it to "
            "schedule, as in schedule(step, args=(iterator,)), and call next in the function."
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        keep_until_run(self)
        return keep, (self._key, functools.partial(iter, self._dataset))


def _key_of_life(thing: object, forget: Callable[[str], None]) -> str:
    """Return a key for an object; `forget` is called with it when the object is collected."""
    key = secrets.token_hex(8)
    weakref.finalize(thing, forget, key).atexit = False
    return key


def _taker_of(thing: str) -> Closure:
    closure = _pickled_for.get()
    if closure is None:
        raise TypeError(
            f"{thing} can be sent to a worker only among the args or kwargs of schedule, not in "
            "what a function refers to; and it cannot be pickled otherwise."
        )
    return closure
