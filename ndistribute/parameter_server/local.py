"""A parameter server in this very process: the same requests, as function calls."""

from __future__ import annotations

import threading
from typing import Any

from ndistribute.errors import CollectiveTimeoutError, WorkerLostError
from ndistribute.parameter_server.server import StoreService


class LocalServer(StoreService):
    """Serve a store to clients of this process, whose arrays it does not adopt."""

    def __init__(self) -> None:
        super().__init__(None, "the server in this process")
        self.store.variables.adopts = False

    def connect(self, name: str) -> _Client:
        """Return a client, under a name that no other client has."""
        return _Client(self, name)


class _Client:
    """Carry requests and replies as a connection would."""

    instance = "the only one"

    def __init__(self, server: LocalServer, name: str) -> None:
        self.name = name
        self._server = server
        self._closed = False
        server.connected(self)

    def start(self, request: Any, timeout: float | None) -> _Call:
        if self._closed:
            raise WorkerLostError(f"{self.name} was closed.")
        call = _Call(self.name, timeout)
        reply = self._server.handle(self, call, request)
        if reply is not None:
            self.send(reply, call)
        return call

    def send(self, record: Any, call: Any) -> None:
        """Take a reply."""
        call.reply = record
        call.arrived.set()

    def close(self) -> None:
        self._closed = True
        self._server.disconnected(self, died=False)


class _Call:
    """A request that may have to wait for what other threads do."""

    instance = _Client.instance

    def __init__(self, name: str, timeout: float | None) -> None:
        self.arrived = threading.Event()
        self.reply: Any = None
        self._name, self._timeout = name, timeout

    def result(self) -> Any:
        if not self.arrived.wait(timeout=self._timeout):
            raise CollectiveTimeoutError(
                f"{self._name}: the server in this process did not answer within "
                f"{self._timeout:g} s."
            )
        return self.reply

    def cancel(self) -> None:
        """Wait no more."""
