"""The replicas of one process as those who run a step see them.

A step is begun, left by each replica and ended; where there are other processes, they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ndistribute.collective.communicator import Communicator
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.collective.workers import Workers
from ndistribute.stream import Stream

__all__ = ["ReplicaGroup"]


class ReplicaGroup:
    """Hold the communicators of the replicas of one process.

    Args:
        communicators: one for each replica, in order.
        rendezvous: where they meet.
        streams: the device and stream of each.
        workers: the other processes, where there are any.
        close: ends what the communicators hold on devices.
    """

    def __init__(
        self,
        communicators: Sequence[Communicator],
        rendezvous: Rendezvous,
        streams: Sequence[Stream],
        workers: Workers | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.workers = workers
        self.communicators = tuple(communicators)
        self.streams = tuple(streams)
        self._rendezvous = rendezvous
        self._close = close

    def begin(self) -> None:
        """Start a step; every replica must be out of the last one."""
        if self.workers is not None:
            self.workers.enter()
        self._rendezvous.reset()
        for communicator in self.communicators:
            communicator.begin()

    def leave(self, rank: int) -> None:
        """Say that a replica has returned from its step."""
        self._rendezvous.leave(rank, self.communicators[rank].calls_made)

    def end(self) -> None:
        """End a step that was begun, when every replica is out of it."""
        if self.workers is not None:
            self.workers.leave()

    def close(self, *, abandoned: bool = False) -> None:
        """End what is held on devices, and forget how the last step failed.

        The traceback of a failure holds the arrays that replicas saw. Replicas that were abandoned
        in a step may still be inside, and are to learn of its failure.
        """
        if self._close is not None:
            self._close()
        if not abandoned:
            self._rendezvous.reset()

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits, with the reason."""
        if self.workers is not None:
            self.workers.fail(cause)
        self.communicators[0].abort(cause)
