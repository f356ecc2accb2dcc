"""Rows of an array by their indices: the gradient of an embedding look-up.

Only the rows that a step touched are kept, so a large table's gradient costs what the batch costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.device import Array, array_namespace

__all__ = ["IndexedSlices"]


class IndexedSlices:
    """Hold some rows of an array that is zero elsewhere.

    Args:
        values: shape ``(k, *dense_shape[1:])``; a row that stands several times is meant summed.
        indices: integers of shape ``(k,)``, each in ``[0, dense_shape[0])``.
        dense_shape: the shape of the whole array.

    Raises:
        ValueError: the shapes do not fit together.

    >>> rows = IndexedSlices(np.ones((2, 3)), np.array([4, 4]), (5, 3))
    >>> rows.to_dense()[4]
    array([2., 2., 2.])
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Array, indices: Array, dense_shape: tuple[int, ...]) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = tuple(int(length) for length in dense_shape)
        expected = (*indices.shape, *self.dense_shape[1:])
        if indices.ndim != 1 or values.shape != expected:
            raise ValueError(
                f"IndexedSlices of a {self.dense_shape} array with indices of shape "
                f"{indices.shape} needs values of shape {expected}, got {values.shape}."
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the rows."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole array."""
        return self.dense_shape

    def summed(self) -> IndexedSlices:
        """Return the same array with each row at most once, in rising order of the indices.

        Equal indices are added in the order in which they stand, so the result is reproducible.

        >>> IndexedSlices(np.array([[1.0], [2.0], [4.0]]), np.array([7, 2, 7]), (9, 1)).summed()
        IndexedSlices(indices=[2 7], shape=(9, 1), dtype=float64)
        """
        xp = array_namespace(self.values)
        rows, inverse = xp.unique(self.indices, return_inverse=True)
        if len(rows) == len(self.indices):
            order = xp.argsort(self.indices)
            return IndexedSlices(self.values[order], rows, self.dense_shape)
        totals = xp.zeros((len(rows), *self.dense_shape[1:]), self.values.dtype)
        xp.add.at(totals, inverse, self.values)
        return IndexedSlices(totals, rows, self.dense_shape)

    def to_dense(self) -> Array:
        """Return the whole array, zeros where no row was given."""
        xp = array_namespace(self.values)
        dense = xp.zeros(self.dense_shape, self.values.dtype)
        xp.add.at(dense, self.indices, self.values)
        return dense

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(indices={self.indices}, shape={self.dense_shape}, dtype={self.dtype})"
        )
