"""What carries calls to a server, as clients and services see it, and the ways in which it fails.

A call is a method's name, a token that admits it, and a body of bytes; so is its answer. Behind
this stand gRPC (``rpc.py``) and the same process (``local.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ndistribute.cluster.wire.tensors import HEAD_LIMIT_BYTES, PART_BYTES, Buffer, MalformedError
from ndistribute.errors import DistributeError

__all__ = [
    "MAXIMUM_BODY_BYTES",
    "Envelope",
    "Lifeline",
    "NoRoomError",
    "PendingCall",
    "TransferLostError",
    "Transport",
    "UnreachableError",
]

_ENVELOPE = struct.Struct("<QQQQ32s")
MAXIMUM_BODY_BYTES = PART_BYTES + HEAD_LIMIT_BYTES + 65536
"""No message on the wire is longer; what is goes in parts."""


class UnreachableError(DistributeError, ConnectionError):
    """Say that nobody answers at an address, or that the connection broke."""


class NoRoomError(DistributeError):
    """Say that a server has no room for a transfer now."""


class TransferLostError(DistributeError):
    """Say that a server does not have a transfer any more, because it dropped it or was new."""


@dataclass(frozen=True)
class Envelope:
    """Stand before what a call or an answer carries.

    Args:
        total: how many bytes the whole message has.
        covered: how many of them, from the first, follow at once and are part of the seal.
        transfer: the number of the transfer that has the others; 0 where they follow too.
        offset: where what follows lies in the message, or in the transfer.

    >>> Envelope.read(Envelope(10, 4, 0, 0).packed(bytes(32)) + b"12345")[2].tobytes()
    b'12345'
    """

    total: int
    covered: int
    transfer: int
    offset: int

    def text(self, covered: bytes | memoryview = b"") -> bytes:
        """Return what the seal is made over."""
        numbers = (self.total, self.covered, self.transfer, self.offset)
        return b" ".join(b"%d" % number for number in numbers) + b"\0" + covered

    def packed(self, seal: bytes) -> bytes:
        """Return what goes on the wire."""
        return _ENVELOPE.pack(self.total, self.covered, self.transfer, self.offset, seal)

    @staticmethod
    def read(body: Buffer) -> tuple[Envelope, bytes, memoryview]:
        """Return an envelope, its seal, and what follows.

        Raises:
            MalformedError: the body is too short.
        """
        if len(body) < _ENVELOPE.size:
            raise MalformedError(f"A body of {len(body)} bytes is cut short.")
        *numbers, seal = _ENVELOPE.unpack_from(body)
        envelope, rest = Envelope(*numbers), memoryview(body)[_ENVELOPE.size :]
        if envelope.covered > len(rest):
            raise MalformedError(f"{envelope.covered} bytes are cut short: {len(rest)} came.")
        return envelope, seal, rest


class PendingCall(Protocol):
    """Stand for a call that is on its way."""

    def result(self, timeout: float) -> Buffer:
        """Return the answer's body.

        Raises:
            TimeoutError: it took longer than the call's or this timeout.
            DistributeError: the call failed, see ``Transport``.
        """

    def cancel(self) -> None:
        """Wait for it no more."""


class Lifeline(Protocol):
    """Stand for a call that lasts as long as its client."""

    def has_ended(self) -> bool:
        """Say whether it is known that it ended, without waiting."""

    def cancel(self) -> None:
        """End it."""


class Transport(Protocol):
    """Carry calls to one server, from any number of threads at once.

    A call fails with ``UnreachableError``, ``UnknownSessionError``, ``AuthenticationError``,
    ``NoRoomError``, ``TransferLostError``, ``MalformedError`` or ``TimeoutError``.
    """

    address: str
    part_bytes: int
    """The most of a message that goes in one call."""

    def call(self, method: str, token: bytes, body: Sequence[Buffer], timeout: float) -> Buffer:
        """Make a call with a body of some buffers, and return the answer's body."""

    def start(
        self, method: str, token: bytes, body: Sequence[Buffer], timeout: float
    ) -> PendingCall:
        """Begin a call, so that several may be on their way."""

    def stay(self, token: bytes, body: Sequence[Buffer], ended: Callable[[], None]) -> Lifeline:
        """Make the call ``Stay``, which has no answer: its end tells the server of this one's.

        Args:
            token: what admits it.
            body: its body.
            ended: may be called, by any thread, when it ends otherwise.
        """

    def close(self) -> None:
        """Give up what is on its way, and hold nothing any more; a second call does nothing."""
