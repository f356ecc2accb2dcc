"""The clients that a session or a task has of the servers of its cluster.

A step must not run twice, so a request is never sent again: a lost connection is an error at once.
"""

from __future__ import annotations

import atexit
import dataclasses
import weakref
from collections.abc import Mapping

from ndistribute.errors import AuthenticationError, InvalidArgumentError, UnavailableError
from ndistribute.graph.requests import Reply
from ndistribute.transport.connection import Connection, ConnectionLostError
from ndistribute.transport.rpc import Client
from ndistribute.transport.secret import Credentials

_open: weakref.WeakSet[ClientPool] = weakref.WeakSet()


class ClientPool:
    """The clients of servers, by address.

    Args:
        credentials: the secret and the identity of the job; an empty identity means that of the
            first server.
        name: the name of these clients, ``job:index``.
        tasks: the names of the servers by address, for errors.
    """

    def __init__(
        self, credentials: Credentials, name: str, tasks: Mapping[str, str] | None = None
    ) -> None:
        self.credentials, self.name, self.tasks = credentials, name, tasks or {}
        self.has_met = False
        """Whether a server has proved that it belongs to the job."""
        self._clients: dict[str, TaskClient] = {}
        self._is_closed = False
        _open.add(self)

    def client(self, address: str) -> TaskClient:
        """Return the client of a server."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients.setdefault(address, TaskClient(self, address))
            if self._is_closed:
                client.close()
        return client

    def close(self) -> None:
        """Close the connections to all servers; a second call does nothing."""
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()


class TaskClient(Client):
    """The client of a server of graphs; it raises the errors of operations."""

    failed = InvalidArgumentError

    def __init__(self, pool: ClientPool, address: str) -> None:
        super().__init__(
            address,
            pool.credentials,
            name=pool.name,
            purpose="graph",
            replies=Reply,
            timeout=float("inf"),
            repeats=False,
        )
        self._pool = pool

    def lost(self, why: object) -> UnavailableError:
        """Return the error for a server that cannot be reached."""
        task = self._pool.tasks.get(self.address)
        return UnavailableError(
            f"{task or 'the server'} at {self.address} cannot be reached: {str(why).rstrip('.')}. "
            "A new session can continue when the task runs again.",
            task=task,
        )

    def _connect(self, deadline: float) -> Connection:
        pool = self._pool
        self.credentials = pool.credentials
        try:
            connection = super()._connect(deadline)
        except AuthenticationError as error:
            if not pool.has_met:
                raise
            raise ConnectionLostError(str(error)) from error  # Another job's server took over.
        pool.has_met, job = True, pool.credentials.job or connection.peer.job
        pool.credentials = dataclasses.replace(pool.credentials, job=job)
        return connection


@atexit.register
def _close_all() -> None:
    # A process that ends without a good-bye counts as one that died.
    for pool in list(_open):
        pool.close()
