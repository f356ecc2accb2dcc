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
    """Change variables by their gradients as an optimizer does; the outcome is `Done`.

    Args:
        names: the variables; the outcome holds their versions.
        gradients: one for each.
        slots: for each variable the names of those that the rule keeps beside it, of the same
            shape and dtype, in the order of the rule's `slot_names`.
        counter: the name of a variable of one int64: it rises by one, to the number of this step.
        rule: a name of `update_rules.RULES`.
        learning_rate: of this step.
        hyperparameters: of the rule; those left out have their defaults.
    """

    names: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    slots: tuple[tuple[str, ...], ...]
    counter: str
    rule: str
    learning_rate: float
    hyperparameters: dict[str, float] = msgspec.field(default_factory=dict)


class Aggregate(Record, frozen=True):
    """Add a set of gradients to those of a step; the outcome is `Accumulated`.

    The set that is the last one needed applies the mean of all, and the step rises by one.

    Args:
        name: of the aggregate, made on first use at step 0.
        at_step: the aggregate's step that the gradients were computed for. A set for a lower step
            than the aggregate's is dropped. A set for a higher step, which a server restored from
            an older snapshot gets, moves the aggregate there, without the sets that it had.
        count: how many sets are needed; a client's second set for a step is dropped.
        apply: the gradients and what is done with their mean; in the last set it counts.
    """

    name: str
    at_step: int
    count: int
    apply: Apply


Change = Assign | Add | Subtract | Scatter | Apply | Aggregate


class NewVariable(Record, frozen=True):
    """Describe a variable to be made unless it exists.

    Args:
        name: on its server.
        shape: of the value.
        dtype: its name, such as ``"float32"``.
        fill: the value that every element starts with.
        initial: the value that the variable starts with. With neither, a variable that does not
            exist is not made, and the reply says that its value is wanted.
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
    """Get variables as they are at one moment; answered by `Values`.

    Args:
        names: of the variables.
        known: for each the version that the client holds, 0 for none: only a newer value is sent.
            Empty: all values are sent.
    """

    names: tuple[str, ...]
    known: tuple[int, ...] = ()


class RowsOf(Record, frozen=True):
    """Name rows of a variable, in the order wanted; an index may stand several times."""

    name: str
    indices: Array


class ReadRows(Record, frozen=True):
    """Get rows of variables as they are at one moment; answered by `Values`."""

    items: tuple[RowsOf, ...]


class Transaction(Record, frozen=True):
    """Make changes, all of them or none, nothing between them, and once; answered by `Changed`.

    Args:
        client: who numbers its transactions: a client's id, or a name of a coordinator's. It is
            never used again after a restart, so something random is in it.
        sequence: the number of this transaction, used for no other one of this client.
        low_water: no transaction of a lower number is sent (again) from now on.
        changes: in the order in which they are made.
    """

    client: str
    sequence: int
    low_water: int
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
    did before.

    Args:
        group: the name of the group of clocks.
        clock: the step, counted from 0.
        slack: how many steps this client may be ahead of the last.
        count: how many members there are. A client's name up to a ``#`` says which one it is.
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


Request = (
    Create
    | Read
    | ReadRows
    | Transaction
    | Delete
    | AwaitStep
    | AwaitClock
    | Status
    | SaveSnapshot
    | KeepLog
)

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


class CreatedVariable(Record, frozen=True):
    """Say what became of a variable that was to be made, and its version.

    `wanted`: it does not exist, and the request held neither a value nor a fill; version 0.
    """

    state: Literal["made", "found", "wanted"]
    version: int


class Created(Record, frozen=True):
    """Hold what became of each variable of a `Create`, in order."""

    variables: tuple[CreatedVariable, ...]


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
    """Hold the outcome of each change of a transaction, in order.

    Args:
        outcomes: one for each change.
        total: how many transactions the server had made with this one, those of earlier lives that
            its snapshots hold included. A client that knew a higher number meets a server that was
            restored from before, and knows what it lost.
        repeated: whether the transaction had been made before, so nothing was done now. The
            outcomes are those of this moment then.
    """

    outcomes: tuple[Outcome, ...]
    total: int
    repeated: bool = False


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
    """Hold how many transactions a server made.

    Args:
        total: in all its lives, as far as snapshots and logs have them.
        began: how many of them this life began with.
    """

    total: int
    began: int


class Saved(Record, frozen=True):
    """Say that a snapshot is on the disk, with what the first `total` transactions changed."""

    total: int


Reply = Failure | Created | Values | Changed | Deleted | Step | Released | Totals | Saved


class Report(Record, frozen=True):
    """What one process knows of a life of a server, for another process to know.

    Args:
        server: its name, such as ``"ps:0"``.
        life: the random id of that life.
        began: how many transactions it began with, from snapshots and logs.
        total: how many it had made at least, those included.
    """

    server: str
    life: str
    began: int
    total: int
