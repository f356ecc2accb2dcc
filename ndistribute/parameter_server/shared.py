"""`SharedVariables`: the variables of a task that steps of graphs read and change.

The same functions plan and make the changes as in a parameter server. Each variable has a lock,
because steps run concurrently. If the task keeps its variables on a disk, all of them share the
lock of the store, and `log` writes each change to the disk before it is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ndistribute.devices import copy_to, device_of, is_device_array, to_host
from ndistribute.dtypes import PORTABLE
from ndistribute.ownership import read_only
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.stored_variables import Cell, OptimizerStep, Refused, Variables
from ndistribute.transport.codec import Array


class SharedVariables(Variables):
    """Variables by name, which keep the shape and dtype of their first value."""

    casts = True

    def __init__(self) -> None:
        super().__init__()
        self.log: Callable[[m.SharedChange], None] = lambda change: None
        self.sync: Callable[[], None] = lambda: None
        """Waits until the disk, if changes are logged, has all changes so far."""
        self._lock: Any = None  # The lock of all variables; None: each has its own.

    def keep(
        self, lock: Any, log: Callable[[m.SharedChange], None], sync: Callable[[], None]
    ) -> None:
        """Make all changes under a lock, after they are logged."""
        self._lock, self.log, self.sync = lock, log, sync
        for cell in self.cells.values():
            cell.lock = lock

    def find(self, name: str) -> Cell:
        """Return the variable of a name, without a value if it is new."""
        cell = self.cells.get(name)
        if cell is None:
            if not isinstance(name, str):
                raise Refused(f"the name of a variable must be text, got {name!r}.")
            cell = self.cells.setdefault(name, Cell(None, 0, self._lock or threading.RLock()))
        return cell

    def cell(self, name: str) -> Cell:
        """Return a variable, or refuse one without a value."""
        cell = self.cells.get(name)
        if cell is None or cell.array is None:
            raise _without_value(name)
        return cell

    def get(self, name: str) -> Any:
        """Return a snapshot of a variable's value, or None if it has none yet."""
        cell = self.find(name)
        with cell.lock:
            return cell.array if cell.array is None else read_only(cell.array)

    def value(self, name: str) -> Any:
        """Return a snapshot of a variable's value, or refuse a variable without a value."""
        value = self.get(name)
        if value is None:
            raise _without_value(name)
        return value

    def assign(self, name: str, value: Any, keeps_shape: bool = True) -> None:
        """Set a variable to a copy of a value, which must fit its dtype and a kept shape."""
        cell = self.find(name)
        with cell.lock:
            if cell.array is not None:
                keeps_shape = cell.keeps_shape
                _check_same(name, cell.array, value, keeps_shape)
            fresh = value.copy()  # The program may change what it fed.
            self.log(m.Assign(name, fresh, keeps_shape))
            cell.array, cell.keeps_shape = fresh, keeps_shape

    def update(self, name: str, how: Any, values: Any, indices: Any = None) -> Any:
        """Add to a variable or to rows of it, and return a snapshot of the result."""
        cell = self.find(name)
        with cell.lock:
            if cell.array is None:
                raise _without_value(name)
            if is_device_array(values):
                self._move(cell, values)
            if indices is None and values.shape != cell.array.shape:
                values = np.broadcast_to(values, cell.array.shape)
            change = m.VariableUpdate(name, how, values, indices)
            made = self.plan_update(change)
            self.log(change)
            made()
            return cell.snapshot()

    def apply(self, change: m.Apply) -> None:
        """Make a step of an optimizer; of sparse gradients, only their rows change."""
        names = sorted(change.written)  # In a fixed order, to prevent deadlocks of steps.
        held = []
        try:  # An `ExitStack` took 2 µs for four locks, as long as some steps.
            for name in names:
                lock = self.cell(name).lock
                lock.acquire()
                held.append(lock)
            if is_device_array(change.gradients[0].values):
                for name in names:
                    self._move(self.cell(name), change.gradients[0].values)
            step = OptimizerStep(self, change)
            step.open()
            self.log(change)
            step.make(change.gradients)
        finally:
            for lock in held:
                lock.release()

    def clear(self) -> None:
        """Remove all values."""
        for name, cell in list(self.cells.items()):
            with cell.lock:
                if cell.array is not None:
                    self.log(m.Assign(name, None))
                    cell.array = None

    def replay(self, change: m.SharedChange) -> None:
        """Make a change that was logged."""
        match change:
            case m.Assign(name, None):
                self.find(name).array = None
            case m.Assign(name, value, keeps_shape, dtype):
                self.assign(name, unpacked(value, dtype), keeps_shape)
            case m.VariableUpdate(name, how, values, indices):
                self.update(name, how, values, indices)
            case m.Apply():
                self.apply(change)

    def _move(self, cell: Cell, values: Any) -> None:
        """Move a variable, such as a restored one, to the GPU on which it is changed."""
        if not is_device_array(cell.array):
            cell.array = copy_to(cell.array, device_of(values))


def storable(change: m.SharedChange) -> m.SharedChange:
    """Return a change in the form that a log can contain."""
    if isinstance(change, m.Assign) and change.value is not None:
        value, dtype = packed(change.name, change.value)
        return msgspec.structs.replace(change, value=value, dtype=dtype)
    if isinstance(change, m.Apply):
        numbers = {name: float(value) for name, value in change.hyperparameters.items()}
        return msgspec.structs.replace(change, hyperparameters=numbers)
    return change


def packed(name: str, value: Any) -> tuple[Array, str]:
    """Return a value as an array for files; for text, its bytes, and the dtype of the text."""
    array = to_host(value)
    if array.dtype.name in PORTABLE:
        return array, ""
    if array.dtype.hasobject:
        raise Refused(
            f"variable {name!r} holds Python objects, which cannot be saved: give it text or "
            "numbers, or start its server without a snapshot directory."
        )
    array = np.ascontiguousarray(array[..., None])
    return array.view(np.uint8), array.dtype.str


def unpacked(array: Any, dtype: str) -> Any:
    """Return the value that was passed to `packed`."""
    return array.view(dtype)[..., 0] if dtype else array


def _without_value(name: str) -> Refused:
    why = "run global_variables_initializer(), or restore a checkpoint, before you use it."
    return Refused(f"variable {name!r} has no value: {why}", "unknown")


def _check_same(name: str, old: Any, value: Any, keeps_shape: bool) -> None:
    """Refuse a value of another dtype or shape; text may have any length."""
    same_kind = old.dtype == value.dtype or old.dtype.kind == value.dtype.kind == "U"
    if (keeps_shape and old.shape != value.shape) or not same_kind:
        raise Refused(
            f"variable {name!r} is {old.dtype} of shape {old.shape}, and the value to assign is "
            f"{value.dtype} of shape {value.shape}: a variable keeps its dtype and shape, and all "
            "clients share it. Give one of the variables another name, or first remove all "
            "variables of the servers with Session.reset(target)."
        )
