"""The ON_WRITE kind with one copy, on the parameter device.

Replicas elsewhere keep what they last fetched, together with its version, and fetch again only
after an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndistribute.device import Array, Device, copy_to
from ndistribute.variables.mirrored import MirroredVariable
from ndistribute.variables.policy import VariablePolicy

__all__ = ["CentralVariable"]


class CentralVariable(MirroredVariable):
    """Keep one value for all replicas, in one place."""

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._version = 0
        self._fetched: dict[int, tuple[int, Array]] = {}

    def _homes(self, devices: Sequence[Device]) -> list[Device]:
        return [self._strategy.parameter_device]

    @property
    def values(self) -> tuple[Array, ...]:
        """Return a snapshot of the one component."""
        return (self._cells[0].read(),)

    def component(self) -> Array:
        """Return a snapshot in this replica's memory."""
        replica = self.replica("read")
        central = self._cells[0].read()
        home = self._devices[0]
        if replica is None or replica.device.memory_space == home.memory_space:
            return central
        rank = replica.local_replica_id
        version, array = self._fetched.get(rank, (-1, central))
        if version != self._version:
            version, array = self._version, copy_to(central, replica.device)
            self._fetched[rank] = (version, array)
        return array

    def begin_update(self) -> list[Array]:
        """Return the one array to change in place."""
        self._version += 1
        return super().begin_update()

    def _apply(self, write: Any) -> None:
        self._version += 1
        super()._apply(write)
