"""What a collective makes of one array before it travels: checked, flat, described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndistribute.collective.backend import Signature
from ndistribute.collective.reduce_op import ReduceOp, result_dtype
from ndistribute.device import Array, array_namespace, as_array

__all__ = ["flattened", "reducible", "rows_first", "signature"]


def reducible(op: ReduceOp, value: Any) -> Array:
    """Return a leaf as an array of the result's dtype."""
    array = as_array(value)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"{op.name} of {type(value).__name__} is not defined: pass arrays of numbers, or a "
            "nest of them."
        )
    if op is ReduceOp.MEAN and array.dtype.kind in "iub":
        return array.astype(result_dtype(op, array.dtype))
    return array


def flattened(array: Array) -> Array:
    """Return a contiguous array's elements as one axis, without a copy."""
    return array.ravel()  # Row by row; a copy only where the array is not laid out so.


def rows_first(array: Array, axis: int) -> Array:
    """Return an array with an axis moved to the front, where rows lie end to end.

    Raises:
        ValueError: the array has no such axis.
    """
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"all_gather along axis {axis} of an array of shape {array.shape}: the axis must be in "
            f"[{-array.ndim}, {array.ndim}). A number has no axis: pass np.reshape(x, (1,))."
        )
    xp = array_namespace(array)
    return xp.ascontiguousarray(xp.moveaxis(array, axis, 0))


def signature(arrays: Sequence[Array], *, ragged: bool = False) -> Signature:
    """Describe arrays for comparison; where rows may differ in number, a star stands for it."""
    if ragged:
        return tuple([(a.dtype, ("*", *a.shape[1:])) for a in arrays])
    return tuple([(a.dtype, a.shape) for a in arrays])
