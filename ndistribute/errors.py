"""Every exception that the package raises on purpose.

One root, so that a program can catch all of ours at once; each class is also the built-in class
that describes it, so that code which knows nothing of this package handles it as well.
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "CheckpointCorruptError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DistributeError",
    "MissingDependencyError",
    "WorkerLostError",
]


class DistributeError(RuntimeError):
    """Describe a failure that the package detected.

    Args:
        message: what failed, what was expected, what to do.
        rank: the replica or worker that the message is about.
        op: the collective call that failed, for example ``"all_reduce SUM"``.
        sequence: the number of that call, counted from 1 in each step.

    >>> error = CollectiveMismatchError("shapes differ", rank=1, op="all_reduce", sequence=3)
    >>> isinstance(error, ValueError), error.rank, error.sequence
    (True, 1, 3)
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        op: str | None = None,
        sequence: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.sequence = sequence


class CollectiveMismatchError(DistributeError, ValueError):
    """Say that replicas called a collective with different shapes, dtypes or ops, or skipped it."""


class CollectiveTimeoutError(DistributeError, TimeoutError):
    """Say who waited for whom in a collective, for how long, and what this replica called last."""


class WorkerLostError(DistributeError, ConnectionError):
    """Say that another replica or worker failed, so that this one can not go on.

    The failure itself, where it is known, is the ``__cause__``.
    """


class CheckpointCorruptError(DistributeError):
    """Say that a checkpoint on disk is not what was written."""


class AuthenticationError(DistributeError, PermissionError):
    """Say that a peer did not prove that it belongs to the job."""


class MissingDependencyError(DistributeError, ImportError):
    """Name the extra that installs an optional package."""
