"""The processes of a group: who is there, who was lost, and why.

One thread listens to all of them, whatever carries the data. A process that dies, falls silent,
fails or leaves is known to all others at once, and everyone who waits in a collective learns it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence

from ndistribute.collective.backend import Call
from ndistribute.collective.exchanges import Exchanges
from ndistribute.collective.membership import Membership
from ndistribute.collective.mesh import Mesh
from ndistribute.collective.messages import (
    Abort,
    Ask,
    Exchange,
    Failed,
    GoodBye,
    Left,
    Message,
    Reached,
    Skipped,
    describe_error,
    pack,
    raise_again,
    restore_error,
)
from ndistribute.collective.patience import Patience
from ndistribute.collective.watch import Watch
from ndistribute.collective.whereabouts import BEFORE_ALL, Place, Whereabouts
from ndistribute.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)

__all__ = ["Peers"]

_FAREWELL_SECONDS = 2.0


class Peers:
    """Know the other processes of a group.

    Args:
        membership: who this process is, and where the others are.
        timeout: how long all processes may take to start, in seconds.

    Raises:
        CollectiveTimeoutError: not all of them started in time.
    """

    def __init__(self, membership: Membership, timeout: float = 300.0) -> None:
        self.rank = membership.rank
        self.size = membership.size
        self.generation = 0
        self.cause: DistributeError | None = None
        self.where = Whereabouts()
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
        self._exchanges = Exchanges(self.rank, self.size, self._changed)
        self._data: dict[int, socket.socket] = {}
        self._mesh = Mesh(membership)
        try:
            control = self._mesh.connect("control", 0, timeout)
        except BaseException:
            self._mesh.close()
            raise
        self.hosts = tuple(self._mesh.hellos[rank]["host"] for rank in range(self.size))
        self.pids = tuple(int(self._mesh.hellos[rank]["pid"]) for rank in range(self.size))
        self._watch = Watch(
            self.rank, control, membership.heartbeat_seconds, self._on_message, self._on_silence
        )
        self._watch.start()
        try:
            self._data = self._mesh.connect("data", 0, timeout, self.check)
        except BaseException as error:
            self.abort(error)
            self.close()
            raise

    @property
    def is_broken_here(self) -> bool:
        """Say whether the group broke in the step that this process is in or left last, or before.

        Another process may have failed in a step that this one has yet to begin.
        """
        return self.cause is not None and self._broken_after[0] <= self.where.last[0]

    @property
    def broken_and_known(self) -> bool:
        """Say whether the group is broken, and this process's own code has been told why."""
        return self.cause is not None and self._reported

    @property
    def is_alarmed(self) -> bool:
        """Say whether `check` may have something to raise."""
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
            raise_again(cause)
        if self._closed:
            raise WorkerLostError(f"worker {self.rank} has left its group.", rank=self.rank)

    def _is_finished_by_all(self, here: Place) -> bool:
        """Say whether the process that broke the group had finished a call."""
        position, finished = self._broken_after
        if here[0] == position:
            return here[1] <= finished
        return here[0] == position - 2 and here[1] <= self._broken_before

    def patience(self, call: Call, timeout: float) -> Patience:
        """Return what watches over a wait.

        A backend whose data may still be under way when its sender has left the step asks for it
        in every call: that is how the sender knows that it has not skipped the call.
        """
        self.where.made = self.where.place_of(call)
        return Patience(self, call, timeout)

    def data_socket(self, rank: int) -> socket.socket:
        """Return the connection that carries data to and from another process."""
        return self._data[rank]

    def name_of(self, rank: int) -> str:
        """Return how a process is called in messages."""
        return f"worker {rank} ({self._mesh.hellos[rank]['name']}, pid {self.pids[rank]})"

    def enter(self) -> None:
        """Start a step, in which this process may meet the others.

        Raises:
            WorkerLostError: another process failed since the last step.
            RuntimeError: this process is a fork of the one that joined the group.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this process was forked from worker {self.rank}, whose place among the workers "
                "is its own: run steps there, or start processes by 'spawn'."
            )
        if self.cause is not None and self.where.position + 1 > self._broken_after[0]:
            self._reported = True
            raise_again(self.cause)
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
        failure = describe_error(cause, self.rank)
        self._watch.post_all(pack(Failed(self.generation, self._failed_at, failure)))

    def settle(self, timeout: float) -> None:
        """Wait until the others have left the step in which `fail` was called, or it has broken.

        Raises:
            CollectiveTimeoutError: not all of them have left in time.
        """
        if self._failed_at == BEFORE_ALL:
            return
        others = set(range(self.size)) - {self.rank}

        def is_over() -> bool:
            if self.is_broken_here:
                return True
            left = others - self.where.departed.keys() <= self._left.keys()
            return left and not any(self._left.values())

        with self._changed:
            in_time = self._changed.wait_for(is_over, timeout)
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
        error = restore_error(describe_error(cause, self.rank))
        error.__cause__ = cause
        self._break_all(error, self.where.last if after is None else after, seen=seen)

    def ask(self, call: Call) -> None:
        """Ask all other processes whether they have made or skipped a call of the current step."""
        self._watch.post_all(pack(Ask(self.generation, self.where.place_of(call))))

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
        return self._meet(self._exchanges.begin(self.generation, kind), blob, timeout)

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
        for sock in self._data.values():
            sock.close()
        with self._changed:
            self.generation += 1
            self.cause, self._broken_after, self._broken_before = self._early.pop(
                self.generation, (None, BEFORE_ALL, 0)
            )
            self._reported = False
            self._failed_at = BEFORE_ALL
            self.where.start_over()
            self._exchanges.start_over(self.generation)
        try:
            self._refuse_gone(Call(0, "recover"), range(self.size))
            self._data = self._mesh.connect("data", self.generation, timeout, self.check)
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

    def _part(self) -> None:
        self._watch.close(pack(self.where.farewell()), _FAREWELL_SECONDS)
        self._mesh.close()
        for sock in self._data.values():
            sock.close()

    def _meet(
        self, key: str, blob: bytes, timeout: float, *, while_broken: bool = False
    ) -> list[bytes]:
        """Return what every process passed under a key; a broken group may do so as well."""
        call = Call(0, key.split(":")[1])

        def refuse(missing: Sequence[int]) -> None:
            if not while_broken:
                self.check()
            self._refuse_gone(call, missing)

        self._watch.post_all(pack(Exchange(key, blob)))
        return self._exchanges.meet(key, blob, timeout, refuse, keep=while_broken)

    def _refuse_gone(self, call: Call, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self.where.departed:
                raise self.given_up(call, rank)
            if rank in self._lost:
                raise WorkerLostError(
                    f"{call.kind}: {self.name_of(rank)} was lost: start the job again.", rank=rank
                )

    def _on_message(self, rank: int, message: Message) -> None:
        """Take a message in, on the watching thread."""
        if isinstance(message, Exchange):
            self._exchanges.put(message.key, rank, message.blob)
        elif isinstance(message, GoodBye):
            self._take_leave(rank, message)
        elif isinstance(message, Failed):
            error = restore_error(message.error)
            self._failures[rank] = message.generation, message.place, error
            self._answer(rank)
        elif isinstance(message, Left):
            with self._changed:
                if (message.generation, message.position) == (self.generation, self._failed_at[0]):
                    self._left[rank] = message.broken
                    self._changed.notify_all()
        elif isinstance(message, Abort):
            error = restore_error(message.error)
            self._break(error, message.place, message.before, generation=message.generation)
        else:
            self._compare_places(rank, message)

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
            self._watch.post(rank, pack(Left(generation, position, broken)))

    def _compare_places(self, rank: int, message: Ask) -> None:
        with self._changed:
            if message.generation != self.generation:
                return
            place = message.place
            if isinstance(message, Skipped):
                self.where.note_skipped(rank, place)
            elif isinstance(message, Reached):
                self.where.note_reached(rank, place)
            elif self.where.has_reached(place):
                self._watch.post(rank, pack(Reached(self.generation, place)))
            elif self.where.has_skipped(place):
                self._watch.post(rank, pack(Skipped(self.generation, place)))

    def _take_leave(self, rank: int, message: GoodBye) -> None:
        self._watch.forget(rank)
        with self._changed:
            self.where.note_departed(rank, message.reason, message.made)
            self._changed.notify_all()
        if message.failed:
            lost = WorkerLostError(f"{self.name_of(rank)} {message.reason}", rank=rank)
            generation, place, error = self._failures.get(rank, (-1, BEFORE_ALL, lost))
            if generation == self.generation:  # It raised in a step, and that has ended it.
                self._break(error, place, self.where.before)
            else:
                self._break(lost, BEFORE_ALL, 0)

    def _on_silence(self, rank: int, why: str) -> None:
        """Take in that a process was lost, on the watching thread."""
        if rank in self.where.departed or self._closed:
            return
        with self._changed:
            self._lost.add(rank)
            self._changed.notify_all()
        error = WorkerLostError(f"{self.name_of(rank)} was lost: {why}", rank=rank)
        self.abort(error, seen=False, after=BEFORE_ALL)

    def _break_all(self, cause: DistributeError, after: Place, *, seen: bool = False) -> None:
        """Break the group on all processes, unless it is."""
        before = self.where.before
        generation = self._break(cause, after, before, seen=seen)
        if generation is not None:
            failure = describe_error(cause, self.rank)
            self._watch.post_all(pack(Abort(generation, after, before, failure)))

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
            self.cause, self._broken_after, self._broken_before = cause, after, before
            self._reported = seen
            self._changed.notify_all()
            return now
