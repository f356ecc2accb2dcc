"""What travels between a parameter server and its clients: requests, changes and replies.

Every request may be sent again by a client that heard nothing. Reads, creates, deletes and waits
are the same however often they come; a `Transaction` carries the number by which the server knows
that it has made it already. docs: `store`, for what a server does with each.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ndistribute.transport.codec import Array, Record


class Dense(Record, frozen=True):
    """A gradient with a value for every element."""

    values: Array


class Rows(Record, frozen=True):
    """A gradient that is zero but for some rows; a row that stands several times is summed."""

    indices: Array
    values: Array


Gradient = Dense | Rows


class Assign(Record, frozen=True):
    """Replace a variable's value; the outcome is `Done`."""

    name: str
    value: Array


class Add(Record, frozen=True):
    """Add to a variable; the outcome is `Done`."""

    name: str
    value: Array


class Subtract(Record, frozen=True):
    """Subtract from a variable; the outcome is `Done`."""

    name: str
    value: Array


class Scatter(Record, frozen=True):
    """Change some rows of a variable; the outcome is `Done`.

    Indices may repeat: of several updates of a row the last stays, the others are combined.
    """

    name: str
    how: Literal["update", "add", "sub"]
    indices: Array
    values: Array


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
    set for a step is dropped, and so is one for a lower step. A set for a higher step, which a
    server restored from an older snapshot gets, moves the aggregate there, without its sets.
    """

    name: str  # Of the aggregate, which is made on first use at step 0.
    at_step: int
    count: int
    apply: Apply  # Its hyperparameters count in the last set.


Change = Assign | Add | Subtract | Scatter | Apply | Aggregate


class NewVariable(Record, frozen=True):
    """Describe a variable to be made unless it exists, with a fill or an initial value.

    With neither, one that does not exist is not made, and the reply says that its value is wanted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: float | None = None
    initial: Array | None = None


class Create(Record, frozen=True):
    """Make variables unless they exist; answered by `Created`. The first value stays.

    If one exists with another shape or dtype, none is made.
    """

    variables: tuple[NewVariable, ...]


class Read(Record, frozen=True):
    """Get variables as they are at one moment; answered by `Values`."""

    names: tuple[str, ...]
    known: tuple[int, ...] = ()  # The versions that the client holds: only newer values are sent.


class RowsOf(Record, frozen=True):
    """Name rows of a variable, in the order wanted; an index may stand several times."""

    name: str
    indices: Array


class ReadRows(Record, frozen=True):
    """Get rows of variables as they are at one moment; answered by `Values`."""

    items: tuple[RowsOf, ...]


class Transaction(Record, frozen=True):
    """Make changes, all of them or none, nothing between them, and once; answered by `Changed`."""

    client: str  # Who numbers it; something random is in it, so that no later life has it.
    sequence: int
    low_water: int  # No transaction of a lower number is sent (again) from now on.
    changes: tuple[Change, ...]


class Delete(Record, frozen=True):
    """Delete those of the variables that exist; answered by `Deleted`."""

    names: tuple[str, ...]


class AwaitStep(Record, frozen=True):
    """Wait until an aggregate is at a step or above; answered by `Step`.

    A client whose set for the current step the server does not have is answered with the current
    step at once: the set came too late, or was lost when the server was restarted, and may be given
    again. If clients left, so that the `count` sets of a step can not come, it is a `Failure`.
    """

    name: str
    step: int
    count: int


class AwaitClock(Record, frozen=True):
    """Say which step this client is about to begin, and wait for slower ones; a `Released`.

    It is answered once `count` members came, and all that are there have reached `clock - slack`.
    Members that left count no more; one that comes again has its place. One that comes with a lower
    clock than all others have is counted from theirs, so it does not make them wait for what they
    did before. A client's name up to a ``#`` says which member it is.
    """

    group: str
    clock: int
    slack: int
    count: int


class Status(Record, frozen=True):
    """Get how many transactions the server made; answered by `Totals`."""


class SaveSnapshot(Record, frozen=True):
    """Write a snapshot now; answered by `Saved`, by servers that have a directory for them."""


class KeepLog(Record, frozen=True):
    """Acknowledge updates from now on once they are in a log on the disk; answered by `Saved`."""


Logged = Create | Delete | Transaction
"""What changes variables, so a log of it can be replayed."""
Request = Logged | Read | ReadRows | AwaitStep | AwaitClock | Status | SaveSnapshot | KeepLog

FailureKind = Literal[
    "unknown",  # There is nothing of that name.
    "mismatch",  # A shape, a dtype, an index or a number does not fit.
    "left",  # Clients that the request waited for left.
    "superseded",  # The same client asked again for the same; the newer call gets the answer.
    "full",  # The disk, or memory, has no room for it.
]


class Failure(Record, frozen=True):
    """Say why a request was not carried out."""

    kind: FailureKind
    message: str


State = Literal["made", "found", "wanted"]


class Created(Record, frozen=True):
    """Say which variables of a `Create` were made or found, in order, and which want a value."""

    states: tuple[State, ...]


class Value(Record, frozen=True):
    """Hold a variable's version, and its value or rows of it; None if the client has the newest."""

    version: int
    array: Array | None


class Values(Record, frozen=True):
    """Hold what was read, in the request's order."""

    values: tuple[Value, ...]


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


class Deleted(Record, frozen=True):
    """Say how many variables were deleted."""

    count: int


class Step(Record, frozen=True):
    """Hold an aggregate's step."""

    value: int


class Released(Record, frozen=True):
    """Say that a wait at a clock is over, and how many members the group has."""

    count: int


class Totals(Record, frozen=True):
    """Hold how many transactions a server made in all its lives, as far as it could restore them.

    A client that knew a higher total meets a server that was restored from before that.
    """

    total: int
    began: int  # How many of them this life began with.


class Saved(Record, frozen=True):
    """Say that a snapshot is on the disk, with what the first `total` transactions changed."""

    total: int


Reply = Failure | Created | Values | Changed | Deleted | Step | Released | Totals | Saved


class Report(Record, frozen=True):
    """Tell another process what this one knows of a life of a server; see `Totals`."""

    server: str  # Such as ``"ps:0"``.
    life: str  # Its random id.
    began: int
    total: int  # At least so many.
