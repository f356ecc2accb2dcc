"""`IndexedSlices`: a sparse gradient, such as that of an embedding lookup.

It has only the rows that a step used, so its size depends on the batch and not on the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish, result_dtype
from ndistribute.devices import Array, Device, array_namespace, copy_to, device_of, is_gpu_array
from ndistribute.dtypes import native


class IndexedSlices:
    """Rows of an array whose other rows are zero.

    Args:
        values: the rows, of shape ``(k, *dense_shape[1:])``.
        indices: the index of each row, integers of shape ``(k,)`` in ``[0, dense_shape[0])``. Rows
            with the same index are added.
        dense_shape: the shape of the whole array.

    Raises:
        ValueError: the shapes are inconsistent.

    >>> rows = IndexedSlices(np.ones((2, 3)), np.array([4, 4]), (5, 3))
    >>> rows.to_dense()[4]
    array([2., 2., 2.])
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Array, indices: Array, dense_shape: tuple[int, ...]) -> None:
        if type(indices) is not type(values):
            indices = copy_to(indices, device_of(values))
        self.values, self.indices = values, indices
        self.dense_shape = tuple(int(length) for length in dense_shape)
        expected = (*indices.shape, *self.dense_shape[1:])
        if indices.ndim != 1 or values.shape != expected:
            raise ValueError(
                f"IndexedSlices of a {self.dense_shape} array with indices of shape "
                f"{indices.shape} needs values of shape {expected}, got {values.shape}."
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self.values.dtype  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.dense_shape

    def summed(self) -> IndexedSlices:
        """Return the same array with unique indices, in ascending order.

        Rows with the same index are added in a fixed order, so the result is reproducible.

        >>> IndexedSlices(np.array([[1.0], [2.0], [4.0]]), np.array([7, 2, 7]), (9, 1)).summed()
        IndexedSlices(indices=[2 7], shape=(9, 1), dtype=float64)
        """
        if is_gpu_array(self.values):
            return IndexedSlices(*_sum_runs(self.values, self.indices), self.dense_shape)
        order = np.argsort(self.indices, kind="stable")
        rows, values = self.indices[order], self.values[order]
        starts = np.flatnonzero(_begins(rows))
        if len(starts) == len(rows):
            return IndexedSlices(values, rows, self.dense_shape)
        totals, rows = np.add.reduceat(values, starts, axis=0), rows[starts]
        return IndexedSlices(totals, rows, self.dense_shape)

    def reduced(self, op: ReduceOp, size: int, gather: Callable[[Any], Any]) -> IndexedSlices:
        """Return the reduction over replicas, which all pass rows of arrays of the same shape.

        Rows with equal indices are added on each replica first, then over replicas in order.

        Args:
            op: SUM or MEAN; a row that a replica does not pass counts as zeros.
            size: the number of replicas.
            gather: concatenates a nest of arrays over the replicas, along the first axis.

        Returns:
            The rows that at least one replica passed, with unique indices in ascending order.

        Raises:
            ValueError: `op` is another reduction.

        >>> rows = IndexedSlices(np.ones((2, 1)), np.array([4, 4]), (5, 1))
        >>> rows.reduced(ReduceOp.SUM, 1, lambda nest: nest).values
        array([[2.]])
        """
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(
                f"{op.name} of IndexedSlices is not supported, only SUM and MEAN: rows that were "
                "not passed count as zeros. Call to_dense() first."
            )
        own_values = native(self.values)
        wide = own_values.astype(accumulation_dtype(op, self.dtype), copy=False)
        own = IndexedSlices(wide, self.indices, self.dense_shape).summed()
        # Without rows it sends no data, but all replicas must pass the same shape of the table.
        table = array_namespace(own.values).empty((0, *own.dense_shape), own.dtype)
        values, indices, _ = gather((own.values, own.indices, table))
        total = IndexedSlices(values, indices, self.dense_shape).summed()
        finish(op, total.values, size)
        total.values = total.values.astype(result_dtype(op, own_values.dtype), copy=False)
        return total

    def to_dense(self) -> Array:
        """Return the whole array, of shape `dense_shape`, with zeros in all other rows."""
        rows = self.summed()
        dense = array_namespace(rows.values).zeros(self.dense_shape, rows.dtype)
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
            f"IndexedSlices(indices={self.indices}, shape={self.dense_shape}, dtype={self.dtype})"
        )


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
