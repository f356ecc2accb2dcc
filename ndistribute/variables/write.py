"""A write to a variable, as a value.

It is checked whole before any copy changes, and applied to each copy after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import (
    Array,
    Device,
    array_namespace,
    as_array,
    copy_to,
    is_gpu_array,
    to_host,
)
from ndistribute.stream import working_on
from ndistribute.values import DistributedValues
from ndistribute.variables.casting import cast, native

if TYPE_CHECKING:
    from ndistribute.variables.cell import Cell
    from ndistribute.variables.variable import Variable

__all__ = ["Write", "check_rows", "check_value"]


@dataclass(frozen=True, slots=True)
class Write:
    """Describe a write.

    Args:
        how: ``"assign"``, ``"assign_add"`` or ``"assign_sub"``.
        value: the whole array, or some of its rows; of the variable's dtype.
    """

    how: str
    value: Any

    @property
    def sparse(self) -> bool:
        """Return whether only some rows are written."""
        return isinstance(self.value, IndexedSlices)

    def apply(self, cell: Cell, device: Device) -> None:
        """Carry the write out on one component."""
        overwritten = self.how == "assign" and not self.sparse
        target = cell.writable(keep=not overwritten)
        with working_on(device):
            if self.sparse:
                _apply_rows(Write(self.how, self.value.on(device)), target)
                return
            value = copy_to(self.value, device)
            if overwritten:
                target[...] = value
            elif self.how == "assign_add":
                target += value
            else:
                target -= value

    def rows_once(self) -> Write:
        """Return a write in which each row stands once: of equal indices the last one holds."""
        if self.how != "assign" or not self.sparse:
            return self
        rows = self.value
        indices = to_host(rows.indices)
        unique, last = np.unique(indices[::-1], return_index=True)
        chosen = len(indices) - 1 - last
        return Write(
            self.how, IndexedSlices(rows.values[chosen], as_array(unique), rows.dense_shape)
        )


def check_value(variable: Variable, how: str, value: Any) -> Array:
    """Return the value of a write as an array of the variable's dtype.

    Raises:
        ValueError: it is a `PerReplica`, has another shape, or would lose its kind of number.
    """
    array = _as_number_array(variable, how, value)
    if array.shape != variable.shape:
        raise ValueError(
            f"{how} of an array of shape {array.shape} to variable {variable.name!r} of shape "
            f"{variable.shape}: the shapes must be equal. Nothing has changed."
        )
    return array


def check_rows(variable: Variable, how: str, indices: Any, values: Any) -> IndexedSlices:
    """Return the rows of a scatter as `IndexedSlices` of the variable's dtype.

    Raises:
        ValueError: an index is out of range or no integer, or the shapes do not fit.
    """
    if isinstance(indices, IndexedSlices):
        indices, values = indices.indices, indices.values
    where = f"scatter ({how}) on variable {variable.name!r} of shape {variable.shape}"
    if not variable.ndim:
        raise ValueError(f"{where}: a variable without axes has no rows. Nothing has changed.")
    rows = native(np.atleast_1d(to_host(as_array(indices))))
    if rows.size == 0:
        rows = rows.astype(np.int64)
    if rows.dtype.kind not in "iu" or rows.ndim != 1:
        raise ValueError(
            f"{where}: indices must be integers of one axis, got {rows.dtype} of shape "
            f"{rows.shape}. Nothing has changed."
        )
    outside = rows[(rows < 0) | (rows >= variable.shape[0])]
    if outside.size:
        raise ValueError(
            f"{where}: index {outside[0]} is not in [0, {variable.shape[0]}). Nothing has changed."
        )
    array = _as_number_array(variable, how, values)
    expected = (len(rows), *variable.shape[1:])
    try:
        array = array_namespace(array).broadcast_to(array, expected)
    except ValueError:
        raise ValueError(
            f"{where}: {len(rows)} indices need values of shape {expected}, got {array.shape}. "
            "Nothing has changed."
        ) from None
    return IndexedSlices(array, rows, variable.shape)


def _as_number_array(variable: Variable, how: str, value: Any) -> Array:
    if isinstance(value, DistributedValues):
        raise ValueError(
            f"{how} of a {type(value).__name__} to variable {variable.name!r}: across replicas a "
            "variable takes one value. Combine it first with strategy.reduce(op, value), or "
            "assign inside run."
        )
    return cast(value, variable.dtype, f"{how} to variable {variable.name!r}")


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
