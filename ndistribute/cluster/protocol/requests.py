"""What a client asks of a parameter server: one frozen record for each kind of request.

What changes something is a `Transaction`, and what waits carries an `Origin` as well: the server
does it once, however often it comes, so a client that heard nothing simply asks again. docs:
`store`, for what a server does with each; `replies`, for what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ndistribute.cluster.protocol.changes import (
    Accumulate,
    Add,
    Aggregate,
    Apply,
    Assign,
    Change,
    Enqueue,
    IncrementStep,
    Scatter,
    Subtract,
)
from ndistribute.cluster.protocol.spans import Span
from ndistribute.cluster.protocol.terms import Dense, Gradient, Origin, Quorum, Rows
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.tensors import Array, Buffer

__all__ = [
    "Accumulate",
    "Acknowledge",
    "Add",
    "Aggregate",
    "Apply",
    "Assign",
    "AwaitClock",
    "AwaitStep",
    "Barrier",
    "Batch",
    "Change",
    "Create",
    "Dense",
    "Dequeue",
    "Enqueue",
    "Gradient",
    "IncrementStep",
    "Join",
    "Leave",
    "Locate",
    "Origin",
    "Quorum",
    "Read",
    "ReadRows",
    "ReadStep",
    "ReadTotal",
    "Request",
    "Rows",
    "SaveSnapshot",
    "Scatter",
    "Single",
    "Subtract",
    "TakeGradient",
    "Transaction",
    "Waiting",
    "decode_request",
    "encode_request",
]


@dataclass(frozen=True, slots=True, eq=False)
class Create:
    """Make a variable, unless it is there; answered by `Created`. The first one's value stays."""

    name: str
    initial: Array


@dataclass(frozen=True, slots=True)
class Read:
    """Get a variable, if its version is above `newer_than`; answered by `Value`."""

    name: str
    newer_than: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadRows:
    """Get some rows of a variable, in the order asked, again and again if so asked: a `Value`."""

    name: str
    indices: Array


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Get the global step; answered by `Step`."""


@dataclass(frozen=True, slots=True)
class ReadTotal:
    """Get how many transactions the server made in its life; answered by `Total`."""


@dataclass(frozen=True, slots=True)
class Locate:
    """Ask where variables lie in the server's shared memory; answered by `Located`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Transaction:
    """Make changes, all of them or none, nothing between them; answered by `Changed`."""

    origin: Origin
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class TakeGradient:
    """Wait for `count` gradients and get the mean of those there; answered by `Taken`.

    The accumulator is empty then, and its step one higher.
    """

    origin: Origin
    name: str
    count: int
    quorum: Quorum | None = None


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until `count` series are here; answered by `Released`."""

    origin: Origin
    name: str
    count: int
    quorum: Quorum | None = None


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Wait for a token of a queue; answered by `Token`."""

    origin: Origin
    name: str
    quorum: Quorum | None = None


@dataclass(frozen=True, slots=True)
class AwaitStep:
    """Wait until an aggregate is at a step, or above; answered by `Step`.

    A server that was restored from a snapshot, and does not have the set that this series gave for
    the step, answers with the lower step that it is at: nothing would end that wait. The set may be
    given again, or the client goes on with a higher step.
    """

    origin: Origin
    name: str
    step: int
    quorum: Quorum | None = None


@dataclass(frozen=True, slots=True)
class AwaitClock:
    """Say that this client is about to begin a step, and wait for those behind: a `Released`.

    It is answered once `count` members came, and all that are there have reached `clock - slack`.
    Members that left count no more; one that comes again has its place. One that comes with a lower
    clock than all others have is counted from theirs, so it does not make them wait for what they
    did before.

    Args:
        origin: of the wait.
        name: of the group of clocks.
        clock: the step, counted from 0.
        slack: how many steps this client may be ahead of the last.
        count: how many members there are. A client's name up to a ``#`` says which one it is.
    """

    origin: Origin
    name: str
    clock: int
    slack: int
    count: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Promise to ask no more for some numbers of a series; answered by `Done`.

    Args:
        series: which.
        number: all up to this one are meant.
        beyond: and these.
    """

    series: str
    number: int
    beyond: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member of a group that others may wait for; answered by `Done`."""

    group: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Say that a client left or died; answered by `Done`.

    What waits for it learns it, and what still comes under its name as a series is refused.
    """

    client: str


@dataclass(frozen=True, slots=True)
class SaveSnapshot:
    """Write a snapshot now; answered by `Saved`, by servers that have a directory for them."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Ask for several things at once, nothing between them; answered by `Batched`.

    Each is done or not for itself. What may have to wait has no place in it, nor has a snapshot.
    """

    requests: tuple[Single, ...]


Waiting = TakeGradient | Barrier | Dequeue | AwaitStep | AwaitClock
Reading = Read | ReadRows | ReadStep | ReadTotal | Locate
Single = Create | Reading | Transaction | Acknowledge | Join | Leave
Request = Single | Waiting | Batch | SaveSnapshot


def encode_request(request: Request) -> list[Buffer]:
    """Return a request as buffers to send one after the other; tensors are not copied.

    >>> decode_request(b"".join(encode_request(Read("weights", 3))), limit_bytes=1000)
    Read(name='weights', newer_than=3)
    """
    return records.encode(request)


def decode_request(buffer: Buffer, limit_bytes: int) -> Request:
    """Return the request that a buffer holds; its tensors are views of the buffer.

    Args:
        buffer: what `encode_request` returned, joined.
        limit_bytes: the most that it may take.

    Raises:
        MalformedError: the buffer is something else, is cut short, or takes more.
    """
    request: Request = records.decode(buffer, Request, limit_bytes)
    return request
