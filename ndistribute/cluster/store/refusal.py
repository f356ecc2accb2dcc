"""Why a store does not do what it was asked."""

from __future__ import annotations

from ndistribute.cluster.protocol.replies import Failure, FailureKind

__all__ = ["Refused"]

# What nothing came of, and may go otherwise when the same is asked again.
_PASSING: frozenset[FailureKind] = frozenset({"full"})


class Refused(Exception):  # noqa: N818 - caught where it becomes a reply, never seen by a user.
    """Stop handling a request; nothing has changed."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)

    @property
    def passing(self) -> bool:
        """Return whether the same request may be made again under its origin."""
        return self.failure.kind in _PASSING
