"""The ON_WRITE kind whose value lies on a parameter server.

Each process keeps a copy, which it brings up to date when it reads; a write is a change that the
server makes. Where a process is sent a variable it gets a handle on the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array, to_host
from ndistribute.parameter_server.messages import Change, Item, Update
from ndistribute.variables.copies import LocalCopy
from ndistribute.variables.policy import VariablePolicy
from ndistribute.variables.served import ServedVariable
from ndistribute.variables.write import Write

__all__ = ["RemoteVariable", "attached"]


class RemoteVariable(ServedVariable):
    """Keep one value on a server.

    A counter lies on several: it is written on all and read from the first.
    """

    @classmethod
    def make_at(
        cls,
        strategy: Any,
        array: Array,
        policy: VariablePolicy,
        server_name: str,
        servers: Sequence[int],
    ) -> RemoteVariable:
        """Make a variable where it is told, unless it is there; the value of the first stays.

        Args:
            strategy: whose servers hold it.
            array: the initial value.
            policy: of the variable.
            server_name: what it is called on its servers; no other variable there is.
            servers: their numbers.

        Raises:
            ValueError: there is one of another shape or dtype.
        """
        made = cls._attach(strategy, array, policy, server_name, servers)
        host = to_host(array)
        try:
            strategy.servers.create({i: [(server_name, host)] for i in made.servers})
        except ValueError as error:
            raise ValueError(
                f"{error} All workers must create the same variables in the same order."
            ) from error
        return made

    @classmethod
    def _attach(
        cls,
        strategy: Any,
        like: Array,
        policy: VariablePolicy,
        server_name: str,
        servers: Sequence[int],
    ) -> RemoteVariable:
        """Make a handle on a variable that is, or will be, on its servers."""
        made = object.__new__(cls)
        made._set_up(strategy, like, policy)
        made._server_name = server_name
        made._servers = tuple(servers)
        made._copy = LocalCopy(server_name, made._servers[0])
        strategy.handles[server_name] = made
        return made

    @classmethod
    def make(cls, strategy: Any, array: Array, policy: VariablePolicy) -> RemoteVariable:
        """Make a variable on the server whose turn it is."""
        name, server = strategy.place(policy.name)
        return cls.make_at(strategy, array, policy, name, (server,))

    _server_name: str
    _servers: tuple[int, ...]
    _copy: LocalCopy

    @property
    def server_name(self) -> str:
        """Return what the variable is called on its servers."""
        return self._server_name

    @property
    def servers(self) -> tuple[int, ...]:
        """Return the numbers of the servers that hold the variable."""
        return self._servers

    @property
    def local_copy(self) -> LocalCopy:
        """Return what this process holds of it."""
        return self._copy

    @property
    def variables(self) -> tuple[RemoteVariable, ...]:
        """Return this variable: it lies in one piece."""
        return (self,)

    def read_rows(self, rows: Array) -> Array:
        """Return rows from the server, as they are now, without fetching the others."""
        server, item = self._servers[0], Item(self._server_name, rows=rows)
        found = self._strategy.servers.read({server: [item]})[server]
        self._copy.saw(found.versions[0])
        part: Array = found.arrays[0]
        return part

    def changes_of(self, write: Write) -> dict[int, list[Change]]:
        """Return what a write changes on which server."""
        how: Any = write.how
        if write.sparse:
            indices, values = to_host(write.value.indices), to_host(write.value.values)
            change = Update(self._server_name, how, values, indices)
        else:
            change = Update(self._server_name, how, to_host(write.value))
        return {server: [change] for server in self._servers}

    def parts_of(self, gradient: Any) -> list[tuple[RemoteVariable, Any]]:
        """Return the variables of which this one consists, each with its part of a gradient."""
        return [(self, gradient)]

    def beside(self, label: str, value: float, policy: VariablePolicy) -> RemoteVariable:
        """Make a variable of the same shape and dtype where this one lies, unless it is there."""
        array = np.broadcast_to(np.array(value, self.dtype), self.shape)
        name = f"{self._server_name}/{label}"
        return RemoteVariable.make_at(self._strategy, array, policy, name, self._servers)

    def _fetched(self, *, in_step: bool) -> tuple[Array, Any]:
        found: list[tuple[Array, Any]] = self._strategy.copies.read([self._copy], in_step=in_step)
        return found[0]

    def __reduce__(self) -> Any:
        like = (self.shape, self.dtype)
        return attached, (self._strategy, *like, self._policy, self._server_name, self._servers)


def attached(
    strategy: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    policy: VariablePolicy,
    server_name: str,
    servers: tuple[int, ...],
) -> RemoteVariable:
    """Return this process's handle on a variable that another process sent."""
    found: RemoteVariable | None = strategy.handles.get(server_name)
    if found is not None:
        return found
    like = np.broadcast_to(np.zeros((), dtype), shape)
    return RemoteVariable._attach(strategy, like, policy, server_name, servers)
