"""Scheduled functions: closures, the handles to their results, and the queue of closures.

A closure first waits for its inputs, then is ready, then in flight on a worker, and has ended at
last. If its worker is lost, it becomes ready again, a limited number of times. The queue starts no
thread and sends nothing. Results of other functions, and datasets that each worker creates for
itself, are pickled as references, which the worker resolves; the closure records them.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
import traceback
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from ndistribute.coordinator.pickling import Pickled, dump, key_of, load
from ndistribute.coordinator.worker import input_value, keep, kept_dataset
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, WorkerLostError
from ndistribute.mistakes import count_of

ATTEMPTS = 4
"""How often a function runs at most if its worker is lost each time."""
_log = logging.getLogger("ndistribute")
_EMPTY = Pickled(b"")


@dataclass(eq=False, slots=True)
class Closure:
    """A scheduled function with its arguments."""

    result: RemoteValue
    functions: dict[str, Pickled]  # By key: the function, and those that create datasets.
    references: list[Any]  # Objects to keep alive until the closure has run.
    inputs: list[RemoteValue] = field(default_factory=list)  # Results among the arguments.
    arguments: Pickled = _EMPTY
    number: int = 0  # From 1, in the order in which closures were scheduled.
    missing: int = 0  # The number of unfinished inputs.
    attempt: int = 0  # How often it was sent; a worker that counts as lost may still run it.
    lost_on: list[str] = field(default_factory=list)  # The workers that were lost while running it.

    def dump(self, arguments: Any) -> Pickled:
        """Return pickled arguments, and record what they refer to."""
        before = _pickled_for.set(self)
        try:
            return dump(arguments)
        finally:
            _pickled_for.reset(before)

    def __str__(self) -> str:
        return f"closure {self.number} ({self.result.name})"


_pickled_for: ContextVar[Closure | None] = ContextVar("_pickled_for", default=None)


def keep_until_run(thing: object) -> None:
    """Keep an object alive until the function whose arguments are being pickled has run."""
    # For `__reduce__` of objects that workers create themselves; they drop theirs when this one
    # goes.
    if (closure := _pickled_for.get()) is not None:
        closure.references.append(thing)


class RemoteValue:
    """The result of a function that `ClusterCoordinator.schedule` has scheduled.

    You can pass it as an argument to another scheduled function, which then gets the value. This
    process does not unpickle a value that it only passes on.

    >>> import ndistribute as nd
    >>> strategy = nd.ParameterServerStrategy()
    >>> with strategy, nd.ClusterCoordinator(strategy) as coordinator:
    ...     three = coordinator.schedule(lambda: 3)
    ...     four = coordinator.schedule(lambda x: x + 1, args=(three,))
    ...     four.fetch()
    4
    """

    __slots__ = ("_arrived", "_done_calls", "_value", "error", "name", "owner", "payload")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner  # The queue of its coordinator.
        self.name = name  # The function's name, for messages.
        self._arrived: threading.Event | None = None  # Created by the first wait.
        self._done_calls: tuple[Callable[[RemoteValue], None], ...] = ()
        self._value: list[Any] = []  # Empty until the first `fetch`.
        self.payload: Pickled | None = None  # The pickled result.
        self.error: Exception | None = None  # The error, if there is no result.

    def done(self) -> bool:
        """Return True if the function has returned, raised or been cancelled."""
        return self.payload is not None or self.error is not None

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it; every call returns the same object.

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
                    f"The result of {self.name} did not come within {timeout} s. It may still "
                    "come; join() raises an error if the workers are gone."
                )
        if self.error is not None:
            raise self.error
        if not self._value and self.payload is not None:
            self._value.append(load(self.payload))
        return self._value[0]  # If two threads loaded it, the first object counts.

    get = fetch

    def add_done_callback(self, call: Callable[[RemoteValue], None]) -> None:
        """Call a function with this value once it is done; it must return at once."""
        with self.owner.lock:
            if not self.done():
                self._done_calls += (call,)
                return
        call(self)

    def set_outcome(self, outcome: Pickled | Exception) -> None:
        """Set the result or the error; the caller holds the lock of the owner."""
        if isinstance(outcome, Exception):
            self.error = outcome
        else:
            self.payload = outcome
        if self._arrived is not None:
            self._arrived.set()
        calls, self._done_calls = self._done_calls, ()
        for call in calls:
            call(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        closure = _closure_for("A RemoteValue")
        closure.inputs.append(self)
        return input_value, (len(closure.inputs) - 1,)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done() else "pending"
        return f"<RemoteValue of {self.name}, {state}>"


class PerWorkerDataset:
    """A dataset that each worker creates for itself at its first use.

    If you pass it to a scheduled function, the function gets the worker's own dataset. If you pass
    its iterator, the function gets the worker's iterator, at its current position. A restarted
    worker creates both again.
    """

    def __init__(self, made: Any, function: Pickled, forget: Callable[[str], None]) -> None:
        self._made, self.function, self.forget = made, function, forget
        self._function_key, self._key = key_of(function), _key_while_alive(self, forget)

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element; a function that makes the dataset is called here."""
        return (self._made() if callable(self._made) else self._made).element_spec

    def __iter__(self) -> PerWorkerValue:
        return PerWorkerValue(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        closure = _closure_for("A per-worker dataset, or its iterator,")
        closure.functions[self._function_key] = self.function
        closure.references.append(self)
        return kept_dataset, (self._function_key, self._key)


class PerWorkerValue:
    """A value with one component on each worker: the iterators of a `PerWorkerDataset`.

    >>> import ndistribute as nd
    >>> strategy = nd.ParameterServerStrategy()
    >>> with strategy, nd.ClusterCoordinator(strategy) as coordinator:
    ...     iterator = iter(coordinator.create_per_worker_dataset(nd.Dataset.range(3)))
    ...     (
    ...         isinstance(iterator, nd.PerWorkerValue),
    ...         int(coordinator.schedule(next, (iterator,)).fetch()),
    ...     )
    (True, 0)
    """

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self._dataset = dataset  # Keeps the dataset alive.
        self._key = _key_while_alive(self, dataset.forget)

    def __iter__(self) -> PerWorkerValue:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "The iterator of a per-worker dataset has elements only on the workers: pass it to "
            "schedule, as in schedule(step, args=(iterator,)), and call next in the function."
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        keep_until_run(self)
        return keep, (self._key, functools.partial(iter, self._dataset))


def _key_while_alive(thing: object, forget: Callable[[str], None]) -> str:
    """Return a key for an object; `forget` is called with it when the object is collected."""
    key = secrets.token_hex(8)
    weakref.finalize(thing, forget, key).atexit = False
    return key


def _closure_for(thing: str) -> Closure:
    closure = _pickled_for.get()
    if closure is None:
        raise TypeError(
            f"{thing} can be sent to a worker only in args or kwargs of schedule, not as a name "
            "that a function uses. It cannot be pickled in another way."
        )
    return closure


class ClosureQueue:
    """All scheduled closures until they end; a worker's number is its index in `workers`."""

    capacity = 4096  # The most closures that may wait.
    capacity_bytes = 1 << 30  # The most bytes of their arguments.

    def __init__(self, workers: Sequence[str], timeout: float = 60.0) -> None:
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.low_water = 1
        """The lowest number of an unfinished closure."""
        self._workers = tuple(workers)
        self._timeout = timeout
        self.process = os.getpid()
        self._changed = threading.Condition(self.lock)  # There is room, or all closures have ended.
        self._error: Exception | None = None  # The first error that was not yet raised.
        self._last = 0
        self._open: OrderedDict[int, Closure] = OrderedDict()  # All unfinished closures.
        self._ready: deque[Closure] = deque()
        self._followers: dict[RemoteValue, list[Closure]] = defaultdict(list)
        self._bytes = 0  # The arguments of all queued closures.
        # The closures of each present worker, in the order in which it runs them.
        self._in_flight: dict[int, dict[int, Closure]] = {}
        self._why_away: list[Exception | None] = [None] * len(workers)  # Per absent worker.
        self._stuck: dict[int, str] = {}  # The workers that do not reach a server, and that server.
        self._owed: dict[int, set[int]] = {}  # By worker: what others run too.
        self._stalled: float | None = None  # Since when all workers are absent.

    def add(self, closure: Closure) -> None:
        """Wait for room, and add and number a closure; raise the error of an earlier one."""
        with self.lock:
            while True:
                self._raise_error()
                if self.closing.is_set():
                    raise RuntimeError("The coordinator was closed: make another one.")
                if self._error is None and not self.is_full():
                    break
                self._changed.wait()  # Ends when workers take closures, or `lose` cancels them.
            for value in closure.inputs:
                if value.error is not None:
                    problem = f"{closure.result.name} got {value!r}, which has no value."
                    raise ValueError(problem) from value.error
            missing = {value for value in closure.inputs if not value.done()}
            self._last += 1
            closure.number, closure.missing = self._last, len(missing)
            self._open[closure.number] = closure
            self._bytes += closure.arguments.nbytes
            for value in missing:
                self._followers[value].append(closure)
            if not missing:
                self._ready.append(closure)

    def join(self, timeout: float | None) -> None:
        """Wait until all closures have ended, and raise the first error."""
        with self.lock:
            if not self._changed.wait_for(lambda: not self._open, timeout):
                waiting = self._waiting()
                raise CollectiveTimeoutError(
                    f"join: the functions did not end within {timeout} s; running: "
                    f"{len(self._open) - waiting}; waiting: {waiting}{self._who_is_away()}. They "
                    "continue: join again."
                )
            self._raise_error()

    def done(self) -> bool:
        """Return True if all closures have ended; raise the first error."""
        self.check_process()
        with self.lock:
            self._raise_error()
            return not self._open

    def close(self) -> None:
        with self.lock:
            self.closing.set()
            if self._open:
                self._give_up(RuntimeError("The coordinator was closed before all was done."))
            self._changed.notify_all()

    def check_process(self) -> None:
        """Raise `RuntimeError` in a fork of the coordinator's process."""
        if os.getpid() != self.process:
            raise RuntimeError(
                f"This process is a fork of process {self.process}, which made the coordinator: "
                "schedule, join and fetch there, or make another coordinator here."
            )

    def arrive(self, worker: int) -> None:
        """Record that a worker is there, and has nothing to run."""
        with self.lock:
            self._stalled = None
            self._owed.pop(worker, None)
            self._in_flight[worker] = {}

    def idle_worker(self) -> int | None:
        with self.lock:
            if not self._ready or self.closing.is_set():
                return None
            return next((worker for worker, sent in self._in_flight.items() if not sent), None)

    def take(self, worker: int, depth: int) -> list[Closure]:
        """Return the next closures for a worker, which then has at most `depth`."""
        taken: list[Closure] = []
        with self.lock:
            if worker not in self._in_flight:
                return []
            flying, was_full = self._in_flight[worker], self.is_full()
            while self._ready and len(flying) < depth and not self.closing.is_set():
                # In advance only if as many remain for each other worker, even an absent one: the
                # last closures should go to the first free worker.
                if len(self._ready) < len(self._workers) * len(flying):
                    break
                closure = self._ready.popleft()
                self._bytes -= closure.arguments.nbytes
                closure.attempt += 1
                flying[closure.number] = closure
                taken.append(closure)
            if taken and was_full:
                self._changed.notify_all()
        return taken

    def finish(self, worker: int, number: int, value: Pickled | Exception, trace: str = "") -> None:
        """Record the result of a closure; an error cancels all queued closures."""
        with self.lock:
            closure = self._in_flight.get(worker, {}).pop(number, None)
            self._stuck.pop(worker, None)
            if closure is None:  # Meanwhile the worker was recorded as lost or stuck.
                if owed := self._owed.get(worker):
                    owed.discard(number)
                    if not owed:
                        self._in_flight[worker] = {}
                return
            if isinstance(value, Exception):
                where = f"on {self._workers[worker]}, there:\n{trace.rstrip()}"
                value.add_note(f"{closure} raised this {where}")
            self._finish(closure, value)
            if isinstance(value, Exception):
                self._fail(value)
            for follower in self._followers.pop(closure.result, ()):
                follower.missing -= 1
                if not follower.missing:
                    self._ready.append(follower)
            if not self._open:
                self._changed.notify_all()

    def lose(self, worker: int, problem: Exception) -> None:
        """Record that a worker is absent; other workers run its closures."""
        with self.lock:
            before, self._why_away[worker] = self._why_away[worker], problem
            was_here = worker in self._in_flight
            lost = list(self._in_flight.pop(worker, {}).values())
            self._stuck.pop(worker, None)
            self._owed.pop(worker, None)
            if lost and self._error is None:  # Only the first closure was running.
                lost[0].lost_on.append(self._workers[worker])
                if len(lost[0].lost_on) >= ATTEMPTS:
                    self._error = WorkerLostError(
                        f"{lost[0]} was run {ATTEMPTS} times, and each time its worker was lost: "
                        f"{', '.join(lost[0].lost_on)}. It does not run again: most likely, it "
                        "ends the process that runs it, or needs more memory than there is. See "
                        "the last output of those workers."
                    )
                    self._error.__cause__ = problem
                    self._finish(lost[0], self._error)
            if self._error is not None:
                self._fail(self._error)
            else:
                self._give_back(lost)
            self._check_timeout(problem)
        refused = isinstance(problem, AuthenticationError)
        if was_here and not self.closing.is_set():
            what = ", ".join(map(str, lost)) or "nothing"
            _log.warning("%s is lost (%s); it was to run %s", self._workers[worker], problem, what)
        elif refused and not isinstance(before, AuthenticationError):
            text = "%s refuses connections, and gets no work: %s"
            _log.warning(text, self._workers[worker], problem)

    def _check_timeout(self, problem: Exception) -> None:
        if self._in_flight or not self._open:
            self._stalled = None
            return
        now = time.monotonic()
        self._stalled = self._stalled or now
        if all(isinstance(why, AuthenticationError) for why in self._why_away):
            error: Exception = AuthenticationError(f"No worker accepts this process: {problem}")
        elif now - self._stalled >= self._timeout:
            error = WorkerLostError(
                f"No worker could be reached for {self._timeout:g} s while "
                f"{count_of(self._waiting(), 'function')} waited{self._who_is_away()}. Start the "
                "workers again, or raise timeout_seconds."
            )
        else:
            return
        self._stalled = None
        error.__cause__ = problem
        self._give_up(error)

    def stick(self, worker: int, number: int, why: str) -> None:
        """Record that the running closure of a worker waits for a server it does not reach."""
        with self.lock:
            if number in self._in_flight.get(worker, {}):
                self._stuck[worker] = why

    def relieve(self) -> None:
        """Let idle workers run the closures of workers that do not reach a server."""
        with self.lock:
            # If no other worker is idle, they may not reach it either.
            if not self._stuck or self._ready or self._error or all(self._in_flight.values()):
                return
            worker, why = self._stuck.popitem()
            self._why_away[worker] = ConnectionError(f"it waits for {why}")
            # Copies, because another thread may still be sending the originals with their attempt
            # number.
            flying = {n: replace(sent) for n, sent in self._in_flight.pop(worker).items()}
            self._owed[worker] = set(flying)
            self._open.update(flying)
            self._give_back(flying.values())
        what = ", ".join(map(str, flying.values()))
        name = self._workers[worker]
        _log.warning("%s waits for %s; idle workers run its functions: %s", name, why, what)

    def is_full(self) -> bool:
        return self._waiting() >= self.capacity or self._bytes >= self.capacity_bytes

    def _give_back(self, closures: Iterable[Closure]) -> None:
        self._ready.extendleft(reversed([*closures]))
        self._bytes += sum(closure.arguments.nbytes for closure in closures)

    def _waiting(self) -> int:
        return len(self._open) - sum(map(len, self._in_flight.values()))

    def _finish(self, closure: Closure, result: Pickled | Exception) -> None:
        closure.result.set_outcome(result)
        del self._open[closure.number]
        self.low_water = next(iter(self._open), self._last + 1)

    def _give_up(self, error: Exception) -> None:
        """End all closures with an error, including those in flight."""
        for flying in self._in_flight.values():
            flying.clear()
        self._stuck.clear()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep the first error until it is raised, and cancel all queued closures."""
        self._error = self._error or error
        # The error's own text may fail.
        before = traceback.format_exception_only(self._error)[0].strip()
        flying = {number for some in self._in_flight.values() for number in some}
        for closure in [self._open[number] for number in self._open if number not in flying]:
            why = f"this error occurred before: {before}. Schedule it again."
            cancelled = CancelledError(f"{closure} was cancelled, since {why}")
            cancelled.__cause__ = self._error
            self._finish(closure, cancelled)
        self._ready.clear()
        self._followers.clear()
        self._bytes = 0
        if not self._open:
            self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise the error once, when no closure is in flight."""
        if self._error is not None and not self._open:
            error, self._error = self._error, None
            self._changed.notify_all()
            raise error

    def _who_is_away(self) -> str:
        away = [
            f"{name} ({self._why_away[worker] or 'not seen yet'})"
            for worker, name in enumerate(self._workers)
            if worker not in self._in_flight
        ]
        return f"; away: {', '.join(away)}" if away else ""
