"""Writes to variables as values, and how those of all replicas combine.

A variable's dtype never changes, so written values are cast to it. A cast that would lose a
fraction, an imaginary part or the high digits of an integer raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, as_array, device_of, to_host
from ndistribute.dtypes import can_cast, kind_of, standard
from ndistribute.stream import working_on
from ndistribute.variables.policy import VariableAggregation

__all__ = ["Write", "cast", "map_values"]


@dataclass(frozen=True, slots=True)
class Write:
    """A write to a variable.

    Args:
        how: ``"assign"``, ``"assign_add"`` or ``"assign_sub"``.
        value: a whole array, or rows as `IndexedSlices`, of the variable's dtype.
    """

    how: str
    value: Any

    @property
    def sparse(self) -> bool:
        """True if only some rows are written."""
        return isinstance(self.value, IndexedSlices)

    def rows_once(self) -> Write:
        """Return a write in which each index occurs once, with the last row of equal ones."""
        if self.how != "assign" or not self.sparse:
            return self
        rows = self.value
        indices = to_host(rows.indices)
        unique, last = np.unique(indices[::-1], return_index=True)
        values = rows.values[len(indices) - 1 - last]
        return Write(self.how, IndexedSlices(values, as_array(unique), rows.dense_shape))

    def aggregated(self, aggregation: VariableAggregation, communicator: Any) -> Write:
        """Return the combination of all replicas' writes; a collective call."""
        rows, op = self.value, aggregation.reduce_op
        if op is not None:
            return Write(self.how, communicator.all_reduce(op, self.rows_once().value))
        if not self.sparse:
            return Write(self.how, communicator.broadcast(rows, root=0))
        first = slice(None if communicator.rank == 0 else 0)
        own = (rows.indices[first], rows.values[first])
        indices, values = communicator.all_gather(own, axis=0)
        return Write(self.how, IndexedSlices(values, indices, rows.dense_shape))


def map_values(function: Callable[[Array], Array], value: Any) -> Any:
    """Return a function's result for an array, or for the rows of `IndexedSlices`."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(map_values(function, value.values), value.indices, value.dense_shape)
    with working_on(device_of(value)):
        return function(value)


def cast(value: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Return a value as an array of a dtype.

    Args:
        value: an array or number.
        dtype: the dtype of the result.
        what: the operation, for the error message.

    Raises:
        ValueError: the dtype cannot represent the value.

    >>> cast([1, 2], np.dtype(np.uint8), "assign")
    array([1, 2], dtype=uint8)
    """
    array = as_array(value)
    if array.dtype == dtype:
        return array
    with working_on(device_of(array)):
        if not _fits(value, array, dtype):
            raise ValueError(
                f"{what}: the cast from {array.dtype} to {dtype} would lose information. "
                "Convert the value with astype first. Nothing has changed."
            )
        return array.astype(dtype)


def _fits(value: Any, array: Array, dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind == "O":  # An integer of more than 64 bits, or not a number.
        return False
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        # Whether integers fit a narrower or an unsigned dtype depends on their values.
        safe = np.can_cast(array.dtype, dtype)
        return safe or bool((array.astype(dtype) == array).all())
    if isinstance(value, bool | int | float | complex):
        # A Python number has a kind, but no width.
        return np.result_type(type(value), standard(dtype)).kind == kind_of(dtype)
    return can_cast(array.dtype, dtype)
