"""What a coordinator asks of a worker, and what the worker answers.

A coordinator and a worker have a conversation, which begins with `Hello` and ends with either of
them: a worker that was started again knows nothing of it. It goes in turns: an `Exchange` brings
closures and takes outcomes home, and one that is asked again, because its answer got lost, is
answered again. The next turn says that the answer to the one before has come.
"""

from __future__ import annotations

from dataclasses import dataclass

from ndistribute.cluster.coordination.pickles import Pickled
from ndistribute.cluster.links.totals import Report
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.tensors import Buffer

__all__ = [
    "Collect",
    "Exchange",
    "Forgotten",
    "Hello",
    "Outcome",
    "Outcomes",
    "Run",
    "Welcome",
    "WorkerReply",
    "WorkerRequest",
    "decode_worker_reply",
    "decode_worker_request",
]


@dataclass(frozen=True, slots=True)
class Hello:
    """Begin a conversation; answered by `Welcome`."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Run a function.

    Args:
        series: whose closure it is, for the servers.
        number: of the closure; the same however often it is sent to workers.
        functions: the digests of the function, and of those that make its datasets.
        arguments: its args and kwargs.
        inputs: the results of other closures that stand in the arguments.
    """

    series: str
    number: int
    functions: tuple[str, ...]
    arguments: Pickled
    inputs: tuple[Pickled, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Bring closures, and get outcomes; answered by `Outcomes` or `Forgotten`.

    Args:
        conversation: what `Welcome` called it.
        turn: from 1, and one more each time.
        functions: those that the worker has not got yet; it keeps them.
        runs: to be run one after the other.
        forgotten: the iterators that nobody uses any more.
        wait: whether to answer only when there is an outcome.
    """

    conversation: str
    turn: int
    functions: tuple[Pickled, ...]
    runs: tuple[Run, ...]
    forgotten: tuple[int, ...]
    wait: bool


@dataclass(frozen=True, slots=True)
class Collect:
    """Get the whole outcome of a closure of the present turn; answered like an `Exchange`."""

    conversation: str
    number: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Name the conversation that has begun."""

    conversation: str


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Say what a closure did.

    Args:
        number: of the closure.
        good: whether it returned.
        value: the result, or the exception; None where it is so long that it is to be collected.
        nbytes: how long it is.
        trace: where the exception was raised, in words.
        reports: how many updates the servers had made when they made the closure's.
    """

    number: int
    good: bool
    value: Pickled | None
    nbytes: int
    trace: str = ""
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Hold the outcomes since the turn before, and say whether this turn found a worker idle."""

    outcomes: tuple[Outcome, ...]
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Say that this worker knows nothing of the conversation."""


WorkerRequest = Hello | Exchange | Collect
WorkerReply = Welcome | Outcomes | Forgotten


def decode_worker_request(buffer: Buffer, limit_bytes: int) -> WorkerRequest:
    """Return the request that a buffer holds; see `records.decode`."""
    request: WorkerRequest = records.decode(buffer, WorkerRequest, limit_bytes)
    return request


def decode_worker_reply(buffer: Buffer, limit_bytes: int) -> WorkerReply:
    """Return the reply that a buffer holds; see `records.decode`."""
    reply: WorkerReply = records.decode(buffer, WorkerReply, limit_bytes)
    return reply
