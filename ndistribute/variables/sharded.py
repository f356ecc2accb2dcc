"""One variable in several shards, each on a server: for a table too large, or too busy, for one.

To its users it is a variable like any other; only where its rows lie is decided here. The shards
are variables of their own, which an optimizer updates where they are.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, Device
from ndistribute.parameter_server.messages import Change, Item
from ndistribute.variables.policy import VariablePolicy
from ndistribute.variables.remote import RemoteVariable
from ndistribute.variables.served import ServedVariable
from ndistribute.variables.shards import Shards
from ndistribute.variables.write import Write

__all__ = ["ShardedVariable", "joined"]


class ShardedVariable(ServedVariable):
    """Keep one value in shards of consecutive rows, dealt to the servers.

    A write is whole or not at all: it is checked before any shard changes, and all that it changes
    on one server changes together. What is read from several servers may be of different moments.
    """

    _parts: tuple[RemoteVariable, ...]
    _shards: Shards
    _whole: tuple[Any, Array]

    @classmethod
    def make_sharded(
        cls, strategy: Any, array: Array, policy: VariablePolicy, shards: int
    ) -> ShardedVariable:
        """Make a variable and its shards, which are named after it.

        Args:
            strategy: whose servers hold them.
            array: the initial value, of at least as many rows as there are shards.
            policy: of the variable.
            shards: how many there are.
        """
        parts = [
            RemoteVariable.make(strategy, part, _numbered(policy, k))
            for k, part in enumerate(Shards(tuple(array.shape), shards).cut(array))
        ]
        return joined(strategy, tuple(array.shape), array.dtype, policy, tuple(parts))

    @property
    def variables(self) -> tuple[RemoteVariable, ...]:
        """Return the shards, in the order of the rows."""
        return self._parts

    def read_rows(self, rows: Array) -> Array:
        """Return rows from the shards that have them, as they are now."""
        asked: dict[int, list[Item]] = defaultdict(list)
        places = []
        for portion in self._shards.portions(rows):
            part = self._parts[portion.shard]
            server = part.servers[0]
            places.append((part, server, len(asked[server])))
            asked[server].append(Item(part.server_name, rows=portion.indices))
        if not places:
            return np.empty((0, *self.shape[1:]), self.dtype)
        found = self._strategy.servers.read(asked)
        for part, server, number in places:
            part.local_copy.saw(found[server].versions[number])
        # The rows are rising, and so are the shards.
        return self._shards.join([found[server].arrays[number] for _, server, number in places])

    def changes_of(self, write: Write) -> dict[int, list[Change]]:
        """Return what a write changes on which server."""
        changes: dict[int, list[Change]] = defaultdict(list)
        for part, value in self.parts_of(write.value):
            if not write.sparse or len(value.indices):
                for server, some in part.changes_of(Write(write.how, value)).items():
                    changes[server] += some
        return changes

    def parts_of(self, gradient: Any) -> list[tuple[RemoteVariable, Any]]:
        """Return the shards, each with its part of a gradient, which may be no rows."""
        if isinstance(gradient, IndexedSlices):
            pieces: list[Any] = self._shards.cut_rows(gradient.on(Device("cpu:0")))
        else:
            pieces = self._shards.cut(gradient)
        return list(zip(self._parts, pieces, strict=True))

    def beside(self, label: str, value: float, policy: VariablePolicy) -> ShardedVariable:
        """Make a variable with shards like this one's, beside them, unless it is there."""
        parts = [
            part.beside(label, value, _numbered(policy, k)) for k, part in enumerate(self._parts)
        ]
        return joined(self._strategy, self.shape, self.dtype, policy, tuple(parts))

    def _fetched(self, *, in_step: bool) -> tuple[Array, Any]:
        found = self._strategy.copies.read(
            [part.local_copy for part in self._parts], in_step=in_step
        )
        versions = [version for _, version in found]
        if self._whole[0] != versions:
            whole = self._shards.join([array for array, _ in found])
            whole.flags.writeable = False
            self._whole = (versions, whole)
        return self._whole[1], versions

    def __reduce__(self) -> Any:
        return joined, (self._strategy, self.shape, self.dtype, self._policy, self._parts)


def joined(
    strategy: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    policy: VariablePolicy,
    parts: tuple[RemoteVariable, ...],
) -> ShardedVariable:
    """Return this process's variable of some shards, the same one whenever it is asked for.

    Args:
        strategy: of the shards.
        shape: of the whole.
        dtype: likewise.
        policy: of the variable.
        parts: the shards.
    """
    name = f"{parts[0].server_name} and more"
    found: ShardedVariable | None = strategy.handles.get(name)
    if found is not None:
        return found
    made: ShardedVariable = object.__new__(ShardedVariable)
    made._set_up(strategy, np.broadcast_to(np.zeros((), dtype), shape), policy)
    made._parts = parts
    made._shards = Shards(shape, len(parts))
    made._whole = (None, np.empty(0))
    strategy.handles[name] = made
    return made


def _numbered(policy: VariablePolicy, shard: int) -> VariablePolicy:
    return dataclasses.replace(policy, name=f"{policy.name}/part_{shard}")
