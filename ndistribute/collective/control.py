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
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ndistribute.collective import star
from ndistribute.collective.backend import Call
from ndistribute.collective.bootstrap import DataConnections, ProcessInfo
from ndistribute.collective.step_tracker import BEFORE_ALL, END, Place, StepTracker
from ndistribute.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from ndistribute.transport.waiting import SHOWN, WaitReport, shortened, why_absent

# A process that comes later than this is asked whether it comes at all; rank 0 has to answer all.
_ASK_SECONDS = 0.2
_ASKING_AT_ONCE = 64
_REPEAT_SECONDS = (0.05, 1.0)  # At least and at most between two questions who is missing.
_GRACE_SECONDS = 1.0  # For the answer to that, or for data without a control plane.
_REASON_CHARACTERS = 2000
_Key = tuple[str, int, Place]  # Of an exchange: its kind, the generation, and its number.


class WaitMonitor:
    """Watch over one wait in a collective: its deadline, failures, and who does not come.

    Whoever waits polls its wire as it likes and calls `check` now and then.
    """

    def __init__(self, plane: ControlPlane, call: Call, timeout: float) -> None:
        self._plane, self._call, self._timeout = plane, call, timeout
        self._place = plane.where.made = plane.where.place_of(call)
        start = time.monotonic()
        self._deadline, self._ask_at = start + timeout, start + _ASK_SECONDS

    def check(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if the group is broken, a process in `missing()` will not come, or time is up."""
        plane = self._plane
        plane.check()
        now = time.monotonic()
        if now < min(self._ask_at, self._deadline) and not plane.where.anyone_gone:
            return
        # First who has gone and then who is missing: what came before a good-bye has come.
        gone = plane.where.gone(self._place)
        absent = missing()
        # Rank 0 takes part in every call, and without it nobody else can say that he gave up.
        cut_off = [0] if now > plane.cut_off_at + _GRACE_SECONDS else []
        for rank in [*absent, *cut_off]:
            if rank in gone:
                error = plane.error_for(self._call, rank)
                plane.abort(error)
                raise error
        if now >= self._deadline:
            late = plane.where.late(self._place, absent, sorted(plane.others))
            raise CollectiveTimeoutError(
                f"{self._call.title}: worker {plane.rank} waited {self._timeout:g} s for worker(s) "
                f"{', '.join(map(str, late))}. Work that takes longer needs "
                "CommunicationOptions(timeout_seconds=...).",
                rank=late[0] if late else None,
                op=self._call.kind,
                sequence=self._call.sequence,
            )
        if now >= self._ask_at:
            self._ask_at = now + _ASK_SECONDS * max(1.0, plane.size / _ASKING_AT_ONCE)
            plane.tell(self._place, made=True)


class ControlPlane:
    """Know the other processes of a group, all of which have `timeout` seconds to start.

    Attributes:
        data_socket: returns the connection that carries data to and from another process.
        generation: how often the group was made whole again.
        cause: what broke it since.
        raised: whether this process's own code has raised anything since `enter`.
        cut_off_at: when rank 0 left, by the monotonic clock; from then on nobody hears of another.
    """

    raised: bool
    _failed_at: Place
    _origin: BaseException | None

    def __init__(self, info: ProcessInfo, timeout: float = 300.0) -> None:
        self.rank, self.size = info.rank, info.size
        self.others = frozenset(range(info.size)) - {info.rank}
        self.where = StepTracker()
        self.cut_off_at = float("inf")
        self._info = info
        self._broken: dict[int, star.Failed] = {}  # By generation; others may be in the next one.
        self._failures: dict[int, star.Failed] = {}  # Who raised in a step that is not over here.
        self._lost: set[int] = set()
        self._closed = False
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._members: list[dict[str, Any]] = []
        self._data = DataConnections(info)
        self.data_socket = self._data.get
        self._begin(0)
        deadline = time.monotonic() + timeout
        try:
            self._star = star.Star(info, self._on_message, timeout)
        except BaseException:
            self._data.close()
            raise
        try:
            self._join(deadline - time.monotonic(), timeout)
        except BaseException as error:
            self.abort(error)
            self.close()
            raise
        self.hosts = tuple(str(member["host"]) for member in self._members)

    @property
    def is_broken_here(self) -> bool:
        """Return True if the group broke in the step that this process is in or left last.

        Another process may have failed in a step that this one has yet to begin.
        """
        return self.cause is not None and self.cause.place[0] <= max(0, self.where.last[0])

    @property
    def is_alarmed(self) -> bool:
        """Return True if `check` may have something to raise."""
        return self.cause is not None or bool(self._failures)

    def check(self) -> None:
        """Raise what broke the group, unless the call of this moment is still finished by all."""
        here = self.where.position, self.where.finished + 1
        for failed in list(self._failures.values()):
            # Who raised in this step does not come to calls that it had not made.
            if failed.generation == self.generation and (here[0], 0) <= failed.place < here:
                self._break(failed, tell=True)
        cause = self.cause
        if cause is not None and not _is_finished_by_all(cause, here):
            self._raise(cause)
        if self._closed:
            self._refuse_closed()

    def patience(self, call: Call, timeout: float) -> WaitMonitor:
        """Return what watches over a wait, in seconds.

        A backend whose data may still be under way when its sender has left the step asks for it
        in every call: that is how the sender knows that it has not skipped the call.
        """
        return WaitMonitor(self, call, timeout)

    def name_of(self, rank: int) -> str:
        """Return how a process is called in messages."""
        if not self._members:
            return f"worker {rank}"
        return f"worker {rank} ({self._members[rank]['name']}, pid {self._members[rank]['pid']})"

    def enter(self, reset: Callable[[], None], timeout: float) -> None:
        """Start a step, in which this process may meet the others; after a failure, `recover`.

        Raises:
            WorkerLostError: another process failed since the last step, or is gone for good.
            RuntimeError: this process is a fork of the one that joined the group.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this process was forked from worker {self.rank}, whose place among the workers "
                "is its own: run steps there, or start processes by 'spawn'."
            )
        if self._closed:
            self._refuse_closed()
        if self._failed_at != BEFORE_ALL and not self.is_broken_here:
            self._settle(timeout)
        knows = self.raised or self._told is self.cause
        if self.cause is not None and self.is_broken_here and knows:
            self.recover(reset, timeout)
        self.raised = False
        if self.cause is not None and self.where.position + 1 > self.cause.place[0]:
            self._raise(self.cause)
        self.where.begin_step()

    def leave(self) -> None:
        """End a step."""
        self.where.end_step()
        self._origin = None  # Its traceback holds the step.
        if self._asked or self._failures:
            self._catch_up()

    def fail(self, cause: BaseException) -> None:
        """Tell the others that this process's own code raises.

        What was over by then stays, on all processes; who needs more of this one in this step
        raises the cause. If nobody does, nothing is broken.
        """
        if not isinstance(cause, Exception):  # An interrupt may have left a call half done.
            self.abort(cause)
        elif self.where.inside and not self.raised and self.cause is None:
            self._failed_at = self.where.last
            self._star.post(self._failure(cause, self._failed_at))
            self._asked.add((self._failed_at[0], END))  # It tells, and asks, as it leaves the step.
        self.raised = True  # Whatever broke the group: another process may have failed first.

    def abort(self, cause: BaseException, *, after: Place | None = None) -> None:
        """Break the group off, on every process, from the call after a place on.

        A call that is over on one process is finished by the others too: they may still be in it,
        and have what they need. So all have changed their variables equally. The first cause holds,
        unless another one comes that leaves less to be finished.

        Args:
            cause: what happened, and is on its way to this process's own code.
            after: the last call to be finished; None: the last one that is over here.
        """
        place = self.where.last if after is None else after
        self._break(self._failure(cause, place), tell=True, origin=cause)

    def tell(self, place: Place, *, made: bool) -> None:
        """Tell that this process has made or skipped a call, and ask who has told nothing of it."""
        blob = star.MADE if made else star.SKIPPED
        self._pass((star.CALL, self.generation, place), blob)

    def error_for(self, call: Call, rank: int) -> DistributeError:
        """Return the error for a wait for a process that will not come."""
        if rank in self._lost:
            about = f"{call.kind}: {self.name_of(rank)} was lost: start the job again."
            return WorkerLostError(about, rank=rank)
        departed = self.where.departed.get(rank)
        reason = (
            f"has left the step in which worker {self.rank} made this call. Every replica must "
            "make the same calls in the same order."
            if departed is None
            else f"{departed}, and worker {self.rank} waits for it. Every worker must run the same "
            "number of steps."
        )
        kind = CollectiveMismatchError if departed is None else WorkerLostError
        about = f"{call.title}: {self.name_of(rank)} {reason}"
        return kind(about, rank=rank, op=call.kind, sequence=call.sequence)

    def exchange(self, kind: str, blob: bytes, timeout: float) -> list[bytes]:
        """Return what every process passed, in rank order; exchanges of one kind meet in turn."""
        self._exchanges[kind] += 1
        return self._meet(kind, blob, timeout, number=self._exchanges[kind])

    def recover(self, reset: Callable[[], None], timeout: float) -> None:
        """Make a broken group whole again: every process must call it.

        What the wires hold of the calls that failed is cleared by `reset`, when no process is
        inside a call any more, and before any makes the next.
        """
        # By generation, not counted: who has waited in vain meets the others when it tries again.
        own = str(self.where.total).encode()
        totals = self._meet("recover", own, timeout, while_broken=True)
        with self._changed:
            self._begin(self.generation + 1)
        try:
            self._data.renew(self.generation)
            self._refuse_gone("recover", self.others)
            reset()
            self._meet("ready", b"", timeout)
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

    def _begin(self, generation: int) -> None:
        """Begin a generation of the group; what was under way in the last one counts no more."""
        self.generation = generation
        self._broken = {at: failed for at, failed in self._broken.items() if at >= generation}
        self.cause = self._broken.get(generation)
        self._origin = None  # What the cause was, where it happened here.
        self._told: star.Failed | None = None  # Which cause this process's own code knows.
        self.raised = False
        self._failed_at = BEFORE_ALL  # After which call its own code raised.
        self._asked: set[Place] = set()  # The calls about which others wait for an answer.
        self._exchanges = Counter[str]()  # How many of a kind were begun.
        self._passed: dict[_Key, dict[int, bytes]] = {}  # What is known of those that go on.
        self.where.start_over()
        self._catch_up()

    def _settle(self, timeout: float) -> None:
        """Wait until the others have left the step in which this process failed, or it breaks."""
        end, deadline = (self._failed_at[0], END), time.monotonic() + timeout
        with self._changed:
            while not self.is_broken_here and self.cut_off_at == float("inf"):
                if not (late := self.others - self.where.gone(end)):
                    break
                if (left := deadline - time.monotonic()) <= 0:
                    error = CollectiveTimeoutError(
                        f"worker {self.rank} raised in a step, and waited {timeout:g} s until "
                        f"worker(s) {sorted(late)} left it.",
                        op="step",
                    )
                    self.abort(error, after=BEFORE_ALL)
                    raise error
                if not self._changed.wait(timeout=min(left, _REPEAT_SECONDS[1])):
                    self.tell(end, made=False)
        self._failed_at = BEFORE_ALL

    def _join(self, left: float, timeout: float) -> None:
        """Tell the others who this process is, and learn who they are."""
        info = self._info
        own = json.dumps(info.details(started=secrets.token_hex(8))).encode()
        deadline, report = time.monotonic() + left, WaitReport(f"worker {self.rank}")
        told: list[bytes] = []
        while not told:
            try:
                until = min(deadline, report.due)
                told = self._meet(star.JOIN, own, until - time.monotonic())
            except CollectiveTimeoutError as error:
                if self.cause is not None:
                    raise  # Another process has given up.
                # Rank 0 is to say who else is.
                late = self._missing((star.JOIN, 0, BEFORE_ALL)) or [0]
                if until < deadline:
                    # Rank 0 tells for all who have reached it.
                    report.tell(self._described(late) if self.rank == 0 or late == [0] else "")
                    continue
                missing = self._described(late)
                raise CollectiveTimeoutError(
                    f"worker {self.rank} waited {timeout:g} s for {missing}.{self._star.refusal} "
                    f"Were all {self.size} processes started, with the same secret, and is worker "
                    f"0 reachable from there at {info.first}?",
                    rank=error.rank,
                    op="start",
                ) from error
        self._members = [json.loads(text) for text in told]
        self._star.stop_accepting()
        addresses = [member["address"] for member in self._members]
        self._data.open(addresses, self._members[0]["started"])  # As rank 0 names this start.

    def _described(self, late: Sequence[int]) -> str:
        """Return who has not joined, and what is found at their addresses."""
        names, known = [f"worker {rank}" for rank in late], self._info.addresses
        if not known:  # As under MPI and torchrun.
            return f"{shortened(names)} to join at {self._info.first}"
        shown = [known[rank] for rank in late[:SHOWN]]
        for place, (address, why) in enumerate(zip(shown, why_absent(shown), strict=True)):
            names[place] += f" at {address} ({why})"
        return shortened(names)

    def _part(self) -> None:
        failure = getattr(sys, "last_value", None)
        # In an interactive session the last error did not end anything.
        failed = isinstance(failure, BaseException) and not hasattr(sys, "ps1")
        reason = f"ended with {type(failure).__name__}: {failure}" if failed else "has finished"
        reason = star.sendable(reason[:_REASON_CHARACTERS])
        try:
            farewell = star.GoodBye(reason, failed, self.where.made)
            self._star.close(farewell, broken=self.cause is not None)
        finally:
            self._data.close()

    def _meet(
        self, kind: str, blob: bytes, timeout: float, *, number: int = 0, while_broken: bool = False
    ) -> list[bytes]:
        """Return what every process passed under a key; a broken group may do so as well."""
        key = kind, self.generation, (number, 0)
        deadline, ask_at = time.monotonic() + timeout, 0.0
        shortest, longest = _REPEAT_SECONDS
        pause = min(max(shortest, timeout / 4), longest)
        with self._changed:
            self._passed.setdefault(key, {})
            while len(self._passed[key]) < self.size:
                if not while_broken:
                    self.check()
                elif self._closed:
                    self._refuse_closed()
                missing = self._missing(key)
                self._refuse_gone(kind, missing)
                now = time.monotonic()
                if now >= deadline + (0.0 if missing else _GRACE_SECONDS):
                    missing = missing or [0]  # It is to say who is missing.
                    raise CollectiveTimeoutError(
                        f"{kind}: worker {self.rank} waited {timeout:g} s for worker(s) "
                        f"{', '.join(map(str, missing))}.",
                        rank=missing[0],
                        op=kind,
                    )
                if now >= ask_at or not missing:
                    self._pass(key, blob)
                    ask_at = now + pause
                self._changed.wait(timeout=ask_at - now)
            passed = self._passed.pop(key)
        return [passed[rank] for rank in range(self.size)]

    def _pass(self, key: _Key, blob: bytes) -> None:
        self._star.post(star.Exchange(*key, {self.rank: blob}))

    def _missing(self, key: _Key) -> list[int]:
        """Return who has passed nothing in an exchange; nobody, if rank 0 has not told it yet."""
        if self.cut_off_at < float("inf"):
            return [0]
        passed = self._passed[key]
        return [rank for rank in range(self.size) if passed and rank not in passed]

    def _refuse_gone(self, kind: str, ranks: Iterable[int]) -> None:
        for rank in sorted(self._lost.union(self.where.departed).intersection(ranks)):
            raise self.error_for(Call(0, kind), rank)

    def _refuse_closed(self) -> NoReturn:
        raise WorkerLostError(f"worker {self.rank} has left its group.", rank=self.rank)

    def _raise(self, cause: star.Failed) -> NoReturn:
        """Raise a cause to this process's own code, anew: its first traceback is another's."""
        self._told = cause
        raise star.restore_error(cause.error) from self._origin

    def _on_message(self, rank: int, message: star.Message) -> None:
        """Take a message in, on a thread of the star."""
        with self._changed:
            match message:
                case star.Exchange():
                    self._learn(message)
                case star.GoodBye():
                    self._take_leave(rank, message)
                case star.Lost():
                    self._lose(rank, message.why.rstrip("."))
                case star.Abort():
                    self._break(message.failed)
                case star.Failed():
                    self._failures[rank] = message
                    self._catch_up()
            self._changed.notify_all()

    def _learn(self, told: star.Exchange) -> None:
        """Take in what others have passed; answer where they wait for this process."""
        key = told.kind, told.generation, told.place
        if told.kind != star.CALL:
            if key in self._passed:
                self._passed[key] = told.passed
        elif told.generation == self.generation:
            if self.rank not in told.passed:
                self._asked.add(told.place)
                self._catch_up()
                return
            for rank, blob in told.passed.items():
                self.where.note(rank, told.place, made=blob == star.MADE)

    def _catch_up(self) -> None:
        """Answer who asked about calls, and forget failures, as far as they are over here.

        Called after each step, and for each question, on two threads: the later one finds both.
        """
        with self._changed:
            for place in list(self._asked):
                made = self.where.has_made(place)
                if made is not None:
                    self._asked.remove(place)
                    self.tell(place, made=made)
            here = self.generation, self.where.position
            self._failures = {
                rank: failed
                for rank, failed in self._failures.items()
                if (failed.generation, failed.place[0]) >= here
            }

    def _take_leave(self, rank: int, message: star.GoodBye) -> None:
        self.where.note_departed(rank, message.reason, message.made)
        for key, passed in self._passed.items():
            if len(passed) < self.size:
                self._passed[key] = {}  # It may have passed something since this was told.
        if message.failed:
            failed = self._failures.get(rank)
            if failed is None or failed.generation != self.generation:
                lost = WorkerLostError(f"{self.name_of(rank)} {message.reason}", rank=rank)
                failed = self._failure(lost, BEFORE_ALL)
            self._break(failed)  # If it raised in a step, that has ended it.

    def _lose(self, rank: int, why: str) -> None:
        """Take in that a connection at rank 0, or the one to it, has ended."""
        by = 0
        if rank == 0:
            by, self.cut_off_at = self.rank, time.monotonic()
            if 0 in self.where.departed or self._closed:
                return
            why = f"{why}; or it took this process for lost, which may have been stopped"
        self._lost.add(rank)
        reason = f"was lost: its connection to worker {by} ended: {why}."
        lost = WorkerLostError(f"{self.name_of(rank)} {reason}", rank=rank)
        self._break(self._failure(lost, BEFORE_ALL))

    def _failure(self, cause: BaseException, place: Place) -> star.Failed:
        error = star.describe_error(cause, self.rank)
        return star.Failed(self.generation, place, self.where.before, error)

    def _break(
        self, failed: star.Failed, *, tell: bool = False, origin: BaseException | None = None
    ) -> None:
        """Break a generation of the group, unless it is broken with no more to be finished."""
        with self._changed:
            known = self._broken.get(failed.generation)
            if failed.generation < self.generation or (known and failed.place >= known.place):
                return
            if tell:
                self._star.post(star.Abort(failed))
            if failed.generation == self.generation:
                self._origin = origin
                self._told = self._told if origin is None else failed
                self.cause = failed  # After them, for it is looked at without the lock.
            self._broken[failed.generation] = failed  # Last: an interrupt before is made up for.
            self._changed.notify_all()


def _is_finished_by_all(cause: star.Failed, here: Place) -> bool:
    """Return True if the process that broke the group had finished a call."""
    position, finished = cause.place
    if here[0] == position:
        return here[1] <= finished
    return here[0] == position - 2 and here[1] <= cause.before
