"""What travels between a parameter server and its clients: requests, changes and replies.

Every request may be sent again by a client that heard nothing. Reads, creates, deletes and waits
are the same however often they come; a `Transaction` has the number by which a server knows it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ndistribute.transport.codec import Array, Record


class Gradient(Record, frozen=True):
    """A gradient, or the rows of it that are not zero; one that stands several times is summed."""

    values: Array
    indices: Array | None = None


class Update(Record, frozen=True):
    """Write to a variable, or to rows of it; the outcome is `Done`.

    Indices may repeat: of several assignments to a row the last stays, the others are combined.
    """

    name: str
    how: Literal["assign", "assign_add", "assign_sub"]
    values: Array
    indices: Array | None = None


class Apply(Record, frozen=True):
    """Change variables by their gradients as an optimizer does; the outcome is `Done`."""

    names: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    slots: tuple[tuple[str, ...], ...]  # Of each variable, in the order of the rule's `slot_names`.
    counter: str  # A variable of one int64, which rises by one, to the number of this step.
    rule: str  # A name of `update_rules.RULES`.
    learning_rate: float
    hyperparameters: dict[str, float] = msgspec.field(default_factory=dict)


class Aggregate(Record, frozen=True):
    """Add a set of gradients to those of a step; the outcome is `Accumulated`.

    The last of `count` sets applies the mean of all, and the step rises by one. A client's second
    set for a step is dropped, and so is one for a lower step. One for a higher step, which a
    restored server gets, moves the aggregate there, without its sets.
    """

    name: str  # Of the aggregate, which is made on first use at step 0.
    at_step: int
    count: int
    apply: Apply  # Its hyperparameters count in the last set.


Change = Update | Apply | Aggregate


class NewVariable(Record, frozen=True):
    """Describe a variable to be made unless it exists; with no value, only ask if one is wanted."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: float | None = None
    initial: Array | None = None


class Create(Record, frozen=True):
    """Make variables, all or none, but for those that exist; answered by `Created`."""

    variables: tuple[NewVariable, ...]


class Item(Record, frozen=True):
    """Name a variable to read, or rows of it in the order wanted; an index may repeat."""

    name: str
    known: int = 0  # The version that the client holds: of the whole only newer values are sent.
    rows: Array | None = None


class Read(Record, frozen=True):
    """Get variables, or rows of them, as they are at one moment; answered by `Values`."""

    items: tuple[Item, ...]


class Transaction(Record, frozen=True):
    """Make changes, all of them or none, nothing between them, and once; answered by `Changed`."""

    client: str  # Who numbers it; something random is in it, so that no later life has it.
    sequence: int
    low_water: int  # No transaction of a lower number is sent (again) from now on.
    changes: tuple[Change, ...]


class Delete(Record, frozen=True):
    """Delete those of the variables that exist; answered by their `Number`."""

    names: tuple[str, ...]


class AwaitStep(Record, frozen=True):
    """Wait until an aggregate is at a step or above; answered by its step, a `Number`.

    It is answered at once if the client's own set for the current step is not there: it came late,
    or was lost with the server. If `count` sets can not come, for clients left, it is a `Failure`.
    """

    name: str
    step: int
    count: int


class AwaitClock(Record, frozen=True):
    """Say which step this client is about to begin, and wait for slower ones.

    It is over once `count` came and all that are there have reached `clock - slack`. Who left
    counts no more; a client whose name is the same up to a ``#`` has its place. Who begins anew
    goes on from the others' clocks, so that they do not wait: the answer is the clock that counts.
    """

    name: str  # Of the group.
    clock: int
    slack: int
    count: int


class Status(Record, frozen=True):
    """Get `Totals`: at once, once a snapshot holds them, or once all updates are kept in a log."""

    of: Literal["memory", "snapshot", "log"] = "memory"


Logged = Create | Delete | Transaction
"""What changes variables, so a log of it can be replayed."""
Wait = AwaitStep | AwaitClock
Request = Logged | Wait | Read | Status


class Failure(Record, frozen=True):
    """Say why a request was not carried out."""

    kind: Literal[
        "unknown",  # There is nothing of that name.
        "mismatch",  # A shape, a dtype, an index or a number does not fit.
        "left",  # Clients that the request waited for left.
        "superseded",  # The same client asked again for the same; the newer call gets the answer.
        "full",  # The disk, or memory, has no room for it.
    ]
    message: str


class Created(Record, frozen=True):
    """Say which variables of a `Create` were made or found, in order, and which want a value."""

    states: tuple[Literal["made", "found", "wanted"], ...]


class Values(Record, frozen=True):
    """Hold what was read, in the request's order; None where the client has the newest value."""

    versions: tuple[int, ...]
    arrays: tuple[Array | None, ...]


class Done(Record, frozen=True):
    """Hold the versions of the variables that a change names, in its order; 0 if deleted since."""

    versions: tuple[int, ...]


class Accumulated(Record, frozen=True):
    """Say whether a set of gradients was taken, and the step of the aggregate."""

    accepted: bool
    step: int


Outcome = Done | Accumulated


class Changed(Record, frozen=True):
    """Hold the outcome of each change of a transaction, and `Totals.total` with this one."""

    outcomes: tuple[Outcome, ...]
    total: int
    repeated: bool = False  # It was made before; the outcomes are those of this moment.


class Number(Record, frozen=True):
    """Hold a number; the request says of what."""

    value: int


class Totals(Record, frozen=True):
    """Hold how many transactions a server made in all its lives, as far as they were restored."""

    total: int
    began: int  # How many of them this life began with.


Reply = Failure | Created | Values | Changed | Number | Totals


class Report(Record, frozen=True):
    """Tell another process what this one knows of a life of a server; see `Totals`."""

    server: str  # Such as ``"ps:0"``.
    life: str  # Its random id.
    began: int
    total: int  # At least so many.
