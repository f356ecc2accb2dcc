"""The exceptions that this package defines.

All derive from `DistributeError`, so one `except` clause catches them. Each one also derives from
the built-in class that fits, so code that knows nothing of this package handles it as well.
"""

from __future__ import annotations

from typing import Any

from ndistribute.exports import export as _export


class DistributeError(RuntimeError):
    """A failure that this package detected; the base class of all its exceptions.

    Args:
        message: what failed, what was expected and what to do. Programs of TensorFlow pass a node
            and an operation, or None, before it.
        rank: the index of the replica or worker that the message is about, from 0; None if unknown.
        op: the collective call that failed, for example ``"all_reduce SUM"``; None for other
            failures.
        sequence: the number of that call, counted from 1 in each step; None for other failures.

    >>> error = CollectiveMismatchError("shapes differ", rank=1, op="all_reduce", sequence=3)
    >>> isinstance(error, ValueError), error.rank, error.sequence
    (True, 1, 3)
    """

    error_code: int = 2
    """The number that TensorFlow gives errors of this kind; 2 is that of unknown ones."""

    def __init__(
        self, *message: Any, rank: int | None = None, op: Any = None, sequence: int | None = None
    ) -> None:
        whole = message if len(message) > 2 else (None, None, *message)
        self.node_def, place, self.message, *code = whole
        if code:
            (self.error_code,) = code
        super().__init__(self.message)
        self.rank = rank
        self.op = place if op is None else op
        self.sequence = sequence


class CollectiveMismatchError(DistributeError, ValueError):
    """A collective to which replicas passed different shapes, dtypes or ops, or that one missed."""

    error_code = 3


class CollectiveTimeoutError(DistributeError, TimeoutError):
    """A wait for other replicas or workers that took too long; the message names them."""

    error_code = 4


class WorkerLostError(DistributeError, ConnectionError):
    """The failure of another replica, worker or server, without which this one cannot continue.

    The ``__cause__`` is the failure itself, if it is known.
    """

    error_code = 14


class CheckpointCorruptError(DistributeError):
    """A checkpoint or snapshot on disk that is incomplete or damaged."""

    error_code = 15


class AuthenticationError(DistributeError, PermissionError):
    """A peer that did not prove that it belongs to the job."""

    error_code = 16


class MissingDependencyError(DistributeError, ImportError):
    """An optional package that is not installed; the message names the command to install it."""


class TracingError(DistributeError, TypeError):
    """A compiled step does what only a plain step can; the message names the line."""


class OperationError(DistributeError):
    """The failure of an operation of a graph program, which fails the whole step.

    Args:
        message: see `DistributeError`.
        op: the name of the operation; None if the failure is not of a single operation.
        task: the task in which it failed, such as ``"/job:ps/task:0"``; None if there is only one
            task.
    """

    def __init__(self, *message: Any, op: Any = None, task: str | None = None) -> None:
        super().__init__(*message, op=op)
        self.task = task


class InvalidArgumentError(OperationError, ValueError):
    """An operation that got a value it cannot use, or a graph that cannot run."""

    error_code = 3


class FailedPreconditionError(OperationError):
    """A variable without a value."""

    error_code = 9


class NotFoundError(OperationError, LookupError):
    """A tensor, file or variable that does not exist."""

    error_code = 5


class OutOfRangeError(OperationError, StopIteration):
    """The end of the input."""

    error_code = 11


class CancelledError(OperationError):
    """An operation that ended because the step failed elsewhere or the session was closed."""

    error_code = 1


class AbortedError(OperationError):
    """A step that a restarted task cannot continue; a new session can."""

    error_code = 10


class UnavailableError(OperationError, WorkerLostError):
    """A task that cannot be reached; a new session can continue once the task is back."""

    error_code = 14


class DeadlineExceededError(OperationError, TimeoutError):
    """A step that took longer than its timeout."""

    error_code = 4


_export(vars())
