"""The ON_WRITE kind: the same value on every replica, one array per memory space.

Replicas that share memory share the array. A write in a replica aggregates over all replicas and
is then applied once to each array, while everyone waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, Device
from ndistribute.errors import CollectiveMismatchError
from ndistribute.variables.cell import Cell
from ndistribute.variables.policy import VariableAggregation, VariablePolicy
from ndistribute.variables.variable import Variable
from ndistribute.variables.write import Write

__all__ = ["MirroredVariable", "write_once"]


class MirroredVariable(Variable):
    """Keep one value for all replicas."""

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._devices = self._homes(strategy.devices)
        spaces = [device.memory_space for device in self._devices]
        self._cells = [Cell(array, device) for device in self._devices]
        self._cell_of = [
            spaces.index(device.memory_space) if device.memory_space in spaces else 0
            for device in strategy.devices
        ]

    def _homes(self, devices: Sequence[Device]) -> list[Device]:
        """Return where the arrays live: on the first device of each memory space."""
        first: dict[str, Device] = {}
        for device in devices:
            first.setdefault(device.memory_space, device)
        return list(first.values())

    def component(self) -> Array:
        """Return a snapshot of this replica's array; across replicas, of the first one's."""
        replica = self.replica("read")
        if replica is None:
            return self._cells[0].read()
        return self._cells[self._cell_of[replica.local_replica_id]].read()

    @property
    def values(self) -> tuple[Array, ...]:
        """Return a snapshot for each replica of this process."""
        return tuple(self._cells[index].read() for index in self._cell_of)

    def home_of(self, replica: int) -> int:
        """Return which of the arrays of `begin_update` a replica of this process updates."""
        return self._cell_of[replica]

    def begin_update(self) -> list[Array]:
        """Return the arrays to change in place, one per memory space.

        Called once for all replicas while they wait; they then change the parts that they own.
        """
        return [cell.writable() for cell in self._cells]

    def _write(self, write: Write) -> None:
        write_once(self, write, lambda variable, combined: variable._apply(combined))

    def _apply(self, write: Write) -> None:
        for cell, device in zip(self._cells, self._devices, strict=True):
            write.apply(cell, device)


V = TypeVar("V", bound=Variable)


def write_once(variable: V, write: Write, apply: Callable[[V, Write], None]) -> None:
    """Carry out a write once for all replicas of this process, aggregated in a replica.

    Args:
        variable: what each replica writes to; all must write to the same.
        write: this replica's.
        apply: carries out the aggregated write, while all wait.

    Raises:
        ValueError: the variable has no aggregation.
        CollectiveMismatchError: replicas write to different variables.
    """
    replica = variable.replica("write")
    if replica is None:
        apply(variable, write)
        return
    communicator = replica.communicator
    communicator.purpose = f"{write.how} to {variable.name!r}"
    try:
        combined = aggregate(variable, communicator, write)
    finally:
        communicator.purpose = ""

    def apply_once(writes: Sequence[tuple[V, Write]]) -> None:
        for rank, (other, _) in enumerate(writes):
            if other is not writes[0][0]:
                _refuse_mixed(write.how, communicator.calls_made, rank, other, writes[0][0])
        apply(*writes[0])

    communicator.merge(write.how, (variable, combined), apply_once)


def aggregate(variable: Variable, communicator: Any, write: Write) -> Write:
    """Combine the replicas' writes into the one that their variable's aggregation makes of them.

    Raises:
        ValueError: the variable has no aggregation.
    """
    policy = variable.aggregation
    if policy is VariableAggregation.NONE:
        raise ValueError(
            f"{write.how} to variable {variable.name!r} inside run: each replica passes its own "
            "value, so the variable needs aggregation='sum', 'mean' or 'only_first_replica' to "
            "say what becomes of them."
        )
    if policy.reduce_op is not None:
        write = write.rows_once()
        return Write(write.how, communicator.all_reduce(policy.reduce_op, write.value))
    if not write.sparse:
        return Write(write.how, communicator.broadcast(write.value, root=0))
    rows: IndexedSlices = write.value
    count = len(rows.indices) if communicator.rank == 0 else 0
    indices, values = communicator.all_gather((rows.indices[:count], rows.values[:count]), axis=0)
    return Write(write.how, IndexedSlices(values, indices, rows.dense_shape))


def _refuse_mixed(how: str, call: int, rank: int, got: Variable, expected: Variable) -> NoReturn:
    raise CollectiveMismatchError(
        f"{how} #{call}: replica {rank} wrote to variable {got.name!r}, replica 0 to "
        f"{expected.name!r}. Every replica must write to the same variables in the same order.",
        rank=rank,
        op=how,
        sequence=call,
    )
