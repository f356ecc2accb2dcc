"""Lets peers in: a bounded number of handshakes at a time, each on a short-lived thread.

Any stranger can occupy a handshake until its deadline, so the oldest one makes way when a new
connection needs the place: a good peer needs milliseconds. What is refused is logged, at a rate
that no stranger can raise.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ndistribute.transport.handshake import TlsFiles, authenticate

__all__ = ["MAXIMUM_HANDSHAKES", "Admission", "RefusalLog"]

MAXIMUM_HANDSHAKES = 32
# Younger handshakes are left in peace: when a large job starts, all who wait are good peers.
_SAFE_SECONDS = 0.25
_SECONDS_BETWEEN_RECORDS = 1.0
_MADE_WAY = "it made way for newer connections, or the gate closed"
_log = logging.getLogger("ndistribute")


class RefusalLog:
    """Log refused connections, at most one record a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = -_SECONDS_BETWEEN_RECORDS
        self._unlogged = 0

    def add(self, peer: str, reason: object) -> None:
        """Log a refusal, or count it where one was logged just now."""
        now = time.monotonic()
        with self._lock:
            if now - self._last < _SECONDS_BETWEEN_RECORDS:
                self._unlogged += 1
                return
            self._last, before = now, self._take()
        _log.warning("refused a connection from %s%s: %s", peer, before, reason)

    def close(self) -> None:
        """Log how many refusals were only counted."""
        with self._lock:
            before = self._take()
        if before:
            _log.warning("refused connections%s", before)

    def _take(self) -> str:
        count, self._unlogged = self._unlogged, 0
        return f" ({count} more since the last record)" if count else ""


@dataclass
class _Handshake:
    handle: socket.socket
    began: float
    evicted: bool = False

    def interrupt(self) -> None:
        self.evicted = True
        with contextlib.suppress(OSError):  # The peer may have closed it by itself.
            self.handle.shutdown(socket.SHUT_RDWR)


class Admission:
    """Authenticate connections, at most 32 at a time.

    Args:
        secret: the job's secret.
        hello: what an authenticated peer is told.
        tls: this process's certificate, where the job uses TLS.
        on_peer: called with the socket and the hello of each authenticated peer.
        on_place: called, on any thread, when a handshake has ended.
        refusals: where failures are logged.
    """

    def __init__(
        self,
        secret: bytes,
        hello: bytes,
        tls: TlsFiles | None,
        on_peer: Callable[[socket.socket, bytes], None],
        on_place: Callable[[], None],
        refusals: RefusalLog,
    ) -> None:
        self._secret = secret
        self._hello = hello
        self._tls = tls
        self._on_peer = on_peer
        self._on_place = on_place
        self._refusals = refusals
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, _Handshake] = {}  # The oldest comes first.
        self._threads: list[threading.Thread] = []
        self._visiting: set[threading.Thread] = set()  # Those of peers that proved themselves.
        self._closed = False

    def start(self, sock: socket.socket, peer: str, deadline: float) -> bool:
        """Begin a handshake, unless there are too many.

        Args:
            sock: the connection; it is used up when the handshake begins.
            peer: the name of the other end.
            deadline: when the handshake must end, on the clock of ``time.monotonic``.

        Returns:
            Whether it began.

        Raises:
            OSError: when the system has no more files or threads.
        """
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            strangers = len(self._threads) - len(self._visiting)
            if self._closed or strangers >= MAXIMUM_HANDSHAKES:
                return False
            thread = threading.Thread(
                target=self._run,
                args=(sock, peer, deadline),
                name=f"ndistribute handshake with {peer}",
                daemon=True,
            )
            # TLS moves the connection to another socket object: a duplicate reaches it there.
            handshake = _Handshake(sock.dup(), time.monotonic())
            try:
                thread.start()
            except RuntimeError as error:
                handshake.handle.close()
                raise OSError(f"no thread for a handshake: {error}") from error
            self._running[thread] = handshake
            self._threads.append(thread)
            return True

    def make_room(self, count: int) -> None:
        """Interrupt so many of the oldest handshakes, but for those that have only just begun.

        ``on_place`` says when they have ended.
        """
        latest = time.monotonic() - _SAFE_SECONDS
        with self._lock:
            for handshake in list(self._running.values())[:count]:
                if handshake.began <= latest:
                    handshake.interrupt()

    def close(self, deadline: float) -> list[str]:
        """Interrupt all handshakes and wait for their threads.

        Returns:
            The names of threads that are still in ``on_peer`` at the deadline.
        """
        with self._lock:
            self._closed = True
            for handshake in self._running.values():
                handshake.interrupt()
            threads = [
                thread for thread in self._threads if thread is not threading.current_thread()
            ]
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def _run(self, sock: socket.socket, peer: str, deadline: float) -> None:
        try:
            self._admit(sock, deadline)
        except Exception as error:
            # Whatever a stranger provokes costs this connection, and nothing else.
            self._refusals.add(peer, error)
        finally:
            self._on_place()

    def _admit(self, sock: socket.socket, deadline: float) -> None:
        try:
            sock, hello = authenticate(
                sock,
                self._secret,
                self._hello,
                server=True,
                deadline=deadline,
                tls=self._tls,
                commit=self._commit,
            )
        except Exception as error:
            if self._leave():
                raise ConnectionAbortedError(_MADE_WAY) from error
            raise
        self._receive(sock, hello)

    def _receive(self, sock: socket.socket, hello: bytes) -> None:
        """Call ``on_peer``, which is not a stranger's time and so takes no stranger's place."""
        with self._lock:
            self._visiting.add(threading.current_thread())
        try:
            self._on_peer(sock, hello)
        except Exception:
            sock.close()
            _log.exception("a peer with the right secret was dropped: on_peer failed")
        finally:
            with self._lock:
                self._visiting.discard(threading.current_thread())

    def _commit(self) -> None:
        """Refuse a peer that was interrupted, while it can still learn so and come again."""
        if self._leave():
            raise ConnectionAbortedError(_MADE_WAY)

    def _leave(self) -> bool:
        """Give the place back, and say whether this handshake was interrupted before."""
        with self._lock:
            handshake = self._running.pop(threading.current_thread(), None)
        if handshake is None:
            return False
        handshake.handle.close()
        return handshake.evicted
