"""What calls and their answers carry: an envelope, the seal of who wrote it, and what is in it.

The seal covers the envelope and the first bytes of the message, and says for which call it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ndistribute.cluster.wire.session import Session
from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.transport import Envelope

__all__ = ["answer_body", "read_answer", "read_request", "request_body"]


def request_body(
    session: Session,
    method: str,
    envelope: Envelope,
    covered: bytes = b"",
    others: Sequence[Buffer] = (),
) -> tuple[bytes, int, list[Buffer]]:
    """Return the token of a call, its number, and its body as buffers."""
    token, number = session.token(method)
    seal = session.seal("request", method, number, envelope.text(covered))
    return token, number, [envelope.packed(seal) + covered, *others]


def read_request(
    session: Session, method: str, number: int, body: Buffer
) -> tuple[Envelope, memoryview]:
    """Return what a call carries, once it is known to be the client's.

    Raises:
        AuthenticationError: somebody changed it on the way.
        MalformedError: it is cut short.
    """
    envelope, seal, rest = Envelope.read(body)
    session.check(seal, "request", method, number, envelope.text(rest[: envelope.covered]))
    return envelope, rest


def answer_body(
    session: Session,
    method: str,
    number: int,
    envelope: Envelope,
    covered: Sequence[Buffer] = (),
    others: Sequence[Buffer] = (),
) -> list[Buffer]:
    """Return the body of an answer as buffers."""
    head = b"".join(covered)
    seal = session.seal("answer", method, number, envelope.text(head))
    return [envelope.packed(seal) + head, *others]


def read_answer(
    session: Session, method: str, number: int, body: Buffer
) -> tuple[Envelope, memoryview]:
    """Return what an answer carries, once it is known to be the server's.

    Raises:
        AuthenticationError: somebody changed it on the way.
        MalformedError: it is cut short.
    """
    envelope, seal, rest = Envelope.read(body)
    session.check(seal, "answer", method, number, envelope.text(rest[: envelope.covered]))
    return envelope, rest
