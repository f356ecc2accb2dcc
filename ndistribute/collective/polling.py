"""How transports wait: they poll, so each wait has a deadline and learns at once of any failure.

MPI and sockets move messages in ways of their own, but a process waits for them alike. Waiting in
the system and being woken costs about 30 us on each side, so a rank first looks again and again.
"""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.collective.control import ControlPlane, WaitMonitor
from ndistribute.collective.ring import Handle
from ndistribute.errors import WorkerLostError

__all__ = ["CHECK_SECONDS", "PollingTransport"]

CHECK_SECONDS = 0.05
# A process that fails ends its connections; what failed comes over another one, maybe later.
_GRACE_SECONDS = 0.5


class PollingTransport(abc.ABC):
    """Wait for messages that a subclass moves.

    Args:
        peers: the processes of the group.
    """

    spin_seconds: float
    """How long a rank looks again and again before it sleeps."""

    _patience: WaitMonitor

    def __init__(self, peers: ControlPlane) -> None:
        self._peers = peers

    def begin(self, patience: WaitMonitor) -> None:
        """Start a call."""
        self._patience = patience

    def wait(self, handle: Handle) -> None:
        """Wait until a message is done, and push all others on meanwhile."""
        self._wait(lambda: handle.done)

    def end(self) -> None:
        """Wait until all messages of the call are done."""
        self._wait(lambda: not self._waiting())

    @abc.abstractmethod
    def _advance(self) -> bool:
        """Move what can be moved, and return True if anything could."""

    @abc.abstractmethod
    def _sleep(self, idle: float) -> None:
        """Let a moment pass, in which something may come; nothing has for some seconds."""

    @abc.abstractmethod
    def _waiting(self) -> Sequence[Any]:
        """Return what is on its way: to or from which `peer`, and whether this one `receives`."""

    def _wait(self, is_over: Callable[[], bool]) -> None:
        moved_at = time.monotonic()
        check_at = moved_at + CHECK_SECONDS
        while not is_over():
            moved = self._advance()
            now = time.monotonic()
            if now >= check_at or self._peers.is_alarmed:
                check_at = now + CHECK_SECONDS
                self._check()
            if moved:
                moved_at = now
            elif now - moved_at < self.spin_seconds:
                os.sched_yield()  # The peer may be waiting for this very core.
            else:
                self._sleep(now - moved_at)

    def _check(self) -> None:
        self._patience.check(self._missing)

    def _missing(self) -> list[int]:
        """Return the ranks that owe this one something, or else do not take what it sends."""
        waiting = self._waiting()
        owing = {one.peer for one in waiting if one.receives}
        return sorted(owing or {one.peer for one in waiting})

    def _lost(
        self, reason: str, rank: int | None = None, look: Callable[[], None] = lambda: None
    ) -> WorkerLostError:
        """Return the error for a message that can not be moved, unless the group knows a better."""
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            self._check()
            look()
            time.sleep(0.002)
        return WorkerLostError(reason, rank=rank)
