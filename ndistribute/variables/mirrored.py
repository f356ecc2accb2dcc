"""The kinds of variables that are stored in this process.

A mirrored variable has one array per memory space, which the replicas there share. A central
variable has a single array. A variable that is synchronized on read has one array per replica. A
sharded variable has one shard per replica.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.context import current_trace, open_traces, part_of
from ndistribute.devices import Array, Device, copy_to, is_device_array
from ndistribute.dtypes import kind_of
from ndistribute.errors import DistributeError
from ndistribute.indexed_slices import map_values
from ndistribute.ownership import ArrayOwner
from ndistribute.stream import working_on
from ndistribute.values import PerReplica
from ndistribute.variables.policy import VariableAggregation, VariablePolicy, Write
from ndistribute.variables.variable import Variable, create_variable, detached


class SnapshotArray(ArrayOwner):
    """An array whose readers get snapshots.

    A read returns a read-only view. If a view still exists, the next update writes to a new array;
    otherwise it happens in place.
    """

    __slots__ = ("_group", "_view", "device", "version")

    def __init__(self, initial: Array, device: Device) -> None:
        self.device = device
        self.version = 0
        self._group: CellGroup | None = None
        with working_on(device):
            # The copy owns its memory, so NumPy makes it the base even of views of views.
            self.hold(copy_to(initial, device).copy(order="C"))

    def read(self) -> Array:
        """Return a snapshot that never changes, which is read-only on a CPU."""
        if open_traces and (trace := current_trace()) is not None:
            return trace.read(self)
        if self._group is not None:
            self._group.fetch()
        # Each reader gets its own view, because it may set the view's shape or flags.
        return self._view.view()

    def writable(self, *, keep: bool = True) -> Array:
        """Return the array to update: a new one if a snapshot exists; `keep` copies the values."""
        if open_traces and (trace := current_trace()) is not None:
            return trace.writable(self)
        if self._group is not None:
            with nullcontext() if keep else suppress(DistributeError):
                self._group.fetch()
            self._group.array, self._group.is_newer = None, False
        self.version += 1
        if self.is_shared(own_views=1):
            with working_on(self.device):
                needed = keep or is_device_array(self.array)
                self.hold(self.array.copy() if needed else np.empty_like(self.array))
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

    @property
    def is_elsewhere(self) -> bool:
        """Whether a compiled step may have left a newer value on its device."""
        return self._group is not None

    @property
    def group(self) -> CellGroup:
        """The cells that compiled steps hold in one array together with this cell."""
        if self._group is None:
            self._group = CellGroup([self], None)
        return self._group

    def set_group(self, group: CellGroup) -> None:
        """Make compiled steps hold the cell in one array with others."""
        self._group = group

    def hold(self, array: Array) -> None:
        """Replace the array with an array that nobody else writes to."""
        self.array = array
        self._view = array.view()
        if not is_device_array(array):
            self._view.flags.writeable = False


class CellGroup:
    """Cells that compiled steps hold in one of JAX's arrays, the cells of a variable's replicas.

    Args:
        cells: a cell for each replica of this process, or one cell for all.
        axis: the axis along which the array joins the replicas' arrays; -1: a new first axis; None:
            all replicas have the same value.
    """

    __slots__ = ("array", "axis", "cells", "in_use", "is_newer")

    def __init__(self, cells: Sequence[SnapshotArray], axis: int | None) -> None:
        self.cells, self.axis = cells, axis
        self.array: Any = None  # The array of JAX, if it is not older than the cells.
        self.is_newer = False  # Whether the cells are older.
        # The lock of the compiled step that last took the array, held while the step runs.
        self.in_use: AbstractContextManager[Any] = nullcontext()

    def store(self, array: Any) -> None:
        """Keep the array that a compiled step returned."""
        self.array, self.is_newer = array, True
        for cell in self.cells:
            cell.version += 1

    def has_array(self) -> bool:
        """Return whether there is an array of JAX; raise if a step that failed has taken it."""
        if self.array is not None and self.array.is_deleted():
            self.fetch()  # Which raises, unless the cells have the value.
            self.array = None
        return self.array is not None

    def fetch(self) -> None:
        """Copy the array that a compiled step returned into the cells, unless they have it."""
        if not self.is_newer:
            return
        with self.in_use:
            try:
                parts = [np.array(self.array.addressable_data(k)) for k in range(len(self.cells))]
            except (RuntimeError, ValueError) as error:  # As JAX says that it has none.
                raise DistributeError(
                    "the value of a variable was lost with a compiled step that failed: restore "
                    "the last checkpoint, or assign to the variable."
                ) from error
            for cell, part in zip(self.cells, parts, strict=True):
                cell.hold(part.reshape(part.shape[1:]) if self.axis == -1 else part)
            self.is_newer = False


def _join(cells: Sequence[SnapshotArray], axis: int | None) -> None:
    group = CellGroup(cells, axis)
    for cell in cells:
        cell.set_group(group)


def _apply_rows(write: Write, target: Array) -> None:
    on_gpu, combine = is_device_array(target), np.add if write.how == "assign_add" else np.subtract
    # For repeated indices, CuPy's result is undefined, or defined for a few dtypes only.
    if write.how == "assign":
        rows = write.rows_once() if on_gpu else write.value
        target[rows.indices] = rows.values
    elif on_gpu:
        rows = write.value.summed()
        target[rows.indices] = combine(target[rows.indices], rows.values)
    else:
        combine.at(target, write.value.indices, write.value.values)


class DeviceCopies:
    """Copies of an array in other memory spaces, each kept until there is a newer version."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Array]] = {}

    def on(self, device: Device, version: Any, array: Array) -> Array:
        """Return a snapshot of a version of an array, in a device's memory."""
        known, copy = self._held.get(device.memory_space, (None, array))
        if known != version:
            copy = copy_to(array, device)
            if not is_device_array(copy):
                copy.flags.writeable = False
            self._held[device.memory_space] = (version, copy)
        return copy.view()


class MirroredVariable(Variable):
    """A variable with one value for all replicas, and one array per memory space."""

    home_of: list[int]
    """For each replica of this process, the index of the array that it reads and updates."""

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        homes = self._homes(strategy.devices)
        spaces = list(dict.fromkeys(device.memory_space for device in homes))
        self.home_of = [spaces.index(device.memory_space) for device in homes]
        devices = [homes[self.home_of.index(k)] for k in range(len(spaces))]
        self._cells = [SnapshotArray(array, device) for device in devices]

    def join_cells(self) -> None:
        """Let compiled steps hold the one value of all replicas in one array."""
        _join(self._cells, None)

    def _homes(self, devices: Sequence[Device]) -> Sequence[Device]:
        """Return the device that stores the array of each replica."""
        return devices

    def component(self) -> Array:
        """Return a snapshot of this replica's array, or of the first one outside replicas."""
        replica = self.replica("read")
        home = 0 if replica is None else self.home_of[replica.local_replica_id]
        return self._cells[home].read()

    @property
    def values(self) -> tuple[Array, ...]:
        """Snapshots, one for each replica of this process."""
        return tuple(detached(self._cells[home].read()) for home in self.home_of)

    def begin_update(self) -> list[Array]:
        """Return the arrays to change in place, one per memory space; once for all replicas."""
        # A compiled step has the shards of all replicas in one array.
        cells = self._cells if current_trace() is None else self._cells[:1]
        return [cell.writable() for cell in cells]

    def _apply(self, write: Write) -> None:
        for cell in self._cells:
            cell.apply(write)


class CentralVariable(MirroredVariable):
    """A variable with one value for all replicas, on the strategy's parameter device.

    Replicas in other memory spaces fetch a copy, and keep it until the next update.
    """

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._elsewhere = DeviceCopies()

    def _homes(self, devices: Sequence[Device]) -> Sequence[Device]:
        return [self._strategy.parameter_device] * len(devices)

    @property
    def values(self) -> tuple[Array, ...]:
        """A tuple with a snapshot of the one component."""
        return (detached(self._cells[0].read()),)

    def component(self) -> Array:
        """Return a snapshot in the memory of this replica's device."""
        replica, cell = self.replica("read"), self._cells[0]
        if replica is None or replica.device.memory_space == cell.device.memory_space:
            return cell.read()
        return self._elsewhere.on(replica.device, cell.version, cell.read())


class SyncOnReadVariable(Variable):
    """A variable with its own value for each replica, combined when it is read across replicas."""

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._cells = [SnapshotArray(array, device) for device in strategy.devices]

    def join_cells(self) -> None:
        """Let compiled steps hold the values of the replicas in one array."""
        _join(self._cells, -1)

    def component(self) -> Array:
        """Return this replica's value, or the values of all replicas combined outside replicas."""
        replica = self.replica("read")
        if replica is not None:
            return self._cells[replica.local_replica_id].read()
        value: Array = self._strategy.attempt(self._combined, f"the value of {self.name!r}")
        return value

    def _combined(self) -> Array:
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
        combine = operator.itemgetter(0) if op is None else partial(reduce_arrays, op)
        return _combined(self, self._cells[0].device, combine)

    @property
    def values(self) -> tuple[Array, ...]:
        """Snapshots of the values of this process's replicas."""
        return tuple(detached(cell.read()) for cell in self._cells)

    def _apply_own(self, write: Write, replica: Any) -> None:
        self._cells[replica.local_replica_id].apply(write)

    def _apply(self, write: Write) -> None:
        """Write to all components; with SUM, so that they add up to the written value.

        An assigned float is divided evenly; other values go to replica 0, and 0 to the others.
        """
        self._strategy.attempt(lambda: self._divide(write))

    def _divide(self, write: Write) -> None:
        count = self._strategy.num_replicas_in_sync
        first = others = write
        if self.aggregation.reduce_op is ReduceOp.SUM and count > 1:
            if write.how == "assign" and kind_of(self.dtype) in "fc":
                even = map_values(lambda array: array / count, write.value)
                first = others = Write(write.how, even)
            else:
                others = Write(write.how, map_values(np.zeros_like, write.value))
        for context, cell in zip(self._strategy.replica_contexts, self._cells, strict=True):
            cell.apply(others if context.replica_id_in_sync_group else first)


class ShardedVariable(MirroredVariable):
    """A variable that is cut along an axis, with one contiguous shard on each replica.

    A replica reads its own shard. Outside replicas, a read gathers the whole from all replicas. An
    optimizer updates each shard with the gradient of its own replica, without an all-reduce.
    """

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        Variable._set_up(self, strategy, array, policy)
        count, axis = strategy.num_replicas_in_sync, policy.shard_axis or 0
        if not 0 <= axis < array.ndim or array.shape[axis] < count:
            raise ValueError(
                f"variable {policy.name!r} of shape {array.shape} cannot be cut along axis {axis} "
                f"into a shard for each of {count} replicas: pass an axis, counted from 0, with "
                f"at least {count} elements, or do not shard the variable."
            )
        contexts = strategy.replica_contexts
        self.home_of = list(range(len(contexts)))
        self._cuts = [self.cut(context.replica_id_in_sync_group) for context in contexts]
        pairs = zip(self._cuts, contexts, strict=True)
        self._cells = [SnapshotArray(array[cut], context.device) for cut, context in pairs]

    def join_cells(self) -> None:
        """Let compiled steps hold the shards in one array."""
        _join(self._cells, self._policy.shard_axis)

    def cut(self, rank: int) -> tuple[Any, ...]:
        """Return the index of a replica's shard in the whole."""
        axis = self._policy.shard_axis or 0
        count, length = self._strategy.num_replicas_in_sync, self._shape[axis]
        return (slice(None),) * axis + (part_of(length, rank, count),)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value that a read returns here: the shard's inside a replica."""
        replica = self.replica("read")
        return self._shape if replica is None else self._cell_of(replica).array.shape

    def component(self) -> Array:
        """Return this replica's shard, or the whole outside replicas."""
        replica = self.replica("read")
        if replica is not None:
            return self._cell_of(replica).read()
        if self._strategy.num_replicas_in_sync == 1:
            return self._cells[0].read()
        home: Device = self._cells[0].device
        axis = self._policy.shard_axis
        return _combined(self, home, partial(home.namespace.concatenate, axis=axis))

    def _cell_of(self, replica: Any) -> SnapshotArray:
        cell: SnapshotArray = self._cells[replica.local_replica_id]
        return cell

    def _checked_write(self, how: str, value: Any) -> Self:
        if self.replica("write") is not None:
            raise RuntimeError(
                f"{how} to the sharded variable {self.name!r} is not possible inside run: assign "
                "the whole value outside run, or let an optimizer update it."
            )
        return super()._checked_write(how, value)

    def _checked_scatter(self, how: str, indices: Any, values: Any) -> Self:
        raise ValueError(
            f"a scatter to the sharded variable {self.name!r} is not supported: assign the whole "
            "value."
        )

    def _apply(self, write: Write) -> None:
        for cell, cut in zip(self._cells, self._cuts, strict=True):
            cell.apply(Write(write.how, write.value[cut]))


def _combined(variable: Variable, home: Device, combine: Callable[[list[Array]], Array]) -> Array:
    """Return the values of all replicas combined on a device, read-only on a CPU."""
    strategy = variable.distribute_strategy

    def read() -> Any:
        return strategy.across_workers(PerReplica(variable.values))

    parts = strategy.attempt(read).values
    with working_on(home):
        total = combine([copy_to(part, home) for part in parts])
    if isinstance(total, np.ndarray):
        total.flags.writeable = False
    return total


def sharded_variable(
    initial_value: Any, axis: int, *, name: str | None = None, dtype: Any = None
) -> Variable:
    """Return a trainable variable that is divided among the replicas: each stores one shard.

    Inside a step of `run`, a replica reads its own shard. Elsewhere a read returns the whole, so
    checkpoints do not depend on the number of replicas.

    Args:
        initial_value: the whole, or a function that returns it.
        axis: the axis to cut, counted from 0; it must be at least as long as the number of
            replicas.
        name: as for `Variable`.
        dtype: as for `Variable`.

    Raises:
        ValueError: the strategy keeps its variables on servers, or the axis is too short.

    >>> import ndistribute as nd
    >>> with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    ...     w = sharded_variable(np.arange(6.0), axis=0)
    ...     strategy.local_results(strategy.run(lambda: w + 0)), w.numpy()
    ((array([0., 1., 2.]), array([3., 4., 5.])), array([0., 1., 2., 3., 4., 5.]))
    """
    policy = VariablePolicy.parse(name, True, "auto", "none")
    policy = replace(policy, shard_axis=operator.index(axis))
    made: Variable = create_variable(initial_value, dtype, policy)
    return made


def divided(variables: Sequence[Any]) -> list[int]:
    """Return which variables are divided among replicas: each replica has its shard's gradient."""
    sharded = [k for k, variable in enumerate(variables) if isinstance(variable, ShardedVariable)]
    return [k for k in sharded if variables[k].distribute_strategy.num_replicas_in_sync > 1]
