"""Where a coordinator's threads meet: those that schedule and wait, and one for each worker.

The rules are those of `ClosureQueue`; here are the lock, the waiting, and the patience with workers
that are away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ndistribute.cluster.coordination.closures import Closure, ClosureQueue
from ndistribute.cluster.coordination.pickles import Pickled
from ndistribute.cluster.protocol.spans import Span
from ndistribute.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)

__all__ = ["Dispatch"]

# One closure may make many changes, so those that take long are not put off.
_ACKNOWLEDGED_TOGETHER, _ACKNOWLEDGED_SECONDS = 64, 0.05
_log = logging.getLogger("ndistribute")


class Dispatch:
    """Hand closures to workers, and outcomes back.

    Args:
        names: of the workers.
        patience: for how many seconds all workers may be away while work waits.
        acknowledge: called now and then with the numbers of all closures that are over.
    """

    def __init__(
        self, names: tuple[str, ...], patience: float, acknowledge: Callable[[Sequence[Span]], None]
    ) -> None:
        self._names = names
        self._patience = patience
        self._acknowledge = acknowledge
        self._acknowledged = time.monotonic()  # When something was.
        self._succeeded = 0  # How many closures have since.
        self._acknowledging = threading.Lock()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # Something may be taken.
        self._changed = threading.Condition(self._lock)  # There is room, or nothing to do.
        self._queue = ClosureQueue(len(names))
        self._away: dict[int, Exception | None] = dict.fromkeys(range(len(names)))
        self._stalled: float | None = None  # Since when all are away while work waits.
        self.closing = threading.Event()

    def add(self, closure: Closure) -> None:
        """Take a closure, when there is room.

        Raises:
            Exception: what a function raised before.
            RuntimeError: the coordinator is closed.
            ValueError: an input has no value.
        """
        with self._lock:
            while self._queue.full or self._queue.error is not None:
                self._raise_if_any()
                self._check_open()
                self._changed.wait()  # Ends when workers take some, or `absent` gives them up.
            self._check_open()
            for value in closure.inputs:
                if value.error is not None:
                    raise ValueError(f"{closure.name} got {value!r}, which has no value.") from (
                        value.error
                    )
            self._queue.add(closure)
            self._work.notify()

    def join(self, timeout: float | None) -> None:
        """Wait until everything is over.

        Raises:
            CollectiveTimeoutError: it was not in time.
            Exception: what a function raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._queue.at_rest:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise CollectiveTimeoutError(
                        f"join: after {timeout} s {self._queue.flying} function(s) still run and "
                        f"{self._queue.queued} wait{self._who_is_away()}. They go on: join again."
                    )
                self._changed.wait(timeout=left)
            self._raise_if_any()

    def done(self) -> bool:
        """Say whether everything is over.

        Raises:
            Exception: what a function raised.
        """
        with self._lock:
            self._raise_if_any()
            return self._queue.at_rest

    def close(self) -> None:
        """Cancel what waits, and send everybody home."""
        with self._lock:
            self.closing.set()
            if not self._queue.at_rest:
                self._give_up(RuntimeError("The coordinator was closed before all was over."))
            self._work.notify_all()
            self._changed.notify_all()

    def take(self, worker: int, depth: int, *, wait: bool) -> list[Closure]:
        """Return what a worker is to run next; nothing where the coordinator closes.

        Args:
            worker: its index.
            depth: how many it may have at most.
            wait: whether to wait until there is something.
        """
        with self._lock:
            while not self.closing.is_set():
                full = self._queue.full
                taken = self._queue.take(worker, depth)
                if full and taken:
                    self._changed.notify_all()
                if taken or not wait:
                    return taken
                self._work.wait()  # Its thread has nothing else to do until `close`.
            return []

    def succeed(self, worker: int, closure: Closure, result: Pickled) -> None:
        """Take what a closure returned."""
        with self._lock:
            self._work.notify(self._queue.succeed(worker, closure, result))
            self._succeeded += 1
            self._after_one()
        self._acknowledge_some()

    def fail(self, worker: int, closure: Closure, error: Exception) -> None:
        """Take what a closure raised."""
        with self._lock:
            self._queue.fail(worker, closure, error)
            self._after_one()

    def arrived(self, worker: int) -> None:
        """Note that a worker is there."""
        with self._lock:
            self._away.pop(worker, None)
            self._stalled = None

    def lost(self, worker: int, problem: Exception) -> None:
        """Note that a worker is away; others run what it had."""
        with self._lock:
            self._away[worker] = problem
            back = self._queue.give_back(worker)
            self._work.notify(len(back))
            self._after_one()
        if not self.closing.is_set():
            what = ", ".join(map(str, back)) or "it had nothing to run"
            _log.warning("%s is lost (%s); given back: %s", self._names[worker], problem, what)

    def absent(self, worker: int, problem: Exception) -> None:
        """Note that a worker is still away, and give up where that has lasted too long."""
        now = time.monotonic()
        with self._lock:
            self._away[worker] = problem
            if len(self._away) < len(self._names) or self._queue.at_rest:
                self._stalled = None
                return
            self._stalled = self._stalled or now
            refused = all(isinstance(why, AuthenticationError) for why in self._away.values())
            if not refused and now - self._stalled < self._patience:
                return
            self._stalled = None
            self._give_up(self._nobody_left(problem, refused))

    def _give_up(self, error: Exception) -> None:
        for worker in range(len(self._names)):
            self._queue.give_back(worker)
        self._queue.abort(error)
        self._changed.notify_all()

    def _nobody_left(self, problem: Exception, refused: bool) -> DistributeError:
        if refused:
            error: DistributeError = AuthenticationError(
                f"No worker let this process in: {problem}"
            )
        else:
            error = WorkerLostError(
                f"No worker was there for {self._patience:g} s while {self._queue.queued} "
                f"function(s) waited{self._who_is_away()}. Start the workers again, or give them "
                "longer by timeout_seconds."
            )
        error.__cause__ = problem
        return error

    def _who_is_away(self) -> str:
        away = [
            f"{self._names[worker]} ({self._away[worker] or 'not seen yet'})"
            for worker in sorted(self._away)
        ]
        return f"; away: {', '.join(away)}" if away else ""

    def _after_one(self) -> None:
        if not self._queue.flying and (self._queue.error or not self._queue.queued):
            self._changed.notify_all()

    def _raise_if_any(self) -> None:
        error = self._queue.take_error()
        if error is not None:
            self._changed.notify_all()
            raise error

    def _check_open(self) -> None:
        if self.closing.is_set():
            raise RuntimeError("The coordinator was closed: make another one.")

    def _acknowledge_some(self) -> None:
        """Tell servers what they need not remember any more: it is never sent again."""
        if not self._acknowledging.acquire(blocking=False):
            return  # Another thread does.
        try:
            now = time.monotonic()
            few = self._succeeded < _ACKNOWLEDGED_TOGETHER
            if few and now < self._acknowledged + _ACKNOWLEDGED_SECONDS:
                return
            with self._lock:
                ended, self._succeeded = tuple(self._queue.over), 0
            self._acknowledge(ended)
            self._acknowledged = now
        except Exception as error:  # They only remember longer than they must.
            _log.info("the servers were not told which functions are over: %s", error)
        finally:
            self._acknowledging.release()
