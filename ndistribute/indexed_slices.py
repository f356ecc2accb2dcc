"""`IndexedSlices`: a sparse gradient, such as that of an embedding lookup.

It has only the rows that a step used, so its size depends on the batch and not on the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ndistribute.devices import (
    Array,
    Device,
    array_namespace,
    as_array,
    copy_to,
    device_of,
    is_device_array,
    to_host,
)
from ndistribute.stream import working_on


class IndexedSlices:
    """Rows of an array whose other rows are zero.

    Args:
        values: the rows, of shape ``(k, *dense_shape[1:])``.
        indices: the index of each row, integers of shape ``(k,)`` in ``[0, dense_shape[0])``. Rows
            with the same index are added.
        dense_shape: the shape of the whole array; None where only the rows matter, as in a scatter.

    Raises:
        ValueError: the shapes are inconsistent, or an unknown `dense_shape` is needed.

    >>> rows = IndexedSlices(np.ones((2, 3)), np.array([4, 4]), (5, 3))
    >>> rows.to_dense()[4]
    array([2., 2., 2.])
    """

    __slots__ = ("_dense_shape", "indices", "values")

    def __init__(
        self, values: Array, indices: Array, dense_shape: Iterable[int] | None = None
    ) -> None:
        values = values if hasattr(values, "shape") else as_array(values)
        if type(indices) is not type(values):
            indices = copy_to(as_array(indices), device_of(values))
        self.values, self.indices = values, indices
        self._dense_shape = None if dense_shape is None else tuple(map(int, dense_shape))
        whole = values.shape if self._dense_shape is None else self._dense_shape
        expected = (*indices.shape, *whole[1:])
        if indices.ndim != 1 or values.shape != expected:
            raise ValueError(
                f"IndexedSlices of a {whole} array with indices of shape "
                f"{indices.shape} needs values of shape {expected}, got {values.shape}."
            )

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        if self._dense_shape is None:
            raise ValueError("the shape of the whole array is unknown: pass dense_shape.")
        return self._dense_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self.values.dtype  # type: ignore[no-any-return]

    shape = dense_shape

    def summed(self) -> IndexedSlices:
        """Return the same array with unique indices, in ascending order.

        Rows with the same index are added in a fixed order, so the result is reproducible.

        >>> IndexedSlices(np.array([[1.0], [2.0], [4.0]]), np.array([7, 2, 7]), (9, 1)).summed()
        IndexedSlices(indices=[2 7], shape=(9, 1), dtype=float64)
        """
        xp: Any = array_namespace(self.values, self.indices)
        if hasattr(xp, "rows_once"):  # In a compiled step.
            values, indices = xp.rows_once(self, last=False)
            return IndexedSlices(values, indices, self.dense_shape)
        return IndexedSlices(*sum_rows(self.values, self.indices), self.dense_shape)

    def last_rows(self) -> IndexedSlices:
        """Return unique indices, in ascending order, with the last of the rows of each."""
        xp: Any = array_namespace(self.values, self.indices)
        if hasattr(xp, "rows_once"):  # In a compiled step.
            values, indices = xp.rows_once(self, last=True)
            return IndexedSlices(values, indices, self.dense_shape)
        reverse = to_host(self.indices)[::-1]
        unique, last = np.unique(reverse, return_index=True)
        values = self.values[len(reverse) - 1 - last]
        return IndexedSlices(values, unique, self.dense_shape)

    def to_dense(self) -> Array:
        """Return the whole array, of shape `dense_shape`, with zeros in all other rows."""
        dense = array_namespace(self.values).zeros(self.dense_shape, self.dtype)
        if hasattr(self.values, "on_device"):  # A compiled step has no values to sort.
            np.add.at(dense, self.indices, self.values)
            return dense
        rows = self.summed()
        dense[rows.indices] = rows.values
        return dense

    def on(self, device: Device) -> IndexedSlices:
        """Return the same rows in the memory of a device, without a copy if they are there."""
        if device_of(self.values).memory_space == device.memory_space:
            return self
        values, indices = copy_to(self.values, device), copy_to(self.indices, device)
        return IndexedSlices(values, indices, self.dense_shape)

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(indices={self.indices}, shape={self._dense_shape}, dtype={self.dtype})"
        )


def refuse_rows(what: str, leaves: Iterable[Any]) -> None:
    """Raise NotImplementedError if there are `IndexedSlices` among the leaves of a nest."""
    if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
        raise NotImplementedError(
            f"{what} does not support IndexedSlices: pass their values and indices, or to_dense()."
        )


def dense(gradient: Any) -> Any:
    """Return the gradient of a whole array, if it is given for rows or elements."""
    return gradient.to_dense() if hasattr(gradient, "to_dense") else gradient


def map_values(function: Callable[[Array], Array], value: Any) -> Any:
    """Return a function's result for an array, or for the rows of `IndexedSlices`."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(map_values(function, value.values), value.indices, value.dense_shape)
    with working_on(device_of(value)):
        return function(value)


def sum_rows(values: Array, indices: Array) -> tuple[Array, Array]:
    """Return rows with unique indices, in ascending order, and these indices.

    Rows of equal indices are added in a fixed order.
    """
    if is_device_array(values):
        return _sum_runs(values, indices)
    order = np.argsort(indices, kind="stable")
    rows, values = indices[order], values[order]
    starts = np.flatnonzero(_begins(rows))
    if len(starts) == len(rows):
        return values, rows
    return np.add.reduceat(values, starts, axis=0), rows[starts]


def _sum_runs(values: Array, indices: Array) -> tuple[Array, Array]:
    """Sum rows of equal indices on a GPU; return the sums and their indices, in ascending order.

    Pairs are added, then pairs of pairs, so replicas that sum the same rows get the same bits.
    CuPy's `add.at` adds in an order that depends on the scheduling of GPU threads.
    """
    xp = array_namespace(values)
    order = xp.argsort(indices)
    rows, sums = indices[order], values[order]
    if not len(rows):
        return sums, rows
    starts = xp.flatnonzero(_begins(rows))
    ends = xp.concatenate([starts[1:], xp.full(1, len(rows), starts.dtype)])
    longest, step = int((ends - starts).max()), 1
    while step < longest:
        same = (rows[step:] == rows[:-step]).reshape(-1, *(1,) * (sums.ndim - 1))
        head = sums[:-step]
        head += xp.where(same, sums[step:], 0)
        step *= 2
    return sums[starts], rows[starts]


def _begins(rows: Array) -> Array:
    """Return for each of some sorted numbers whether it is the first of equal ones."""
    begins = array_namespace(rows).ones(len(rows), bool)
    begins[1:] = rows[1:] != rows[:-1]
    return begins
