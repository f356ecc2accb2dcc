"""Where other processes come in: listening sockets, and one thread that drives all handshakes.

Anybody on the network may knock. A stranger costs one descriptor and no thread, for a few seconds
at most; there are few of them, and the oldest makes way, so that strangers neither use up what the
job needs nor keep a good peer out: its handshake takes milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from ndistribute.transport.address import (
    is_of_this_user,
    name_of_peer,
    split_address,
    unix_name,
)
from ndistribute.transport.handshake import Accepted, Check, Hello, Steps, accept, tls_error
from ndistribute.transport.secret import Credentials
from ndistribute.transport.tls import tls_context

__all__ = ["MAXIMUM_STRANGERS", "Listener", "listen", "listen_unix"]

MAXIMUM_STRANGERS = 128
HANDSHAKE_SECONDS = 5.0
LISTEN_FD = "NDISTRIBUTE_LISTEN_FD"
_BACKLOG = 512
_ACCEPTED_AT_ONCE = 16
_LINGER_SECONDS = 0.2  # For a peer that is refused to read why.
_SAFE_SECONDS = 0.05  # A handshake takes milliseconds, so one that has just begun is left in peace.
_SECONDS_BETWEEN_RECORDS = 1.0
_ALERT = bytes.fromhex("15 0301 0002 0246")  # TLS: fatal, protocol version.
_log = logging.getLogger("ndistribute")


def listen(address: str, environ: Mapping[str, str] | None = None) -> socket.socket:
    """Return a socket that listens at an address, and nowhere else.

    Args:
        address: ``host:port`` or ``[v6]:port``; port 0 means any free port.
        environ: where a launcher names the socket that it keeps for this process
            (`NDISTRIBUTE_LISTEN_FD`), so that nobody else can take the port.

    Raises:
        OSError: when this process cannot listen there; it says what to do.
        ValueError: when it is not an address.

    >>> with listen("localhost:0") as listener:
    ...     listener.getsockname()[1] > 0
    True
    """
    host, port = split_address(address)
    number = (environ or {}).get(LISTEN_FD, "")
    if number:
        return _inherited(number, address, port)
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
            errno.EMFILE: "This process may open no more files: raise `ulimit -n`.",
        }.get(error.errno or 0, "Check the host's name and its network.")
        raise OSError(
            error.errno, f"cannot listen at {host} port {port}: {error.strerror}. {advice}"
        ) from error


def _inherited(number: str, address: str, port: int) -> socket.socket:
    """Return the socket that a launcher keeps for this process, listening."""
    try:
        # A duplicate: a second strategy of this process finds the original.
        listener = socket.socket(fileno=os.dup(int(number)))
    except (OSError, ValueError) as error:
        raise OSError(
            f"{LISTEN_FD}={number} is no open socket of this process. The launcher sets it for "
            "the processes that it starts; unset it where you start them yourself."
        ) from error
    ours = listener.getsockname()[1]
    if ours == port:
        listener.listen(_BACKLOG)
        return listener
    listener.close()
    raise OSError(
        f"{LISTEN_FD}={number} listens on port {ours}, but the cluster has {address} for this "
        "process. Is its index in TF_CONFIG its own?"
    )


def listen_unix(address: str) -> socket.socket | None:
    """Return a Unix socket for clients of this host, which derive its name from the address.

    Returns:
        None where another process has the name; clients use the network then.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(unix_name(address))  # No file: nothing is left behind.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        _log.warning("no Unix socket for %s: %s", address, error)
        return None
    return sock


class _Stranger:
    """A connection that has not proved itself yet."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.peer = name_of_peer(sock)
        self.deadline = deadline
        self.steps: Steps | None = None
        self.wanted: bytes | int = 0
        self.received = b""
        self.silent = True
        self.leaving: object = None  # Why it was refused, while it may still read that.


class Listener:
    """Accept connections, and pass on those of peers that know the job's secret.

    Args:
        sockets: listening sockets, as `listen` and `listen_unix` make them; closed with this.
        credentials: the job's secret and identity, and this process's certificate.
        hello: what an authenticated peer is told.
        on_peer: called with the socket and the outcome of the handshake of each authenticated peer,
            on the listener's thread, so it must not wait. The socket is the callee's.
        check: returns why an authenticated peer is refused all the same.
        handshake_seconds: how long a connection may take to prove itself.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        credentials: Credentials,
        hello: Hello,
        on_peer: Callable[[socket.socket, Accepted], None],
        *,
        check: Check = lambda hello: "",
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        tls = credentials.tls
        self._tls = None if tls is None else tls_context(tls, server=True)
        self._sockets = list(sockets)
        self._secret = credentials.secret
        self._hello, self._check = credentials.signed(hello), check
        self._on_peer = on_peer
        self._seconds = handshake_seconds
        # An eighth of the descriptors at most: the others are for the job.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(4, min(MAXIMUM_STRANGERS, files // 8))
        self._refusals = _RefusalLog()
        self._strangers: dict[socket.socket, _Stranger] = {}  # The oldest comes first.
        self._closing = False
        self._pause = threading.Event()
        self._spare = _spare_file()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        try:
            for sock in (*self._sockets, self._woken):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
            name = "ndistribute listener"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        except BaseException:
            self._end()
            raise
        _open.add(self)

    def close(self) -> None:
        """Stop listening, and drop who has not proved itself; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        if self._thread is not threading.current_thread():  # Else a callback closes it.
            self._thread.join(timeout=5.0)
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

    def let_go(self) -> None:
        """Close a forked child's copies of the sockets; the parent's listener goes on."""
        self._closing = True
        for sock in (*self._sockets, *self._strangers, self._waker, self._woken):
            with contextlib.suppress(OSError):
                os.close(sock.detach())
        self._end()

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience()):
                    sock = key.fileobj
                    if sock in self._sockets and isinstance(sock, socket.socket):
                        self._accept(sock)
                    elif sock in self._strangers:
                        self._serve(self._strangers[sock])
                self._expire()
        except Exception:
            _log.exception("the listener failed: nobody else can connect")
        finally:
            self._end()

    def _end(self) -> None:
        self._selector.close()
        for sock in (*self._strangers, *self._sockets, self._waker, self._woken):
            sock.close()
        self._drop_spare()
        _open.discard(self)

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            with contextlib.suppress(OSError):
                os.close(spare)

    def _patience(self) -> float | None:
        """Return the seconds to the first deadline, or until there is room for one more."""
        first = min((each.deadline for each in self._strangers.values()), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if len(self._strangers) >= self._most and not self._drop_one():
                self._pause.wait(timeout=_SAFE_SECONDS / 10)  # All have only just begun.
                return
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # It was gone before it was accepted.
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(listener, error)
                else:
                    self._refusals.add("somebody", error)
                    self._pause.wait(timeout=_SAFE_SECONDS / 10)
                return
            if sock.family == socket.AF_UNIX and not is_of_this_user(sock):
                self._refusals.add("another user of this host", "only this user's processes may")
                sock.close()
                continue
            sock.setblocking(False)
            stranger = _Stranger(sock, time.monotonic() + self._seconds)
            self._strangers[sock] = stranger
            try:
                self._selector.register(sock, selectors.EVENT_READ)
                self._begin(stranger)
            except OSError as error:  # The system's limit of watched files, or it is gone.
                self._drop(stranger, error)

    def _drop_one(self) -> bool:
        """Drop the stranger that is least likely to be a good peer; return False if all may be."""
        latest = time.monotonic() + self._seconds - _SAFE_SECONDS
        strangers = self._strangers.values()
        old = [each for each in strangers if each.deadline < latest]
        for found in (
            next((each for each in strangers if each.leaving is not None), None),
            next((each for each in old if each.silent), None),
            next(iter(old), None),
        ):
            if found is not None:
                self._drop(found, "too many connections wait, and it is the oldest")
                return True
        return False

    def _make_room(self, listener: socket.socket, error: OSError) -> None:
        """Send the next one away when no descriptor is left, with one that was kept for this."""
        self._refusals.add("somebody", f"{error}; raise `ulimit -n`")
        for stranger in list(self._strangers.values()):
            self._drop(stranger, "this process has too many open files")
        self._drop_spare()
        with contextlib.suppress(OSError):
            listener.accept()[0].close()
        self._spare = _spare_file()

    def _begin(self, stranger: _Stranger) -> None:
        if self._tls is not None:
            del self._strangers[stranger.sock]
            self._selector.unregister(stranger.sock)
            stranger.sock = self._tls.wrap_socket(
                stranger.sock, server_side=True, do_handshake_on_connect=False
            )
            self._strangers[stranger.sock] = stranger
            self._selector.register(stranger.sock, selectors.EVENT_READ)
        else:
            self._start(stranger)

    def _start(self, stranger: _Stranger) -> None:
        stranger.steps = accept(self._secret, self._hello, self._check, stranger.peer)
        stranger.wanted = next(stranger.steps)

    def _serve(self, stranger: _Stranger) -> None:
        """Go on with a handshake as far as it goes without waiting."""
        stranger.silent = False
        try:
            if stranger.leaving is not None:
                if not socket.socket.recv(stranger.sock, 4096):  # Past TLS, which has ended.
                    self._drop(stranger, stranger.leaving)
                return
            if stranger.steps is None and isinstance(stranger.sock, ssl.SSLSocket):
                stranger.sock.do_handshake()
                self._start(stranger)
            self._advance(stranger)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except ssl.SSLError as error:
            self._refuse(stranger, tls_error(stranger.peer, error), _ALERT)
        except Exception as error:
            # Whatever a stranger provokes costs this connection, and nothing else.
            self._refuse(stranger, error)

    def _advance(self, stranger: _Stranger) -> None:
        sock, steps = stranger.sock, stranger.steps
        if steps is None:
            return
        while True:
            wanted = stranger.wanted
            try:
                if isinstance(wanted, bytes):
                    sock.sendall(wanted)  # Short: it always fits the socket's empty buffer.
                    stranger.wanted = next(steps)
                    continue
                part = sock.recv(wanted - len(stranger.received))
                if not part:
                    raise ConnectionResetError("it closed the connection during the handshake")
                stranger.received += part
                if len(stranger.received) == wanted:
                    received, stranger.received = stranger.received, b""
                    stranger.wanted = steps.send(received)
            except StopIteration as done:
                self._admit(stranger, done.value)
                return

    def _admit(self, stranger: _Stranger, accepted: Accepted) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock]
        try:
            self._on_peer(stranger.sock, accepted)
        except Exception as error:
            stranger.sock.close()
            _log.error("%s could not be served: %s", accepted.hello.name or stranger.peer, error)

    def _refuse(self, stranger: _Stranger, reason: object, last_words: bytes = b"") -> None:
        """Drop a stranger once it has read why, which the system destroys at an early close."""
        try:
            if stranger.sock not in self._strangers:
                return
            stranger.leaving = reason
            stranger.deadline = time.monotonic() + _LINGER_SECONDS
            if last_words:
                socket.socket.send(stranger.sock, last_words)  # Outside TLS.
            socket.socket.shutdown(stranger.sock, socket.SHUT_WR)
        except OSError:
            self._drop(stranger, reason)

    def _drop(self, stranger: _Stranger, reason: object) -> None:
        if self._strangers.pop(stranger.sock, None) is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(stranger.sock)
        why = stranger.leaving or reason
        if isinstance(why, ConnectionError):  # It left by itself: for a Unix socket, say.
            _log.debug("a connection from %s ended: %s", stranger.peer, f"{why}")
        else:
            self._refusals.add(stranger.peer, why)
        stranger.sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.deadline <= now]:
            self._drop(stranger, f"it did not finish the handshake in {self._seconds:g} s")


class _RefusalLog:
    """Log refused connections, at most one record a second."""

    def __init__(self) -> None:
        self._last = -_SECONDS_BETWEEN_RECORDS
        self._unlogged = 0

    def add(self, peer: str, reason: object) -> None:
        """Log a refusal, or count it where one was logged just now."""
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_RECORDS:
            self._unlogged += 1
            return
        self._last, count = now, self._unlogged
        self._unlogged = 0
        before = f" ({count} more since the last record)" if count else ""
        _log.warning("refused a connection from %s%s: %s", peer, before, reason)

    def close(self) -> None:
        """Log how many refusals were only counted."""
        if self._unlogged:
            _log.warning("refused connections (%d more since the last record)", self._unlogged)


def _spare_file() -> int:
    """Return a descriptor that holds a place, -1 if there is none."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # Another thread has had it.
        return -1


_open: weakref.WeakSet[Listener] = weakref.WeakSet()


def _let_go_of_all() -> None:
    """Close a fork's copies, which would keep the addresses of a parent that has ended."""
    for listener in list(_open):
        listener.let_go()
    _open.clear()


os.register_at_fork(after_in_child=_let_go_of_all)
