"""What carries messages between processes, as the ring sees it: sockets or MPI."""

from __future__ import annotations

from typing import Protocol

from ndistribute.collective.control import WaitMonitor
from ndistribute.device import Array

__all__ = ["Handle", "Wire"]


class Handle(Protocol):
    """Stand for a message on its way."""

    @property
    def done(self) -> bool:
        """Return whether it has arrived, or has left."""


class Wire(Protocol):
    """Move flat arrays between processes; messages from one to another keep their order.

    In front of the first message of a call to each peer goes the call's header, and who receives
    it compares it with its own before anything is made of the message.
    """

    block_bytes: int
    """How large messages should be: cut smaller, they cost more; larger, they leave the cache."""

    def begin(
        self, header: bytes, patience: WaitMonitor, sends_to: int, ring: tuple[int, int]
    ) -> None:
        """Start a call.

        Args:
            header: what this rank says about the call.
            patience: what ends waits that take too long.
            sends_to: the peer of the first message.
            ring: the ranks before and after this one: it hears from the one and tells the other
                of this call even where they exchange no data.
        """

    def isend(self, peer: int, array: Array) -> Handle:
        """Begin to send an array, which stays unchanged until the handle is done.

        An empty one sends the header, where it has not gone to this peer yet, and nothing else.
        """

    def irecv(self, peer: int, array: Array) -> Handle:
        """Begin to receive into an array; into an empty one, the header alone."""

    def wait(self, handle: Handle) -> None:
        """Wait until a message is done, and push all others on meanwhile."""

    def end(self) -> None:
        """Wait until all messages of the call are done."""

    def reset(self) -> None:
        """Forget every message, after a failure."""

    def close(self) -> None:
        """Give back what the wire holds."""
