"""Which function a coordinator sends to which worker next, and what is left when one fails.

A closure waits for its inputs, is ready, is in flight on a worker, and is over; only the loss of a
worker brings it back, and not for ever. The queue starts no thread and sends nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import CancelledError

from ndistribute.coordinator.pickling import Pickled
from ndistribute.coordinator.remote_value import Closure, RemoteValue
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, WorkerLostError

ATTEMPTS = 4
"""A function is run at most so often if its worker is lost each time while it runs."""
_log = logging.getLogger("ndistribute")


class ClosureQueue:
    """Keep what was scheduled until it is over; a worker's number is its place among the names."""

    capacity = 4096  # How many closures may wait.
    capacity_bytes = 1 << 30  # None is added once the arguments of those that wait take so much.

    def __init__(self, workers: Sequence[str], patience: float = 60.0) -> None:
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.low_water = 1
        """The lowest number of a closure that is not over."""
        self._workers = tuple(workers)
        self._patience = patience
        self.process = os.getpid()
        self._changed = threading.Condition(self.lock)  # There is room, or nothing to do.
        self._error: Exception | None = None  # The first one since it was last raised.
        self._last = 0
        self._open: OrderedDict[int, Closure] = OrderedDict()  # All that are not over.
        self._ready: deque[Closure] = deque()
        self._followers: dict[RemoteValue, list[Closure]] = defaultdict(list)
        self._bytes = 0  # Of the arguments of all that no worker has.
        # What each worker that is there has, in the order in which it runs them.
        self._in_flight: dict[int, dict[int, Closure]] = {}
        self._why_away: list[Exception | None] = [None] * len(workers)  # Of those that are.
        self._stalled: float | None = None  # Since when all are away while work waits.

    def add(self, closure: Closure) -> None:
        """Add a closure and number it, when there is room; raise what a function raised before."""
        with self.lock:
            while True:
                self._raise_error()
                if self.closing.is_set():
                    raise RuntimeError("The coordinator was closed: make another one.")
                if self._error is None and not self.is_full():
                    break
                self._changed.wait()  # Ends when workers take some, or `lose` gives them up.
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
        """Wait until everything is over, and raise what a function raised."""
        with self.lock:
            if not self._changed.wait_for(lambda: not self._open, timeout):
                waiting = self._waiting()
                raise CollectiveTimeoutError(
                    f"join: after {timeout} s {len(self._open) - waiting} function(s) still run "
                    f"and {waiting} wait{self._who_is_away()}. They go on: join again."
                )
            self._raise_error()

    def done(self) -> bool:
        """Return True if everything is over; raise what a function raised."""
        self.check_process()
        with self.lock:
            self._raise_error()
            return not self._open

    def close(self) -> None:
        """Cancel what is not over, and hand out nothing any more."""
        with self.lock:
            self.closing.set()
            if self._open:
                self._give_up(RuntimeError("The coordinator was closed before all was over."))
            self._changed.notify_all()

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the coordinator's."""
        if os.getpid() != self.process:
            raise RuntimeError(
                f"This process is a fork of process {self.process}, which made the coordinator: "
                "schedule, join and fetch there, or make another coordinator here."
            )

    def arrive(self, worker: int) -> None:
        """Note that a worker is there, and has nothing to run."""
        with self.lock:
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
        """Return what a worker that is there runs next, so that it has at most `depth` closures."""
        taken: list[Closure] = []
        with self.lock:
            flying, was_full = self._in_flight[worker], self.is_full()
            while self._ready and len(flying) < depth and not self.closing.is_set():
                # In advance only while there are as many for each of the others, even if they are
                # away: at the end each should go to whoever is free first.
                if len(self._ready) < len(self._workers) * len(flying):
                    break
                closure = self._ready.popleft()
                self._bytes -= closure.arguments.nbytes
                flying[closure.number] = closure
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
            if isinstance(result, Exception):
                where = f"on {self._workers[worker]}, there:\n{trace.rstrip()}"
                result.add_note(f"{closure} raised this {where}")
            self._settle(closure, result)
            if isinstance(result, Exception):
                self._fail(result)
            for follower in self._followers.pop(closure.result, ()):
                follower.missing -= 1
                if not follower.missing:
                    self._ready.append(follower)
            if not self._open:
                self._changed.notify_all()

    def lose(self, worker: int, problem: Exception) -> None:
        """Note that a worker is away, or still away; others run what it had."""
        with self.lock:
            before, self._why_away[worker] = self._why_away[worker], problem
            was_here = worker in self._in_flight
            lost = list(self._in_flight.pop(worker, {}).values())
            if lost and self._error is None:  # It ran the first one; the others waited behind it.
                lost[0].lost_on.append(self._workers[worker])
                if len(lost[0].lost_on) >= ATTEMPTS:
                    self._error = WorkerLostError(
                        f"{lost[0]} was run {ATTEMPTS} times, and each time its worker was lost: "
                        f"{', '.join(lost[0].lost_on)}. It is not run again: most likely it ends "
                        "the process that runs it, or takes more memory than there is; see what "
                        "those workers wrote last."
                    )
                    self._error.__cause__ = problem
                    self._settle(lost[0], self._error)
            if self._error is not None:
                self._fail(self._error)
            else:
                self._ready.extendleft(reversed(lost))
                self._bytes += sum(closure.arguments.nbytes for closure in lost)
            self._check_patience(problem)
        refused = isinstance(problem, AuthenticationError)
        if was_here and not self.closing.is_set():
            what = ", ".join(map(str, lost)) or "nothing"
            _log.warning("%s is lost (%s); it had %s", self._workers[worker], problem, what)
        elif refused and not isinstance(before, AuthenticationError):
            _log.warning("%s gets no work, for it refuses: %s", self._workers[worker], problem)

    def _check_patience(self, problem: Exception) -> None:
        if self._in_flight or not self._open:
            self._stalled = None
            return
        now = time.monotonic()
        self._stalled = self._stalled or now
        if all(isinstance(why, AuthenticationError) for why in self._why_away):
            error: Exception = AuthenticationError(f"No worker let this process in: {problem}")
        elif now - self._stalled >= self._patience:
            error = WorkerLostError(
                f"No worker was there for {self._patience:g} s while {self._waiting()} "
                f"function(s) waited{self._who_is_away()}. Start the workers again, or give "
                "them longer by timeout_seconds."
            )
        else:
            return
        self._stalled = None
        error.__cause__ = problem
        self._give_up(error)

    def is_full(self) -> bool:
        return self._waiting() >= self.capacity or self._bytes >= self.capacity_bytes

    def _waiting(self) -> int:
        """Return how many closures no worker has."""
        return len(self._open) - sum(map(len, self._in_flight.values()))

    def _settle(self, closure: Closure, result: Pickled | Exception) -> None:
        closure.result.settle(result)
        del self._open[closure.number]
        self.low_water = next(iter(self._open), self._last + 1)

    def _give_up(self, error: Exception) -> None:
        """End everything with an error, what workers have as well."""
        for flying in self._in_flight.values():
            flying.clear()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep an error for who asks, unless there is one, and cancel what no worker has."""
        self._error = self._error or error
        # Its own text may be what can not be made.
        before = traceback.format_exception_only(self._error)[0].strip()
        flying = {number for some in self._in_flight.values() for number in some}
        for closure in [self._open[number] for number in self._open if number not in flying]:
            cancelled = CancelledError(
                f"{closure} was cancelled, since this was raised before: {before}. Schedule it "
                "again."
            )
            cancelled.__cause__ = self._error
            self._settle(closure, cancelled)
        self._ready.clear()
        self._followers.clear()
        self._bytes = 0
        if not self._open:
            self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise the error once, when no worker has anything any more."""
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
