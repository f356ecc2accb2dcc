"""The processes of a group: who is there, who was lost, and why.

One thread listens to all of them, whatever carries the data. A process that dies, falls silent,
fails or leaves is known to all others at once, and everyone who waits in a collective learns it.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.collective.backend import Call
from ndistribute.collective.membership import Membership
from ndistribute.collective.mesh import Mesh
from ndistribute.collective.messages import (
    Kind,
    describe_error,
    encode_json,
    encode_message,
    restore_error,
)
from ndistribute.collective.patience import Patience
from ndistribute.collective.watch import Watch
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
        self.position = 0
        self.departed: dict[int, str] = {}
        self._lost: set[int] = set()
        self._reported = False
        self._closed = False
        self._changed = threading.Condition()
        self._received: dict[str, dict[int, bytes]] = defaultdict(dict)
        self._exchanges: dict[str, int] = defaultdict(int)
        self._mesh = Mesh(membership)
        try:
            control = self._mesh.connect("control", 0, timeout)
            self._data = self._mesh.connect("data", 0, timeout)
        except BaseException:
            self._mesh.close()
            raise
        self.hosts = tuple(self._mesh.hellos[rank]["host"] for rank in range(self.size))
        self.pids = tuple(int(self._mesh.hellos[rank]["pid"]) for rank in range(self.size))
        self._watch = Watch(
            self.rank, control, membership.heartbeat_seconds, self._on_message, self._on_silence
        )

    @property
    def broken_and_known(self) -> bool:
        """Say whether the group is broken, and this process's own code has been told why."""
        return self.cause is not None and self._reported

    def check(self) -> None:
        """Raise what broke the group, if anything did."""
        if self.cause is not None:
            self._reported = True
            raise _again(self.cause)

    def patience(self, call: Call, timeout: float) -> Patience:
        """Return what watches over a wait."""
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
        """
        self.check()
        self.position += 1

    def leave(self) -> None:
        """End a step: a call that it did not make, it will not make."""
        self.position += 1

    def abort(self, cause: BaseException, *, seen: bool = True) -> None:
        """Break the group off, on every process; the first cause holds.

        Args:
            cause: what happened.
            seen: whether the cause is already on its way to this process's own code.
        """
        fields = describe_error(cause, self.rank)
        error = restore_error(fields)
        error.__cause__ = cause
        if self._break(error, seen=seen):
            self._watch.post_all(encode_json(Kind.ABORT, generation=self.generation, error=fields))

    def ask(self, call: Call, ranks: Sequence[int]) -> None:
        """Ask processes whether they have left the step in which this one waits for them."""
        question = encode_json(
            Kind.ASK, generation=self.generation, position=self.position, title=call.title
        )
        for rank in ranks:
            if rank != self.rank:
                self._watch.post(rank, question)

    def refuse_departed(self, call: Call, ranks: Sequence[int]) -> None:
        """Raise if a process that is waited for has gone.

        Raises:
            WorkerLostError: it has.
        """
        for rank in ranks:
            if rank in self.departed:
                raise WorkerLostError(
                    f"{call.title}: {self.name_of(rank)} {self.departed[rank]}, and worker "
                    f"{self.rank} waits for it. Every worker must run the same number of steps.",
                    rank=rank,
                    op=call.kind,
                    sequence=call.sequence,
                )

    def exchange(
        self, kind: str, blob: bytes, timeout: float, *, while_broken: bool = False
    ) -> list[bytes]:
        """Return what every process passed, in rank order; for set-up, not for data.

        Args:
            kind: what is exchanged; the processes' exchanges of one kind meet in turn.
            blob: what this process passes.
            timeout: how long to wait, in seconds.
            while_broken: whether a broken group may exchange all the same.
        """
        self._exchanges[kind] += 1
        key = f"{kind}:{self._exchanges[kind]}"
        self._watch.post_all(encode_message(Kind.EXCHANGE, key.encode() + b"\n" + blob))
        deadline = time.monotonic() + timeout
        call = Call(self._exchanges[kind], kind)
        with self._changed:
            self._received[key][self.rank] = blob
            while len(self._received[key]) < self.size:
                if not while_broken:
                    self.check()
                missing = [r for r in range(self.size) if r not in self._received[key]]
                self.refuse_departed(call, missing)
                self._refuse_lost(call, missing)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CollectiveTimeoutError(
                        f"{call.title}: worker {self.rank} waited {timeout:g} s for worker(s) "
                        f"{', '.join(map(str, missing))}.",
                        rank=missing[0],
                        op=kind,
                        sequence=call.sequence,
                    )
                self._changed.wait(timeout=min(left, 1.0))
            received = self._received.pop(key)
        return [received[rank] for rank in range(self.size)]

    def recover(self, reset: Callable[[], None], timeout: float) -> None:
        """Make a broken group whole again: every process must call it.

        Args:
            reset: clears what the wires hold of the calls that failed; run when no process is
                inside a call any more, and before any makes the next.
            timeout: how long to wait for each other, in seconds.

        Raises:
            WorkerLostError: a process is gone for good.
        """
        self.exchange("recover", b"", timeout, while_broken=True)
        for sock in self._data.values():
            sock.close()
        with self._changed:
            self.generation += 1
            self.cause = None
            self._reported = False
        self._data = self._mesh.connect("data", self.generation, timeout)
        reset()
        self.exchange("ready", b"", timeout)

    def close(self) -> None:
        """Say good-bye, and close every connection."""
        if self._closed:
            return
        self._closed = True
        failure = getattr(sys, "last_value", None)
        reason = "has finished"
        if isinstance(failure, BaseException):
            reason = f"ended with {type(failure).__name__}: {failure}"
        self._watch.close(
            encode_json(Kind.GOODBYE, reason=reason[:2000], failed=reason != "has finished"),
            _FAREWELL_SECONDS,
        )
        self._mesh.close()
        for sock in self._data.values():
            sock.close()

    def _refuse_lost(self, call: Call, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self._lost:
                raise WorkerLostError(
                    f"{call.title}: {self.name_of(rank)} was lost, so the group can not go on. "
                    "Start the job again.",
                    rank=rank,
                    op=call.kind,
                    sequence=call.sequence,
                )

    def _on_message(self, rank: int, kind: Kind, payload: bytes) -> None:
        """Take a message in, on the watching thread."""
        if kind is Kind.EXCHANGE:
            key, _, blob = payload.partition(b"\n")
            with self._changed:
                self._received[key.decode()][rank] = blob
                self._changed.notify_all()
            return
        if kind is Kind.HEARTBEAT:
            return
        fields: dict[str, Any] = json.loads(payload)
        if kind is Kind.ABORT and fields["generation"] == self.generation:
            self._break(restore_error(fields["error"]))
        elif kind is Kind.ASK and fields["generation"] == self.generation:
            if self.position > fields["position"]:
                self.abort(self._skipped(rank, fields["title"]), seen=False)
        elif kind is Kind.GOODBYE:
            self._watch.forget(rank)
            with self._changed:
                self.departed[rank] = fields["reason"]
                self._changed.notify_all()
            if fields["failed"]:
                self._break(WorkerLostError(f"{self.name_of(rank)} {fields['reason']}", rank=rank))

    def _on_silence(self, rank: int, why: str) -> None:
        """Take in that a process was lost, on the watching thread."""
        if rank in self.departed or self._closed:
            return
        with self._changed:
            self._lost.add(rank)
        error = WorkerLostError(f"{self.name_of(rank)} was lost: {why}", rank=rank)
        self.abort(error, seen=False)

    def _break(self, cause: DistributeError, *, seen: bool = False) -> bool:
        """Keep a cause, and say whether it is the first."""
        with self._changed:
            first = self.cause is None
            if first:
                self.cause = cause
                self._reported = seen
            self._changed.notify_all()
        return first

    def _skipped(self, rank: int, title: str) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"{title}: {self.name_of(self.rank)} has left the step in which worker {rank} made "
            "this call. Every replica must make the same calls in the same order.",
            rank=self.rank,
            op=title.partition(" ")[0],
        )


def _again(cause: DistributeError) -> DistributeError:
    """Return the cause for another raise: an exception that is raised twice loses its traceback."""
    error = type(cause)(str(cause), rank=cause.rank, op=cause.op, sequence=cause.sequence)
    error.__cause__ = cause.__cause__
    return error
