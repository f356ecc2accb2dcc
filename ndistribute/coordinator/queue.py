"""Which function a coordinator sends to which worker next, and what is left when one fails.

A closure waits for its inputs, is ready, is in flight on a worker, and is over; only the loss of a
worker brings it back, and not for ever. The queue starts no thread and sends nothing: whoever asks
it what a worker runs next, sends that.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from ndistribute.coordinator.pickling import Pickled
from ndistribute.coordinator.remote_value import RemoteValue
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, WorkerLostError

__all__ = ["ATTEMPTS", "Closure", "ClosureQueue"]

ATTEMPTS = 4
"""A function is run at most so often if its worker is lost each time while it runs."""
_log = logging.getLogger("ndistribute")


@dataclass(eq=False, slots=True)
class Closure:
    """Hold a scheduled function, its arguments, and what stands for its result."""

    name: str  # Of the function, for messages.
    functions: dict[str, Pickled]  # By keys: what is run, and what makes datasets in arguments.
    arguments: Pickled
    inputs: Sequence[RemoteValue]  # The results that stand in the arguments.
    kept: Sequence[Any]  # What must live until it has run.
    result: RemoteValue
    number: int = 0  # From 1, in the order in which closures were scheduled.
    missing: int = 0  # How many of its inputs are not there yet.
    lost_on: list[str] = field(default_factory=list)  # The workers that were lost running it.

    def __str__(self) -> str:
        return f"closure {self.number} ({self.name})"


class ClosureQueue:
    """Keep what was scheduled until it is over; any thread may call.

    Args:
        workers: their names; a worker's number is its place among them.
        patience: for how many seconds all workers may be away while work waits.
    """

    capacity = 4096  # How many closures may wait.
    capacity_bytes = 1 << 30  # None is added once the arguments of those that wait take so much.

    def __init__(self, workers: Sequence[str], patience: float = 60.0) -> None:
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.low_water = 1
        """The lowest number of a closure that is not over."""
        self._workers = tuple(workers)
        self._patience = patience
        self._process = os.getpid()
        self._changed = threading.Condition(self.lock)  # There is room, or nothing to do.
        self._error: Exception | None = None  # The first one since it was last raised.
        self._last = 0
        self._over: set[int] = set()  # The numbers above the low water of closures that are.
        self._ready: deque[Closure] = deque()
        self._blocked: dict[Closure, None] = {}  # Those that lack an input.
        self._followers: dict[RemoteValue, list[Closure]] = defaultdict(list)
        self._bytes = 0  # Of the arguments of all that are ready or blocked.
        # What each worker that is there has, in the order in which it runs them.
        self._in_flight: dict[int, dict[int, Closure]] = {}
        self._flying = 0  # How many all of them have.
        self._away: dict[int, Exception | None] = dict.fromkeys(range(len(workers)))
        self._stalled: float | None = None  # Since when all are away while work waits.

    def add(self, closure: Closure) -> None:
        """Add a closure and number it, when there is room.

        Raises:
            Exception: what a function raised before.
            RuntimeError: the coordinator is closed.
            ValueError: an input has no value.
        """
        with self.lock:
            while self.is_full() or self._error is not None:
                self._raise_error()
                self._check_open()
                self._changed.wait()  # Ends when workers take some, or `absent` gives them up.
            self._check_open()
            for value in closure.inputs:
                if value.error is not None:
                    problem = f"{closure.name} got {value!r}, which has no value."
                    raise ValueError(problem) from value.error
            missing = {value for value in closure.inputs if not value.done()}
            self._last += 1
            closure.number, closure.missing = self._last, len(missing)
            self._bytes += closure.arguments.nbytes
            for value in missing:
                self._followers[value].append(closure)
            if missing:
                self._blocked[closure] = None
            else:
                self._ready.append(closure)

    def join(self, timeout: float | None) -> None:
        """Wait until everything is over.

        Raises:
            CollectiveTimeoutError: it was not in time.
            Exception: what a function raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            while not self._at_rest():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise CollectiveTimeoutError(
                        f"join: after {timeout} s {self._flying} function(s) still run and "
                        f"{self._queued()} wait{self._who_is_away()}. They go on: join again."
                    )
                self._changed.wait(timeout=left)
            self._raise_error()

    def done(self) -> bool:
        """Return True if everything is over; raise what a function raised."""
        self.check_process()
        with self.lock:
            self._raise_error()
            return self._at_rest()

    def close(self) -> None:
        """Cancel what is not over, and hand out nothing any more."""
        with self.lock:
            self.closing.set()
            if not self._at_rest():
                self._give_up(RuntimeError("The coordinator was closed before all was over."))
            self._changed.notify_all()

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the coordinator's."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"This process is a fork of process {self._process}, which made the coordinator: "
                "schedule, join and fetch there, or make another coordinator here."
            )

    def arrive(self, worker: int) -> None:
        """Note that a worker is there, and has nothing to run."""
        with self.lock:
            self._away.pop(worker, None)
            self._stalled = None
            self._in_flight[worker] = {}

    def idle_worker(self) -> int | None:
        """Return a worker that has nothing to run although something is ready."""
        with self.lock:
            if self._ready and not self.closing.is_set():
                for worker, flying in self._in_flight.items():
                    if not flying:
                        return worker
        return None

    def take(self, worker: int, depth: int) -> list[Closure]:
        """Return what a worker runs next, perhaps nothing.

        A worker gets closures in advance only while there are as many for each of the others, even
        if they are away: at the end each should go to whoever is free first.

        Args:
            worker: its number; it is there.
            depth: how many it may have at most.
        """
        taken: list[Closure] = []
        with self.lock:
            flying, was_full = self._in_flight[worker], self.is_full()
            while self._ready and len(flying) < depth and not self.closing.is_set():
                if len(self._ready) < len(self._workers) * len(flying):
                    break
                closure = self._ready.popleft()
                self._bytes -= closure.arguments.nbytes
                flying[closure.number] = closure
                self._flying += 1
                taken.append(closure)
            if taken and was_full:
                self._changed.notify_all()
        return taken

    def finish(
        self, worker: int, number: int, result: Pickled | Exception, trace: str = ""
    ) -> None:
        """Take what a closure returned or raised; an error cancels what no worker has yet."""
        with self.lock:
            closure = self._in_flight.get(worker, {}).pop(number, None)
            if closure is None:
                return  # The worker counted as lost meanwhile.
            self._flying -= 1
            if isinstance(result, Exception):
                where = f"on {self._workers[worker]}, there:\n{trace.rstrip()}"
                result.add_note(f"{closure} raised this {where}")
                self._settle(closure, result)
                self._abort(result)
            else:
                self._settle(closure, result)
                for follower in self._followers.pop(closure.result, ()):
                    follower.missing -= 1
                    if not follower.missing:
                        del self._blocked[follower]
                        self._ready.append(follower)
            self._tell_waiters()

    def lose(self, worker: int, problem: Exception) -> None:
        """Note that a worker is away; others run what it had.

        It ran the first closure that it had, so that was an attempt; the others waited behind it.
        """
        with self.lock:
            self._away[worker] = problem
            lost = list(self._in_flight.pop(worker, {}).values())
            self._flying -= len(lost)
            if lost and self._error is None:
                lost[0].lost_on.append(self._workers[worker])
                if len(lost[0].lost_on) >= ATTEMPTS:
                    error = WorkerLostError(
                        f"{lost[0]} was run {ATTEMPTS} times, and each time its worker was lost: "
                        f"{', '.join(lost[0].lost_on)}. It is not run again: most likely it ends "
                        "the process that runs it, or takes more memory than there is; see what "
                        "those workers wrote last."
                    )
                    error.__cause__ = problem
                    self._settle(lost[0], error)
                    self._abort(error)
            if self._error is None:
                self._ready.extendleft(reversed(lost))
                self._bytes += sum(closure.arguments.nbytes for closure in lost)
            else:
                self._cancel([closure for closure in lost if not closure.result.done()])
            self._tell_waiters()
        if not self.closing.is_set():
            what = ", ".join(map(str, lost)) or "nothing"
            _log.warning("%s is lost (%s); it had %s", self._workers[worker], problem, what)

    def absent(self, worker: int, problem: Exception) -> None:
        """Note that a worker is still away, and give up if that has lasted too long."""
        now = time.monotonic()
        with self.lock:
            self._away[worker] = problem
            if len(self._away) < len(self._workers) or self._at_rest():
                self._stalled = None
                return
            self._stalled = self._stalled or now
            refused = all(isinstance(why, AuthenticationError) for why in self._away.values())
            if refused or now - self._stalled >= self._patience:
                self._stalled = None
                error: Exception = WorkerLostError(
                    f"No worker was there for {self._patience:g} s while {self._queued()} "
                    f"function(s) waited{self._who_is_away()}. Start the workers again, or give "
                    "them longer by timeout_seconds."
                )
                if refused:
                    error = AuthenticationError(f"No worker let this process in: {problem}")
                error.__cause__ = problem
                self._give_up(error)

    def _queued(self) -> int:
        return len(self._ready) + len(self._blocked)

    def is_full(self) -> bool:
        """Return True if no more may be added."""
        return self._queued() >= self.capacity or self._bytes >= self.capacity_bytes

    def _at_rest(self) -> bool:
        return not (self._flying or self._ready or self._blocked)

    def _settle(self, closure: Closure, result: Pickled | Exception) -> None:
        closure.result.settle(result)
        closure.kept = closure.inputs = ()
        self._over.add(closure.number)
        while self.low_water in self._over:
            self._over.remove(self.low_water)
            self.low_water += 1

    def _abort(self, error: Exception) -> None:
        """Keep an error for who asks, unless there is one, and cancel what no worker has."""
        self._error = self._error or error
        waiting = [*self._ready, *self._blocked]
        self._ready.clear()
        self._blocked.clear()
        self._followers.clear()
        self._bytes = 0
        self._cancel(waiting)

    def _give_up(self, error: Exception) -> None:
        """End everything with an error, what workers have as well."""
        for flying in self._in_flight.values():
            self._ready.extend(flying.values())
            flying.clear()
        self._flying = 0
        self._abort(error)
        self._changed.notify_all()

    def _cancel(self, closures: Sequence[Closure]) -> None:
        # Its own text may be what can not be made.
        before = traceback.format_exception_only(self._error)[0].strip()
        reason = f"since this was raised before: {before}. Schedule it again."
        for closure in closures:
            cancelled = CancelledError(f"{closure} was cancelled, {reason}")
            cancelled.__cause__ = self._error
            self._settle(closure, cancelled)

    def _tell_waiters(self) -> None:
        if not self._flying and (self._error or self._at_rest()):
            self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise the error once, when no worker has anything any more."""
        if self._error is not None and not self._flying:
            error, self._error = self._error, None
            self._changed.notify_all()
            raise error

    def _check_open(self) -> None:
        if self.closing.is_set():
            raise RuntimeError("The coordinator was closed: make another one.")

    def _who_is_away(self) -> str:
        away = [
            f"{self._workers[worker]} ({self._away[worker] or 'not seen yet'})"
            for worker in sorted(self._away)
        ]
        return f"; away: {', '.join(away)}" if away else ""
