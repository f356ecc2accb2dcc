"""Reductions: how two values combine, and in which dtype they are summed.

Pure arithmetic over lists of arrays in replica order, so every strategy and every backend gets
the same bits. MEAN is SUM and one scale in the accumulation dtype.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array, array_namespace
from ndistribute.dtypes import computing_dtype

_UFUNCS = {"SUM": "add", "MEAN": "add", "MIN": "minimum", "MAX": "maximum", "PROD": "multiply"}


class ReduceOp(enum.Enum):
    """Choose how the replicas' values become one.

    Attributes:
        ufunc: the name of the binary function, in NumPy's and CuPy's namespaces.

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

    __hash__ = object.__hash__  # There is one of each; what `Enum` has is slower.

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the op that a name stands for, in any case.

        Raises:
            ValueError: the name is unknown.
        """
        if isinstance(op, cls):
            return op
        name = op.rpartition(".")[2].upper() if isinstance(op, str) else ""
        if name not in cls.__members__:
            raise ValueError(
                f"{op!r} is no reduction: the first argument is one of "
                f"{', '.join(cls.__members__)}, as nd.ReduceOp.SUM or by its name."
            )
        return cls[name]


@functools.lru_cache(maxsize=256)
def result_dtype(op: ReduceOp, dtype: np.dtype[Any] | type) -> np.dtype[Any]:
    """Return the dtype of a reduction's result: the input's, but float64 for a mean of integers.

    >>> result_dtype(ReduceOp.MEAN, np.int32), result_dtype(ReduceOp.SUM, np.int32)
    (dtype('float64'), dtype('int32'))
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float64) if op is ReduceOp.MEAN and dtype.kind in "iub" else dtype


@functools.lru_cache(maxsize=256)
def accumulation_dtype(op: ReduceOp, dtype: np.dtype[Any] | type) -> np.dtype[Any]:
    """Return the dtype in which values are combined: float32 for 16-bit floats.

    A 16-bit running sum loses a small addend beside a large sum; see Micikevicius et al., "Mixed
    Precision Training", 2018, section 3.3.

    >>> accumulation_dtype(ReduceOp.SUM, np.float16)
    dtype('float32')
    """
    return computing_dtype(result_dtype(op, dtype))


def reduce_arrays(op: ReduceOp, arrays: Sequence[Array], out: Array | None = None) -> Array:
    """Combine arrays of one shape and dtype in the order in which they are given.

    Args:
        op: how.
        arrays: at least one, in one memory; not changed.
        out: where the result goes, of the result's dtype; may be the first or second of `arrays`
            where that has the accumulation dtype.

    Returns:
        The result, in `result_dtype`.

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
    """Scale a sum into a mean, in place; other reductions are complete as they are."""
    if op is ReduceOp.MEAN:
        total /= count
