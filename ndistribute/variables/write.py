"""A write to a variable, as a value: what it changes, and what becomes of those of all replicas.

A variable keeps its dtype for life, so what is written to it is cast; a cast that would cut off a
fraction, an imaginary part or the high digits of an integer is an error instead.
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
    """Describe a write.

    Args:
        how: ``"assign"``, ``"assign_add"`` or ``"assign_sub"``.
        value: the whole array, or some of its rows; of the variable's dtype.
    """

    how: str
    value: Any

    @property
    def sparse(self) -> bool:
        """Return True if only some rows are written."""
        return isinstance(self.value, IndexedSlices)

    def rows_once(self) -> Write:
        """Return a write in which each row stands once: of equal indices the last one holds."""
        if self.how != "assign" or not self.sparse:
            return self
        rows = self.value
        indices = to_host(rows.indices)
        unique, last = np.unique(indices[::-1], return_index=True)
        values = rows.values[len(indices) - 1 - last]
        return Write(self.how, IndexedSlices(values, as_array(unique), rows.dense_shape))

    def aggregated(self, aggregation: VariableAggregation, communicator: Any) -> Write:
        """Return the one write that all replicas' writes make; each replica calls this."""
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
    """Return a function of an array, or of the rows of `IndexedSlices`, on its device."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(map_values(function, value.values), value.indices, value.dense_shape)
    with working_on(device_of(value)):
        return function(value)


def cast(value: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Return a value as an array of a dtype.

    Args:
        value: an array or number.
        dtype: the dtype that is wanted.
        what: what is about to happen, for the error.

    Raises:
        ValueError: the dtype cannot hold the value.

    >>> cast([1, 2], np.dtype(np.uint8), "assign")
    array([1, 2], dtype=uint8)
    """
    array = as_array(value)
    if array.dtype == dtype:
        return array
    with working_on(device_of(array)):
        if not _fits(value, array, dtype):
            raise ValueError(
                f"{what}: {array.dtype} does not fit {dtype}, the cast would lose information. "
                "Convert the value with astype first. Nothing has changed."
            )
        return array.astype(dtype)


def _fits(value: Any, array: Array, dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind == "O":  # An integer of more than 64 bits, or no number at all.
        return False
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        # Only the values say whether integers fit a narrower or an unsigned dtype.
        safe = np.can_cast(array.dtype, dtype)
        return safe or bool((array.astype(dtype) == array).all())
    if isinstance(value, bool | int | float | complex):
        # A number of Python's has a kind, but no width of its own.
        return np.result_type(type(value), standard(dtype)).kind == kind_of(dtype)
    return can_cast(array.dtype, dtype)
