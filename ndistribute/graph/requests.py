"""The messages of graph programs: from clients to a master, from it to tasks, and between tasks."""

from __future__ import annotations

import msgspec

from ndistribute import errors
from ndistribute.graph.definition import OperationDef, Value
from ndistribute.transport import failures
from ndistribute.transport.codec import Record

# From a client to the server of its target, the master of its session.


class RunStep(Record, frozen=True):
    """Run a step of a session; the reply is `FetchedValues` or a `Failure`."""

    session: str
    known: int  # The number of operations that the master has.
    operations: tuple[OperationDef, ...]  # Those that it lacks.
    fetches: tuple[str, ...]
    targets: tuple[str, ...]
    feeds: tuple[str, ...]
    values: tuple[Value, ...]
    timeout: float | None = None
    soft: bool = False  # Whether to replace devices that do not exist.
    log: bool = False  # Whether to log where operations run.


class Close(Record, frozen=True):
    """End a session; the reply is `FetchedValues`."""

    session: str


class Reset(Record, frozen=True):
    """Drop the variables of all tasks, or of this task alone; the reply is `FetchedValues`."""

    everywhere: bool = True


# From a master to a task.


class Register(Record, frozen=True):
    """Keep a part of a graph; the reply is `FetchedValues` or a `Failure`."""

    part: str
    session: str
    operations: tuple[OperationDef, ...]
    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    soft: bool = False


class ForgetParts(Record, frozen=True):
    """Drop the parts of a session; there is no reply."""

    session: str


class RunPart(Record, frozen=True):
    """Run a part in a step; the reply is `FetchedValues` or a `Failure`."""

    part: str
    step: str
    values: tuple[Value, ...]


Failure = failures.Failure


class Abort(Record, frozen=True):
    """End a step that failed in another task; there is no reply."""

    step: str
    failure: Failure


# Between tasks.


class Deliver(Record, frozen=True):
    """Values that a task computed for another one; there is no reply."""

    step: str
    values: dict[str, Value]


class FetchedValues(Record, frozen=True):
    """The values of the fetches."""

    values: tuple[Value, ...] = ()


Request = RunStep | Close | Reset | Register | ForgetParts | RunPart | Abort | Deliver
Reply = FetchedValues | Failure


_ERRORS: list[type[Exception]] = [errors.OperationError, *errors.OperationError.__subclasses__()]
_KINDS: failures.Kinds = {"": errors.OperationError} | {kind.__name__: kind for kind in _ERRORS}


def failure_of(error: BaseException, task: str) -> Failure:
    """Return an error as a message; `task` is where it happened, unless the error knows."""
    failure = failures.failure_of(error, _KINDS)
    kind = failure.kind or errors.InvalidArgumentError.__name__
    return msgspec.structs.replace(failure, kind=kind, task=failure.task or task)


def values_of(reply: Reply) -> tuple[Value, ...]:
    """Return the values of a reply, or raise the error of a failure."""
    if isinstance(reply, Failure):
        raise error_of(reply)
    return reply.values


def error_of(failure: Failure) -> Exception:
    """Return the error of a message."""
    where = f"{failure.task}: " if failure.task and failure.task not in failure.message else ""
    return failures.error_of(failure, _KINDS, where)
