"""The messages between a parameter server and its clients: requests, changes and replies.

A client without a reply may send any request again. Reads, creates, deletes and waits are
idempotent; the changes of a `Transaction` have numbers by which the server recognises them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Literal, NamedTuple

import msgspec

from ndistribute.transport import failures
from ndistribute.transport.codec import Array, Record


class Gradient(Record, frozen=True):
    """A dense gradient, or some rows of one; rows with the same index are added."""

    values: Array
    indices: Array | None = None


class VariableUpdate(Record, frozen=True, tag="Update"):  # Logs on disks have this tag.
    """Write to a variable or to some of its rows; the outcome is `Done`.

    Indices may repeat: the last of several assignments to a row counts; all additions are made.
    """

    name: str
    how: Literal["assign", "assign_add", "assign_sub"]
    values: Array
    indices: Array | None = None


class Apply(Record, frozen=True):
    """Apply gradients to variables by an update rule; the outcome is `Done`."""

    names: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    slots: tuple[tuple[str, ...], ...]  # Per variable, in the order of `slot_names`.
    counter: str | None  # An int64 variable that each step increments; None: none is needed.
    rule: str  # The `name` of an update rule.
    learning_rate: float
    hyperparameters: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def written(self) -> tuple[str, ...]:
        """The names of everything that changes: the variables, their slots and the counter."""
        return _written(self.names, self.slots, self.counter)


@functools.lru_cache(maxsize=1024)  # Because most steps repeat.
def _written(
    names: tuple[str, ...], slots: tuple[tuple[str, ...], ...], counter: str | None
) -> tuple[str, ...]:
    return (*names, *itertools.chain(*slots), *(() if counter is None else (counter,)))


class Aggregate(Record, frozen=True):
    """Add the gradients of one client to those of a step; the outcome is `Accumulated`.

    The last of `count` contributions applies the mean of all of them and increments the step. The
    server drops a client's second contribution to a step, and contributions to earlier steps. A
    contribution to a later step, which a restored server may receive, moves the aggregate to that
    step and drops what it had collected.
    """

    name: str  # The aggregate, created at step 0 by its first use.
    at_step: int
    count: int
    apply: Apply  # The last contribution's hyperparameters apply.


Change = VariableUpdate | Apply | Aggregate


class NewVariable(Record, frozen=True):
    """A variable to create if it is missing; without a value, ask whether to send one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: float | None = None
    initial: Array | None = None


class Create(Record, frozen=True):
    """Create the missing variables, all or none; the reply is `Created`."""

    variables: tuple[NewVariable, ...]


class Item(Record, frozen=True):
    """A variable to read, or rows of it in this order; indices may repeat."""

    name: str
    known: int = 0  # The client's version: a whole value is sent only if newer.
    rows: Array | None = None


class Read(Record, frozen=True):
    """Read variables or rows of them at one point in time; the reply is `Values`."""

    items: tuple[Item, ...]


class Mark(NamedTuple):
    """Identifies the update of a closure that a change belongs to, in all attempts to run it."""

    counter: str = ""  # Each replica of each strategy of the closure counts its own updates.
    number: int = 0
    digest: int = 0  # The checksum of the kinds and variables of the updates so far.


class Transaction(Record, frozen=True):
    """Make changes atomically, and each exactly once; the reply is `Changed`.

    Changes that were made before are left out. A closure may send several transactions, all with
    its number. Each begins where the last one ended, which differs between attempts.
    """

    client: str  # The client id, with a random part that no restarted client repeats.
    sequence: int
    low_water: int  # The client no longer sends numbers below this.
    changes: tuple[Change, ...]
    marks: tuple[Mark, ...] = ()  # One for each change of a closure, in rising order per counter.
    attempt: int = 1  # The attempt to run the closure.


class Rerun(Record, frozen=True):
    """Begin a later attempt to run a closure; the reply is `Marks`.

    From now on the server refuses transactions of earlier attempts, whose worker may still live.
    """

    client: str
    sequence: int
    attempt: int


class Delete(Record, frozen=True):
    """Delete these variables if they exist; the reply is the `Number` of deleted variables."""

    names: tuple[str, ...]


class AwaitStep(Record, frozen=True):
    """Wait until an aggregate reaches a step; the reply is the current step, a `Number`.

    The reply comes at once if the server lacks the client's contribution to the current step,
    because it came late or was lost with the server. The reply is a `Failure` if too many clients
    have left for `count` contributions to arrive.
    """

    name: str
    step: int
    count: int


class AwaitClock(Record, frozen=True):
    """Announce the step that this client is about to begin, and wait for slower clients.

    The wait ends when `count` clients have connected and all present clients have reached
    `clock - slack`. Clients that left do not count. A client replaces an earlier one whose name is
    the same up to ``#``. A new client starts at the lowest clock of the others, so that they do not
    wait for it. The reply is the clock that the server counts for this client.
    """

    name: str  # The group.
    clock: int
    slack: int
    count: int


class Status(Record, frozen=True):
    """Get `Totals`: at once, after the next snapshot, or after updates are logged from now on."""

    of: Literal["memory", "snapshot", "log"] = "memory"


class Assign(Record, frozen=True):
    """Set the value of a graph's variable, or remove it."""

    name: str
    value: Array | None
    keeps_shape: bool = True  # False if the initialising graph did not know the shape.
    dtype: str = ""  # The dtype of text, which `value` contains as bytes.


class NewEpoch(Record, frozen=True):
    """Begin an epoch of a shard, in which another copy leads, or the same one leads alone."""

    epoch: int


ClientChange = Create | Delete | Transaction | Rerun
SharedChange = Assign | VariableUpdate | Apply
"""The changes of graphs' variables, which no client requests or repeats."""
Logged = ClientChange | SharedChange | NewEpoch
"""The requests that change variables; a log can contain and replay them."""
Wait = AwaitStep | AwaitClock
Request = ClientChange | Wait | Read | Status


class Beat(Record, frozen=True):
    """The state of a copy of a shard; the reply is the other copy's. Clients send it to ask.

    A copy is new after its start, joins while it receives the state, and then follows or leads.
    """

    role: Literal["", "new", "joins", "follows", "leads"] = ""  # Empty: a client asks.
    whole: bool = False  # Whether it leads, and changes wait for the other copy.
    epoch: int = 0
    total: int = 0  # The number of all changes.
    start: int = 0  # See `Totals`.
    why: str = ""  # The reason for a client why its request is refused.
    leave: bool = False  # Whether the other copy must stop following in this epoch.


class Replicate(Record, frozen=True):
    """Make the leading copy's changes; the reply is the `Number` of changes so far."""

    epoch: int
    first: int  # The number of changes before this message.
    changes: tuple[Logged, ...]
    whole: bool  # Whether the copy has all earlier changes, and may lead after these.
    logs: bool = False  # Whether every change must be logged on a disk.


class Join(Record, frozen=True):
    """Get the state of the leading copy, a `CopyState`, and then the changes after it."""


class Vote(Record, frozen=True):
    """Tell the witness of a shard the epoch of a copy, or ask to lead the next one alone.

    The reply is the `Number` 1 if the copy may lead, or could if it asked; 2: the other may.
    """

    shard: int
    copy: int
    epoch: int
    asks: bool


Failure = failures.Failure
Refusal = Literal[
    "unknown",  # Nothing has that name.
    "mismatch",  # A wrong shape, dtype, index or number.
    "left",  # The clients that the request waited for have left.
    "superseded",  # A newer call gets the reply, or a newer attempt makes the changes.
    "full",  # The disk or the memory is full.
    "moved",  # The other copy may lead: find the leader, and send the request there.
]
"""The kind of the `Failure` of a request that the server did not execute."""


class Created(Record, frozen=True):
    """The state of each variable of a `Create`: created, found, or waiting for a value."""

    states: tuple[Literal["made", "found", "wanted"], ...]


class Values(Record, frozen=True):
    """The values that were read, in order; None if the client has the newest value."""

    versions: tuple[int, ...]
    arrays: tuple[Array | None, ...]


class Done(Record, frozen=True):
    """The versions of the variables of a change, in its order; 0 if deleted since."""

    versions: tuple[int, ...]


class Accumulated(Record, frozen=True):
    """Whether a contribution was accepted, and the step of the aggregate."""

    accepted: bool
    step: int


Outcome = Done | Accumulated


class Changed(Record, frozen=True):
    """The outcome of each change of a transaction, and `Totals.total` including it."""

    outcomes: tuple[Outcome, ...]
    total: int
    repeated: bool = False  # All were made before; the outcomes are the current ones.


class Marks(Record, frozen=True):
    """For each counter of a closure, the last update that the server made."""

    marks: tuple[Mark, ...]


class Number(Record, frozen=True):
    """A number, whose meaning depends on the request."""

    value: int


class Totals(Record, frozen=True):
    """The number of transactions that a server's state contains, over all restored instances."""

    total: int
    began: int  # The number with which this instance started.
    start: int = 0  # Rises with each start of a server with a directory; 0 without one.


class CopyState(Record, frozen=True):
    """The state of a store as in a snapshot, and what snapshots leave out."""

    names: tuple[str, ...]
    arrays: tuple[Array, ...]
    data: bytes
    position: int  # The number of changes in the state.
    floor: int  # New variables get versions above this.
    totals: Totals
    logs: bool  # Whether every change is logged on a disk.


Reply = Failure | Created | Values | Changed | Marks | Number | Totals | Beat


class Report(Record, frozen=True):
    """What one process knows about an instance of a server, for another; see `Totals`."""

    server: str  # Such as ``"ps:0"``.
    instance: str  # The random id of the instance.
    began: int
    total: int  # A lower bound.
    start: int
