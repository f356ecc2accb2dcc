"""The failure detector: sends heartbeats on a process's connections, and ends silent ones.

A closed connection means that the peer has died, and is detected at once. A host that is
unreachable is detected when the kernel stops sending (TCP_USER_TIMEOUT) or, on connections
without heartbeats, when it gets no answers to its probes. A stopped or blocked process is detected
by its silence. That takes longer, because a process that holds Python's lock while it computes is
silent too. One thread per process sends and receives heartbeats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
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
_BEATS = 8  # The number of heartbeats within the timeout.
_LONGEST_PAUSE_SECONDS = 5.0
_LONGEST_SECONDS = 32_767.0 * _BEATS  # Three days: the kernel's limit for TCP_KEEPIDLE.
_log = logging.getLogger("ndistribute")


class Watched(Protocol):
    """The interface of a connection that the detector watches."""

    beat_within: float  # The shorter timeout of the two ends.

    def tick(self, now: float, excused: bool) -> None:
        """Send a heartbeat, and end a silent connection unless this process itself was stopped."""


def silence_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """Return the heartbeat timeout: seconds of silence after which a process counts as lost."""
    seconds = seconds_of(environ, "NDISTRIBUTE_HEARTBEAT_SECONDS", SILENCE_SECONDS)
    return min(seconds, _LONGEST_SECONDS)


def probe_when_idle(sock: socket.socket, silence: float) -> None:
    """Make the kernel probe a silent peer of a TCP connection, several times within `silence`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(silence / _BEATS)))


class FailureDetector:
    """Send heartbeats and end silent connections, on one thread while there are connections."""

    def __init__(self) -> None:
        # The garbage collector may close a connection, which calls `forget`, within `watch`.
        self._lock = threading.RLock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        # Functions that close; or None: the connections changed. Finalizers also put orders here.
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pause = 0.0
        self._thread: threading.Thread | None = None

    def watch(self, connection: Watched) -> None:
        """Watch a connection until `forget` is called."""
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
                fresh.start()  # Without the lock, which a finalizer on that thread may need.
            except RuntimeError:
                with self._lock:
                    self._thread = None if self._thread is fresh else self._thread
                raise

    def close_soon(self, close: Callable[[], None]) -> None:
        """Call `close` for a finalizer, on the detector's thread if there are connections.

        A finalizer may run at any point, even while its thread holds a lock that `close` needs.
        """
        if self._thread is None:
            close()
        else:
            self._orders.put(close)

    def forget(self, connection: Watched) -> None:
        """Stop watching a connection; after the last one, end the thread and wait for it."""
        with self._lock:
            self._watched.discard(connection)
            if self._watched:
                return
            # The next `watch` starts a new thread, so this one certainly ends.
            thread, self._thread = self._thread, None
            orders, self._orders = self._orders, queue.SimpleQueue()
        orders.put(None)
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def _run(self) -> None:
        before, orders = time.monotonic(), self._orders
        while True:
            with contextlib.suppress(queue.Empty, RuntimeError):  # No thread can start.
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
                except Exception:  # Keep watching the others.
                    _log.exception("a connection could not be watched")
            del watched, connection  # Keep no connection alive.


# The failure detector of this process.
detector = FailureDetector()

# Objects whose descriptors a forked child closes; otherwise they outlive the parent.
not_for_forks: weakref.WeakSet[Any] = weakref.WeakSet()


def _start_over() -> None:
    for owner in list(not_for_forks):
        owner.let_go()
    not_for_forks.clear()
    detector.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_over)
