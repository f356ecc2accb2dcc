"""What a process does with a variable whose value lies on servers, whole or in shards.

Reads bring local copies up to date, or fetch the few rows that an index in brackets names: a table
on servers is large, and a step needs the rows of its batch. A tape sees the same as for any other
variable. Writes are changes that the servers make, all of one write together on each server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ndistribute import context
from ndistribute.device import Array, copy_to
from ndistribute.parameter_server.messages import Change
from ndistribute.variables.array_like import ArrayLike
from ndistribute.variables.mirrored import write_once
from ndistribute.variables.policy import VariablePolicy, VariableSynchronization
from ndistribute.variables.row_selection import select_rows
from ndistribute.variables.variable import Variable
from ndistribute.variables.write import Write

if TYPE_CHECKING:
    from ndistribute.variables.remote import RemoteVariable

__all__ = ["ServedVariable"]

# A variable of so few bytes comes whole, with the others of a step: its rows alone would cost a
# message of their own.
_SMALL_BYTES = 1 << 14


class ServedVariable(Variable):
    """Keep one value on servers."""

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._elsewhere: dict[str, tuple[Any, Array]] = {}

    @property
    def variables(self) -> tuple[RemoteVariable, ...]:
        """Return the variables that lie on one server each, in the order of the rows."""
        raise NotImplementedError(f"{type(self).__name__} defines no variables.")

    def parts_of(self, gradient: Any) -> list[tuple[RemoteVariable, Any]]:
        """Return each of `variables` with its part of a gradient, which may be no rows."""
        raise NotImplementedError(f"{type(self).__name__} defines no parts_of.")

    def beside(self, label: str, value: float, policy: VariablePolicy) -> ServedVariable:
        """Make a variable of the same shape and dtype where this one lies, unless it is there.

        Args:
            label: tells it from others beside this one, in its name on the servers.
            value: of all elements, at first.
            policy: of the new variable.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no beside.")

    def read_rows(self, rows: Array) -> Array:
        """Return rows from the servers, as they are now, without fetching the others.

        Args:
            rows: their numbers on the host, rising and each once.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no read_rows.")

    def changes_of(self, write: Write) -> dict[int, list[Change]]:
        """Return what a write changes on which server."""
        raise NotImplementedError(f"{type(self).__name__} defines no changes_of.")

    def _fetched(self, *, in_step: bool) -> tuple[Array, Any]:
        """Return a snapshot on the host, and what is another for each other value."""
        raise NotImplementedError(f"{type(self).__name__} defines no _fetched.")

    @property
    def values(self) -> tuple[Array, ...]:
        """Return a snapshot of the one component."""
        return (self.component(),)

    def component(self) -> Array:
        """Return a snapshot in this replica's memory, of this step or newer."""
        self.replica("read")
        replica = context.current_frame().replica
        host, version = self._fetched(in_step=replica is not None)
        if replica is None or replica.device.kind == "cpu":
            return host
        space = replica.device.memory_space
        known, array = self._elsewhere.get(space, (None, host))
        if known != version:
            array = copy_to(host, replica.device)
            self._elsewhere[space] = (version, array)
        return array

    def __getitem__(self, index: Any) -> Any:
        if not self.ndim or self._is_small or self._strategy.copies.is_final:
            return super().__getitem__(index)
        index = tuple(map(_read, index)) if isinstance(index, tuple) else _read(index)
        selection = select_rows(index, self.shape)
        if selection.rows is None:
            return super().__getitem__(index)
        self.replica("read")
        part = self.read_rows(selection.rows)[selection.rest]
        frame = context.current_frame()
        if frame.replica is not None and frame.replica.device.kind != "cpu":
            part = copy_to(np.asarray(part), frame.replica.device)
        return part if frame.recorder is None else frame.recorder.read_part(self, index, part)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"variable {self.name!r} is a number and has no len().")
        return self.shape[0]

    def __repr__(self) -> str:
        if self._is_small:
            return super().__repr__()
        return f"<{type(self).__name__} {self.name!r} {self.dtype.name}{self.shape} on servers>"

    @property
    def _is_small(self) -> bool:
        return self.size * self.dtype.itemsize <= _SMALL_BYTES

    def _write(self, write: Write) -> None:
        if self.synchronization is VariableSynchronization.ON_READ:
            # Each replica writes for itself, and all write to the one value.
            self.replica("write")
            self._apply(write)
        else:
            write_once(self, write, lambda variable, combined: variable._apply(combined))

    def _apply(self, write: Write) -> None:
        self._strategy.servers.change(self.changes_of(write))
        self._strategy.copies.changed(part.local_copy for part in self.variables)


def _read(item: Any) -> Any:
    return item.component() if isinstance(item, ArrayLike) else item
