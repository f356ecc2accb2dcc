"""The control plane: group members, lost processes, and the calls that all processes complete.

Whatever transport carries the data, all processes learn at once that one has died, stopped
responding, failed or left, and their waits in collectives raise. An abort names the last call that
its sender has completed. The others complete that call and all earlier ones, so all processes
change their variables equally. Control messages may overtake data, so a process that has left a
step, or the job, counts as missing only in calls that it did not make before.
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

from ndistribute import errors
from ndistribute.collective import star
from ndistribute.collective.backend import Call
from ndistribute.collective.bootstrap import DataConnections, ProcessInfo
from ndistribute.collective.step_tracker import BEFORE_ALL, END, Place, StepTracker
from ndistribute.transport.failures import sendable
from ndistribute.transport.reach import why_absent
from ndistribute.transport.waiting import SHOWN, WaitReport, shortened

# After waiting this long, a process asks the others about its call; rank 0 relays the question.
_ASK_SECONDS = 0.2
_ASKING_AT_ONCE = 64
_REPEAT_SECONDS = (0.05, 1.0)  # The shortest and the longest time between two such questions.
# How long to wait for an answer of rank 0, and for data after rank 0 has left.
_GRACE_SECONDS = 1.0
_REASON_CHARACTERS = 2000
_LATE = " If they need more time, increase timeout_seconds in CommunicationOptions."

_Key = tuple[str, int, Place]  # An exchange: its kind, the generation, and its number.


class WaitMonitor:
    """The monitor of one wait in a collective, whose `check` the waiting code calls regularly.

    A backend whose data may arrive after its sender has left the step must create a monitor in
    every call. On the sender, the monitor records that the sender has made the call.
    """

    def __init__(self, plane: ControlPlane, call: Call) -> None:
        self._plane, self._call = plane, call
        self._place = plane.where.made = plane.where.position, call.sequence
        start = time.monotonic()
        self._deadline, self._ask_at = start + call.timeout, start + _ASK_SECONDS

    def check(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if the group is broken, a rank in `missing()` is gone, or the time is over."""
        plane = self._plane
        plane.check()
        now = time.monotonic()
        if now < min(self._ask_at, self._deadline) and not plane.where.anyone_gone:
            return
        # This order matters: data that precedes a GoodBye has arrived when `missing` is called.
        gone = plane.where.gone(self._place)
        absent = missing()
        # Rank 0 takes part in every call, and without it no process learns of another one's
        # failure.
        cut_off = [0] if now > plane.cut_off_at + _GRACE_SECONDS else []
        for rank in [*absent, *cut_off]:
            if rank in gone:
                error = plane.error_for(self._call, rank)
                plane.abort(error)
                raise error
        if now >= self._deadline:
            late = plane.where.late(self._place, absent, sorted(plane.others))
            what = f"worker {plane.rank} waited {self._call.timeout:g} s for"
            text = f"{what} {_workers(late)}.{plane.star.obstacles or _LATE}"
            raise self._call.error(errors.CollectiveTimeoutError, text, late[0] if late else None)
        if now >= self._ask_at:
            self._ask_at = now + _ASK_SECONDS * max(1.0, plane.size / _ASKING_AT_ONCE)
            plane.announce(self._place, made=True)


class ControlPlane:
    """The control plane of one process; all processes must start within `timeout` seconds.

    `check_start` is called while this process waits for the others to start, and may raise.
    """

    def __init__(
        self,
        info: ProcessInfo,
        timeout: float = 300.0,
        check_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = info.rank, info.size
        self.others = frozenset(range(info.size)) - {info.rank}
        self.where = StepTracker()
        self.cut_off_at = float("inf")  # When rank 0 left and control messages ended.
        self.wake: Callable[[], None] | None = None  # Wakes a call that sleeps in shared memory.
        self._info, self._check_start = info, check_start
        # By generation; other processes may be ahead.
        self._broken: dict[int, star.StepFailure] = {}
        # By rank, in steps that this process has not left.
        self._failures: dict[int, star.StepFailure] = {}
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
            self.star = star.Star(info, self._on_message, timeout, check_start)
            self._data.report, self._data.cut_off = self.star.report, self._cut_off
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
        self.addresses = tuple(str(member["address"]) for member in self._members)

    def _begin(self, generation: int) -> None:
        """Begin a generation of the group, and drop the state of the last generation."""
        self.generation = generation  # The number of recoveries.
        self._broken = {at: failed for at, failed in self._broken.items() if at >= generation}
        # The failure that broke the current generation, and the exception if this process raised
        # it.
        self.cause = self._broken.get(generation)
        self._origin: BaseException | None = None
        # The exceptions that this process has raised.
        self._raised_cause: star.StepFailure | None = None
        self.raised = False  # Whether the user's code in this process has raised since `enter`.
        self._failed_at = BEFORE_ALL  # The last call before the user's code raised.
        self._asked: set[Place] = set()  # The calls about which others ask.
        self._exchanges = Counter[str]()  # Started exchanges by kind.
        self._passed: dict[_Key, dict[int, bytes]] = {}  # Pending exchanges.
        self.where.start_over()
        self._catch_up()

    @property
    def is_broken_here(self) -> bool:
        """Whether the group broke in the current or the last step of this process, not later."""
        return self.cause is not None and self.cause.place[0] <= max(0, self.where.last[0])

    @property
    def lost(self) -> set[int]:
        """The ranks that were lost without a GoodBye."""
        return self._lost - set(self.where.departed)

    @property
    def gone(self) -> set[int]:
        """The ranks that were lost, or have left."""
        return self._lost.union(self.where.departed)

    @property
    def has_changed(self) -> bool:
        """Whether a change of members, and not an error in a step, has broken the group."""
        cause = self.cause
        if cause is None:
            return bool(self.gone)
        return cause.error.kind == errors.WorkerLostError.__name__

    @property
    def has_failure(self) -> bool:
        """Whether `check` may raise."""
        return self.cause is not None or bool(self._failures)

    def check(self) -> None:
        """Raise the failure of the group, unless all processes complete the current call."""
        here = self.where.position, self.where.finished + 1
        for failed in list(self._failures.values()):
            # A process that raised in this step makes no more calls in it.
            if failed.generation == self.generation and (here[0], 0) <= failed.place < here:
                self._break(failed, notify=True)
        cause = self.cause
        if cause is not None and not _is_finished_by_all(cause, here):
            self._raise(cause)
        if self._closed:
            self._refuse_closed()

    def name_of(self, rank: int) -> str:
        """Return the name of a process in messages."""
        if not self._members:
            return f"worker {rank}"
        return f"worker {rank} ({self._members[rank]['name']}, pid {self._members[rank]['pid']})"

    def enter(self, reset: Callable[[], None], timeout: float) -> None:
        """Start a step, in which this process may call collectives; after a failure, `recover`."""
        if os.getpid() != self._process:
            what = f"this process was forked from worker {self.rank} and is not a worker itself:"
            how = "run steps in the worker, or start processes with the 'spawn' method."
            raise RuntimeError(f"{what} {how}")
        if self._closed:
            self._refuse_closed()
        if self._failed_at != BEFORE_ALL and not self.is_broken_here:
            self._settle(timeout)
        knows = self.raised or self._raised_cause is self.cause
        if self.cause is not None and self.is_broken_here and knows:
            self.recover(reset, timeout)
        self.raised = False
        if self.cause is not None and self.where.position + 1 > self.cause.place[0]:
            self._raise(self.cause)
        self.where.begin_step()

    def leave(self) -> None:
        self.where.end_step()
        self._origin = None  # Its traceback keeps the objects of the step alive.
        if self._asked or self._failures:
            self._catch_up()

    def fail(self, cause: BaseException) -> None:
        """Report to the other processes that the user's code in this process raised.

        Calls that this process has completed remain valid. A process that waits in this step for a
        later call of this process raises the cause. If no process waits for one, the group is not
        broken.
        """
        if not isinstance(cause, Exception):  # An interrupt may have left a call incomplete.
            self.abort(cause)
        elif self.where.inside and not self.raised and self.cause is None:
            self._failed_at = self.where.last
            self.star.post(self._failure(cause, self._failed_at))
            self._asked.add((self._failed_at[0], END))  # `leave` answers, and asks the others.
        self.raised = True  # Done even if another process failed first.

    def abort(self, cause: BaseException, *, after: Place | None = None) -> None:
        """Break the group on all processes after a call: by default the last completed call.

        The other processes have received all data of that call. The first cause counts, unless a
        later cause allows fewer calls.
        """
        place = self.where.last if after is None else after
        self._break(self._failure(cause, place), notify=True, origin=cause)

    def announce(self, place: Place, *, made: bool) -> None:
        """Report whether this process made or skipped a call; ask processes that did not report."""
        blob = star.MADE if made else star.SKIPPED
        self.star.post(star.Exchange(star.CALL, self.generation, place, {self.rank: blob}))

    def error_for(self, call: Call, rank: int) -> errors.DistributeError:
        """Return the error of a wait for a process that cannot make the call."""
        if rank in self._lost:
            about = f"{call.kind}: {self.name_of(rank)} was lost. Start the job again."
            return errors.WorkerLostError(about, rank=rank)
        departed = self.where.departed.get(rank)
        if departed is None:
            what = f"{self.name_of(rank)} has left the step in which worker {self.rank} made this"
            text = f"{what} call. Every replica must make the same calls in the same order."
            return call.error(errors.CollectiveMismatchError, text, rank)
        what = f"{self.name_of(rank)} {departed}, and worker {self.rank} waits for it."
        text = f"{what} Every worker must run the same number of steps."
        return call.error(errors.WorkerLostError, text, rank)

    def exchange(self, kind: str, blob: bytes, timeout: float) -> list[bytes]:
        """Return the value of each process, in rank order; exchanges of one kind match in order."""
        self._exchanges[kind] += 1
        return self._meet(kind, blob, timeout, number=self._exchanges[kind])

    def recover(self, reset: Callable[[], None], timeout: float) -> None:
        """Repair a broken group and start its next generation; all processes must call this.

        `reset` clears the data of failed calls in the transports. It runs after all processes have
        left their calls, and before any process makes the next call.
        """
        # Its key is the generation, not a count: after a timeout, a process can try again.
        total = str(self.where.total).encode()
        totals = self._meet("recover", total, timeout, while_broken=True)
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
            raise errors.CollectiveMismatchError(
                "recover: some workers completed a collective in which another worker failed, so "
                "their variables may differ. Restore them, or start the job again.",
                op="recover",
            )

    def close(self) -> None:
        """Send a GoodBye, and close all connections."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # A fork: the connections are those of the process that joined.
        if threading.current_thread().name.startswith("ndistribute"):
            # The garbage collector runs on any thread, and no thread can join itself.
            threading.Thread(target=self._part, name="ndistribute farewell", daemon=True).start()
        else:
            self._part()

    def _settle(self, timeout: float) -> None:
        """Wait until all others have left the step that failed here, or the group breaks."""
        end, deadline = (self._failed_at[0], END), time.monotonic() + timeout
        with self._changed:
            while not self.is_broken_here and self.cut_off_at == float("inf"):
                if not (late := self.others - self.where.gone(end)):
                    break
                if (left := deadline - time.monotonic()) <= 0:
                    what = f"worker {self.rank} raised an error in a step, and waited {timeout:g} s"
                    text = f"{what} for {_workers(sorted(late))} to leave the step.{_LATE}"
                    error = errors.CollectiveTimeoutError(text, op="step")
                    self.abort(error, after=BEFORE_ALL)
                    raise error
                if not self._changed.wait(timeout=min(left, _REPEAT_SECONDS[1])):
                    self.announce(end, made=False)
        self._failed_at = BEFORE_ALL

    def _join(self, left: float, timeout: float) -> None:
        """Exchange the names and addresses of all processes."""
        info = self._info
        details = json.dumps(info.details(started=secrets.token_hex(8))).encode()
        deadline, report = time.monotonic() + left, WaitReport(f"worker {self.rank}")
        members: list[bytes] = []
        while not members:
            try:
                self._check_start()
                until = min(deadline, report.due, time.monotonic() + _REPEAT_SECONDS[0])
                members = self._meet(star.JOIN, details, until - time.monotonic())
            except errors.CollectiveTimeoutError as error:
                if self.cause is not None:
                    raise  # Another process has given up.
                # If rank 0 has not answered, only rank 0 is known to be missing.
                late = self._missing((star.JOIN, 0, BEFORE_ALL)) or [0]
                if until < deadline:
                    # Rank 0 reports for all processes that have reached it.
                    report.tell(self._described(late) if self.rank == 0 or late == [0] else "")
                    continue
                what = f"worker {self.rank} waited {timeout:g} s for {self._described(late)}."
                check = f"Check that all {self.size} processes were started with the same secret,"
                reach = f"and that they can reach worker 0 at {info.first}."
                text = f"{what}{self.star.obstacles} {check} {reach}"
                raise errors.CollectiveTimeoutError(text, rank=error.rank, op="start") from error
        self._members = [json.loads(text) for text in members]
        self.star.stop_accepting()
        addresses = [member["address"] for member in self._members]
        self._data.open(addresses, self._members[0]["started"])  # Rank 0 chose this id.

    def _described(self, late: Sequence[int]) -> str:
        """Return the names of missing processes, and what answers at their addresses."""
        names, known = [f"worker {rank}" for rank in late], self._info.addresses
        if not known:  # This is so under MPI and torchrun.
            return f"{shortened(names)} to join at {self._info.first}"
        shown = [known[rank] for rank in late[:SHOWN]]
        for place, (address, why) in enumerate(zip(shown, why_absent(shown), strict=True)):
            names[place] += f" at {address} ({why})"
        return shortened(names)

    def _part(self) -> None:
        failure = getattr(sys, "last_value", None)
        # In an interactive session the last error did not end the process.
        failed = isinstance(failure, BaseException) and not hasattr(sys, "ps1")
        reason = f"ended with {type(failure).__name__}: {failure}" if failed else "has finished"
        farewell = star.GoodBye(sendable(reason[:_REASON_CHARACTERS]), failed, self.where.made)
        try:
            self.star.close(farewell, broken=self.cause is not None)
        finally:
            self._data.close()

    def _meet(
        self, kind: str, blob: bytes, timeout: float, *, number: int = 0, while_broken: bool = False
    ) -> list[bytes]:
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
                    missing = missing or [0]  # The process has not answered.
                    late = _workers(missing)
                    text = f"{kind}: worker {self.rank} waited {timeout:g} s for {late}."
                    raise errors.CollectiveTimeoutError(text, rank=missing[0], op=kind)
                if now >= ask_at or not missing:
                    self.star.post(star.Exchange(*key, {self.rank: blob}))
                    ask_at = now + pause
                self._changed.wait(timeout=ask_at - now)
            passed = self._passed.pop(key)
        return [passed[rank] for rank in range(self.size)]

    def _missing(self, key: _Key) -> list[int]:
        """Return the ranks that are missing in an exchange; none if rank 0 has not answered yet."""
        if self.cut_off_at < float("inf"):
            return [0]
        passed = self._passed[key]
        return [rank for rank in range(self.size) if passed and rank not in passed]

    def _refuse_gone(self, kind: str, ranks: Iterable[int]) -> None:
        for rank in sorted(self.gone.intersection(ranks)):
            raise self.error_for(Call(0, kind), rank)

    def _refuse_closed(self) -> NoReturn:
        raise errors.WorkerLostError(f"worker {self.rank} has left its group.", rank=self.rank)

    def _raise(self, cause: star.StepFailure) -> NoReturn:
        self._raised_cause = cause
        raise star.restore_error(cause.error) from self._origin

    def _on_message(self, rank: int, message: star.Message) -> None:
        """Handle a message, on a thread of the star."""
        with self._changed:
            match message:
                case star.Exchange():
                    self._learn(message)
                case star.GoodBye():
                    self._take_leave(rank, message)
                case star.Lost():
                    self._lose(rank, message.why.rstrip("."))
                case star.GroupFailure():
                    self._break(message.failed)
                case star.StepFailure():
                    self._failures[rank] = message
                    self._catch_up()
            self._changed.notify_all()
        if (self.has_failure or self.where.anyone_gone) and (wake := self.wake):
            wake()

    def _learn(self, message: star.Exchange) -> None:
        """Record the values of others in an exchange; answer if they wait for this process."""
        key = message.kind, message.generation, message.place
        if message.kind != star.CALL:
            if key in self._passed:
                self._passed[key] = message.passed
        elif message.generation == self.generation:
            if self.rank not in message.passed:
                self._asked.add(message.place)
                self._catch_up()
                return
            for rank, blob in message.passed.items():
                self.where.note(rank, message.place, made=blob == star.MADE)

    def _catch_up(self) -> None:
        """Answer questions about calls, and drop failures, of steps that this process has left.

        Two threads call this, after each step and after each question; the later call sees both.
        """
        with self._changed:
            for place in list(self._asked):
                made = self.where.has_made(place)
                if made is not None:
                    self._asked.remove(place)
                    self.announce(place, made=made)
            here = self.generation, self.where.position
            for rank, failed in list(self._failures.items()):
                if (failed.generation, failed.place[0]) < here:
                    del self._failures[rank]

    def _take_leave(self, rank: int, message: star.GoodBye) -> None:
        self.where.note_departed(rank, message.reason, message.made)
        for key, passed in self._passed.items():
            if len(passed) < self.size:
                self._passed[key] = {}  # It may have passed a value since this answer.
        if message.failed:
            failed = self._failures.get(rank)
            if failed is None or failed.generation != self.generation:
                lost = errors.WorkerLostError(f"{self.name_of(rank)} {message.reason}", rank=rank)
                failed = self._failure(lost, BEFORE_ALL)
            self._break(failed)  # A failure in a step ended the process.

    def _lose(self, rank: int, why: str) -> None:
        """Handle the end of a connection at rank 0, or of the connection to rank 0."""
        if rank == 0:
            self.cut_off_at = time.monotonic()
            if 0 in self.where.departed or self._closed:
                return
            why = f"{why}; or this process was stopped, and it counted this process as lost"
        self._lost.add(rank)
        reason = f"was lost: its connection to worker {0 if rank else self.rank} ended: {why}."
        lost = errors.WorkerLostError(f"{self.name_of(rank)} {reason}", rank=rank)
        self._break(self._failure(lost, BEFORE_ALL))

    def _cut_off(self, rank: int, why: str, generation: int) -> None:
        """Break a generation of the group because its data connection to a process has failed."""
        if rank not in self.where.departed and not self._closed:
            text = f"{self.name_of(self.rank)} cannot reach {self.name_of(rank)}: {why}"
            # The kernel may have lost data of a completed call, so no call counts.
            lost = errors.WorkerLostError(text, rank=rank)
            self._break(self._failure(lost, BEFORE_ALL, generation), notify=True)

    def _failure(
        self, cause: BaseException, place: Place, generation: int | None = None
    ) -> star.StepFailure:
        error = star.describe_error(cause, self.rank)
        generation = self.generation if generation is None else generation
        return star.StepFailure(generation, place, self.where.before, error)

    def _break(
        self, failed: star.StepFailure, *, notify: bool = False, origin: BaseException | None = None
    ) -> None:
        """Break a generation, unless it is broken already from the same or an earlier call on."""
        with self._changed:
            known = self._broken.get(failed.generation)
            if failed.generation < self.generation or (known and failed.place >= known.place):
                return
            if notify:
                self.star.post(star.GroupFailure(failed))
            if failed.generation == self.generation:
                self._origin = origin
                self._raised_cause = self._raised_cause if origin is None else failed
                self.cause = failed  # Set last, because it is read without the lock.
            # Done last, so that this runs again after an interrupt.
            self._broken[failed.generation] = failed
            self._changed.notify_all()


def _is_finished_by_all(cause: star.StepFailure, here: Place) -> bool:
    """Return True if the process that broke the group had completed the call `here`."""
    position, finished = cause.place
    if here[0] == position:
        return here[1] <= finished
    return here[0] == position - 2 and here[1] <= cause.before


def _workers(ranks: Iterable[int]) -> str:
    """Return the workers' names for a message."""
    return ", ".join(f"worker {rank}" for rank in ranks) or "the others"
