"""The ON_READ kind: each replica has its own value, and reading across replicas combines them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.device import Array, copy_to, device_of
from ndistribute.dtypes import kind_of
from ndistribute.stream import working_on
from ndistribute.values import PerReplica
from ndistribute.variables.array_like import detached
from ndistribute.variables.mirrored import Cell
from ndistribute.variables.policy import VariableAggregation, VariablePolicy
from ndistribute.variables.variable import Variable
from ndistribute.variables.write import Write

__all__ = ["SyncOnReadVariable"]


class SyncOnReadVariable(Variable):
    """Keep one value for each replica."""

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._cells = [Cell(array, device) for device in strategy.devices]

    def component(self) -> Array:
        """Return this replica's own value; across replicas, all of them combined.

        Raises:
            ValueError: read across replicas without an aggregation.
        """
        replica = self.replica("read")
        if replica is not None:
            return self._cells[replica.local_replica_id].read()
        everyone = self._strategy.num_replicas_in_sync
        first_only = self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        if everyone == 1 or (first_only and everyone == len(self._cells)):
            return self._cells[0].read()
        op = self.aggregation.reduce_op
        if op is None and not first_only:
            raise ValueError(
                f"variable {self.name!r} has a value per replica and no aggregation: read it "
                "inside run, take strategy.local_results(variable), or create it with "
                "aggregation='sum', 'mean' or 'only_first_replica'."
            )
        home = self._cells[0].device
        parts = self._strategy.across_workers(PerReplica(self.values)).values
        with working_on(home):
            moved = [copy_to(part, home) for part in (parts[:1] if op is None else parts)]
            total = reduce_arrays(op or ReduceOp.SUM, moved)
        if isinstance(total, np.ndarray):
            total.flags.writeable = False
        return total

    @property
    def values(self) -> tuple[Array, ...]:
        """Return a snapshot of each replica's value."""
        return tuple(detached(cell.read()) for cell in self._cells)

    def _write(self, write: Write) -> None:
        replica = self.replica("write")
        if replica is not None:
            self._cells[replica.local_replica_id].apply(write)
            return
        for context, cell in zip(self._strategy.replica_contexts, self._cells, strict=True):
            cell.apply(self._share(write, context.replica_id_in_sync_group))

    def _share(self, write: Write, replica_id: int) -> Write:
        """Return the part of a cross-replica write that falls to one replica's component.

        With SUM the components must add up to what was written: an assigned float is divided
        evenly, anything that can not be divided goes to the first.
        """
        count = self._strategy.num_replicas_in_sync
        if self.aggregation.reduce_op is not ReduceOp.SUM or count == 1:
            return write
        if write.how == "assign" and kind_of(self.dtype) in "fc":
            return Write(write.how, _map(write.value, lambda array: array / count))
        if replica_id == 0:
            return write
        return Write(write.how, _map(write.value, np.zeros_like))


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(_map(value.values, function), value.indices, value.dense_shape)
    with working_on(device_of(value)):
        return function(value)
