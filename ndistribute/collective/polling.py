"""Waiting for messages by polling, with a deadline and a check for failures.

MPI and sockets move messages differently, but a process waits for them in the same way. Sleeping in
the kernel and waking up costs about 30 us on each side, so a rank first spins for a while.
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
# The reason why a connection closed may arrive a little later through the control plane.
_GRACE_SECONDS = 0.5


class PollingTransport(abc.ABC):
    """The base of transports: waits for messages, which a subclass moves.

    Args:
        peers: the control plane of the group.
    """

    spin_seconds: float
    """How long a rank spins before it sleeps."""

    _patience: WaitMonitor

    def __init__(self, peers: ControlPlane) -> None:
        self._peers = peers

    def begin(self, patience: WaitMonitor) -> None:
        """Start a call, whose waits `patience` ends."""
        self._patience = patience

    def wait(self, handle: Handle) -> None:
        """Wait until a message is done; keep moving all other messages."""
        self._wait(lambda: handle.done)

    def end(self) -> None:
        """Wait until all messages of the call are done."""
        self._wait(lambda: not self._waiting())

    @abc.abstractmethod
    def _advance(self) -> bool:
        """Move all messages as far as possible; return True if any moved."""

    @abc.abstractmethod
    def _sleep(self, idle: float) -> None:
        """Sleep briefly; nothing has moved for `idle` seconds."""

    @abc.abstractmethod
    def _waiting(self) -> Sequence[Any]:
        """Return pending messages, each with its `peer` and whether it `receives`."""

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
                os.sched_yield()  # The peer may need this core.
            else:
                self._sleep(now - moved_at)

    def _check(self) -> None:
        self._patience.check(self._missing)

    def _missing(self) -> list[int]:
        """Return the ranks from which messages are missing, or else those that do not receive."""
        waiting = self._waiting()
        owing = {one.peer for one in waiting if one.receives}
        return sorted(owing or {one.peer for one in waiting})

    def _lost(
        self, reason: str, rank: int | None = None, look: Callable[[], None] = lambda: None
    ) -> WorkerLostError:
        """Return an error for a failed message, unless the control plane raises a better one."""
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            self._check()
            look()
            time.sleep(0.002)
        return WorkerLostError(reason, rank=rank)
