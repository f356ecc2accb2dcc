"""One step at a time: threads that run steps of one strategy take turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Turn"]

# How long `run` waits for another thread's `run` of the same strategy.
TURN_SECONDS = 600.0


class Turn:
    """Let one thread at a time use a strategy; the one that does may do so again inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # Knows its owner, and refuses to be released by others.

    @contextlib.contextmanager
    def taken(self, user: object) -> Iterator[None]:
        """Wait for the turn, and keep it for a ``with`` block.

        Raises:
            RuntimeError: another thread keeps it too long.
        """
        try:
            if not self._lock.acquire(timeout=TURN_SECONDS):
                raise RuntimeError(
                    f"another thread has been running a step of {user!r} for {TURN_SECONDS:g} s."
                )
            yield
        finally:
            try:  # noqa: SIM105 - a call before the release would let an interrupt in.
                self._lock.release()
            except RuntimeError:
                pass  # It was not acquired.
