"""Requests and replies over connections: a client that survives server restarts, and a server.

Calls are numbered, so the threads of a client share a connection, and replies may arrive in any
order. The first thread that waits for a reply reads from the connection, for the other threads too,
so a call on an idle connection needs no thread switch. The server has one thread per connection,
which reads a request, calls the service, and sends the reply.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ndistribute import errors
from ndistribute.transport.codec import Decoder, MalformedError, Record
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.failure_detector import FORKED, detector, silence_seconds
from ndistribute.transport.failures import Failure, error_of, failure_of
from ndistribute.transport.handshake import Accepted, Hello
from ndistribute.transport.listener import Listener, listen, listen_unix
from ndistribute.transport.secret import Credentials
from ndistribute.transport.waiting import FIRST_SECONDS, WaitReport

_PAUSES = (0.01, 0.02, 0.05, 0.1)  # Seconds between attempts to connect; the last one repeats.
_RESTORE_SECONDS = 5.0
_LEAST_SECONDS = 1.0  # For an attempt to connect.
_MOST_CONNECTIONS = 4096
_UNEXPECTED = {"": errors.DistributeError}
_log = logging.getLogger("ndistribute")


class Call:
    """A pending call, as `Client.start` returns it."""

    def __init__(self, client: Client, request: Record, deadline: float) -> None:
        self._client, self._request = client, request
        self._begun, self.deadline = time.monotonic(), deadline
        self._connect_until = min(deadline, self._begun + FIRST_SECONDS)  # Until a report is due.
        self.reply: Any = None
        self.connection: Connection
        self._number = 0
        self._problem: Exception | None = None  # The reason to send the request again.
        self._report: WaitReport | None = None  # Set once the request must be sent again.
        self._try(self._send)

    def result(self, until: float = float("inf")) -> Any:
        """Return the reply, as `Client.call` does, or None if it has not arrived by `until`."""
        pauses = iter(_PAUSES)
        while self.reply is None:
            if time.monotonic() > until:
                return None
            if self._problem is None:
                self._try(functools.partial(self._client._receive, self, until))
            else:
                self._again(next(pauses, _PAUSES[-1]))
        if isinstance(self.reply, Failure) and not self.reply.kind:  # An unexpected exception.
            raise error_of(self.reply, _UNEXPECTED, f"{self._client.title} failed: ")
        return self.reply

    def cancel(self) -> None:
        """Give up the call; its reply is dropped."""
        self._client._pending.pop(self._number, None)

    @property
    def instance(self) -> str:
        return self.connection.peer.instance

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ConnectionLostError as error:
            self._problem = error
            self._client._why = str(error)
        except BaseException as error:
            self.cancel()
            if not isinstance(error, TimeoutError):
                raise
            client, waited = self._client, time.monotonic() - self._begun
            raise errors.CollectiveTimeoutError(
                f"{client.name}: {client.title} did not answer within {waited:.1f} s. It may be "
                "stopped or busy; raise timeout_seconds if it needs longer."
            ) from error

    def _send(self) -> None:
        self.cancel()
        self._number = next(self._client._numbers)
        self.connection = self._client._connected(self._connect_until)
        self._problem = None
        self._client._pending[self._number] = self
        self.connection.send(self._request, self._number, self.deadline)

    def _again(self, pause: float) -> None:
        client, why, now = self._client, f"{self._problem}".rstrip("."), time.monotonic()
        waited, left = now - self._begun, self.deadline - now
        self._report = self._report or WaitReport(client.name.partition("#")[0], self._begun)
        if self._report.tell(f"{client.title} ({why})"):
            client.waits(f"{client.title} ({why})")
        self._connect_until = min(self.deadline, max(self._report.due, now + _LEAST_SECONDS))
        if left > 0 and not client._closing.wait(timeout=min(pause, left)):
            self._try(self._send)
            return
        self.cancel()
        if client._closing.is_set():
            message = f"{client.name} was closed while it asked {client.title}: {why}."
        else:
            message = (
                f"{client.name}: {client.title} was not reached within {waited:.1f} s: {why}. Was "
                "it started, with the same secret, and is the address reachable from here?"
            )
        raise errors.WorkerLostError(message) from self._problem


class Client:
    """Send requests to one server, from any number of threads.

    After a lost connection the client sends a pending request again, so requests must be safe to
    repeat. A server that restarts at its address before the deadline of a call only delays the
    call. The client appends a random suffix to its name, because a restarted process is another
    client. `replies` is the union of the reply classes.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        name: str,
        purpose: str,
        replies: Any,
        audience: str = "",
        timeout: float = 60.0,
    ) -> None:
        self.name = f"{name}#{secrets.token_hex(6)}"
        self.instance = ""
        """The last known instance of the server; empty before the first call."""
        self._address, self._credentials = address, credentials
        self._hello = Hello(name=self.name, purpose=purpose, audience=audience, patience=timeout)
        self.title = f"{audience or 'the server'} at {address}"
        self._kinds: Decoder[Any] = Decoder(replies | Failure)
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._connecting = threading.Lock()
        self._changed = threading.Condition()
        self._receiving: dict[Connection, int] = {}  # The thread that receives.
        self._pending: dict[int, Call] = {}
        self._connection: Connection | None = None
        self._why = "another thread connects to it."  # Or why the last attempt failed.
        self._restoring = False
        self._closing = threading.Event()
        self._process = os.getpid()
        self.beat_within = silence_seconds()
        self.waits: Callable[[str], None] = lambda why: None
        """Called in the thread of a call when it reports that the server is out of reach."""

    def call(self, request: Record, timeout: float | None = None) -> Any:
        """Return the reply of the server; the caller owns its arrays."""
        return self.start(request, timeout).result()

    def start(self, request: Record, timeout: float | None = None) -> Call:
        seconds = self._timeout if timeout is None else timeout
        return Call(self, request, time.monotonic() + seconds)

    def tick(self, now: float, excused: bool) -> None:
        """Reconnect if the connection broke while idle, or the server counts the client as dead."""
        connection = self._connection
        if connection is not None and connection.is_broken and not self._restoring:
            self._restoring = True
            name = f"{self.name} connects again"
            threading.Thread(target=self._restore, name=name, daemon=True).start()

    def _restore(self) -> None:
        try:
            self._connected(time.monotonic() + _RESTORE_SECONDS)
        except errors.AuthenticationError as error:  # Another attempt would fail as well.
            _log.warning("%s does not look for %s again: %s", self.name, self.title, str(error))
            return
        except ConnectionLostError as error:
            self._why = str(error)
            _log.info("%s has not reached %s again: %s", self.name, self.title, str(error))
        self._restoring = False

    def close(self) -> None:
        """Say good-bye to the server; a second call does nothing."""
        self._closing.set()
        if os.getpid() != self._process:
            return  # The parent owns the connection.
        detector.forget(self)
        connection = self._connection  # A thread that is connecting now closes its own connection.
        if connection is not None:
            connection.close()

    def _receive(self, call: Call, until: float) -> None:
        """Wait for a reply: receive it, or wait for the thread that receives."""
        connection, me = call.connection, threading.get_ident()
        try:
            with self._changed:
                while connection in self._receiving and call.reply is None:
                    left = min(call.deadline, until) - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    self._changed.wait(timeout=left)
                if call.reply is not None:
                    return
                self._receiving[connection] = me
            number, reply = connection.receive(call.deadline, until)
            asked = self._pending.pop(number, None)
            if asked is not None:  # Otherwise the call was cancelled.
                asked.reply = reply
        except BaseException as error:
            # A reply for another thread may be lost.
            if self._receiving.get(connection) == me and not isinstance(error, TimeoutError):
                connection.abort("the thread that received was interrupted.")
            if not (isinstance(error, TimeoutError) and until <= time.monotonic() < call.deadline):
                raise
        finally:
            with self._changed:  # An interrupt may come at any point, and other threads wait.
                if self._receiving.get(connection) == me:
                    del self._receiving[connection]
                    self._changed.notify_all()

    def _connected(self, deadline: float) -> Connection:
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ConnectionLostError(self._why)
        try:
            connection = self._connection
            if self._closing.is_set():
                raise ConnectionLostError("the client was closed.")
            if connection is not None:
                if connection.is_open:
                    return connection
                connection.close()
            who = self._address, self._credentials, self._hello, self._kinds
            self._connection = connection = connect(*who, deadline=deadline)
            self.instance = connection.peer.instance
            detector.watch(self)
            if self._closing.is_set():
                detector.forget(self)
                connection.close()
            return connection
        finally:
            self._connecting.release()


class Peer:
    """The client of a connection, for a service."""

    def __init__(self, connection: Connection) -> None:
        self.name, self.purpose = connection.peer.name, connection.peer.purpose
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """Return True until the connection is known to have ended."""
        return self._connection.is_open

    @property
    def patience(self) -> float:
        """Return how long a client that was cut off may take to come back; 0 if it has died."""
        return self._connection.peer.patience if self._connection.was_cut else 0.0

    def send(self, record: Record, call: int = 0) -> None:
        """Send a record, from any thread."""
        try:
            self._connection.send(record, call)
        except (ConnectionLostError, TimeoutError):
            return  # `disconnected` tells the service.


class Service(Protocol):
    """The handler of all connections with one purpose."""

    requests: Any  # The union of the request classes.
    macs: bool  # Whether frames carry a MAC, which unpickling requires.

    def connected(self, peer: Peer) -> None:
        """Called when a client has connected."""

    def handle(self, peer: Peer, call: int, request: Any) -> Record | None:
        """Return the reply to a request, or None if it is sent later or never."""

    def disconnected(self, peer: Peer, died: bool) -> None:
        """Called when a connection has ended; `died` is True if the client did not say good-bye."""


class RpcServer:
    """Accept connections at one address, and serve each of them on a thread of its own.

    The server listens when the constructor returns. `name` is its task, such as ``"ps:0"``;
    `services` maps purposes to services. `connected` and `disconnected` are called for the clients
    of all services, before and after those of the service.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        name: str,
        services: Mapping[str, Service],
        *,
        environ: Mapping[str, str] = os.environ,
        connected: Callable[[Peer], None] = lambda peer: None,
        disconnected: Callable[[Peer, bool], None] = lambda peer, died: None,
    ) -> None:
        self._connected, self._disconnected = connected, disconnected
        self.instance = secrets.token_hex(8)
        self._services: dict[str, tuple[Service, Decoder[Any]]] = {
            purpose: (service, Decoder(service.requests)) for purpose, service in services.items()
        }
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Connection] = {}
        self._closing = False
        self._silence = silence_seconds(environ)
        sock = listen(address, environ)
        self.port: int = sock.getsockname()[1]
        place = f"{address.rpartition(':')[0]}:{self.port}"
        sockets = [*listen_unix(place, environ), sock]
        hello = Hello(name=name, instance=self.instance)
        self._listener = Listener(sockets, credentials, hello, self._on_peer, check=self._refusal)

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and end all connections; a second call does nothing."""
        self._listener.close()
        with self._lock:
            self._closing = True
            threads = dict(self._threads)
        for connection in threads.values():
            connection.abort("the server was stopped.", clean=True)
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _refusal(self, hello: Hello) -> str:
        if hello.purpose not in self._services:
            return f"nothing here answers connections for {hello.purpose!r}."
        if len(self._threads) >= _MOST_CONNECTIONS:
            return f"{_MOST_CONNECTIONS} connections are open, and no more are taken."
        return ""

    def _on_peer(self, sock: socket.socket, accepted: Accepted) -> None:
        service, kinds = self._services[accepted.hello.purpose]
        connection = Connection(sock, accepted, kinds, macs=service.macs, silence=self._silence)
        name = f"ndistribute {connection.peer.name}"
        args = service, connection
        thread = threading.Thread(target=self._serve, args=args, name=name, daemon=True)
        try:
            with self._lock:
                if self._closing:
                    raise OSError("the server was stopped")
                thread.start()
                self._threads[thread] = connection
        except (OSError, RuntimeError) as error:
            connection.abort("it is not served.")
            connection.close()
            raise OSError(f"{error}. If threads are short, raise `ulimit -u`") from error

    def _serve(self, service: Service, connection: Connection) -> None:
        peer, died = Peer(connection), True
        try:
            try:
                self._connected(peer)
                service.connected(peer)
                died = _converse(service, connection, peer)
            finally:
                connection.abort("the conversation ended.")
                died = died and not self._closing
                service.disconnected(peer, died)
                self._disconnected(peer, died)
        except Exception:
            _log.exception("the connection of %s failed", peer.name)
        finally:
            connection.close()
            with self._lock:
                del self._threads[threading.current_thread()]


def _converse(service: Service, connection: Connection, peer: Peer) -> bool:
    """Serve requests until the connection ends; return True if it ended without a good-bye."""
    while True:
        try:
            call, request = connection.receive()
        except ConnectionLostError as error:
            if not error.clean:
                _log.warning("the connection of %s ended: %s", peer.name, str(error))
            return not error.clean
        except MalformedError as error:
            _log.warning("%s sent what no client sends: %s", peer.name, str(error))
            return True
        try:
            reply = service.handle(peer, call, request)
            del request
            if reply is not None:
                peer.send(reply, call)
        except Exception as error:
            _log.exception("a request of %s failed", peer.name)
            peer.send(failure_of(error, {}), call)
        reply = None  # Release the reply's memory while the connection is idle.
