"""Listening sockets, and one thread that runs all handshakes.

Anybody on the network may connect. An unauthenticated connection uses one descriptor and no thread,
for a few seconds at most. The number of such connections is limited, and the oldest is closed
first. So they cannot exhaust the process, nor keep out a job's peer, whose handshake takes
milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import resource
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndistribute.errors import AuthenticationError
from ndistribute.transport import handshake
from ndistribute.transport.address import (
    is_name,
    is_of_this_user,
    name_of_peer,
    split_address,
    unix_name,
)
from ndistribute.transport.connection import unix_wanted
from ndistribute.transport.failure_detector import not_for_forks
from ndistribute.transport.secret import Credentials, tls_context

MAXIMUM_HANDSHAKES = 128
HANDSHAKE_SECONDS = 5.0
LISTEN_FD = "NDISTRIBUTE_LISTEN_FD"
_BACKLOG = 512
_LINGER_SECONDS = 0.2  # Time for a refused peer to read the reason.
_SAFE_SECONDS = 0.05  # A handshake takes milliseconds, so younger ones are kept.
_SECONDS_BETWEEN_RECORDS = 1.0
_ALERT = bytes.fromhex("15 0301 0002 0246")  # TLS: fatal, protocol version.
_ADVICE = {
    errno.EADDRINUSE: "Another program has this port (`ss -ltnp` names it): end it, or choose "
    "another port, or port 0 for any free one.",
    errno.EADDRNOTAVAIL: "This host does not have this address (`ip address` lists those it has): "
    "check which process of the job this is.",
    errno.EACCES: "Ports below 1024 are the system's: choose a higher one.",
    errno.EMFILE: "This process may open no more files: raise `ulimit -n`.",
}
_log = logging.getLogger("ndistribute")


def reserve(host: str) -> socket.socket:
    """Return a socket that listens at a free port and reserves it; see `set_accepting`."""
    # Linux releases a port that it has chosen itself when the socket stops listening.
    with listen(f"{host}:0") as free:
        port = free.getsockname()[1]
    return listen(f"{host}:{port}")


def set_accepting(listener: socket.socket, accepts: bool) -> None:
    """Let a socket listen, or refuse connections but still reserve its port."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(accepts))
    if accepts:
        listener.listen(_BACKLOG)
    else:
        listener.shutdown(socket.SHUT_RDWR)


def listen(address: str, environ: Mapping[str, str] | None = None) -> socket.socket:
    """Return a socket that listens at an address or, for a name, at all this host's addresses.

    A host's name often resolves to another address there than elsewhere; on Debian to 127.0.1.1.
    Port 0 means any free port.
    """
    host, port = split_address(address)
    if number := (environ or {}).get(LISTEN_FD, ""):
        return _inherited(number, address, port)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        if not is_name(host):
            return socket.create_server(places[0][4], family=places[0][0], backlog=_BACKLOG)
        _check_own(places)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        place = "", port
        return socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Check the host's name and its network.")
        raise OSError(
            error.errno, f"cannot listen at {host} port {port}: {error.strerror}. {advice}"
        ) from error


def _check_own(places: Sequence[Any]) -> None:
    """Raise OSError if this host has none of the addresses to which a name resolves."""
    for family, *_, place in places:
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((place[0], 0, *place[2:]))
            return
    raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def _inherited(number: str, address: str, port: int) -> socket.socket:
    try:
        # A duplicate, because a second strategy of this process needs the original.
        listener = socket.socket(fileno=os.dup(int(number)))
    except (OSError, ValueError) as error:
        raise OSError(
            f"{LISTEN_FD}={number} is not an open socket of this process. The launcher sets it "
            "for the processes that it starts; unset it if you start them yourself."
        ) from error
    ours = listener.getsockname()[1]
    if ours == port:
        listener.listen(_BACKLOG)
        return listener
    listener.close()
    raise OSError(
        f"{LISTEN_FD}={number} listens on port {ours}, but the cluster has {address} for this "
        "process. Check that TF_CONFIG has this process's own index."
    )


def listen_unix(address: str, environ: Mapping[str, str] = os.environ) -> list[socket.socket]:
    """Return a Unix socket for clients on this host; an empty list if unwanted or in use."""
    if not unix_wanted(environ):
        return []
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(unix_name(address))  # An abstract name: no file remains.
        sock.listen(_BACKLOG)
        return [sock]
    except OSError as error:
        sock.close()
        _log.warning("no Unix socket for %s: %s", address, error)
        return []


@dataclass(eq=False, slots=True)
class _Pending:
    """A connection whose handshake is not finished."""

    sock: socket.socket
    peer: str
    exchange: handshake.Handshake
    deadline: float
    refusal: object = None  # Why it was refused, until the peer has had time to read it.


class Listener:
    """Accepts connections, and passes on those whose peers prove that they know the secret.

    The listener's thread calls `on_peer` with the socket, which the callee then owns, and with the
    outcome of the handshake. If a peer fails, it calls `on_refusal` with the reason. Neither may
    block.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        credentials: Credentials,
        hello: handshake.Hello,
        on_peer: Callable[[socket.socket, handshake.Accepted], None],
        *,
        check: handshake.Check = lambda hello: "",
        on_refusal: Callable[[object], None] = lambda reason: None,
    ) -> None:
        self._on_peer, self._on_refusal = on_peer, on_refusal
        # At most an eighth of the descriptors, so the job keeps the others.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(4, min(MAXIMUM_HANDSHAKES, files // 8))
        self._logged, self._unlogged = -_SECONDS_BETWEEN_RECORDS, 0
        self._pending: dict[socket.socket, _Pending] = {}  # The oldest first.
        self._closing = False
        with contextlib.ExitStack() as on_error:
            for sock in sockets:
                on_error.enter_context(sock)
            signed = handshake.signed(hello, credentials.job)
            self._steps = functools.partial(handshake.accept, credentials.secret, signed, check)
            self._tls = tls_context(credentials.tls, server=True) if credentials.tls else None
            self._selector = on_error.enter_context(selectors.DefaultSelector())
            self._waker, woken = map(on_error.enter_context, socket.socketpair())
            self._sockets = [*sockets, self._waker, woken]
            for sock in sockets:
                sock.setblocking(False)
                accept = functools.partial(self._accept, sock)
                self._selector.register(sock, selectors.EVENT_READ, accept)
            self._selector.register(woken, selectors.EVENT_READ, lambda: None)
            name = "ndistribute listener"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
            on_error.pop_all()
        not_for_forks.add(self)

    def close(self) -> None:
        """Stop listening, and close unauthenticated connections; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        if self._thread is not threading.current_thread():  # Otherwise a callback called this.
            self._thread.join(timeout=5.0)
        if self._unlogged:
            _log.warning("refused connections (%d more since the last record)", self._unlogged)

    def let_go(self) -> None:
        """Close all sockets: at the end, or the copies that a forked child inherits."""
        self._closing = True
        self._selector.close()
        for sock in (*self._pending, *self._sockets):
            sock.close()

    def _run(self) -> None:
        late = f"it did not finish the handshake in {HANDSHAKE_SECONDS:g} s"
        try:
            while not self._closing:
                first = min((each.deadline for each in self._pending.values()), default=None)
                wait = None if first is None else max(0.0, first - time.monotonic())
                for key, _ in self._selector.select(wait):
                    key.data()
                now = time.monotonic()
                for pending in [each for each in self._pending.values() if each.deadline <= now]:
                    self._drop(pending, late)
        except Exception:
            _log.exception("the listener failed: nobody else can connect")
        finally:
            self.let_go()

    def _accept(self, listener: socket.socket) -> None:
        if len(self._pending) >= self._most and not self._drop_oldest():
            time.sleep(_SAFE_SECONDS / 10)  # All handshakes have just begun.
            return
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # The peer closed the connection before it was accepted.
        except OSError as error:  # Without a free descriptor, the peer waits in the backlog.
            self._log_refusal("somebody", f"{error}; raise `ulimit -n`")
            time.sleep(_SAFE_SECONDS / 10)
            return
        peer = name_of_peer(sock)
        try:
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                if not is_of_this_user(sock):
                    raise PermissionError("it is another user's, but only this user may connect")
            elif self._tls is not None:
                # The first use of the socket runs the TLS handshake.
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            exchange = handshake.Handshake(self._steps(peer))
            pending = _Pending(sock, peer, exchange, time.monotonic() + HANDSHAKE_SECONDS)
            advance = functools.partial(self._advance, pending)
            self._selector.register(sock, selectors.EVENT_READ, advance)
            self._pending[sock] = pending
        except OSError as error:  # The limit on watched files is reached, or the peer has left.
            self._log_refusal(peer, error)
            sock.close()

    def _drop_oldest(self) -> bool:
        """Drop the oldest connection, a refused one first; return False if all are new."""
        latest = time.monotonic() + HANDSHAKE_SECONDS - _SAFE_SECONDS
        old = [each for each in self._pending.values() if each.deadline < latest]
        if old:
            oldest = min(old, key=lambda each: each.refusal is None)
            self._drop(oldest, "too many connections wait, and it is the oldest")
        return bool(old)

    def _advance(self, pending: _Pending) -> None:
        if pending.sock not in self._pending:  # An earlier event has dropped it.
            return
        try:
            if pending.refusal is not None:
                if not socket.socket.recv(pending.sock, 4096):  # Without TLS, which has ended.
                    self._drop(pending, pending.refusal)
                return
            accepted = pending.exchange.advance(pending.sock)
        except handshake.WOULD_BLOCK:
            return
        except ssl.SSLError as error:
            self._refuse(pending, handshake.tls_error(pending.peer, error), _ALERT)
            return
        except Exception as error:
            # An error of one peer must end only this peer's connection.
            self._refuse(pending, error)
            return
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock]
        try:
            self._on_peer(pending.sock, accepted)
        except Exception as error:
            pending.sock.close()
            _log.error("%s could not be served: %s", accepted.hello.name or pending.peer, error)

    def _refuse(self, pending: _Pending, reason: object, last_words: bytes = b"") -> None:
        """Drop a connection once its peer had time to read the reason."""
        pending.refusal = pending.refusal or reason
        if isinstance(reason, AuthenticationError):
            self._on_refusal(reason)
        pending.deadline = time.monotonic() + _LINGER_SECONDS
        try:
            socket.socket.send(pending.sock, last_words)  # Outside TLS.
            socket.socket.shutdown(pending.sock, socket.SHUT_WR)
        except OSError:
            self._drop(pending, reason)

    def _drop(self, pending: _Pending, reason: object) -> None:
        del self._pending[pending.sock]
        self._selector.unregister(pending.sock)
        why = pending.refusal or reason
        if isinstance(why, ConnectionError):  # The peer left, perhaps to use a Unix socket.
            _log.debug("a connection from %s ended: %s", pending.peer, f"{why}")
        else:
            self._log_refusal(pending.peer, why)
        pending.sock.close()

    def _log_refusal(self, peer: str, reason: object) -> None:
        """Log a refused connection, or count it if one was logged within the last second."""
        now = time.monotonic()
        if now - self._logged < _SECONDS_BETWEEN_RECORDS:
            self._unlogged += 1
            return
        before = f" ({self._unlogged} more since the last record)" if self._unlogged else ""
        self._logged, self._unlogged = now, 0
        _log.warning("refused a connection from %s%s: %s", peer, before, reason)
