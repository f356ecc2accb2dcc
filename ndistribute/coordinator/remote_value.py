"""A scheduled function, its arguments, and what stands for its result: `RemoteValue`.

Of the result of another function, and of a dataset that each worker makes for itself, a reference
is pickled, which the worker resolves; the closure notes what its arguments refer to.
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
    functions: dict[str, Pickled]  # By keys: what is run, and what makes datasets in arguments.
    kept: list[Any]  # What must live until it has run.
    inputs: list[RemoteValue] = field(default_factory=list)  # Results among the arguments.
    arguments: Pickled = _EMPTY
    number: int = 0  # From 1, in the order in which closures were scheduled.
    missing: int = 0  # How many of its inputs are not there yet.
    lost_on: list[str] = field(default_factory=list)  # The workers that were lost running it.

    def __str__(self) -> str:
        return f"closure {self.number} ({self.result.name})"


_pickled_for: ContextVar[Closure | None] = ContextVar("_pickled_for", default=None)


def dump_for(closure: Closure, arguments: Any) -> Pickled:
    """Return arguments as bytes; the closure notes what they refer to."""
    before = _pickled_for.set(closure)
    try:
        return dump(arguments)
    finally:
        _pickled_for.reset(before)


def keep_until_run(thing: object) -> None:
    """Keep an object alive until the function has run whose arguments this thread pickles now."""
    # For the `__reduce__` of an object of which workers have their own: they drop theirs with it.
    if (closure := _pickled_for.get()) is not None:
        closure.kept.append(thing)


class RemoteValue:
    """Stand for the result of a function that was given to `ClusterCoordinator.schedule`.

    It may be an argument of another scheduled function, which gets the value then; that one goes
    from worker to worker and is never unpickled here.

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
        self.owner = owner  # The queue of the coordinator that made this.
        self.name = name  # Of the function, for messages.
        self._arrived: threading.Event | None = None  # Made when somebody waits: most are not.
        self._value: list[Any] = []  # Empty until it is first fetched.
        self.payload: Pickled | None = None  # The result as it came.
        self.error: Exception | None = None  # Why there will never be one.

    def done(self) -> bool:
        """Return True if the function has returned or raised, or was cancelled."""
        return self.payload is not None or self.error is not None

    def fetch(self, timeout: float | None = None) -> Any:
        """Return the result, once it is there; always the same object.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            CollectiveTimeoutError: it was not there in time.
            concurrent.futures.CancelledError: an earlier function raised before this one ran.
            Exception: what the function raised.
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
        return self._value[0]  # Where two threads have loaded it, the first one's.

    get = fetch

    def settle(self, outcome: Pickled | Exception) -> None:
        """Take what became of the function; the caller has the owner's lock."""
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
    """Stand for a dataset that each worker makes for itself, when it first uses it.

    Among the arguments of a scheduled function it becomes the worker's own dataset, and its
    iterator the worker's iterator, where that left it. A new worker makes them anew.
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
    """Stand for the iterators of a `PerWorkerDataset`, one on each worker."""

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self._dataset = dataset  # It must not be forgotten before this.
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
    """Return a key for an object, of which `forget` is told when it is collected."""
    key = secrets.token_hex(8)
    weakref.finalize(thing, forget, key).atexit = False
    return key


def _taker_of(thing: str) -> Closure:
    closure = _pickled_for.get()
    if closure is None:
        raise TypeError(
            f"{thing} can be sent to a worker only among the args or kwargs of schedule, not in "
            "what a function refers to; and it can not be pickled otherwise."
        )
    return closure
