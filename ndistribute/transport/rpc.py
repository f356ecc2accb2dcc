"""Requests and replies over connections: a client that survives server restarts, and a server.

Each call uses a connection alone, an idle or a new one. The caller's thread reads the reply, so the
client switches no threads. Calls are numbered, so a late reply to an abandoned call is not mistaken
for the reply to another call. The server has one thread per connection, which reads a request,
calls the service, and sends the reply.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ndistribute import errors
from ndistribute.timers import Attempts
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
_LEAST_SECONDS = 1.0  # The least time for an attempt to connect.
_MOST_CONNECTIONS = 4096
_log = logging.getLogger("ndistribute")


class PendingCall:
    """A request that was sent once; it uses a connection alone until its reply."""

    connection: Connection

    def __init__(self, client: Client, request: Record, until: float) -> None:
        self._client, self._request, self._number = client, request, 0
        self.reply: Any = None
        try:
            self._send(min(until, time.monotonic() + client.connect_seconds), until)
        except (ConnectionLostError, TimeoutError) as error:
            raise client.lost(error) from error

    @property
    def instance(self) -> str:
        """Return the instance of the server that got the request."""
        return self.connection.peer.instance

    def result(self, until: float = float("inf")) -> Any:
        """Return the reply, or None if it has not arrived by `until`."""
        try:
            if self.reply is None:
                self._receive(float("inf"), until)
            return self._checked_reply()
        except TimeoutError:
            return None
        except BaseException as error:
            self.cancel()
            if isinstance(error, ConnectionLostError):
                raise self._client.lost(error) from error
            if isinstance(error, MalformedError):
                why = f"the reply of {self._client.address}: {error}"
                raise self._client.failed(why) from error
            raise

    def _checked_reply(self) -> Any:
        if isinstance(self.reply, Failure) and not self.reply.kind:  # An unexpected exception.
            unexpected = {"": self._client.failed}
            raise error_of(self.reply, unexpected, f"{self._client.title} failed: ")
        return self.reply

    def cancel(self) -> None:
        """Abandon the call, and end its connection to tell the server."""
        if self.reply is None:
            self.connection.abort("the call was given up.")
            self._client.give_back(self.connection)

    def _send(self, connect_until: float, deadline: float) -> None:
        is_new = False
        while not is_new:
            self.connection, is_new = self._client.take(connect_until)
            self._number = next(self._client.numbers)
            try:
                self.connection.send(self._request, self._number, deadline)
                return
            except BaseException as error:
                self._client.give_back(self.connection)
                # An idle connection that broke meanwhile did not deliver the request.
                if is_new or not isinstance(error, ConnectionLostError):
                    raise

    def _receive(self, deadline: float, until: float) -> None:
        number = None
        while number != self._number:  # Skip replies to abandoned calls.
            number, reply = self.connection.receive(deadline, until)
        self.reply = reply
        self._client.give_back(self.connection)


class RepeatedCall(PendingCall):
    """A request that is sent again after each loss of the connection, until a deadline."""

    def __init__(self, client: Client, request: Record, deadline: float) -> None:
        self._client, self._request, self._number = client, request, 0
        self._begun, self._deadline = time.monotonic(), deadline
        self._connect_until = min(deadline, self._begun + FIRST_SECONDS)  # Until a report is due.
        self.reply = None
        self._attempts = Attempts(deadline, *_PAUSES, wait=client.closing.wait)
        next(self._attempts)
        self._is_pending = False  # Whether it has a connection.
        self._problem: Exception | None = None  # The reason to send the request again.
        self._report: WaitReport | None = None  # Set once the request must be sent again.
        self._try(self._send_once)

    def result(self, until: float = float("inf")) -> Any:
        while self.reply is None:
            if time.monotonic() > until:
                return None
            if self._problem is not None:
                self._again()
            elif not self._try(functools.partial(self._receive, self._deadline, until), until):
                return None
        return self._checked_reply()

    def cancel(self) -> None:
        """Abandon the call, and drop its reply."""
        if self._is_pending and self.reply is None:
            self._is_pending = False
            self._client.give_back(self.connection)

    def _try(self, step: Callable[[], None], until: float = float("inf")) -> bool:
        """Take a step; return False if it was not finished by `until`."""
        try:
            step()
        except ConnectionLostError as error:
            self._problem = error
        except BaseException as error:
            is_late = isinstance(error, TimeoutError)
            if is_late and until <= time.monotonic() < self._deadline:
                return False
            self.cancel()
            if not is_late:
                raise
            client, waited = self._client, time.monotonic() - self._begun
            raise errors.CollectiveTimeoutError(
                f"{client.name}: {client.title} did not answer within {waited:.1f} s. It may be "
                "stopped or busy; raise timeout_seconds if it needs longer."
            ) from error
        return True

    def _send_once(self) -> None:
        self.cancel()
        self._send(self._connect_until, self._deadline)
        self._problem, self._is_pending = None, True

    def _again(self) -> None:
        client, why, now = self._client, f"{self._problem}".rstrip("."), time.monotonic()
        self._report = self._report or WaitReport(client.name.partition("#")[0], self._begun)
        if self._report.tell(f"{client.title} ({why})"):
            client.waits(f"{client.title} ({why})")
        self._connect_until = min(self._deadline, max(self._report.due, now + _LEAST_SECONDS))
        if next(self._attempts, None) is not None:
            self._try(self._send_once)
            return
        self.cancel()
        if client.closing.is_set():
            message = f"{client.name} was closed while it asked {client.title}: {why}."
        else:
            message = (
                f"{client.name}: {client.title} was not reached within {now - self._begun:.1f} s: "
                f"{why}. Check that it was started with the same secret, and that its address can "
                "be reached from here."
            )
        raise errors.WorkerLostError(message) from self._problem


class Client:
    """Sends requests to one server from any thread; concurrent calls use separate connections.

    If a connection is lost, the client sends a pending request again. So requests must be safe to
    repeat, unless `repeats` is False. A connection counts as lost after `silence` seconds without a
    heartbeat, or after the heartbeat timeout if that is shorter. A server that restarts at its
    address before a call's deadline only delays the call. The client appends a random suffix to its
    name, because a restarted process is another client. `replies` is the union of reply classes.
    """

    failed: type[Exception] = errors.DistributeError
    """The class of the error if the service raised or the reply is malformed."""

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
        repeats: bool = True,
        silence: float = float("inf"),
    ) -> None:
        self.name = f"{name}#{secrets.token_hex(6)}"
        self.instance = ""
        """The last known instance of the server; empty before the first call."""
        self.address, self.credentials = address, credentials
        patience = timeout if repeats else 0.0
        self._hello = Hello(
            self.name, purpose, audience=audience, patience=patience, silence=silence
        )
        self.connect_seconds = silence / 2
        """The longest time to connect for a call that is not repeated."""
        self.title = f"{audience or 'the server'} at {address}"
        self._kinds: Decoder[Any] = Decoder(replies | Failure)
        self._timeout, self._repeats = timeout, repeats
        self.numbers = itertools.count(1)
        # Threads use these without a lock, which a finalizer that closes the client might need.
        self._idle: list[Connection] = []
        self._in_use: set[Connection] = set()
        self._one_way: Connection | None = None
        self._connecting = threading.Lock()  # Held while the one for `send_one_way` is replaced.
        self._restoring = False
        self.closing = threading.Event()
        self._process = os.getpid()
        self.beat_within = min(silence, silence_seconds())
        self.waits: Callable[[str], None] = lambda why: None
        """Called on the thread of a call that reports that the server is out of reach."""

    def call(self, request: Record, timeout: float | None = None) -> Any:
        """Return the reply of the server; the caller owns its arrays."""
        seconds = self._timeout if timeout is None else timeout
        call = self.start(request, seconds)
        if self._repeats:
            return call.result()
        reply = call.result(time.monotonic() + seconds)
        if reply is None:
            call.cancel()
            raise self.lost(f"it did not answer within {seconds:g} s")
        return reply

    def start(self, request: Record, timeout: float | None = None) -> PendingCall:
        """Send a request, whose reply the caller will wait for."""
        seconds = self._timeout if timeout is None else timeout
        kind = RepeatedCall if self._repeats else PendingCall
        return kind(self, request, time.monotonic() + seconds)

    def send_one_way(self, *requests: Record, until: float = float("inf")) -> None:
        """Send requests without replies, in order, on a separate connection; or only connect it."""
        try:
            connection = self._one_way
            if connection is None or not self._is_usable(connection):
                with self._connecting:
                    connection = lost = self._one_way
                    if connection is None or not connection.is_open:
                        connection = self._one_way = self._connect(until)
                        if lost is not None:
                            lost.close()
            for request in requests:
                connection.send(request, deadline=until)
        except (ConnectionLostError, TimeoutError) as error:
            raise self.lost(error) from error

    def lost(self, why: object) -> Exception:
        """Return the error for an unanswered request that may not be repeated."""
        return errors.WorkerLostError(f"{self.title} cannot be reached: {str(why).rstrip('.')}.")

    def take(self, until: float) -> tuple[Connection, bool]:
        """Return a connection for one call, and whether it is new."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # Another thread took the last one.
                break
            self._in_use.add(connection)
            if self._is_usable(connection) and not self.closing.is_set():
                return connection, False
            self.give_back(connection)
        connection = self._connect(until)
        self._in_use.add(connection)
        if self.closing.is_set() and self._repeats:
            detector.forget(self)
            connection.close()
        return connection, True

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next call, if it is open."""
        self._in_use.discard(connection)
        if connection.is_open:
            self._idle.append(connection)
            if not self.closing.is_set():
                return
        connection.close()

    def tick(self, now: float, excused: bool) -> None:
        """Reconnect if all connections are lost; otherwise the client would count as dead."""
        connections = [*self._idle, *tuple(self._in_use)]
        is_broken = any(connection.is_broken for connection in connections)
        if is_broken and not (self._restoring or any(each.is_open for each in connections)):
            self._restoring = True
            name = f"{self.name} connects again"
            threading.Thread(target=self._restore, name=name, daemon=True).start()

    def close(self) -> None:
        """Say good-bye to the server; a second call does nothing.

        It also ends the calls of other threads, except those that are not repeated.
        """
        self.closing.set()
        if os.getpid() != self._process:
            return  # The parent owns the connections.
        detector.forget(self)
        connections = [*self._idle, *(tuple(self._in_use) if self._repeats else ())]
        if self._one_way is not None:
            connections.append(self._one_way)
        for connection in connections:
            with contextlib.suppress(OSError, errors.DistributeError):
                connection.close()

    def _is_usable(self, connection: Connection) -> bool:
        if not self._repeats:  # Over TCP, the first message to an ended server is lost.
            try:
                connection.receive(until=0.0)
            except (TimeoutError, ConnectionLostError):
                return connection.is_open
        return connection.is_open

    def _connect(self, deadline: float) -> Connection:
        if self._repeats and os.getpid() != self._process:
            raise RuntimeError(FORKED)
        if self.closing.is_set():
            raise ConnectionLostError("this process has ended its connections.")
        who = self.address, self.credentials, self._hello, self._kinds
        connection = connect(*who, deadline=deadline)
        self.instance = connection.peer.instance
        if self._repeats:
            detector.watch(self)
        return connection

    def _restore(self) -> None:
        try:
            self.give_back(self.take(time.monotonic() + _RESTORE_SECONDS)[0])
        except errors.AuthenticationError as error:  # Another attempt would also fail.
            _log.warning("%s stops connecting to %s: %s", self.name, self.title, str(error))
            return
        except ConnectionLostError as error:
            _log.info("%s could not connect to %s again: %s", self.name, self.title, str(error))
        self._restoring = False


class LocalClient:
    """A client of a service in the same process, and the service's peer; it copies no arrays."""

    instance = "the only one"

    def __init__(self, service: Any, name: str, timeout: float) -> None:
        self.name, self._service, self._timeout = name, service, timeout
        self._closed = False
        service.connected(self)

    def start(self, request: Any) -> LocalCall:
        if self._closed:
            raise errors.WorkerLostError(f"{self.name} was closed.")
        call = LocalCall(self.name, self._timeout)
        reply = self._service.handle(self, call, request)
        if reply is not None:
            self.send(reply, call)
        return call

    def send(self, record: Any, call: Any) -> None:
        call.reply = record
        call.arrived.set()

    def close(self) -> None:
        if not self._closed:  # A finalizer may call this again, even under the service's lock.
            self._closed = True
            self._service.disconnected(self, died=False)


class LocalCall:
    """A pending request that other threads may have to complete."""

    instance = LocalClient.instance

    def __init__(self, name: str, timeout: float) -> None:
        self.arrived = threading.Event()
        self.reply: Any = None
        self._name, self._timeout = name, timeout
        self._deadline = time.monotonic() + timeout

    def result(self, until: float = float("inf")) -> Any:
        """Return the reply, or None if it has not arrived by `until`."""
        left = min(until, self._deadline) - time.monotonic()
        if not self.arrived.wait(timeout=max(0.0, left)) and time.monotonic() > self._deadline:
            why = f"{self._name}: no answer in this process within {self._timeout:g} s."
            raise errors.CollectiveTimeoutError(why)
        return self.reply

    def cancel(self) -> None:
        """Abandon the call."""


class ClientCount:
    """The connected clients of a service, each of which may have several connections."""

    def __init__(self) -> None:
        self._peers: dict[str, set[Any]] = {}

    def add(self, peer: Any) -> None:
        """Count a connection of a client."""
        self._peers.setdefault(peer.name, set()).add(peer)

    def remove(self, peer: Any, died: bool) -> bool:
        """Return True if the client has left: it said good-bye, or lost its last connection."""
        peers = self._peers.get(peer.name, set())
        has_left = peer in peers and (not died or len(peers) == 1)
        peers.discard(peer)
        if has_left:
            del self._peers[peer.name]
        return has_left

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def __iter__(self) -> Iterator[str]:
        return iter(self._peers)


class Peer:
    """The client of a connection, for a service."""

    def __init__(self, connection: Connection) -> None:
        self.name, self.purpose = connection.peer.name, connection.peer.purpose
        self.task = self.name.partition("#")[0]
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """Return True until the connection is known to have ended."""
        return self._connection.is_open

    @property
    def is_waiting(self) -> bool:
        """Return True if the client has not closed its end of the connection."""
        return self.is_open and not self._connection.is_left

    @property
    def patience(self) -> float:
        """Return how long a client that was cut off may take to return; 0 if it has died."""
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
    """Accepts connections at one address, and serves each connection on a separate thread.

    The server listens when the constructor returns. `name` is its task, such as ``"ps:0"``;
    `services` maps purposes to services. `connected` and `disconnected` are called for clients of
    all services: before the service's `connected`, and after its `disconnected`.
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
        self._lost: set[str] = set()  # Tasks whose loss was logged since they last connected.
        self._closing = False
        self._silence = silence_seconds(environ)
        sock = listen(address, environ)
        self.port: int = sock.getsockname()[1]
        sockets = [*listen_unix(f"{address.rpartition(':')[0]}:{self.port}", environ), sock]
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
            return f"this process has no service for {hello.purpose!r}."
        if len(self._threads) >= _MOST_CONNECTIONS:
            return f"{_MOST_CONNECTIONS} connections are open, and no more are accepted."
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
            connection.abort("this process cannot serve it.")
            connection.close()
            raise OSError(f"{error}. If threads are short, raise `ulimit -u`") from error

    def _serve(self, service: Service, connection: Connection) -> None:
        peer, died = Peer(connection), True
        self._lost.discard(peer.task)
        try:
            try:
                self._connected(peer)
                service.connected(peer)
                died = self._converse(service, connection, peer)
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

    def _converse(self, service: Service, connection: Connection, peer: Peer) -> bool:
        """Serve requests until the connection ends; return True if it ended without a good-bye."""
        while True:
            try:
                call, request = connection.receive()
            except ConnectionLostError as error:
                if not error.clean:
                    with self._lock:  # A task may have many connections; other names, many owners.
                        level = logging.DEBUG if peer.task in self._lost else logging.WARNING
                        self._lost |= {peer.task} if ":" in peer.task else set()
                    _log.log(level, "the connection of %s ended: %s", peer.name, str(error))
                return not error.clean
            except MalformedError as error:
                _log.warning("%s sent an invalid message: %s", peer.name, str(error))
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
