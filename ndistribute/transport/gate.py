"""Where other processes come in: one listening socket, and one thread that accepts.

Anybody on the network may knock. A connection that is silent costs one file and no thread; one
that speaks gets a handshake. Of both there is a fixed number, where the oldest makes way, so that
strangers neither fill the memory nor keep good peers out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ndistribute.transport.address import name_of_peer, split_address
from ndistribute.transport.admission import Admission, RefusalLog
from ndistribute.transport.handshake import TlsFiles
from ndistribute.transport.tls import tls_context

__all__ = ["MAXIMUM_STRANGERS", "Gate", "listen"]

MAXIMUM_STRANGERS = 256
HANDSHAKE_SECONDS = 5.0
_BACKLOG = 512
_ACCEPTED_AT_ONCE = 64
_CROWDED_SECONDS = 0.05  # Between looks for a place, while connections wait for one.
_log = logging.getLogger("ndistribute")


def listen(address: str) -> socket.socket:
    """Return a socket that listens at an address, and nowhere else.

    Args:
        address: ``host:port`` or ``[v6]:port``; port 0 means any free port.

    Raises:
        OSError: when this process cannot listen there; it says what to do.
        ValueError: when it is not an address.

    >>> with listen("localhost:0") as listener:
    ...     listener.getsockname()[1] > 0
    True
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, where = found[0][0], found[0][4]
        return socket.create_server(where, family=family, backlog=_BACKLOG)
    except OSError as error:
        advice = {
            errno.EADDRINUSE: "Another program has this port (`ss -ltnp` names it): end it, or "
            "choose another port, or port 0 for any free one.",
            errno.EADDRNOTAVAIL: "This host does not have this address (`ip address` lists "
            "those it has): check which process of the job this is.",
            errno.EACCES: "Ports below 1024 are the system's: choose a higher one.",
        }.get(error.errno or 0, "Check the host's name and its network.")
        raise OSError(
            error.errno, f"cannot listen at {host} port {port}: {error.strerror}. {advice}"
        ) from error


class Gate:
    """Accept connections, and pass on those of peers that know the job's secret.

    Args:
        listener: a listening socket, as ``listen`` makes it; the gate closes it.
        secret: the job's secret (see ``find_secret``).
        on_peer: called with the socket and the hello of each authenticated peer, on a thread of
            its own, so that several calls may run at once; the socket is the callee's. Where it
            raises, the connection is closed.
        hello: what an authenticated peer is told, at most 4096 bytes.
        tls: this process's certificate, where the job uses TLS.
        handshake_seconds: how long a connection may take to prove itself.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        on_peer: Callable[[socket.socket, bytes], None],
        *,
        hello: bytes = b"",
        tls: TlsFiles | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        if tls is not None:
            tls_context(tls, server=True)  # What is wrong with the files is said now, not later.
        self._listener = listener
        self._seconds = handshake_seconds
        self._refusals = RefusalLog()
        self._admission = Admission(secret, hello, tls, on_peer, self._wake, self._refusals)
        # Connections with their deadlines, the oldest first: silent, and waiting for a handshake.
        self._silent: dict[socket.socket, float] = {}
        self._speaking: dict[socket.socket, float] = {}
        self._closing = threading.Event()
        self._waking = threading.Lock()
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (listener, self._waker, self._woken):
            sock.setblocking(False)
        for sock in (listener, self._woken):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="ndistribute gate", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and drop who has not proved itself; a second call does nothing.

        Args:
            timeout: seconds to wait for calls of ``on_peer`` that still run.
        """
        if self._closing.is_set():
            return
        deadline = time.monotonic() + timeout
        self._closing.set()
        self._wake()
        self._thread.join(timeout=timeout)
        busy = self._admission.close(deadline)
        if busy or self._thread.is_alive():
            _log.warning("the gate did not close within %g s: on_peer runs in %s", timeout, busy)
        self._refusals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wake(self) -> None:
        with self._waking, contextlib.suppress(OSError):  # Full, so the thread wakes; or closed.
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(self._patience()):
                    self._serve(key.fileobj)
                self._expire()
                self._start_handshakes()
        finally:
            self._selector.close()
            with self._waking:  # Else a late handshake might write to whoever gets the number next.
                self._waker.close()
            for sock in (*self._silent, *self._speaking, self._listener, self._woken):
                sock.close()

    def _patience(self) -> float | None:
        """Return the seconds to the first deadline; within each dict they come in order."""
        if self._speaking:
            return _CROWDED_SECONDS
        first = next(iter(self._silent.values()), None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _groups(self) -> tuple[dict[socket.socket, float], dict[socket.socket, float]]:
        return self._silent, self._speaking

    def _serve(self, ready: object) -> None:
        if ready is self._listener:
            self._accept()
        elif ready is self._woken:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        elif isinstance(ready, socket.socket) and ready in self._silent:
            self._selector.unregister(ready)
            self._speaking[ready] = self._silent.pop(ready)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # It was gone before it was accepted.
            except OSError as error:
                # Most likely no file descriptor is left, and a stranger's can be had back.
                self._refusals.add("somebody", error)
                if not self._drop_oldest("this process has too many open files"):
                    self._closing.wait(timeout=0.05)
                return
            self._silent[sock] = time.monotonic() + self._seconds
            try:
                self._selector.register(sock, selectors.EVENT_READ)
            except OSError as error:  # The system's limit of watched files.
                del self._silent[sock]
                self._refusals.add(name_of_peer(sock), error)
                sock.close()
            if len(self._silent) + len(self._speaking) > MAXIMUM_STRANGERS:
                self._drop_oldest("too many connections are waiting, and it is the oldest")

    def _drop_oldest(self, reason: str) -> bool:
        """Close the connection with the earliest deadline; say whether there was any."""
        firsts = [next(iter(group.items())) for group in self._groups() if group]
        if firsts:
            self._drop(min(firsts, key=lambda first: first[1])[0], reason)
        return bool(firsts)

    def _drop(self, sock: socket.socket, reason: object) -> None:
        if self._silent.pop(sock, None) is not None:
            self._selector.unregister(sock)
        self._speaking.pop(sock, None)
        self._refusals.add(name_of_peer(sock), reason)
        sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for group in self._groups():
            for sock in [sock for sock, deadline in group.items() if deadline <= now]:
                self._drop(sock, f"it did not finish the handshake in {self._seconds:g} s")

    def _start_handshakes(self) -> None:
        for sock, deadline in list(self._speaking.items()):
            try:
                if not self._admission.start(sock, name_of_peer(sock), deadline):
                    self._admission.make_room(len(self._speaking))
                    return
            except OSError as error:
                self._drop(sock, error)
                continue
            del self._speaking[sock]
