"""The ON_WRITE kinds in this process's memory: one value for all replicas.

A mirrored variable has an array in each memory space, which the replicas there share; a central
one has a single array. A write in a replica aggregates over all replicas and is then applied once
to each array, while everyone waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, Device, copy_to, is_gpu_array
from ndistribute.errors import CollectiveMismatchError
from ndistribute.ownership import ArrayOwner
from ndistribute.stream import working_on
from ndistribute.variables.array_like import detached
from ndistribute.variables.policy import VariableAggregation, VariablePolicy
from ndistribute.variables.variable import Variable
from ndistribute.variables.write import Write

__all__ = ["Cell", "CentralVariable", "MirroredVariable", "write_once"]


class Cell(ArrayOwner):
    """Hold an array that readers see as it was when they read it.

    A read hands out a read-only view. While somebody holds one, or a view of it, the next update
    goes into a fresh array, else it happens where the array is.

    Args:
        initial: the value; copied.
        device: in whose memory it lives.

    >>> cell = Cell(np.zeros(2), Device("cpu:0"))
    >>> before = cell.read()
    >>> cell.writable()[...] = 1
    >>> before, cell.read()
    (array([0., 0.]), array([1., 1.]))
    """

    __slots__ = ("_view", "device", "version")

    def __init__(self, initial: Array, device: Device) -> None:
        self.device = device
        self.version = 0
        with working_on(device):
            # The copy owns its memory, so NumPy makes it the base of every view of a view.
            self._hold(copy_to(initial, device).copy(order="C"))

    def read(self) -> Array:
        """Return a snapshot that never changes afterwards, read-only but on a GPU."""
        # Each reader gets a view of its own, for he may set its shape or its flags.
        return self._view.view()

    def writable(self, *, keep: bool = True) -> Array:
        """Return the array to update, a fresh one where a snapshot is still held.

        Args:
            keep: whether the update needs the present values.
        """
        self.version += 1
        if self.is_shared(own_views=1):
            with working_on(self.device):
                needed = keep or is_gpu_array(self.array)
                self._hold(self.array.copy() if needed else np.empty_like(self.array))
        return self.array

    def apply(self, write: Write) -> None:
        """Carry out a checked write."""
        overwritten = write.how == "assign" and not write.sparse
        target = self.writable(keep=not overwritten)
        with working_on(self.device):
            if write.sparse:
                _apply_rows(Write(write.how, write.value.on(self.device)), target)
                return
            value = copy_to(write.value, self.device)
            if overwritten:
                target[...] = value
            elif write.how == "assign_add":
                target += value
            else:
                target -= value

    def _hold(self, array: Array) -> None:
        self.array = array
        self._view = array.view()
        if not is_gpu_array(array):
            self._view.flags.writeable = False


def _apply_rows(write: Write, target: Array) -> None:
    rows: IndexedSlices = write.value
    if is_gpu_array(target):
        # What CuPy does where an index stands twice is not defined, or for few dtypes only.
        rows = write.rows_once().value if write.how == "assign" else rows.summed()
    if write.how == "assign":
        target[rows.indices] = rows.values
    elif is_gpu_array(target):
        change = rows.values if write.how == "assign_add" else -rows.values
        target[rows.indices] = target[rows.indices] + change
    elif write.how == "assign_add":
        np.add.at(target, rows.indices, rows.values)
    else:
        np.subtract.at(target, rows.indices, rows.values)


class MirroredVariable(Variable):
    """Keep one value for all replicas, one array for each memory space."""

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._cells = [Cell(array, device) for device in self._homes(strategy.devices)]
        spaces = [cell.device.memory_space for cell in self._cells]
        self._home_of = [
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
        return self._cells[self._home_of[replica.local_replica_id]].read()

    @property
    def values(self) -> tuple[Array, ...]:
        """Return a snapshot for each replica of this process."""
        return tuple(detached(self._cells[home].read()) for home in self._home_of)

    def home_of(self, replica: int) -> tuple[int, Device]:
        """Return which of the arrays of `begin_update` a replica updates, and where that lies."""
        home = self._home_of[replica]
        return home, self._cells[home].device

    def begin_update(self) -> list[Array]:
        """Return the arrays to change in place, one for each memory space.

        Called once for all replicas while they wait; they then change the parts that they own.
        """
        return [cell.writable() for cell in self._cells]

    def _write(self, write: Write) -> None:
        write_once(self, write)

    def _apply(self, write: Write) -> None:
        for cell in self._cells:
            cell.apply(write)


class CentralVariable(MirroredVariable):
    """Keep one value for all replicas, in one place: on the parameter device.

    Replicas elsewhere keep what they last fetched, and fetch again only after an update.
    """

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._fetched: dict[int, tuple[int, Array]] = {}

    def _homes(self, devices: Sequence[Device]) -> list[Device]:
        return [self._strategy.parameter_device]

    @property
    def values(self) -> tuple[Array, ...]:
        """Return a snapshot of the one component."""
        return (detached(self._cells[0].read()),)

    def component(self) -> Array:
        """Return a snapshot in this replica's memory."""
        replica, cell = self.replica("read"), self._cells[0]
        if replica is None or replica.device.memory_space == cell.device.memory_space:
            return cell.read()
        rank = replica.local_replica_id
        version, array = self._fetched.get(rank, (-1, None))
        if version != cell.version:
            array = copy_to(cell.read(), replica.device)
            if not is_gpu_array(array):
                array.flags.writeable = False
            self._fetched[rank] = (cell.version, array)
        return array.view()


def write_once(variable: Any, write: Write) -> None:
    """Carry out a write once for all replicas of this process, aggregated in a replica.

    Args:
        variable: what each replica writes to, the same for all; its `_apply` gets the aggregated
            write, while all wait.
        write: this replica's.

    Raises:
        ValueError: the variable has no aggregation.
        CollectiveMismatchError: replicas write to different variables.
    """
    replica = variable.replica("write")
    if replica is None:
        variable._apply(write)
        return
    communicator = replica.communicator
    communicator.purpose = f"{write.how} to {variable.name!r}"
    try:
        combined = _aggregated(variable, communicator, write)
    finally:
        communicator.purpose = ""

    def apply_once(writes: Sequence[tuple[Any, Write]]) -> None:
        written, whole = writes[0]
        for rank, (other, _) in enumerate(writes):
            if other is not written:
                _refuse_mixed(write.how, communicator.calls_made, rank, other, written)
        written._apply(whole)

    communicator.merge(write.how, (variable, combined), apply_once)


def _aggregated(variable: Variable, communicator: Any, write: Write) -> Write:
    """Combine the replicas' writes into the one that their variable's aggregation makes of them."""
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
