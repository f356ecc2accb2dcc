"""Calls to the servers of tasks, each on a connection of its own while it lasts.

A step must not run twice, so a call is never sent again: a lost connection is an error at once. A
server answers the calls of a connection one after another; calls at the same time use several.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from ndistribute import errors
from ndistribute.errors import InvalidArgumentError, UnavailableError
from ndistribute.graph.messages import Reply
from ndistribute.transport.codec import Decoder, MalformedError
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.failures import Failure
from ndistribute.transport.handshake import Hello
from ndistribute.transport.secret import Credentials

PURPOSE = "graph"
_CONNECT_SECONDS = 10.0
_ENDED = "this process has ended its connections."
_replies: Decoder[Any] = Decoder(Reply)
_open: weakref.WeakSet[Lanes] = weakref.WeakSet()


class Pending:
    """A call without a reply yet; it has a connection for itself."""

    def __init__(self, lanes: Lanes, address: str, connection: Connection) -> None:
        self._lanes, self._address, self._connection = lanes, address, connection
        self._reply: Any = None
        self.instance: str = connection.peer.instance
        """Which start of the server got the call."""

    def result(self, until: float = float("inf")) -> Any:
        """Return the reply, or None if it has not arrived by `until`.

        Raises:
            InvalidArgumentError: the server failed, or its reply is malformed.
            UnavailableError: the connection is lost.
        """
        if self._reply is not None:
            return self._reply
        try:
            _, reply = self._connection.receive(until=until)
        except TimeoutError:
            return None
        except BaseException as error:
            self.cancel()
            if isinstance(error, ConnectionLostError):
                raise self._lanes.unavailable(self._address, error) from error
            if isinstance(error, MalformedError):
                raise InvalidArgumentError(f"the reply of {self._address}: {error}") from error
            raise
        self._reply = reply
        self._lanes.give_back(self._address, self._connection)
        if isinstance(reply, Failure) and not reply.kind:  # An unexpected exception.
            raise InvalidArgumentError(f"the server at {self._address} failed: {reply.message}")
        return reply

    def cancel(self) -> None:
        """Give up the call and its connection."""
        if self._reply is None:
            self._connection.abort("the call was given up.")
            self._connection.close()


class Lanes:
    """The connections of one client to servers: idle ones for the next call, and those in use.

    Args:
        credentials: the secret of the job, and its identity; empty: that of the first server.
        name: the name of this client, ``task#random``.
        tasks: the names of the servers by address, for errors.
    """

    def __init__(
        self, credentials: Credentials, name: str, tasks: Mapping[str, str] | None = None
    ) -> None:
        self.credentials, self._tasks = credentials, tasks or {}
        self._has_met = False
        self._hello = Hello(name=name, purpose=PURPOSE)
        self._lock = threading.Lock()
        self._idle: dict[str, list[Connection]] = {}
        self._one_way: dict[str, Connection] = {}
        self._closed = False
        _open.add(self)

    def start(self, address: str, request: Any, until: float = float("inf")) -> Pending:
        """Send a request whose reply the caller will wait for.

        Raises:
            UnavailableError: the server cannot be reached, or has not read it by `until`.
        """
        while True:
            with self._lock:
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
            fresh = connection is None
            try:
                if connection is None:
                    connection = self._connected(address, until)
                else:
                    _check_open(connection)
                connection.send(request, deadline=until)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if not isinstance(error, ConnectionLostError | TimeoutError):
                    raise
                if fresh or time.monotonic() > until:
                    raise self.unavailable(address, error) from error
                continue  # An idle connection broke meanwhile, and nothing was executed.
            return Pending(self, address, connection)

    def call(self, address: str, request: Any, timeout: float = float("inf")) -> Any:
        """Return the reply to a request.

        Raises:
            InvalidArgumentError: the server failed.
            UnavailableError: the server cannot be reached, or does not answer in time.
        """
        until = time.monotonic() + timeout
        pending = self.start(address, request, until)
        reply = pending.result(until)
        if reply is None:
            pending.cancel()
            raise self.unavailable(address, f"it did not answer within {timeout:g} s")
        return reply

    def tell(self, address: str, *requests: Any, until: float = float("inf")) -> None:
        """Send requests that have no reply, those to a server in order; at least connect to it.

        Raises:
            UnavailableError: the server cannot be reached, or has not read them by `until`.
        """
        try:
            connection = self._one_way_to(address, until)
            for request in requests:
                connection.send(request, deadline=until)
        except (ConnectionLostError, TimeoutError) as error:
            raise self.unavailable(address, error) from error

    def give_back(self, address: str, connection: Connection) -> None:
        """Keep a connection for the next call."""
        with self._lock:
            if not self._closed:
                self._idle.setdefault(address, []).append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Say good-bye to all servers; a second call does nothing."""
        with self._lock:
            self._closed = True
            connections = [one for idle in self._idle.values() for one in idle]
            connections += self._one_way.values()
            self._idle, self._one_way = {}, {}
        for connection in connections:
            with contextlib.suppress(OSError, errors.DistributeError):
                connection.close()

    def unavailable(self, address: str, why: object) -> UnavailableError:
        """Return the error for a server that cannot be reached."""
        task = self._tasks.get(address)
        return UnavailableError(
            f"{task or 'the server'} at {address} cannot be reached: {str(why).rstrip('.')}. A new "
            "session can go on once it is back.",
            task=task,
        )

    def _one_way_to(self, address: str, until: float) -> Connection:
        connection = self._one_way.get(address)
        if connection is not None:
            with contextlib.suppress(ConnectionLostError):
                _check_open(connection)
                return connection
        made = self._connected(address, until)
        with self._lock:
            current = self._one_way.get(address)
            if not self._closed and (current is None or not current.is_open):
                self._one_way[address], current, made = made, made, current
        if made is not None:
            made.close()
        if current is None:
            raise ConnectionLostError(_ENDED)
        return current

    def _connected(self, address: str, until: float) -> Connection:
        if self._closed:
            raise ConnectionLostError(_ENDED)
        deadline = min(until, time.monotonic() + _CONNECT_SECONDS)
        try:
            made = connect(address, self.credentials, self._hello, _replies, deadline=deadline)
        except errors.AuthenticationError as error:
            if not self._has_met:
                raise
            raise ConnectionLostError(str(error)) from error  # Another job's server took over.
        self._has_met, job = True, self.credentials.job or made.peer.job
        self.credentials = dataclasses.replace(self.credentials, job=job)
        return made


def _check_open(connection: Connection) -> None:
    """Raise an error if the server has ended: over TCP, a first message to it would be lost."""
    with contextlib.suppress(TimeoutError):
        connection.receive(until=0.0)


@atexit.register
def _close_all() -> None:
    # A process that ends without a good-bye counts as one that died.
    for lanes in list(_open):
        lanes.close()
