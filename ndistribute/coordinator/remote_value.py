"""What stands in the arguments of a scheduled function for what only its worker can put there.

The result of another function, and a dataset that each worker makes for itself, are not pickled
with the arguments that hold them: a reference is. While arguments are pickled, a `Collected` notes
what they refer to; while they are unpickled, the worker says what each reference means.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ndistribute.coordinator.pickling import Pickled, dump, key_of, load
from ndistribute.errors import CollectiveTimeoutError

__all__ = ["PerWorkerDataset", "RemoteValue", "dump_arguments", "keep_until_run", "load_arguments"]


@dataclass(slots=True)
class Collected:
    """Note what pickled arguments refer to.

    Args:
        values: the results of other functions.
        functions: those that make datasets, by their keys.
        kept: what must live until the arguments have been used.
    """

    values: list[RemoteValue] = field(default_factory=list)
    functions: dict[str, Pickled] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


class _ThisThread(threading.local):
    collected: Collected | None = None  # While it pickles arguments.
    resolve: Callable[..., Any] | None = None  # While it unpickles some.


_this_thread = _ThisThread()


def dump_arguments(arguments: Any) -> tuple[Pickled, Collected]:
    """Return arguments as bytes, and what they refer to."""
    before, _this_thread.collected = _this_thread.collected, Collected()
    try:
        return dump(arguments), _this_thread.collected
    finally:
        _this_thread.collected = before


def load_arguments(pickled: Pickled, resolve: Callable[..., Any]) -> Any:
    """Return arguments; `resolve` is called with a reference and returns what it means there."""
    before, _this_thread.resolve = _this_thread.resolve, resolve
    try:
        return load(pickled)
    finally:
        _this_thread.resolve = before


def keep_until_run(thing: object) -> None:
    """Keep an object alive until the function has run whose arguments this thread pickles now.

    For the `__reduce__` of an object of which workers have their own: they drop theirs with it.
    """
    if _this_thread.collected is not None:
        _this_thread.collected.kept.append(thing)


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

    __slots__ = ("_arrived", "_name", "_value", "error", "owner", "payload")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner  # The queue of the coordinator that made this.
        self._name = name
        self._arrived: threading.Event | None = None  # Made when somebody waits: most are not.
        self._value: list[Any] = []  # Empty until it is first fetched.
        self.payload: Pickled | None = None
        """The result as it came, None if there is none."""
        self.error: Exception | None = None
        """Why there is no result and never will be one."""

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
            self._wait(timeout)
        if self.error is not None:
            raise self.error
        if not self._value and self.payload is not None:
            loaded = load(self.payload)  # Without the lock, for this runs code of the user.
            with self.owner.lock:
                self._value = self._value or [loaded]
        return self._value[0]

    get = fetch

    def settle(self, outcome: Pickled | Exception) -> None:
        """Take what became of the function; the caller has the owner's lock."""
        if isinstance(outcome, Exception):
            self.error = outcome
        else:
            self.payload = outcome
        if self._arrived is not None:
            self._arrived.set()

    def _wait(self, timeout: float | None) -> None:
        self.owner.check_process()
        with self.owner.lock:
            if self.done():
                return
            arrived = self._arrived = self._arrived or threading.Event()
        if not arrived.wait(timeout=timeout):
            raise CollectiveTimeoutError(
                f"The result of {self._name} was not there after {timeout} s. It may still come; "
                "join() says if its workers are gone."
            )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        collected = _collected("A RemoteValue")
        collected.values.append(self)
        return _resolved, ("value", len(collected.values) - 1)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done() else "pending"
        return f"<RemoteValue of {self._name}, {state}>"


class PerWorkerDataset:
    """Stand for a dataset that each worker makes for itself, when it first uses it.

    Among the arguments of a scheduled function its iterator becomes the worker's own one, where
    that worker left it; the dataset itself becomes the worker's dataset. A worker that is started
    again makes them anew.
    """

    def __init__(self, function: Pickled, forget: Callable[[str], None]) -> None:
        self.function, self.forget = function, forget
        self.function_key = key_of(function)
        self.key = _key_of_life(self, forget)

    def __iter__(self) -> _PerWorkerIterator:
        return _PerWorkerIterator(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        collected = _collected("A per-worker dataset, or its iterator,")
        collected.functions[self.function_key] = self.function
        collected.kept.append(self)
        return _resolved, ("dataset", self.function_key, self.key)


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
        return _resolved, ("iterator", self._dataset, self._key)


def _key_of_life(thing: object, forget: Callable[[str], None]) -> str:
    """Return a key for an object, of which `forget` is told when it is collected."""
    key = secrets.token_hex(8)
    weakref.finalize(thing, forget, key).atexit = False
    return key


def _collected(thing: str) -> Collected:
    if _this_thread.collected is None:
        raise TypeError(
            f"{thing} can be sent to a worker only among the args or kwargs of schedule, not in "
            "what a function refers to; and it can not be pickled otherwise."
        )
    return _this_thread.collected


def _resolved(kind: str, *keys: Any) -> Any:
    if _this_thread.resolve is None:
        raise TypeError(f"A {kind} was unpickled outside of a worker.")
    return _this_thread.resolve(kind, *keys)
