"""The one way in which threads wait for each other.

Every replica brings a value; the last to arrive combines them and everyone leaves with the result.
A replica that returns, raises or is too late releases the others with an error at once.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ndistribute.collective.backend import Call, check_calls
from ndistribute.errors import CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError

__all__ = ["Rendezvous"]

T = TypeVar("T")

SLICE_SECONDS = 1.0


class _Round:
    """One meeting: what each replica brought, and how it ended."""

    __slots__ = ("arrived", "calls", "error", "result", "values")

    def __init__(self, size: int) -> None:
        self.calls: list[Call | None] = [None] * size
        self.values: list[Any] = [None] * size
        self.arrived = 0
        self.result: Any = None
        self.error: BaseException | None = None


class Rendezvous:
    """Let a fixed number of threads meet, again and again.

    Args:
        size: how many threads meet.

    >>> alone = Rendezvous(1)
    >>> alone.exchange(0, Call(1, "merge_call"), 20, lambda values: values[0] + 1, timeout=1.0)
    21
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._mutex = threading.Lock()
        self._returned: dict[int, int] = {}
        self._renew()

    def reset(self) -> None:
        """Forget what an earlier step left behind; no thread may be inside."""
        self._returned.clear()
        if self._cause is not None or self._round.arrived:
            self._renew()

    def _renew(self) -> None:
        # A wake lock is a token, held until the waiter may go on. An interrupt may have left one
        # that nobody took, so a step that failed gets new ones.
        self._wake = [threading.Lock() for _ in range(self.size)]
        for lock in self._wake:
            lock.acquire(blocking=False)
        self._round = _Round(self.size)
        self._waiting: dict[int, _Round] = {}
        self._cause: BaseException | None = None

    def exchange(
        self,
        rank: int,
        call: Call,
        value: Any,
        combine: Callable[[Sequence[Any]], T],
        timeout: float,
    ) -> T:
        """Wait until every replica has come, and return what the values combine to.

        Args:
            rank: which replica this is.
            call: what it is doing, compared with the others' calls.
            value: what it brings.
            combine: run once, by the last to arrive, on the values in replica order.
            timeout: seconds to wait for the others.

        Raises:
            CollectiveMismatchError: the calls differ, or another replica has returned.
            CollectiveTimeoutError: not all came in time.
            WorkerLostError: another replica failed; its exception is the ``__cause__``.
        """
        with self._mutex:
            self._check_open(call)
            meeting = self._round
            meeting.calls[rank] = call
            meeting.values[rank] = value
            meeting.arrived += 1
            last = meeting.arrived == self.size
            if last:
                self._round = _Round(self.size)
            else:
                self._waiting[rank] = meeting
        if last:
            self._conclude(meeting, combine)
            if meeting.error is not None:
                raise meeting.error
        else:
            self._wait(rank, meeting, call, timeout)
            if meeting.error is not None:
                raise _for_waiter(meeting.error)
        return meeting.result  # type: ignore[no-any-return]

    def leave(self, rank: int, calls_made: int) -> None:
        """Say that a replica has returned from its step and meets nobody any more."""
        with self._mutex:
            self._returned[rank] = calls_made
            waiting = [meeting.calls[waiter] for waiter, meeting in self._waiting.items()]
            if waiting and waiting[0] is not None:
                self._release(self._skipped(waiting[0]))

    def abort(self, cause: BaseException) -> None:
        """Release everyone who waits, and everyone who comes later, with the first cause given."""
        with self._mutex:
            self._cause = self._cause or cause
            self._release(self._cause)

    def _check_open(self, call: Call) -> None:
        if self._cause is not None:
            raise _for_waiter(self._cause)
        if self._returned:
            raise self._skipped(call)

    def _conclude(self, meeting: _Round, combine: Callable[[Sequence[Any]], Any]) -> None:
        try:
            check_calls([call for call in meeting.calls if call is not None])
            meeting.result = combine(meeting.values)
        except BaseException as error:
            meeting.error = error
        with self._mutex:
            for rank in [rank for rank, held in self._waiting.items() if held is meeting]:
                del self._waiting[rank]
                self._wake[rank].release()

    def _wait(self, rank: int, meeting: _Round, call: Call, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # In slices, for an interrupt that comes just before a sleep is seen only after it.
            if self._wake[rank].acquire(timeout=min(left, SLICE_SECONDS)):
                return
        with self._mutex:
            # The last one may have come between the end of the wait and here.
            if self._wake[rank].acquire(blocking=False):
                return
            absent = [i for i, held in enumerate(meeting.calls) if held is None]
            error = CollectiveTimeoutError(
                f"{call.title}: replica {rank} waited {timeout:g} s for replica(s) "
                f"{', '.join(map(str, absent)) or 'in the reduction'}. A replica that computes "
                "longer needs CommunicationOptions(timeout_seconds=...).",
                rank=absent[0] if absent else None,
                op=call.kind,
                sequence=call.sequence,
            )
            self._cause = self._cause or error
            self._waiting.pop(rank, None)
            self._release(error)
        raise error

    def _release(self, error: BaseException) -> None:
        """End the meetings that wait; the mutex is held."""
        for rank, meeting in list(self._waiting.items()):
            meeting.error = meeting.error or error
            self._wake[rank].release()
        self._waiting.clear()
        self._round = _Round(self.size)

    def _skipped(self, call: Call) -> CollectiveMismatchError:
        rank, made = next(iter(self._returned.items()))
        return CollectiveMismatchError(
            f"{call.title}: replica {rank} returned after {made} collective call(s) while another "
            f"replica called {call}. Every replica must make the same calls in the same order.",
            rank=rank,
            op=call.kind,
            sequence=call.sequence,
        )


def _for_waiter(error: BaseException) -> BaseException:
    """Return what a replica raises that waited while another one failed.

    An exception object belongs to one thread's traceback, so each waiter gets its own.
    """
    if isinstance(error, CollectiveMismatchError | CollectiveTimeoutError):
        own = copy.copy(error)
        own.__notes__ = []  # A shallow copy shares the list, and each replica adds its own note.
        return own
    lost = WorkerLostError(
        f"another replica failed with {type(error).__name__}: {error}. This replica was waiting "
        "for it in a collective."
    )
    lost.__cause__ = error
    return lost
