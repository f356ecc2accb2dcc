"""A client's side of the protocol: a session with a server, and messages that go in parts.

Here a message is sent once, and what goes wrong is raised; ``client.py`` asks again. What is sealed
of a message rides in the call itself, and what is longer than a part goes before it in parts, of
which a few are on their way at any time; so it is with answers.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ndistribute.cluster.guard import UnknownSessionError
from ndistribute.cluster.session import Introduction, Session
from ndistribute.cluster.tensors import PART_BYTES, Buffer, MalformedError, parts
from ndistribute.cluster.transfers import Pieces
from ndistribute.cluster.transport import Envelope, PendingCall, Transport

__all__ = ["Conversation"]

PARTS_IN_FLIGHT = 4
_NOTHING = Envelope(0, 0, 0, 0)


@dataclass(frozen=True)
class _Sent:
    pending: PendingCall
    session: Session
    method: str
    counter: int
    deadline: float


class Conversation:
    """Speak with one server, from any number of threads at once.

    Args:
        transport: what carries the calls.
        secret: the job's secret.
        name: no other client of the server has it.
        audience: which server it should be; empty: any of the job.
        limit_bytes: the longest answer.
    """

    def __init__(
        self, transport: Transport, secret: bytes, name: str, audience: str, limit_bytes: int
    ) -> None:
        self._transport = transport
        self._secret = secret
        self._name = name
        self._audience = audience
        self._limit = limit_bytes
        self._opening = threading.Lock()
        self._transfers = itertools.count(1)
        self.session: Session | None = None

    def ask(self, pieces: Pieces, covered: int, deadline: float) -> memoryview | None:
        """Ask once; return None where the answer is not known yet.

        Args:
            pieces: the message.
            covered: how much of it is sealed.
            deadline: when to give up, on the clock of ``time.monotonic``.

        Raises:
            Exception: those of a ``Transport``.
            ValueError: the answer is too long.
        """
        session = self._open(deadline)
        total, transfer, stop = len(pieces), 0, len(pieces)
        if total > PART_BYTES:
            transfer, stop = next(self._transfers), covered
            self._upload(session, pieces, transfer, deadline)
        envelope = Envelope(total, covered, transfer, 0)
        body, others = b"".join(pieces.cut(0, covered)), pieces.cut(covered, stop)
        answer, rest = self._exchange(session, "Call", envelope, deadline, body, others)
        if answer.total == 0:
            return None
        if answer.total > self._limit:
            raise ValueError(f"The answer has {answer.total} bytes: the limit is {self._limit}.")
        if not answer.transfer:
            return rest.toreadonly()
        data = np.empty(answer.total, np.uint8)
        self._download(session, data.data, answer.transfer, deadline)
        data[: answer.covered] = np.frombuffer(rest, np.uint8)[: answer.covered]
        return data.data.toreadonly()

    def tell(self, method: str, deadline: float) -> None:
        """Make a call of a method that has nothing to carry; a first one opens the session."""
        self._exchange(self._open(deadline), method, _NOTHING, deadline)

    def _upload(self, session: Session, pieces: Pieces, transfer: int, deadline: float) -> None:
        total = len(pieces)
        calls = (
            self._begin(
                session,
                "Part",
                Envelope(total, 0, transfer, part.start),
                deadline,
                others=pieces.cut(part.start, part.stop),
            )
            for part in parts(total)
        )
        for _ in self._several(calls):
            pass

    def _download(self, session: Session, data: memoryview, number: int, deadline: float) -> None:
        plan = parts(len(data))
        calls = (
            self._begin(session, "Fetch", Envelope(len(data), 0, number, part.start), deadline)
            for part in plan
        )
        for part, (_, rest) in zip(plan, self._several(calls), strict=True):
            if len(rest) != part.stop - part.start:
                raise MalformedError(f"{len(rest)} bytes came as the part {part} of an answer.")
            data[part] = rest

    def _several(self, calls: Iterable[_Sent]) -> Iterator[tuple[Envelope, memoryview]]:
        """Yield the answers to calls, of which a few are on their way at any time."""
        flying: deque[_Sent] = deque()
        try:
            for sent in calls:
                flying.append(sent)
                if len(flying) == PARTS_IN_FLIGHT:
                    yield self._end(flying.popleft())
            while flying:
                yield self._end(flying.popleft())
        finally:
            for sent in flying:
                sent.pending.cancel()

    def _begin(
        self,
        session: Session,
        method: str,
        envelope: Envelope,
        deadline: float,
        others: Sequence[Buffer] = (),
    ) -> _Sent:
        """Send a part of a message, or ask for one."""
        token, counter, body = _request(session, method, envelope, b"", others)
        pending = self._transport.start(method, token, body, _left(deadline))
        return _Sent(pending, session, method, counter, deadline)

    def _end(self, sent: _Sent) -> tuple[Envelope, memoryview]:
        with self._noticing(sent.session):
            body = sent.pending.result(_left(sent.deadline))
        return _opened(sent.session, sent.method, sent.counter, body)

    def _exchange(
        self,
        session: Session,
        method: str,
        envelope: Envelope,
        deadline: float,
        covered: bytes = b"",
        others: Sequence[Buffer] = (),
    ) -> tuple[Envelope, memoryview]:
        token, counter, body = _request(session, method, envelope, covered, others)
        with self._noticing(session):
            answer = self._transport.call(method, token, body, _left(deadline))
        return _opened(session, method, counter, answer)

    @contextlib.contextmanager
    def _noticing(self, session: Session) -> Iterator[None]:
        """Forget a session that the server does not know any more."""
        try:
            yield
        except UnknownSessionError:
            with self._opening:
                if self.session is session:
                    self.session = None
            raise

    def _open(self, deadline: float) -> Session:
        """Return the session, a new one where the server knows none."""
        session = self.session
        if session is not None:
            return session
        with self._opening:
            if self.session is None:
                introduction = Introduction(self._secret, self._name, self._audience)
                challenge = self._introduce("Greet", introduction.greeting, deadline)
                welcome = self._introduce("Prove", introduction.prove(challenge), deadline)
                self.session = introduction.finish(welcome)
            return self.session

    def _introduce(self, method: str, token: bytes, deadline: float) -> bytes:
        return self._transport.call(method, token, b"", _left(deadline))


def _request(
    session: Session, method: str, envelope: Envelope, covered: bytes, others: Sequence[Buffer]
) -> tuple[bytes, int, bytes]:
    """Return the token, the number and the body of a call."""
    token, counter = session.token(method)
    seal = session.seal("request", method, counter, envelope.text(covered))
    return token, counter, b"".join((envelope.packed(seal), covered, *others))


def _opened(
    session: Session, method: str, counter: int, body: bytes
) -> tuple[Envelope, memoryview]:
    """Return what an answer carries, once it is known to be the server's."""
    envelope, seal, rest = Envelope.read(body)
    session.check(seal, "answer", method, counter, envelope.text(rest[: envelope.covered]))
    return envelope, rest


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
