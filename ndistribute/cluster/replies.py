"""What a parameter server answers: one frozen record for each kind of reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ndistribute.cluster import records
from ndistribute.cluster.requests import Gradient
from ndistribute.cluster.tensors import Array, Buffer

__all__ = [
    "Accumulated",
    "Batched",
    "Created",
    "Done",
    "Failure",
    "FailureKind",
    "Released",
    "Reply",
    "Staged",
    "Step",
    "Taken",
    "Token",
    "Value",
    "decode_reply",
    "encode_reply",
]

FailureKind = Literal[
    "unknown",  # There is nothing of that name.
    "mismatch",  # A shape, a dtype, an index or a number does not fit.
    "incomplete",  # Not all parts of a closure are here: run it again, as a new attempt.
    "left",  # The client, or one that the request waited for, left.
    "superseded",  # The same client asked again for the same; the newer call gets the answer.
    "acknowledged",  # A repetition of what the client said it would not repeat.
    "full",  # A limit is reached: acknowledge, or try later.
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Say why nothing was done.

    `left`, and `full` and `incomplete`, may go otherwise when asked again.
    """

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Created:
    """Tell what variable there is, and whether this request made it."""

    new: bool
    version: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Hold a variable's version, and its value where that was asked for and is newer."""

    version: int
    array: Array | None


@dataclass(frozen=True, slots=True)
class Done:
    """Hold the versions of what was changed, in the request's order."""

    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """Say that a part of a closure is kept, and whether the closure is committed already."""

    committed: bool


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Say whether a gradient was taken, and at which step the accumulator is."""

    accepted: bool
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """Hold the mean of `count` gradients, and the accumulator's step from now on."""

    step: int
    count: int
    gradient: Gradient


@dataclass(frozen=True, slots=True)
class Released:
    """Say that all who were waited for are at the barrier."""

    count: int


@dataclass(frozen=True, slots=True)
class Token:
    """Hold a token of a queue."""

    value: int


@dataclass(frozen=True, slots=True)
class Step:
    """Hold the global step."""

    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """Hold the replies to a batch, or to the parts of a closure, in order."""

    replies: tuple[Plain, ...]


Plain = Failure | Created | Value | Done | Staged | Accumulated | Step
Reply = Plain | Batched | Taken | Released | Token


def encode_reply(reply: Reply) -> list[Buffer]:
    """Return a reply as buffers to send one after the other; tensors are not copied.

    >>> decode_reply(b"".join(encode_reply(Step(7))), limit_bytes=1000)
    Step(value=7)
    """
    return records.encode(reply)


def decode_reply(buffer: Buffer, limit_bytes: int) -> Reply:
    """Return the reply that a buffer holds; its tensors are views of the buffer.

    Args:
        buffer: what `encode_reply` returned, joined.
        limit_bytes: the most that it may take.

    Raises:
        MalformedError: the buffer is something else, is cut short, or takes more.
    """
    reply: Reply = records.decode(buffer, Reply, limit_bytes)
    return reply
