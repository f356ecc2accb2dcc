"""The control plane: who is in the group, who was lost, and which calls all of them finish.

Whatever carries the data, a process that dies, falls silent, fails or leaves is known to all others
at once, and everyone who waits in a collective learns it. An abort names the last call that is over
on its sender: who is in that call or an earlier one finishes it, so all change their variables
equally.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ndistribute.collective import star
from ndistribute.collective.backend import Call
from ndistribute.collective.bootstrap import DataConnections, ProcessInfo
from ndistribute.collective.step_tracker import BEFORE_ALL, Place, StepTracker
from ndistribute.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)

# A process that comes later than this is asked whether it comes at all; rank 0 has to answer all.
_ASK_SECONDS = 0.2
_ASKING_AT_ONCE = 64
_REPEAT_SECONDS = (0.05, 1.0)  # How often an exchange asks who is missing: if any is gone, if not.
_GRACE_SECONDS = 1.0  # For the answer to that, or for data without a control plane.
_REASON_CHARACTERS = 2000


class WaitMonitor:
    """Watch over one wait in a collective: its deadline, failures, and who does not come.

    Whoever waits polls its wire as it likes and calls `check` now and then.

    Args:
        plane: the processes of the group.
        call: what this process is doing.
        timeout: how long it may take, in seconds.
    """

    def __init__(self, plane: ControlPlane, call: Call, timeout: float) -> None:
        self._plane = plane
        self._call = call
        self._timeout = timeout
        start = time.monotonic()
        self._deadline = start + timeout
        self._ask_at = start + _ASK_SECONDS

    def check(self, missing: Callable[[], Sequence[int]]) -> None:
        """Go on waiting, or raise.

        Args:
            missing: returns the ranks that have not come.

        Raises:
            WorkerLostError: a process was lost, has failed or has finished.
            CollectiveMismatchError: a process skipped the call.
            CollectiveTimeoutError: the time is up.
        """
        plane = self._plane
        plane.check()
        now = time.monotonic()
        if now < min(self._ask_at, self._deadline) and not plane.where.anyone_gone:
            return
        # First who has gone and then who is missing: what came before a good-bye has come.
        gone = plane.where.gone(self._call)
        absent = missing()
        # Rank 0 takes part in every call, and without it nobody else can say that he gave up.
        cut_off = [0] if now > plane.cut_off_at + _GRACE_SECONDS else []
        for rank in [*absent, *cut_off]:
            if rank in gone:
                error = plane.given_up(self._call, rank)
                plane.abort(error)
                raise error
        if now >= self._deadline:
            raise self._too_late(absent)
        if now >= self._ask_at:
            self._ask_at = now + _ASK_SECONDS * max(1.0, plane.size / _ASKING_AT_ONCE)
            plane.ask(self._call)

    def _too_late(self, absent: Sequence[int]) -> CollectiveTimeoutError:
        plane = self._plane
        others = [rank for rank in range(plane.size) if rank != plane.rank]
        late = plane.where.late(self._call, absent, others)
        return CollectiveTimeoutError(
            f"{self._call.title}: worker {plane.rank} waited {self._timeout:g} s for worker(s) "
            f"{', '.join(map(str, late))}. Work that takes longer needs "
            "CommunicationOptions(timeout_seconds=...).",
            rank=late[0] if late else None,
            op=self._call.kind,
            sequence=self._call.sequence,
        )


class ControlPlane:
    """Know the other processes of a group.

    Args:
        info: who this process is, and where rank 0 is.
        timeout: how long all processes may take to start, in seconds.

    Raises:
        CollectiveTimeoutError: not all of them started in time.

    Attributes:
        cut_off_at: when rank 0 left, by the monotonic clock; from then on nobody hears of another.
    """

    def __init__(self, info: ProcessInfo, timeout: float = 300.0) -> None:
        self.rank = info.rank
        self.size = info.size
        self.generation = 0
        self.cause: DistributeError | None = None
        self.where = StepTracker()
        self.cut_off_at = float("inf")
        self._info = info
        self._lost: set[int] = set()
        # By generation, what broke it.
        self._early: dict[int, tuple[DistributeError, Place, int]] = {}
        self._broken_after = BEFORE_ALL  # The last call that all finish in spite of the cause,
        self._broken_before = 0  # and the last one of the step before.
        # Who raised in a step: in which generation, after which call, and what.
        self._failures: dict[int, tuple[int, Place, DistributeError]] = {}
        self._failed_at = BEFORE_ALL  # After which call this process did.
        self._left: dict[int, bool] = {}  # Who has left that step; whether they were told of it.
        self._reported = False
        self._closed = False
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._exchanges: dict[str, int] = defaultdict(int)  # How many of a kind were begun.
        self._answers: dict[str, list[bytes]] = {}
        self._missing: dict[str, list[int]] = {}
        self._members: list[dict[str, Any]] = []
        self._data: DataConnections | None = None
        deadline = time.monotonic() + timeout
        try:
            self._star = star.Star(info, self._on_message, self._on_end, timeout)
        except BaseException:
            info.listener.close()
            raise
        try:
            self._join(deadline - time.monotonic(), timeout)
        except BaseException as error:
            self.abort(error)
            self.close()
            raise
        self.hosts = tuple(str(member["host"]) for member in self._members)
        self.pids = tuple(int(member["pid"]) for member in self._members)

    @property
    def is_broken_here(self) -> bool:
        """Return True if the group broke in the step that this process is in or left last.

        Another process may have failed in a step that this one has yet to begin.
        """
        return self.cause is not None and self._broken_after[0] <= max(0, self.where.last[0])

    @property
    def broken_and_known(self) -> bool:
        """Return True if the group is broken, and this process's own code has been told why."""
        return self.cause is not None and self._reported

    @property
    def is_alarmed(self) -> bool:
        """Return True if `check` may have something to raise."""
        return self.cause is not None or bool(self._failures)

    def check(self) -> None:
        """Raise what broke the group, unless the call of this moment is still finished by all."""
        here = self.where.position, self.where.finished + 1
        for generation, place, error in list(self._failures.values()):
            # Who raised in this step does not come to calls that it had not made.
            if generation == self.generation and (here[0], 0) <= place < here:
                self._break_all(error, place)
        cause = self.cause
        if cause is not None and not self._is_finished_by_all(here):
            self._reported = True
            _raise_again(cause)
        if self._closed:
            raise WorkerLostError(f"worker {self.rank} has left its group.", rank=self.rank)

    def patience(self, call: Call, timeout: float) -> WaitMonitor:
        """Return what watches over a wait.

        A backend whose data may still be under way when its sender has left the step asks for it
        in every call: that is how the sender knows that it has not skipped the call.
        """
        self.where.made = self.where.place_of(call)
        return WaitMonitor(self, call, timeout)

    def data_socket(self, rank: int, check: Callable[[], None] | None = None) -> socket.socket:
        """Return the connection that carries data to and from another process.

        Args:
            rank: of the other process, which is to ask for this connection too.
            check: called now and then while it is made; raises where waiting has become vain.
        """
        if self._data is None:
            raise WorkerLostError(f"worker {self.rank} has left its group.", rank=self.rank)
        return self._data.get(rank, check or self.check)

    def name_of(self, rank: int) -> str:
        """Return how a process is called in messages."""
        if not self._members:
            return f"worker {rank}"
        return f"worker {rank} ({self._members[rank]['name']}, pid {self._members[rank]['pid']})"

    def refuse_forks(self) -> None:
        """Raise RuntimeError if this process is a fork of the one that joined the group."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this process was forked from worker {self.rank}, whose place among the workers "
                "is its own: run steps there, or start processes by 'spawn'."
            )

    def enter(self) -> None:
        """Start a step, in which this process may meet the others.

        Raises:
            WorkerLostError: another process failed since the last step.
        """
        if self.cause is not None and self.where.position + 1 > self._broken_after[0]:
            self._reported = True
            _raise_again(self.cause)
        if self._closed:
            raise WorkerLostError(f"worker {self.rank} has left its group.", rank=self.rank)
        self.where.begin_step()

    def leave(self) -> None:
        """End a step."""
        self.where.end_step()
        for rank in list(self._failures):
            self._answer(rank)

    def fail(self, cause: BaseException) -> None:
        """Tell the others that this process's own code raised, in a step and outside of calls.

        What was over by then stays, on all processes; who needs more of this one in this step
        raises the cause. If nobody does, nothing is broken.
        """
        self._failed_at = self.where.last
        self._left.clear()
        failure = star.describe_error(cause, self.rank)
        self._star.post(star.Failed(self.generation, self._failed_at, failure))

    def settle(self, timeout: float) -> None:
        """Wait until the others have left the step in which `fail` was called, or it has broken.

        Raises:
            CollectiveTimeoutError: not all of them have left in time.
        """
        if self._failed_at == BEFORE_ALL:
            return
        others = set(range(self.size)) - {self.rank}

        def is_over() -> bool:
            if self.is_broken_here or self._is_cut_off:
                return True
            left = others - self.where.departed.keys() <= self._left.keys()
            return left and not any(self._left.values())

        with self._changed:
            in_time = self._changed.wait_for(is_over, min(timeout, threading.TIMEOUT_MAX))
        if not in_time:
            error = CollectiveTimeoutError(
                f"worker {self.rank} raised in a step, and waited {timeout:g} s until worker(s) "
                f"{sorted(others - self._left.keys())} left it.",
                op="step",
            )
            self.abort(error, after=BEFORE_ALL)
            raise error
        self._failed_at = BEFORE_ALL

    def abort(self, cause: BaseException, *, seen: bool = True, after: Place | None = None) -> None:
        """Break the group off, on every process, from the call after a place on.

        A call that is over on one process is finished by the others too: they may still be in it,
        and have what they need. So all have changed their variables equally. The first cause holds,
        unless another one comes that leaves less to be finished.

        Args:
            cause: what happened.
            seen: whether the cause is already on its way to this process's own code.
            after: the last call to be finished; None: the last one that is over here.
        """
        error = star.restore_error(star.describe_error(cause, self.rank))
        error.__cause__ = cause
        self._break_all(error, self.where.last if after is None else after, seen=seen)

    def ask(self, call: Call) -> None:
        """Ask all other processes whether they have made or skipped a call of the current step."""
        self._star.post(star.Ask(self.generation, self.where.place_of(call)))

    def given_up(self, call: Call, rank: int) -> DistributeError:
        """Return the error for a wait for a process that has gone."""
        return self.where.given_up(call, self.rank, rank, self.name_of(rank))

    def exchange(self, kind: str, blob: bytes, timeout: float) -> list[bytes]:
        """Return what every process passed, in rank order; for set-up, not for data.

        Args:
            kind: what is exchanged; the processes' exchanges of one kind meet in turn.
            blob: what this process passes.
            timeout: how long to wait, in seconds.
        """
        self._exchanges[kind] += 1
        return self._meet(f"{self.generation}:{kind}:{self._exchanges[kind]}", blob, timeout)

    def recover(self, reset: Callable[[], None], timeout: float) -> None:
        """Make a broken group whole again: every process must call it.

        Args:
            reset: clears what the wires hold of the calls that failed; run when no process is
                inside a call any more, and before any makes the next.
            timeout: how long to wait for each other, in seconds.

        Raises:
            WorkerLostError: a process is gone for good.
        """
        # By generation, not counted: who has waited in vain meets the others when it tries again.
        own = str(self.where.total).encode()
        totals = self._meet(f"{self.generation}:recover", own, timeout, while_broken=True)
        with self._changed:
            self.generation += 1
            self.cause, self._broken_after, self._broken_before = self._early.pop(
                self.generation, (None, BEFORE_ALL, 0)
            )
            self._reported = False
            self._failed_at = BEFORE_ALL
            self.where.start_over()
            for held in (self._exchanges, self._answers, self._missing):
                held.clear()
            for rank, (generation, *_) in list(self._failures.items()):
                if generation < self.generation:
                    self._failures.pop(rank, None)
        try:
            if self._data is not None:
                self._data.renew(self.generation)
            self._refuse_gone(Call(0, "recover"), range(self.size))
            reset()
            self._meet(f"{self.generation}:ready", b"", timeout)
        except BaseException as error:
            self.abort(error)
            raise
        if len(set(totals)) > 1:
            raise CollectiveMismatchError(
                "recover: a collective was over on some workers alone when another failed inside "
                "of it, so their variables may differ: restore them, or start the job again.",
                op="recover",
            )

    def close(self) -> None:
        """Say good-bye, and close every connection."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # A fork: the connections are those of the process that joined.
        if threading.current_thread().name.startswith("ndistribute"):
            # Garbage is collected on any thread, but none can wait for its own end.
            threading.Thread(target=self._part, name="ndistribute farewell", daemon=True).start()
        else:
            self._part()

    @property
    def _is_cut_off(self) -> bool:
        return self.cut_off_at < float("inf")

    def _join(self, left: float, timeout: float) -> None:
        """Tell the others who this process is, and learn who they are."""
        info = self._info
        own = json.dumps(info.details(started=secrets.token_hex(8))).encode()
        try:
            told = self._meet(star.JOIN, own, left)
        except CollectiveTimeoutError as error:
            if self.cause is not None:
                raise  # Another process has given up.
            late = self._missing.get(star.JOIN) or [0]  # Who is to say who else is.
            who = f"worker{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
            raise CollectiveTimeoutError(
                f"worker {self.rank} waited {timeout:g} s for {who} to start, and to join at "
                f"{info.first}.{self._star.refusal} Were all {self.size} "
                "processes started, with the same secret, and is that address reachable?",
                rank=error.rank,
                op="start",
            ) from error
        self._members = [json.loads(text) for text in told]
        self._star.stop_accepting()
        addresses = [member["address"] for member in self._members]
        # Rank 0 names this start of the group.
        self._data = DataConnections(info, addresses, self._members[0]["started"])

    def _part(self) -> None:
        try:
            self._star.close(self._farewell(), broken=self.cause is not None)
        finally:
            if self._data is None:
                self._info.listener.close()
            else:
                self._data.close()

    def _farewell(self) -> star.GoodBye:
        failure = getattr(sys, "last_value", None)
        # In an interactive session the last error did not end anything.
        failed = isinstance(failure, BaseException) and not hasattr(sys, "ps1")
        reason = f"ended with {type(failure).__name__}: {failure}" if failed else "has finished"
        return star.GoodBye(star.sendable(reason[:_REASON_CHARACTERS]), failed, self.where.made)

    def _meet(
        self, key: str, blob: bytes, timeout: float, *, while_broken: bool = False
    ) -> list[bytes]:
        """Return what every process passed under a key; a broken group may do so as well."""
        call = Call(0, key.split(":")[1])
        deadline, repeat_at = time.monotonic() + timeout, 0.0
        with self._changed:
            while (blobs := self._answers.get(key)) is None:
                if not while_broken:
                    self.check()
                missing = [0] if self._is_cut_off else self._missing.get(key, [])
                self._refuse_gone(call, {*missing, *self._lost})
                now = time.monotonic()
                if now >= deadline + (0.0 if missing else _GRACE_SECONDS):
                    # Worker 0 is to say who is missing.
                    raise self._missed(call, timeout, missing or [0])
                shortest, longest = _REPEAT_SECONDS
                pause = shortest if self.where.departed else longest
                repeat_at = min(repeat_at, now + pause)
                if now >= repeat_at:
                    self._star.post(star.Exchange(key, blob))
                    repeat_at = min(now + pause, max(deadline, now + shortest))
                self._changed.wait(timeout=repeat_at - now)
            if not while_broken:  # Who is interrupted in a recovery comes once more.
                del self._answers[key]
        return blobs

    def _missed(self, call: Call, timeout: float, missing: Sequence[int]) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{call.kind}: worker {self.rank} waited {timeout:g} s for worker(s) "
            f"{', '.join(map(str, missing))}.",
            rank=missing[0],
            op=call.kind,
        )

    def _refuse_gone(self, call: Call, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self.where.departed:
                raise self.given_up(call, rank)
            if rank in self._lost:
                raise WorkerLostError(
                    f"{call.kind}: {self.name_of(rank)} was lost: start the job again.", rank=rank
                )

    def _is_finished_by_all(self, here: Place) -> bool:
        """Return True if the process that broke the group had finished a call."""
        position, finished = self._broken_after
        if here[0] == position:
            return here[1] <= finished
        return here[0] == position - 2 and here[1] <= self._broken_before

    def _on_message(self, rank: int, message: star.Message) -> None:
        """Take a message in, on a thread of the star."""
        match message:
            case star.Answer():
                with self._changed:
                    if message.missing:
                        self._missing[message.key] = message.missing
                    else:
                        self._answers[message.key] = message.blobs
                    self._changed.notify_all()
            case star.GoodBye():
                self._take_leave(rank, message)
            case star.Lost():
                self._lose(rank, message.why, by=0)
            case star.Failed():
                error = star.restore_error(message.error)
                with self._changed:
                    self._failures[rank] = message.generation, message.place, error
                self._answer(rank)
            case star.Left():
                with self._changed:
                    step = message.generation, message.position
                    if step == (self.generation, self._failed_at[0]):
                        self._left[rank] = message.broken
                        self._changed.notify_all()
            case star.Abort():
                error = star.restore_error(message.error)
                self._break(error, message.place, message.before, generation=message.generation)
            case star.Ask():
                self._compare_places(message)

    def _answer(self, rank: int) -> None:
        """Tell a process that raised in a step that this one has left it, once it has."""
        # Called after each step and for each failure, on two threads: the later one finds both.
        failure = self._failures.get(rank)
        if failure is None:
            return
        generation, (position, _), _ = failure
        if generation == self.generation and self.where.position > position:
            broken = self.cause is not None and self._broken_after[0] <= position
            self._failures.pop(rank, None)  # Before the answer, to which a next one may follow.
            self._star.post(star.Left(rank, generation, position, broken))

    def _compare_places(self, message: star.Ask) -> None:
        with self._changed:
            if message.generation != self.generation:
                return
            place = message.place
            if isinstance(message, star.Seen):
                self.where.note_seen(place, message.reached, message.skipped)
            elif (made := self.where.made >= place) or self.where.has_skipped(place):
                self._star.post(star.Reply(self.generation, place, made))

    def _take_leave(self, rank: int, message: star.GoodBye) -> None:
        with self._changed:
            self.where.note_departed(rank, message.reason, message.made)
            self._missing.clear()  # It may have passed something since this was told.
            self._changed.notify_all()
        if message.failed:
            lost = WorkerLostError(f"{self.name_of(rank)} {message.reason}", rank=rank)
            generation, place, error = self._failures.get(rank, (-1, BEFORE_ALL, lost))
            if generation == self.generation:  # It raised in a step, and that has ended it.
                self._break(error, place, self.where.before)
            else:
                self._break(lost, BEFORE_ALL, 0)

    def _on_end(self, why: str) -> None:
        """Take in that the connection to rank 0 has ended."""
        with self._changed:
            self.cut_off_at = time.monotonic()
            self._changed.notify_all()
        if 0 not in self.where.departed and not self._closed:
            own = "or it took this process for lost, which may have been stopped"
            why = f"{why.rstrip('.')}; {own}"
            self._lose(0, why, by=self.rank)

    def _lose(self, rank: int, why: str, by: int) -> None:
        with self._changed:
            self._lost.add(rank)
            self._changed.notify_all()
        reason = f"was lost: its connection to worker {by} ended: {why.rstrip('.')}."
        self._break(WorkerLostError(f"{self.name_of(rank)} {reason}", rank=rank), BEFORE_ALL, 0)

    def _break_all(self, cause: DistributeError, after: Place, *, seen: bool = False) -> None:
        """Break the group on all processes, unless it is."""
        before = self.where.before
        generation = self._break(cause, after, before, seen=seen)
        if generation is not None:
            failure = star.describe_error(cause, self.rank)
            self._star.post(star.Abort(generation, after, before, failure))

    def _break(
        self,
        cause: DistributeError,
        after: Place,
        before: int,
        *,
        seen: bool = False,
        generation: int | None = None,
    ) -> int | None:
        """Keep a cause, and return the generation that it broke; None if it was broken before."""
        with self._changed:
            now = self.generation
            if generation is not None and generation > now:
                # They were quicker than this process.
                self._early.setdefault(generation, (cause, after, before))
            if generation not in (None, now):
                return None
            if self.cause is not None and after >= self._broken_after:
                return None
            self._broken_after, self._broken_before, self._reported = after, before, seen
            self.cause = cause  # Last, for it is looked at without the lock.
            self._changed.notify_all()
            return now


def _raise_again(cause: DistributeError) -> NoReturn:
    """Raise a copy of an exception: one that is raised twice loses its traceback."""
    error = type(cause)(str(cause), rank=cause.rank, op=cause.op, sequence=cause.sequence)
    raise error from cause.__cause__
