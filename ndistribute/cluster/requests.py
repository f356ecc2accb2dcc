"""What a client asks of a parameter server: one frozen record for each kind of request.

Whatever changes something carries an `Origin`, under which the server applies it once, however
often it comes: so a client that heard nothing simply asks again. docs: `store`, for what a server
does with each; `replies`, for what it answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ndistribute.cluster import records
from ndistribute.cluster.tensors import Array, Buffer
from ndistribute.cluster.terms import Dense, Gradient, Origin, Quorum, Rows

__all__ = [
    "Abandon",
    "Accumulate",
    "Acknowledge",
    "Add",
    "Apply",
    "Assign",
    "Barrier",
    "Batch",
    "Commit",
    "Create",
    "Dense",
    "Dequeue",
    "Enqueue",
    "Gradient",
    "IncrementStep",
    "Join",
    "Leave",
    "Origin",
    "Quorum",
    "Read",
    "ReadStep",
    "Request",
    "Rows",
    "Scatter",
    "Subtract",
    "TakeGradient",
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
class Assign:
    """Replace a variable's value; answered by `Done`."""

    origin: Origin
    name: str
    value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """Add to a variable; answered by `Done`."""

    origin: Origin
    name: str
    value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Subtract:
    """Subtract from a variable; answered by `Done`."""

    origin: Origin
    name: str
    value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Change some rows of a variable; answered by `Done`.

    Indices may repeat: of several updates of a row the last stays, all others are combined.
    """

    origin: Origin
    name: str
    how: Literal["update", "add", "sub", "mul", "div", "min", "max"]
    indices: Array
    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """Change variables by their gradients as an optimizer does; answered by `Done`.

    Args:
        origin: of the change.
        optimizer: under this name the server counts steps, and keeps slots, made on first use.
        rule: a name of `update_rules.RULES`.
        learning_rate: of this step.
        hyperparameters: of the rule; those left out have their defaults.
        names: the variables.
        gradients: one for each.
    """

    origin: Origin
    optimizer: str
    rule: str
    learning_rate: float
    names: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    hyperparameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate:
    """Add a gradient to a sum, unless it is stale; answered by `Accumulated`.

    Args:
        origin: of the change.
        name: of the accumulator, made on first use.
        gradient: of the shape and dtype of the accumulator's first.
        at_step: the accumulator's step that it was computed for.
        max_staleness: how many steps it may be behind.
    """

    origin: Origin
    name: str
    gradient: Gradient
    at_step: int
    max_staleness: int = 0


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
class Enqueue:
    """Put tokens in a queue, made on first use; answered by `Done`."""

    origin: Origin
    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Wait for a token of a queue; answered by `Token`."""

    origin: Origin
    name: str
    quorum: Quorum | None = None


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Get the global step; answered by `Step`."""


@dataclass(frozen=True, slots=True)
class IncrementStep:
    """Raise the global step; answered by `Step`."""

    origin: Origin
    by: int = 1


@dataclass(frozen=True, slots=True)
class Commit:
    """Make all changes of a closure, together; answered by `Batched`.

    Args:
        origin: of the closure, its `part` None.
        parts: how many changes there must be; if some are missing, nothing is made.
    """

    origin: Origin
    parts: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Forget the changes of an attempt at a closure; answered by `Done`."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Promise to ask no more for numbers of a series up to `number`; answered by `Done`."""

    series: str
    number: int


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member of a group that others may wait for; answered by `Done`."""

    group: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Say that a client left or died; answered by `Done`.

    What it kept aside is dropped, what waits for it learns it, and what still comes from it, or
    under its name as a series, is refused.
    """

    client: str


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Ask for several things at once, nothing between them; answered by `Batched`.

    What may have to wait has no place in it, nor has a commit or another batch.
    """

    requests: tuple[Single, ...]


Change = Assign | Add | Subtract | Scatter | Apply | Accumulate | Enqueue | IncrementStep
Waiting = TakeGradient | Barrier | Dequeue
Single = Create | Read | Change | ReadStep | Abandon | Acknowledge | Join | Leave
Request = Single | Waiting | Commit | Batch


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
