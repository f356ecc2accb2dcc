"""What processes tell each other beside their data: failures, questions, good-byes.

A message is a length and the control bytes of a record; one of length zero is a heartbeat. It is
read from a socket that has been authenticated; lengths are checked all the same, because a peer may
be broken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NoReturn

from ndistribute.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from ndistribute.transport.codec import Decoder, MalformedError, Record, encode

__all__ = [
    "HEARTBEAT",
    "Abort",
    "Ask",
    "Exchange",
    "Failed",
    "Failure",
    "GoodBye",
    "Left",
    "Message",
    "Reached",
    "Reader",
    "Skipped",
    "describe_error",
    "pack",
    "raise_again",
    "restore_error",
    "sendable",
]

MOST_BYTES = 16 * 1024 * 1024
_MOST_CHARACTERS = 4000
_LENGTH = struct.Struct(">I")
HEARTBEAT = _LENGTH.pack(0)


class Failure(Record, frozen=True):
    """An error, as the other processes raise it."""

    kind: str
    text: str
    rank: int | None = None
    op: str | None = None
    sequence: int | None = None


class Abort(Record, frozen=True):
    """Break the group of a generation off, from the call after a place on."""

    generation: int
    place: tuple[int, int]  # The last call that the sender has finished.
    before: int  # The last one that it finished in the step before.
    error: Failure


class Failed(Record, frozen=True):
    """Tell that this process's own code raised in a step, after the call at a place."""

    generation: int
    place: tuple[int, int]
    error: Failure


class Left(Record, frozen=True):
    """Answer that this process has left that step."""

    generation: int
    position: int
    broken: bool  # Whether it was told that the group is broken.


class Ask(Record, frozen=True):
    """Ask whether the other process has made, or skipped, the call at a place."""

    generation: int
    place: tuple[int, int]


class Reached(Ask, frozen=True):
    """Answer that this process has made the call."""


class Skipped(Ask, frozen=True):
    """Answer that this process has left the step without the call."""


class Exchange(Record, frozen=True):
    """Pass what an exchange takes of this process."""

    key: str
    blob: bytes


class GoodBye(Record, frozen=True):
    """Leave the job: why, whether by a failure, and the last call that was surely made."""

    reason: str
    failed: bool
    made: tuple[int, int]


Message = Abort | Failed | Left | Ask | Reached | Skipped | Exchange | GoodBye
_messages: Decoder[Message] = Decoder(Message)


def pack(message: Message) -> bytes:
    """Return the bytes of a message.

    >>> len(pack(Ask(0, (1, 2))))
    13
    """
    payload, _ = encode(message)
    if len(payload) > MOST_BYTES:
        raise ValueError(f"a control message has at most {MOST_BYTES} bytes, got {len(payload)}.")
    return _LENGTH.pack(len(payload)) + payload


class Reader:
    """Cut a stream of bytes into messages.

    >>> list(Reader().feed(HEARTBEAT + pack(Ask(0, (1, 2))) + bytes(2)))
    [Ask(generation=0, place=(1, 2))]
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete now.

        Raises:
            MalformedError: these bytes are no message.
        """
        self._held += data
        while len(self._held) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._held)[0]
            if end > MOST_BYTES + _LENGTH.size:
                raise MalformedError(f"a control message announces {end} bytes.")
            if len(self._held) < end:
                return
            payload = bytes(self._held[_LENGTH.size : end])
            del self._held[:end]
            if payload:
                yield _messages.decode(payload)


def describe_error(error: BaseException, worker: int) -> Failure:
    """Return what the other processes are told of a failure on one of them."""
    if isinstance(error, CollectiveMismatchError | CollectiveTimeoutError | WorkerLostError):
        return Failure(
            type(error).__name__,
            sendable(str(error)),
            None if error.rank is None else int(error.rank),
            None if error.op is None else sendable(str(error.op)),
            None if error.sequence is None else int(error.sequence),
        )
    try:
        told = str(error)
    except Exception as failure:  # The class is the user's, and this must not fail.
        told = f"(its text can not be had: {type(failure).__name__})"
    text = f"worker {worker} failed: {type(error).__name__}: {told}"
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    return Failure("WorkerLostError", sendable("; ".join([text, *notes])), worker)


def restore_error(failure: Failure) -> DistributeError:
    """Return the exception that a process raises for a failure that it was told of."""
    kinds: dict[str, type[DistributeError]] = {
        kind.__name__: kind
        for kind in (CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError)
    }
    return kinds.get(failure.kind, WorkerLostError)(
        failure.text, rank=failure.rank, op=failure.op, sequence=failure.sequence
    )


def sendable(text: str) -> str:
    """Return a text that can be sent: not too long, and without halves of characters.

    >>> sendable("a file's name: " + chr(0xDCFF))
    "a file's name: ?"
    """
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()


def raise_again(cause: DistributeError) -> NoReturn:
    """Raise a copy of an exception: one that is raised twice loses its traceback."""
    error = type(cause)(str(cause), rank=cause.rank, op=cause.op, sequence=cause.sequence)
    raise error from cause.__cause__
