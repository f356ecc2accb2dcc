"""What a server does with the calls of its clients, whatever carries them.

A call is admitted, by its token, before anything of its body is awaited; then its seal is checked,
then its size, and only then is a message put together and given to the desk that knows what it
means. Many calls run at once; of those that wait for others a bounded number keep their thread,
and the rest are told to ask again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ndistribute.cluster.guard import Guard
from ndistribute.cluster.session import Session
from ndistribute.cluster.tensors import HEAD_LIMIT_BYTES, PART_BYTES, Buffer, MalformedError
from ndistribute.cluster.transfers import Inbox, Limits, Outbox, Pieces
from ndistribute.cluster.transport import Envelope, UnreachableError

__all__ = ["Desk", "Service", "covered_bytes"]

HOLD_SECONDS = 5.0
_SEALED_BYTES = 16384  # So much is sealed of every message; sealing costs 1 ms per megabyte.
_log = logging.getLogger("ndistribute")

Replies = Sequence[tuple[int, Any]]


class Desk(Protocol):
    """Know what messages mean, and answer them."""

    def read(self, message: memoryview) -> Any:
        """Return what a message asks for; called by many threads at once."""

    def handle(self, client: str, ticket: int, request: Any) -> Replies:
        """Return replies with the tickets they belong to: this one, and earlier ones.

        Called by one thread at a time. What is in a reply must not change afterwards.
        """

    def leave(self, client: str) -> Replies:
        """Forget a client that left or died; like ``handle`` otherwise."""

    def write(self, reply: Any) -> Sequence[Buffer]:
        """Return a reply as buffers; called by many threads at once."""


def covered_bytes(pieces: Sequence[Buffer], total: int) -> int:
    """Return how much of a message is sealed: its head, and the first bytes at least."""
    return min(total, max(len(pieces[0]), _SEALED_BYTES), HEAD_LIMIT_BYTES + _SEALED_BYTES)


@dataclass
class _Waiting:
    arrived: threading.Event
    reply: Any = None


class Service:
    """Serve the clients of one server.

    Args:
        guard: who may come in.
        desk: what answers.
        limits: what clients can make this process hold.
        silence_seconds: after how long without a word a client counts as dead.
        holders: how many calls may keep their thread while they wait for others.
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
        self._guard = guard
        self._desk = desk
        self._limits = limits or Limits()
        self._silence = silence_seconds
        self._inbox, self._outbox = Inbox(self._limits), Outbox(self._limits)
        self._tickets = itertools.count(1)
        self._turn = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._places = threading.Semaphore(holders)
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._expire, name="ndistribute ps", daemon=True)
        self._watch.start()

    def admit(self, method: str, token: bytes) -> Callable[[bytes, float], bytes]:
        """Return what runs a call, given its body and the seconds in which it must be answered.

        Raises:
            UnknownSessionError: the call belongs to no session of this server.
        """
        if method == "Greet":
            return lambda body, seconds: self._guard.greet(token)
        if method == "Prove":
            return lambda body, seconds: self._guard.prove(token)
        session, counter = self._guard.admit(method, token)
        return lambda body, seconds: self._run(session, method, counter, body, seconds)

    def close(self, timeout: float = 5.0) -> None:
        """Send away who waits, and end; a second call does nothing."""
        self._closing.set()
        with self._turn:
            for waiting in self._waiting.values():
                waiting.arrived.set()
        self._watch.join(timeout=timeout)

    def _run(
        self, session: Session, method: str, counter: int, body: bytes, seconds: float
    ) -> bytes:
        envelope, seal, rest = Envelope.read(body)
        text = envelope.text(rest[: envelope.covered])
        session.check(seal, "request", method, counter, text)
        client = session.client
        match method:
            case "Call":
                message = self._message(client, envelope, rest)
                return self._call(session, counter, message, seconds)
            case "Part":
                self._inbox.write(client, envelope.transfer, envelope.total, envelope.offset, rest)
            case "Fetch":
                found = self._outbox.read(client, envelope.transfer, envelope.offset)
                answer = Envelope(envelope.total, 0, envelope.transfer, envelope.offset)
                return _sealed(session, method, counter, answer, (), found)
            case "Ping":
                pass
            case "Leave":
                self._leave(session)
            case _:
                raise MalformedError(f"There is no method {method!r}.")
        return _sealed(session, method, counter, Envelope(0, 0, 0, 0), (), ())

    def _message(self, client: str, envelope: Envelope, rest: memoryview) -> memoryview:
        total, covered = envelope.total, envelope.covered
        if not 0 < covered <= total <= self._limits.message_bytes:
            raise MalformedError(
                f"A message of {total} bytes, {covered} of them sealed: the limit is "
                f"{self._limits.message_bytes}."
            )
        if not envelope.transfer:
            if len(rest) != total:
                raise MalformedError(f"A message of {total} bytes came as {len(rest)}.")
            return rest.toreadonly()
        data = self._inbox.take(client, envelope.transfer, total)
        # What is sealed replaces what came unsealed in its place.
        data[:covered] = np.frombuffer(rest[:covered], np.uint8)
        return data.data.toreadonly()

    def _call(self, session: Session, counter: int, message: memoryview, seconds: float) -> bytes:
        answer = self._ask(session.client, message, seconds)
        if answer is None:
            return _sealed(session, "Call", counter, Envelope(0, 0, 0, 0), (), ())
        total = len(answer)
        covered = covered_bytes(answer.cut(0, total), total)
        transfer = self._outbox.put(session.client, answer) if total > PART_BYTES else 0
        stop = covered if transfer else total
        envelope = Envelope(total, covered, transfer, 0)
        sealed, others = answer.cut(0, covered), answer.cut(covered, stop)
        return _sealed(session, "Call", counter, envelope, sealed, others)

    def _ask(self, client: str, message: memoryview, seconds: float) -> Pieces | None:
        """Return the desk's answer, or None where it is not known soon."""
        request = self._desk.read(message)
        ticket = next(self._tickets)
        mine = _Waiting(threading.Event())
        with self._turn:
            if self._closing.is_set():
                raise UnreachableError("The server is stopping.")
            self._waiting[ticket] = mine
            try:
                self._deliver(self._desk.handle(client, ticket, request))
            except BaseException:
                del self._waiting[ticket]
                raise
        if not mine.arrived.is_set() and self._places.acquire(blocking=False):
            try:
                mine.arrived.wait(timeout=min(HOLD_SECONDS, 0.9 * seconds))
            finally:
                self._places.release()
        with self._turn:
            self._waiting.pop(ticket, None)
        return None if mine.reply is None else Pieces(self._desk.write(mine.reply))

    def _deliver(self, replies: Replies) -> None:
        for ticket, reply in replies:
            waiting = self._waiting.get(ticket)
            if waiting is not None:  # Else its client was told to ask again, and will.
                waiting.reply = reply
                waiting.arrived.set()

    def _leave(self, session: Session) -> None:
        if self._guard.leave(session):
            self._inbox.forget(session.client)
            self._outbox.forget(session.client)
            with self._turn:
                self._deliver(self._desk.leave(session.client))

    def _expire(self) -> None:
        pause = self._silence / 10
        last, patient_until = time.monotonic(), 0.0
        while not self._closing.wait(timeout=pause):
            now = time.monotonic()
            if now - last > 3 * pause:  # This process itself was stopped, and heard nobody.
                patient_until = now + self._silence
            last = now
            if now < patient_until:
                continue
            for session in self._guard.silent(self._silence):
                _log.warning(
                    "%s was silent for %g s and counts as dead", session.client, self._silence
                )
                try:
                    self._leave(session)
                except Exception:
                    _log.exception("%s could not be forgotten", session.client)


def _sealed(
    session: Session,
    method: str,
    counter: int,
    envelope: Envelope,
    covered: Sequence[Buffer],
    others: Sequence[Buffer],
) -> bytes:
    """Return the body of an answer."""
    head = b"".join(covered)
    seal = session.seal("answer", method, counter, envelope.text(head))
    return b"".join((envelope.packed(seal), head, *others))
