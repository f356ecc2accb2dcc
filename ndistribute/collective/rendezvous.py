"""The rendezvous of threads, on which all collectives among replicas of one process are built.

Every replica passes a value; the last to arrive combines them, and all replicas get the result. If
a replica returns, raises or is too late, the waits of the others raise at once.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ndistribute.collective.backend import Call, check_calls
from ndistribute.errors import CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError
from ndistribute.timeline import recorded

__all__ = ["Meeting", "Rendezvous"]

T = TypeVar("T")

SLICE_SECONDS = 1.0


class Meeting:
    """One rendezvous: a context that the last replica to arrive enters while the others wait.

    Attributes:
        values: the values of the replicas, in replica order.
        last: the replica that enters the context, or None before it arrives.
        result: the result, which the context sets.
    """

    __slots__ = ("_rendezvous", "arrived", "calls", "done", "error", "last", "result", "values")

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self.calls: list[Any] = [None] * rendezvous.size
        self.values: list[Any] = [None] * rendezvous.size
        self.arrived = 0
        self.last: int | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()  # Free at the end; each waiter releases it again.
        self.done.acquire()

    def __enter__(self) -> None:
        try:
            if self.calls.count(self.calls[0]) < len(self.calls):
                check_calls(self.calls)
        except BaseException as error:
            self._rendezvous.end(self, error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._rendezvous.end(self, error)
        if error is None and self.error is not None:  # A waiter gave up during the context.
            raise _for_waiter(self.error)


class Rendezvous:
    """A reusable rendezvous of a fixed number of threads.

    Args:
        size: the number of threads, one per replica.

    >>> alone = Rendezvous(1)
    >>> alone.exchange(0, Call(1, "merge_call"), 20, lambda values: values[0] + 1, timeout=1.0)
    21
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._mutex = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Clear the state of the last step; no thread may be in a call."""
        self._returned: tuple[int, int] | None = None
        self._cause: BaseException | None = None
        self._meeting: Meeting | None = None

    def refuse_in_fork(self, cause: BaseException) -> None:
        """Let nobody meet in a forked child, which has one thread; another may hold the lock."""
        self._mutex = threading.Lock()
        self.reset()
        self._cause = cause

    def exchange(
        self,
        rank: int,
        call: Call,
        value: Any,
        combine: Callable[[Sequence[Any]], T],
        timeout: float,
    ) -> T:
        """Wait for all replicas, and return the combination of their values.

        Args:
            rank: the index of this replica.
            call: its call, which must equal the calls of the others.
            value: its value.
            combine: called once, by the last replica to arrive, with the values in replica order.
            timeout: the most seconds to wait for the others.

        Raises:
            CollectiveMismatchError: the calls differ, or another replica has returned.
            CollectiveTimeoutError: not all replicas arrived in time.
            WorkerLostError: another replica failed; its exception is the ``__cause__``.
        """
        meeting = self.join(rank, call, value, timeout)
        if meeting.last == rank:
            with meeting:
                meeting.result = combine(meeting.values)
        return meeting.result  # type: ignore[no-any-return]

    @recorded(lambda meeting, self, rank, call, *_: ("wait", call.title))
    def join(self, rank: int, call: Call, value: Any, timeout: float) -> Meeting:
        """Return the meeting at its end, but at once to the last to arrive, which must enter it.

        The arguments and errors are those of `exchange`.
        """
        with self._mutex:
            if self._cause is not None:
                raise _for_waiter(self._cause)
            if self._returned is not None:
                raise self._skipped(call, rank)
            if self._meeting is None:
                self._meeting = Meeting(self)
            meeting = self._meeting
            meeting.calls[rank] = call
            meeting.values[rank] = value
            meeting.arrived += 1
            if meeting.arrived == self.size:
                meeting.last = rank
                return meeting
        self._wait(meeting, rank, call, timeout)
        if meeting.error is not None:
            raise _for_waiter(meeting.error)
        return meeting

    def leave(self, rank: int, calls_made: int) -> None:
        """Record that a replica has returned from its step; make the waits of the others raise."""
        with self._mutex:
            self._returned = self._returned or (rank, calls_made)
            meeting = self._meeting
            calls = [] if meeting is None else list(filter(None, meeting.calls))
        if meeting is not None and calls:
            self.end(meeting, self._skipped(calls[0], meeting.calls.index(calls[0])))

    def abort(self, cause: BaseException) -> None:
        """Make all waits raise because of the first `cause` passed, now and later."""
        with self._mutex:  # Or a replica that now starts a meeting would wait forever.
            if self._cause is None:
                self._cause = cause
            meeting = self._meeting
        self.end(meeting, self._cause)

    def end(self, meeting: Meeting | None, error: BaseException | None) -> None:
        """End a meeting, unless it has ended."""
        with self._mutex:
            if meeting is not None and meeting is self._meeting:
                meeting.error = error
                self._meeting = None
                meeting.done.release()

    def _wait(self, meeting: Meeting, rank: int, call: Call, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # In slices: an interrupt just before a sleep is handled only after it, and may prevent
            # another replica from releasing the lock.
            if meeting.done.acquire(timeout=min(left, SLICE_SECONDS)):
                meeting.done.release()
                return
            if meeting is not self._meeting:
                return
        absent = [other for other, held in enumerate(meeting.calls) if held is None]
        error = CollectiveTimeoutError(
            f"{call.title}: replica {rank} waited {timeout:g} s for replica(s) "
            f"{', '.join(map(str, absent)) or 'in the reduction'}. If they need more time, "
            "raise CommunicationOptions(timeout_seconds=...).",
            rank=absent[0] if absent else None,
            op=call.kind,
            sequence=call.sequence,
        )
        with self._mutex:
            if meeting is self._meeting:
                self._cause = self._cause or error
        self.end(meeting, error)

    def _skipped(self, call: Call, waiting: int) -> CollectiveMismatchError:
        rank, made = self._returned or (0, 0)
        return CollectiveMismatchError(
            f"{call.title}: replica {rank} returned after {made} collective call(s) while replica "
            f"{waiting} called {call}. Every replica must make the same calls in the same order.",
            rank=rank,
            op=call.kind,
            sequence=call.sequence,
        )


def _for_waiter(error: BaseException) -> BaseException:
    """Return the exception of a replica that waited while another one failed.

    Each waiter gets its own object, because an exception has the traceback of one thread.
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
