"""A parameter server in this very process: the same requests, as function calls."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from ndistribute.errors import CollectiveTimeoutError, WorkerLostError
from ndistribute.parameter_server.store import Answers, Store

__all__ = ["LocalServer"]


class LocalServer:
    """Serve a store to clients of this process."""

    def __init__(self) -> None:
        self.store = Store()
        self.lock = threading.Lock()
        self.instance = secrets.token_hex(8)

    def connect(self, name: str) -> _Client:
        """Return a client, under a name that no other client has."""
        return _Client(self, name)


class _Client:
    """Carry requests to a server of this process."""

    def __init__(self, server: LocalServer, name: str) -> None:
        self.name = name
        self.instance = server.instance
        self._server = server
        self._closed = False

    def start(self, request: Any, timeout: float | None) -> _Call:
        if self._closed:
            raise WorkerLostError(f"{self.name} was closed.")
        call = _Call(self, timeout)
        with self._server.lock:
            _deliver(self._server.store.handle(self.name, call, request))
        return call

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with self._server.lock:
                _deliver(self._server.store.left(self.name))


class _Call:
    """A request that may have to wait for what other threads do."""

    def __init__(self, client: _Client, timeout: float | None) -> None:
        self.instance = client.instance
        self.arrived = threading.Event()
        self.reply: Any = None
        self._name, self._timeout = client.name, timeout

    def result(self) -> Any:
        if not self.arrived.wait(timeout=self._timeout):
            raise CollectiveTimeoutError(
                f"{self._name}: the server in this process did not answer within "
                f"{self._timeout:g} s."
            )
        return self.reply

    def cancel(self) -> None:
        """Wait no more."""


def _deliver(answers: Answers) -> None:
    for call, reply in answers:
        call.reply = reply
        call.arrived.set()
