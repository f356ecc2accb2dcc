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

__all__ = ["ReduceOp", "accumulation_dtype", "finish", "reduce_arrays", "result_dtype"]


class ReduceOp(enum.Enum):
    """Choose how the replicas' values become one.

    >>> ReduceOp.parse("mean") is ReduceOp.MEAN
    True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    __hash__ = object.__hash__  # There is one of each; what `Enum` has is slower.

    @property
    def ufunc(self) -> str:
        """Return the name of the binary function, in NumPy's and CuPy's namespaces."""
        return _UFUNCS[self._name_]

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
                f"{op!r} is no reduction: use one of {', '.join(cls.__members__)}, as "
                "nd.ReduceOp.SUM or by its name."
            )
        return cls[name]


_UFUNCS = {
    "SUM": "add",
    "MEAN": "add",
    "MIN": "minimum",
    "MAX": "maximum",
    "PROD": "multiply",
}


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
    dtype = result_dtype(op, dtype)
    half = dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")
    return np.dtype(np.float32) if half else dtype


def reduce_arrays(op: ReduceOp, arrays: Sequence[Array], out: Array | None = None) -> Array:
    """Combine arrays of one shape and dtype in the order in which they are given.

    Args:
        op: how.
        arrays: at least one; not changed.
        out: where the result goes, of the result's dtype; may be the first or second of `arrays`
            where that has the accumulation dtype.

    Returns:
        The result, in `result_dtype`.

    >>> reduce_arrays(ReduceOp.MEAN, [np.float32([1, 2]), np.float32([3, 6])])
    array([2., 4.], dtype=float32)
    """
    first, *others = arrays
    if len(others) == 1 and type(first) is type(others[0]) is type(out) is np.ndarray:
        plain = _plain(op, first.dtype, out.dtype)
        if plain is not None:  # What nearly always happens.
            plain(first, others[0], out=out)
            if op is ReduceOp.MEAN:
                out /= 2
            return out
    accumulate, wide = _ways(op, first.dtype)
    direct = out if out is not None and out.dtype == accumulate else None
    if others:
        xp = array_namespace(*arrays)
        ufunc = getattr(xp, _UFUNCS[op._name_])
        total = ufunc(first, others[0], out=direct, **wide)
        if direct is None:
            total = xp.asarray(total)
        for array in others[1:]:
            ufunc(total, array, out=total, **wide)
    elif direct is None:
        total = first.astype(accumulate, copy=True)
    else:
        direct[...] = first
        total = direct
    if op is ReduceOp.MEAN:
        total /= len(arrays)
    if out is None:
        return total.astype(result_dtype(op, first.dtype), copy=False)
    if direct is None:
        out[...] = total
    return out


@functools.lru_cache(maxsize=256)
def _plain(op: ReduceOp, dtype: np.dtype[Any], out: np.dtype[Any]) -> Any:
    """Return the ufunc that combines NumPy arrays without converting them, None if they must be."""
    return getattr(np, op.ufunc) if dtype == accumulation_dtype(op, dtype) == out else None


@functools.lru_cache(maxsize=256)
def _ways(op: ReduceOp, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], dict[str, Any]]:
    """Return the dtype in which values of a dtype are combined, and how a ufunc is told."""
    accumulate = accumulation_dtype(op, dtype)
    # logical_or and logical_and are what `add` and `multiply` of booleans mean; they need no dtype.
    return accumulate, {} if accumulate == dtype else {"dtype": accumulate}


def finish(op: ReduceOp, total: Array, count: int) -> None:
    """Scale a sum into a mean, in place; other reductions are complete as they are."""
    if op is ReduceOp.MEAN:
        total /= count
