"""Reductions: how two values are combined, and in which dtype.

The functions are pure. They combine values in the order of the list, so the result does not depend
on which replica arrives first. MEAN is SUM followed by one division in the accumulation dtype.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.devices import Array, array_namespace
from ndistribute.dtypes import computing_dtype, native
from ndistribute.indexed_slices import IndexedSlices

_UFUNCS = {"SUM": "add", "MEAN": "add", "MIN": "minimum", "MAX": "maximum", "PROD": "multiply"}


class ReduceOp(enum.Enum):
    """How the values of the replicas are combined into one.

    Attributes:
        ufunc: the name of the binary function in the namespaces of NumPy and CuPy.

    >>> ReduceOp.parse("mean") is ReduceOp.MEAN
    True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    def __init__(self, name: str) -> None:
        self.ufunc = _UFUNCS[name]

    __hash__ = object.__hash__  # Members are singletons; the hash of `Enum` is slower.

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the reduction with a name such as ``"sum"`` or ``"ReduceOp.SUM"``, in any case.

        Raises:
            ValueError: the name is unknown.
        """
        if isinstance(op, cls):
            return op
        name = op.rpartition(".")[2].upper() if isinstance(op, str) else ""
        if name not in cls.__members__:
            raise ValueError(
                f"{op!r} is not a reduction: pass a name ({', '.join(cls.__members__)}) or a "
                "member of nd.ReduceOp as the first argument."
            )
        return cls[name]


@functools.lru_cache(maxsize=256)
def result_dtype(op: ReduceOp, dtype: np.dtype[Any] | type) -> np.dtype[Any]:
    """Return the dtype of the result: float64 for MEAN of integers, otherwise the input's dtype.

    >>> result_dtype(ReduceOp.MEAN, np.int32), result_dtype(ReduceOp.SUM, np.int32)
    (dtype('float64'), dtype('int32'))
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float64) if op is ReduceOp.MEAN and dtype.kind in "iub" else dtype


@functools.lru_cache(maxsize=256)
def accumulation_dtype(op: ReduceOp, dtype: np.dtype[Any] | type) -> np.dtype[Any]:
    """Return the dtype of intermediate results: float32 for 16-bit floats.

    A 16-bit sum loses small addends once it is large; see Micikevicius et al., "Mixed
    Precision Training", 2018, section 3.3.

    >>> accumulation_dtype(ReduceOp.SUM, np.float16)
    dtype('float32')
    """
    return computing_dtype(result_dtype(op, dtype))


def reduce_arrays(op: ReduceOp, arrays: Sequence[Array], out: Array | None = None) -> Array:
    """Return the reduction of arrays of the same shape and dtype, combined in the order given.

    Args:
        op: the reduction.
        arrays: at least one array, all in the same memory; none is changed, except `out`.
        out: an array for the result, of that shape and of `result_dtype`; None means a new array.
            It may be the first or second of `arrays` if these have the accumulation dtype.

    Returns:
        The result, of `result_dtype`.

    >>> reduce_arrays(ReduceOp.MEAN, [np.float32([1, 2]), np.float32([3, 6])])
    array([2., 4.], dtype=float32)
    """
    first = arrays[0]
    dtype = accumulation_dtype(op, first.dtype)
    xp = np if type(first) is np.ndarray else array_namespace(first)
    total = out if out is not None and out.dtype == dtype else xp.empty(first.shape, dtype)
    if len(arrays) == 1:
        total[...] = first
    else:
        combine = getattr(xp, op.ufunc)
        combine(first, arrays[1], out=total, dtype=dtype)
        for array in arrays[2:]:
            combine(total, array, out=total, dtype=dtype)
    if op is ReduceOp.MEAN:
        total /= len(arrays)
    if out is None:
        return total.astype(result_dtype(op, first.dtype), copy=False)
    if total is not out:
        out[...] = total
    return out


def finish(op: ReduceOp, total: Array, count: int) -> None:
    """Divide the sum of `count` values by `count`, in place, if `op` is MEAN."""
    if op is ReduceOp.MEAN:
        total /= count


def reduce_rows(
    rows: IndexedSlices, op: ReduceOp, size: int, gather: Callable[[Any], Any]
) -> IndexedSlices:
    """Return the sum or the mean, over the replicas, of rows of equally shaped arrays.

    Rows with equal indices are added on each replica first, then over replicas in order.

    Args:
        rows: the rows of this replica.
        op: SUM or MEAN; a row counts as zeros for a replica that does not pass it.
        size: the number of replicas.
        gather: a function that concatenates a nest of arrays over the replicas, along the first
            axis.

    Returns:
        The rows that at least one replica passed, with unique indices in ascending order.

    Raises:
        ValueError: `op` is another reduction.

    >>> rows = IndexedSlices(np.ones((2, 1)), np.array([4, 4]), (5, 1))
    >>> reduce_rows(rows, ReduceOp.SUM, 1, lambda nest: nest).values
    array([[2.]])
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        what = f"{op.name} of IndexedSlices is not supported, only SUM and MEAN are:"
        raise ValueError(f"{what} rows that were not passed count as zeros. Call to_dense() first.")
    values = native(rows.values)
    wide = values.astype(accumulation_dtype(op, rows.dtype), copy=False)
    summed = IndexedSlices(wide, rows.indices, rows.dense_shape).summed()
    # Without rows it sends no data, but all replicas must pass the same shape of the table.
    table = array_namespace(wide).empty((0, *rows.dense_shape), wide.dtype)
    totals, indices, _ = gather((summed.values, summed.indices, table))
    total = IndexedSlices(totals, indices, rows.dense_shape).summed()
    mean = total.values / size if op is ReduceOp.MEAN else total.values
    total.values = mean.astype(result_dtype(op, values.dtype), copy=False)
    return total
