"""What a server does with the calls of its clients, whatever carries them.

A call is admitted, by its token, before anything of its body is awaited; then its seal is checked,
then its size, and only then is a message put together and given to the desk that knows what it
means. Many calls run at once; of those that wait for others a bounded number keep a thread that
all share, and the rest are told to ask again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ndistribute.cluster.wire.bodies import answer_body, read_request
from ndistribute.cluster.wire.guard import Guard
from ndistribute.cluster.wire.lifelines import Lifelines
from ndistribute.cluster.wire.pieces import Pieces
from ndistribute.cluster.wire.session import Session
from ndistribute.cluster.wire.tensors import HEAD_LIMIT_BYTES, PART_BYTES, Buffer, MalformedError
from ndistribute.cluster.wire.transfers import Inbox, Limits, Outbox
from ndistribute.cluster.wire.transport import Envelope, UnreachableError
from ndistribute.cluster.wire.waiting_room import Replies, WaitingRoom

__all__ = ["FAR", "Desk", "Door", "Service", "covered_bytes"]

HOLD_SECONDS = 5.0
_SEALED_BYTES = 16384  # So much is sealed of every message; sealing costs 1 ms per megabyte.
_NOTHING = Envelope(0, 0, 0, 0)


class Desk(Protocol):
    """Know what messages mean, and answer them."""

    def bind(self, deliver: Callable[[Replies], None]) -> None:
        """Take what gives replies out later, at any time and from any thread.

        Called once, before anything else. A reply whose client does not wait for it any more is
        dropped: it asks again, and is to get it then.
        """

    def read(self, message: memoryview) -> Any:
        """Return what a message asks for; called by many threads at once.

        Its bytes stay as they are until the call is answered, if only by telling the client to ask
        again: what the desk keeps longer it copies.
        """

    def handle(self, client: str, ticket: int, request: Any) -> Replies:
        """Return replies with the tickets they belong to: this one, and earlier ones.

        Called by one thread at a time. What is in a reply must not change afterwards.
        """

    def leave(self, client: str, died: bool) -> Replies:
        """Forget a client that left, or that died; like ``handle`` otherwise."""

    def write(self, reply: Any) -> Sequence[Buffer]:
        """Return a reply as buffers; called by many threads at once."""

    def shared_file(self) -> int | None:
        """Return a descriptor of memory that clients of this host may map, which stays the desk's.

        Called by many threads at once; None where there is no such memory.
        """

    def close(self) -> None:
        """Hold nothing any more; called once, after the last of the others."""


@dataclass(frozen=True)
class Door:
    """Say what a way into the server allows.

    Args:
        part_bytes: the most of a message that goes in one call.
        shares_threads: whether its calls have their threads in common.
    """

    part_bytes: int
    shares_threads: bool


FAR = Door(PART_BYTES, shares_threads=True)


def covered_bytes(pieces: Sequence[Buffer], total: int) -> int:
    """Return how much of a message is sealed: its head, and the first bytes at least."""
    return min(total, max(len(pieces[0]), _SEALED_BYTES), HEAD_LIMIT_BYTES + _SEALED_BYTES)


class Service:
    """Serve the clients of one server.

    Args:
        guard: who may come in.
        desk: what answers; closing this service closes it.
        limits: what clients can make this process hold.
        silence_seconds: after how long without a word a client counts as dead.
        holders: how many calls may keep a shared thread while they wait for others.
    """

    def __init__(
        self,
        guard: Guard,
        desk: Desk,
        limits: Limits | None = None,
        *,
        silence_seconds: float = 30.0,
        holders: int = 32,
    ) -> None:
        self.guard = guard
        self.limits = limits or Limits()
        self.silence_seconds = silence_seconds
        self.inbox, self.outbox = Inbox(self.limits), Outbox(self.limits)
        self.near_address = b""
        """Where clients of this host are served besides; empty: nowhere."""
        self.on_leave: Callable[[Session, bool], None] = lambda session, died: None
        """Called with each session that ended, and whether its client died."""
        self._desk = desk
        self._room = WaitingRoom(holders)
        self._turn = threading.Lock()
        self._closed = False
        desk.bind(self._room.deliver)
        self.lifelines = Lifelines(guard, lambda one: self._leave(one, True), silence_seconds)

    def close(self, timeout: float = 5.0) -> None:
        """Send away who waits, and end; a second call does nothing."""
        with self._turn:
            first, self._closed = not self._closed, True
        self._room.close()
        self.lifelines.close(timeout)
        if first:
            with self._turn:
                self._desk.close()

    def shared_file(self) -> int | None:
        """Return the desk's descriptor of shared memory, see ``Desk``."""
        return self._desk.shared_file()

    def run(
        self, session: Session, method: str, counter: int, body: Buffer, seconds: float, door: Door
    ) -> list[Buffer]:
        """Return the answer to a call that was admitted, as buffers.

        Args:
            session: what the guard said that it belongs to.
            method: its name.
            counter: its number.
            body: what came with it.
            seconds: in how many it must be answered.
            door: how it came.
        """
        envelope, rest = read_request(session, method, counter, body)
        client, answer = session.client, _NOTHING
        match method:
            case "Call":
                message = self._message(client, envelope, rest)
                return self._call(session, counter, message, seconds, door)
            case "Part":
                total, part = envelope.total, door.part_bytes
                self.inbox.write(client, envelope.transfer, total, envelope.offset, rest, part)
            case "Fetch":
                found = self.outbox.read(client, envelope.transfer, envelope.offset)
                answer = Envelope(envelope.total, 0, envelope.transfer, envelope.offset)
                return answer_body(session, method, counter, answer, (), found)
            case "Near":
                answer = Envelope(len(self.near_address), len(self.near_address), 0, 0)
                return answer_body(session, method, counter, answer, [self.near_address])
            case "File":  # The descriptor itself is for the door to give.
                answer = Envelope(int(self._desk.shared_file() is not None), 0, 0, 0)
            case "Ping" | "Stay":
                pass
            case "Leave":
                self._leave(session, False)
            case _:
                raise MalformedError(f"There is no method {method!r}.")
        return answer_body(session, method, counter, answer)

    def _message(self, client: str, envelope: Envelope, rest: memoryview) -> memoryview:
        total, covered = envelope.total, envelope.covered
        if not 0 < covered <= total <= self.limits.message_bytes:
            raise MalformedError(
                f"A message of {total} bytes, {covered} of them sealed: the limit is "
                f"{self.limits.message_bytes}."
            )
        if not envelope.transfer:
            if len(rest) != total:
                raise MalformedError(f"A message of {total} bytes came as {len(rest)}.")
            return rest.toreadonly()
        data = self.inbox.take(client, envelope.transfer, total)
        # What is sealed replaces what came unsealed in its place.
        data[:covered] = np.frombuffer(rest[:covered], np.uint8)
        return data.data.toreadonly()

    def _call(
        self, session: Session, counter: int, message: memoryview, seconds: float, door: Door
    ) -> list[Buffer]:
        reply = self._ask(session.client, message, seconds, door)
        if reply is None:
            return answer_body(session, "Call", counter, _NOTHING)
        buffers = self._desk.write(reply)
        pieces = Pieces(buffers)
        total = len(pieces)
        covered = covered_bytes(buffers, total)
        long = total > door.part_bytes
        transfer = self.outbox.put(session.client, pieces, door.part_bytes) if long else 0
        envelope = Envelope(total, covered, transfer, 0)
        others = pieces.cut(covered, covered if long else total)
        return answer_body(session, "Call", counter, envelope, pieces.cut(0, covered), others)

    def _ask(self, client: str, message: memoryview, seconds: float, door: Door) -> Any:
        """Return the desk's reply, or None where it is not known soon."""
        request = self._desk.read(message)
        visitor, patience, reply = self._room.enter(), 0.0, None
        try:
            with self._turn:
                if self._closed:
                    raise UnreachableError("The server is stopping.")
                replies = self._desk.handle(client, visitor.ticket, request)
            self._room.deliver(replies)
            patience = min(HOLD_SECONDS, 0.9 * seconds)
        finally:
            reply = self._room.leave(visitor, patience, shares_thread=door.shares_threads)
        return reply

    def _leave(self, session: Session, died: bool) -> None:
        if self.guard.leave(session):
            self.inbox.forget(session.client)
            self.outbox.forget(session.client)
            with self._turn:
                replies = () if self._closed else self._desk.leave(session.client, died)
            self._room.deliver(replies)
        self.on_leave(session, died)
