"""A server in this very process, without sockets: the same calls, carried by function calls."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from ndistribute.cluster.serving.desk import StoreDesk
from ndistribute.cluster.store import Store
from ndistribute.cluster.wire.client import Client
from ndistribute.cluster.wire.guard import INTRODUCTIONS, Guard
from ndistribute.cluster.wire.service import Door, Service
from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.transfers import Limits
from ndistribute.cluster.wire.transport import UnreachableError

__all__ = ["LocalServer", "LocalTransport", "connect_local"]


class LocalServer:
    """Serve a store to clients of this process.

    Args:
        store: what holds the variables; None: a new one.
        limits: what clients can make the server hold.

    >>> from ndistribute.cluster.protocol.requests import ReadStep
    >>> with LocalServer() as server, server.connect("worker:0") as client:
    ...     client.request(ReadStep())
    Step(value=0)
    """

    def __init__(self, store: Store | None = None, limits: Limits | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._limits = limits or Limits()
        desk = StoreDesk(store or Store(), self._limits.message_bytes)
        self._service = Service(Guard(self._secret), desk, self._limits)

    def connect(self, name: str, timeout: float = 60.0) -> Client:
        """Return a client, under a name that no other client has."""
        transport = LocalTransport(self._service)
        return Client(transport, self._secret, name, timeout=timeout, limits=self._limits)

    def close(self) -> None:
        """Send away who waits; a second call does nothing."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect_local(store: Store | None = None, name: str = "local") -> Client:
    """Return the only client of a store in this process.

    Args:
        store: what holds the variables; None: a new one.
        name: the client's.
    """
    secret = secrets.token_bytes(32)
    service = Service(Guard(secret), StoreDesk(store or Store()))
    return Client(LocalTransport(service, owned=True), secret, name)


class LocalTransport:
    """Carry calls to a service of this process.

    Args:
        service: what answers.
        owned: whether to close it at the end.
    """

    def __init__(self, service: Service, *, owned: bool = False) -> None:
        self.address = "this process"
        self.part_bytes = service.limits.message_bytes
        self._door = Door(self.part_bytes, shares_threads=False)
        self._service = service
        self._owned = owned
        self._closed = threading.Event()

    def call(self, method: str, token: bytes, body: Sequence[Buffer], timeout: float) -> Buffer:
        """Make a call; what it carries is copied, as if it had travelled."""
        if self._closed.is_set():
            raise UnreachableError("The transport is closed.")
        if method in INTRODUCTIONS:
            return self._service.guard.introduce(method, token)
        session, number = self._service.guard.admit(method, token)
        whole = b"".join(body)
        return b"".join(self._service.run(session, method, number, whole, timeout, self._door))

    def start(self, method: str, token: bytes, body: Sequence[Buffer], timeout: float) -> _Answered:
        """Make a call, and keep its outcome."""
        try:
            return _Answered(self.call(method, token, body, timeout))
        except Exception as error:
            return _Answered(error=error)

    def stay(self, token: bytes, body: Sequence[Buffer], ended: Callable[[], None]) -> _Answered:
        """Do nothing: the server ends with its client."""
        return _Answered()

    def close(self) -> None:
        """Carry nothing any more."""
        self._closed.set()
        if self._owned:
            self._service.close()


class _Answered:
    """Hold the outcome of a call."""

    def __init__(self, body: Buffer = b"", error: Exception | None = None) -> None:
        self._body, self._error = body, error

    def result(self, timeout: float) -> Buffer:
        if self._error is not None:
            raise self._error
        return self._body

    def has_ended(self) -> bool:
        return False

    def cancel(self) -> None:
        pass
