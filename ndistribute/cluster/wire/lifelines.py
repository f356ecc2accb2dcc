"""Finds out that clients died: at once where the system tells, and by their silence otherwise.

A client keeps a call open as long as it lives, its lifeline. On one host the system ends it when
the process is gone, and so it is sure; over a network it may end for less, and so the client may
speak again for a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ndistribute.cluster.wire.guard import Guard
from ndistribute.cluster.wire.session import Session

__all__ = ["Lifelines"]

GRACE_SECONDS = 2.0
_log = logging.getLogger("ndistribute")


class Lifelines:
    """Watch the clients of a server.

    Args:
        guard: it knows when each was heard.
        bury: called with the session of each that died, by any thread.
        silence_seconds: after how long without a word a client counts as dead.
    """

    def __init__(
        self, guard: Guard, bury: Callable[[Session], None], silence_seconds: float
    ) -> None:
        self._guard = guard
        self._bury = bury
        self._silence = silence_seconds
        self._changed = threading.Condition()
        self._closing = False
        # When the patience with a client ends whose lifeline did, and when it was heard before.
        self._doubted: dict[Session, tuple[float, float]] = {}
        self._thread = threading.Thread(target=self._watch, name="ndistribute ps", daemon=True)
        self._thread.start()

    def ended(self, session: Session, *, sure: bool) -> None:
        """Take note that a client's lifeline ended.

        Args:
            session: the client's.
            sure: whether the client's process is gone, and no network can be to blame.
        """
        if sure:
            if self._guard.knows(session):
                self._died(session, "its process ended")
            return
        with self._changed:
            self._doubted[session] = time.monotonic() + GRACE_SECONDS, session.heard
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Watch no more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=timeout)
        # Else two objects would hold each other, and the server's memory with them, for long.
        self._bury = lambda session: None

    def _watch(self) -> None:
        pause = self._silence / 10
        look, patient_until = time.monotonic() + pause, 0.0
        while self._wait_until(look):
            now = time.monotonic()
            if now - look > 2 * pause:  # This process itself was stopped, and heard nobody.
                patient_until = now + self._silence
            for session in self._lost(now):
                self._died(session, "its connection ended, and it did not speak again")
            if now < look:
                continue
            look = now + pause
            if now >= patient_until:
                for session in self._guard.silent(self._silence):
                    self._died(session, f"it was silent for {self._silence:g} s")

    def _wait_until(self, look: float) -> bool:
        """Wait for the next thing to do; say whether there will be any."""
        with self._changed:
            if not self._closing:
                soonest = min((until for until, _ in self._doubted.values()), default=look)
                self._changed.wait(timeout=max(0.0, min(look, soonest) - time.monotonic()))
            return not self._closing

    def _lost(self, now: float) -> list[Session]:
        """Return those who had their time to speak again and did not."""
        with self._changed:
            for session, (_, heard) in list(self._doubted.items()):
                if session.heard != heard or not self._guard.knows(session):
                    del self._doubted[session]
            lost = [session for session, (until, _) in self._doubted.items() if until <= now]
            for session in lost:
                del self._doubted[session]
            return lost

    def _died(self, session: Session, how: str) -> None:
        _log.warning("%s counts as dead: %s", session.client, how)
        try:
            self._bury(session)
        except Exception:
            _log.exception("%s could not be forgotten", session.client)
