"""What processes tell each other beside their data: heartbeats, failures, questions, good-byes.

A message is a type, a length and that many bytes. It is read from a socket that has been
authenticated; lengths are checked all the same, because a peer may be broken.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator
from typing import Any, NoReturn

from ndistribute.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)

__all__ = [
    "Kind",
    "Reader",
    "describe_error",
    "encode_json",
    "encode_message",
    "raise_again",
    "restore_error",
]

MOST_BYTES = 16 * 1024 * 1024
_MOST_CHARACTERS = 4000
_HEAD = struct.Struct(">BI")


class Kind(enum.IntEnum):
    """Name the messages."""

    HEARTBEAT = 1
    ABORT = 2
    ASK = 3
    EXCHANGE = 4
    GOODBYE = 5
    SKIPPED = 6
    REACHED = 7


def encode_message(kind: Kind, payload: bytes = b"") -> bytes:
    """Return the bytes of a message.

    >>> len(encode_message(Kind.HEARTBEAT))
    5
    """
    if len(payload) > MOST_BYTES:
        raise ValueError(f"a control message has at most {MOST_BYTES} bytes, got {len(payload)}.")
    return _HEAD.pack(kind, len(payload)) + payload


def encode_json(kind: Kind, **fields: Any) -> bytes:
    """Return a message whose payload is a JSON object."""
    return encode_message(kind, json.dumps(fields).encode())


class Reader:
    """Cut a stream of bytes into messages.

    >>> list(Reader().feed(encode_message(Kind.ASK, b"{}") + b"rest"))
    [(<Kind.ASK: 3>, b'{}')]
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yield the messages that are complete now.

        Raises:
            ValueError: these bytes are no message.
        """
        self._held += data
        while len(self._held) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._held)
            if length > MOST_BYTES:
                raise ValueError(f"a control message announces {length} bytes.")
            if len(self._held) < _HEAD.size + length:
                return
            payload = bytes(self._held[_HEAD.size : _HEAD.size + length])
            del self._held[: _HEAD.size + length]
            yield Kind(kind), payload


def describe_error(error: BaseException, worker: int) -> dict[str, Any]:
    """Return what the other processes are told of a failure on one of them."""
    if isinstance(error, CollectiveMismatchError | CollectiveTimeoutError | WorkerLostError):
        return {
            "type": type(error).__name__,
            "text": str(error)[:_MOST_CHARACTERS],
            "rank": None if error.rank is None else int(error.rank),
            "op": None if error.op is None else str(error.op),
            "sequence": None if error.sequence is None else int(error.sequence),
        }
    try:
        told = str(error)
    except Exception as failure:  # The class is the user's, and this must not fail.
        told = f"(its text can not be had: {type(failure).__name__})"
    text = f"worker {worker} failed: {type(error).__name__}: {told}"
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    shown = "; ".join([text, *notes])[:_MOST_CHARACTERS]
    return {"type": "WorkerLostError", "text": shown, "rank": worker}


def restore_error(fields: dict[str, Any]) -> DistributeError:
    """Return the exception that a process raises for a failure that it was told of."""
    kinds: dict[str, type[DistributeError]] = {
        kind.__name__: kind
        for kind in (CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError)
    }
    return kinds.get(fields.get("type", ""), WorkerLostError)(
        str(fields.get("text", "another worker failed")),
        rank=fields.get("rank"),
        op=fields.get("op"),
        sequence=fields.get("sequence"),
    )


def raise_again(cause: DistributeError) -> NoReturn:
    """Raise a copy of an exception: one that is raised twice loses its traceback."""
    error = type(cause)(str(cause), rank=cause.rank, op=cause.op, sequence=cause.sequence)
    raise error from cause.__cause__
