"""The exceptions that this package defines.

All derive from `DistributeError`, so one `except` clause catches them all. Each also derives from a
fitting built-in class, so code that does not know this package handles it too.
"""

from __future__ import annotations

from typing import Any

from ndistribute.exports import export as _export


class DistributeError(RuntimeError):
    """A failure that this package detected; the base class of all its exceptions.

    Args:
        message: what failed, what was expected and what to do. TensorFlow programs pass a node and
            an operation, or None, before the message.
        rank: the index, from 0, of the replica or worker that the message concerns; None if
            unknown.
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
    """Replicas passed different shapes, dtypes or ops to a collective, or one did not call it."""

    error_code = 3


class CollectiveTimeoutError(DistributeError, TimeoutError):
    """A wait for other replicas or workers took too long; the message names them."""

    error_code = 4


class WorkerLostError(DistributeError, ConnectionError):
    """Another replica, worker or server failed, and this process cannot continue without it.

    If the original failure is known, it is the ``__cause__``.
    """

    error_code = 14


class CheckpointCorruptError(DistributeError):
    """A checkpoint or snapshot on disk is incomplete or damaged."""

    error_code = 15


class AuthenticationError(DistributeError, PermissionError):
    """A peer did not prove that it belongs to the job."""

    error_code = 16


class MissingDependencyError(DistributeError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class TracingError(DistributeError, TypeError):
    """A compiled step does something that only a plain step can do; the message names the line."""


class OperationError(DistributeError):
    """An operation of a graph program failed, and with it the whole step.

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
    """An operation got a value that it cannot use, or a graph cannot run."""

    error_code = 3


class FailedPreconditionError(OperationError):
    """A variable has no value yet."""

    error_code = 9


class NotFoundError(OperationError, LookupError):
    """A tensor, file or variable does not exist."""

    error_code = 5


class OutOfRangeError(OperationError, StopIteration):
    """The input has ended."""

    error_code = 11


class CancelledError(OperationError):
    """An operation ended because the step failed elsewhere or the session was closed."""

    error_code = 1


class AbortedError(OperationError):
    """A restarted task cannot continue the step; a new session can run it again."""

    error_code = 10


class UnavailableError(OperationError, WorkerLostError):
    """A task cannot be reached; a new session can continue once the task is back."""

    error_code = 14


class DeadlineExceededError(OperationError, TimeoutError):
    """A step took longer than its timeout."""

    error_code = 4


_export(vars())
