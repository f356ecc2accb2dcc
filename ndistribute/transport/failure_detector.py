"""How a process learns that another one has failed, and shows the others that it lives.

A closed connection is death, and is known at once. A host that vanished is known once the system
gives up sending (TCP_USER_TIMEOUT). A process that is stopped, or stuck, is known by its silence,
after a longer time, for one that computes without letting its other threads run is silent too. One
thread a process beats on all its connections and listens for the others' beats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ndistribute.cluster.resolvers import seconds_of

SILENCE_SECONDS = 60.0
FORKED = (
    "this process is a fork of the one that made the connection: make strategies, servers and "
    "coordinators in the process that uses them."
)
_BEATS = 8  # In the time after which a silent process counts as lost.
_LONGEST_PAUSE_SECONDS = 5.0
_log = logging.getLogger("ndistribute")


class Watched(Protocol):
    """What the detector needs of a connection."""

    beat_within: float  # The shorter of the silences after which the ends are lost to each other.

    def tick(self, now: float, excused: bool) -> None:
        """Beat, and cut it after a long silence, unless this process itself did not run."""


def silence_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """Return after how many seconds of silence a process counts as lost."""
    return seconds_of(environ, "NDISTRIBUTE_HEARTBEAT_SECONDS", SILENCE_SECONDS)


class FailureDetector:
    """Beat on connections, and cut those that are silent, on one thread while there are any."""

    def __init__(self) -> None:
        # Collected garbage may be closed, and so forgotten, in the middle of `watch`.
        self._lock = threading.RLock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        # What to close, and None: look again what is watched. It may be put from a finalizer.
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pause = 0.0
        self._thread: threading.Thread | None = None

    def watch(self, connection: Watched) -> None:
        """Watch a connection until `forget`."""
        fresh, pause = None, min(connection.beat_within / _BEATS, _LONGEST_PAUSE_SECONDS)
        with self._lock:
            self._watched.add(connection)
            if self._thread is None:
                name = "ndistribute heartbeat"
                fresh = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread, self._pause = fresh, pause
            elif pause < self._pause:
                self._orders.put(None)
        if fresh is not None:
            try:
                fresh.start()  # Without the lock, which garbage found on that thread may take.
            except RuntimeError:
                with self._lock:
                    self._thread = None if self._thread is fresh else self._thread
                raise

    def close_soon(self, close: Callable[[], None]) -> None:
        """Close what was found to be garbage, on a thread of its own if anything is connected.

        Garbage is found in the middle of anything, also of what holds a lock that closing takes.
        """
        if self._thread is None:
            close()
        else:
            self._orders.put(close)

    def forget(self, connection: Watched) -> None:
        """Watch a connection no more; with the last one the thread ends, which this waits for."""
        with self._lock:
            self._watched.discard(connection)
            if self._watched:
                return
            # Whoever watches next starts another thread, so that this one is sure to end.
            thread, self._thread = self._thread, None
            orders, self._orders = self._orders, queue.SimpleQueue()
        orders.put(None)
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def _run(self) -> None:
        before, orders = time.monotonic(), self._orders
        while True:
            with contextlib.suppress(queue.Empty, RuntimeError):  # Or no thread can start.
                if (close := orders.get(timeout=self._pause)) is not None:
                    threading.Thread(target=close, name="ndistribute close", daemon=True).start()
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                watched = list(self._watched)
                if not watched:
                    self._thread = None
                    return
                shortest = min(connection.beat_within for connection in watched)
                self._pause = min(shortest / _BEATS, _LONGEST_PAUSE_SECONDS)
            now = time.monotonic()
            excused = now - before > shortest / 2
            before = now
            for connection in watched:
                try:
                    connection.tick(now, excused)
                except Exception:  # The others are watched all the same.
                    _log.exception("a connection could not be watched")
            del watched, connection  # Nothing is kept alive by being watched.


detector = FailureDetector()
"""The detector of this process."""

not_for_forks: weakref.WeakSet[Any] = weakref.WeakSet()
"""What a forked child lets go, or it would be open still when the parent has ended."""


def _start_over() -> None:
    for one in list(not_for_forks):
        one.let_go()
    not_for_forks.clear()
    detector.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)
