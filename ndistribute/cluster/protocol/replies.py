"""What a parameter server answers: one frozen record for each kind of reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ndistribute.cluster.protocol.terms import Gradient
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.tensors import Array, Buffer

__all__ = [
    "Accumulated",
    "Batched",
    "Changed",
    "Created",
    "Done",
    "Failure",
    "FailureKind",
    "Located",
    "Outcome",
    "Plain",
    "Released",
    "Reply",
    "Saved",
    "Step",
    "Taken",
    "Token",
    "Total",
    "Value",
    "decode_reply",
    "encode_reply",
]

FailureKind = Literal[
    "unknown",  # There is nothing of that name.
    "mismatch",  # A shape, a dtype, an index or a number does not fit.
    "left",  # The client, or one that the request waited for, left.
    "superseded",  # The same client asked again for the same; the newer call gets the answer.
    "acknowledged",  # A repetition of what the client said it would not repeat.
    "full",  # A limit is reached: acknowledge, or try later.
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Say why nothing was done; what failed as `full` may be asked again under its origin."""

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
    """Hold a variable's version, and its value, or rows of it, unless it is no newer."""

    version: int
    array: Array | None


@dataclass(frozen=True, slots=True)
class Done:
    """Hold the versions of what was changed, in the request's order."""

    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Say whether gradients were taken, and at which step the accumulator or aggregate is."""

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
    """Say that all who were waited for are there, and how many they are."""

    count: int


@dataclass(frozen=True, slots=True)
class Token:
    """Hold a token of a queue."""

    value: int


@dataclass(frozen=True, slots=True)
class Step:
    """Hold the global step, or an aggregate's."""

    value: int


@dataclass(frozen=True, slots=True)
class Total:
    """Hold how many transactions the server made in its life.

    Args:
        value: how many, earlier starts included.
        began: how many of them were in the snapshot that this start began with.
    """

    value: int
    began: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """Hold the outcome of each change of a transaction, in order.

    Args:
        outcomes: one for each change.
        total: how many transactions the server had made in its life with this one. A client that
            knew a higher one meets a server that was restored from before, and knows what it lost.
    """

    outcomes: tuple[Outcome, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Located:
    """Say where variables lie in the server's shared memory.

    Args:
        slots: the place of each one's version.
        offsets: where each one's data begins, in bytes.
        nbytes: how long each one's data is.
    """

    slots: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """Say that a snapshot is on the disk, with what the first `total` transactions changed."""

    total: int


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """Hold the replies to a batch, in order."""

    replies: tuple[Plain, ...]


Outcome = Done | Accumulated | Step
Plain = Failure | Created | Value | Outcome | Changed | Total | Located
Reply = Plain | Batched | Taken | Released | Token | Saved


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
