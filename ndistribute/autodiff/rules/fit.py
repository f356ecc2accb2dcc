"""Give a gradient the shape and dtype of the value that it belongs to.

Broadcasting and type promotion happen silently in the forward direction; their reverse is a sum
and a cast. Every rule ends here, which is why a float32 model never computes in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array

__all__ = ["as_axes", "fit", "identity", "kept_shape", "lead_sum", "spread", "sum_to", "widened"]

Shape = tuple[int, ...]


def identity(g: Array) -> Array:
    """Pass a gradient on as it is."""
    return g


def fit(g: Array, shape: Shape, dtype: Any) -> Array:
    """Sum a gradient over the axes that broadcasting added, and cast it.

    Returns:
        `g` itself where it fits already.

    >>> fit(np.ones((4, 3)), (3,), np.dtype(np.float32))
    array([4., 4., 4.], dtype=float32)
    """
    if g.shape != shape:
        g = sum_to(g, shape)
    if g.dtype != dtype:
        # The imaginary part of a gradient says nothing about a real value.
        g = (g.real if g.dtype.kind == "c" != dtype.kind else g).astype(dtype)
    return g


def sum_to(g: Array, shape: Shape) -> Array:
    """Sum over the axes along which `shape` was broadcast to the shape of `g`.

    Raises:
        ValueError: `shape` does not broadcast to that of `g`.
    """
    lead = g.ndim - len(shape)
    if lead < 0:
        raise ValueError(f"a gradient of shape {g.shape} does not belong to a value of {shape}.")
    if lead == 1 and len(shape) == 1 and g.shape[1] == shape[0]:
        return lead_sum(g)
    axes = tuple(range(lead)) + tuple(
        axis for axis, length in enumerate(shape, lead) if length == 1 != g.shape[axis]
    )
    total = np.sum(g, axis=axes, **widened(g.dtype)) if axes else g
    if math.prod(total.shape) != math.prod(shape):
        raise ValueError(f"a gradient of shape {g.shape} does not belong to a value of {shape}.")
    return total.reshape(shape).astype(g.dtype, copy=False)


def lead_sum(g: Array) -> Array:
    """Sum a matrix over its rows.

    A product with ones is a GEMV, which took half the time of `np.sum` at 256 x 512 float32.
    """
    if type(g) is np.ndarray and g.dtype.char in "fd" and g.flags.c_contiguous and len(g) > 0:
        return np.ones(len(g), g.dtype) @ g
    return np.sum(g, axis=0, **widened(g.dtype)).astype(g.dtype, copy=False)


def widened(dtype: Any) -> dict[str, Any]:
    """Return the keyword with which a sum of 16-bit floats runs in float32."""
    return {"dtype": np.float32} if dtype.itemsize == 2 else {}


def as_axes(axis: Any, ndim: int) -> Shape:
    """Return the axes that an `axis` argument means, counted from 0.

    >>> as_axes(None, 2), as_axes(-1, 3), as_axes((0, -1), 3)
    ((0, 1), (2,), (0, 2))
    """
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, Sequence) else (axis,)
    return tuple(int(one) % ndim for one in axes) if ndim else ()


def kept_shape(shape: Shape, axis: Any) -> Shape:
    """Return the shape of a reduction that keeps its axes with length 1."""
    if axis is None:
        return (1,) * len(shape)
    axes = as_axes(axis, len(shape))
    return tuple(1 if i in axes else length for i, length in enumerate(shape))


def spread(g: Array, shape: Shape, dtype: Any, axis: Any) -> Array:
    """Repeat the gradient of a reduction over the axes that it reduced.

    A real array, not a broadcast view: a matrix product of a view with stride 0 leaves BLAS.
    """
    whole = np.empty_like(g, dtype=dtype, shape=shape)
    if g.ndim:
        g = g.reshape(kept_shape(shape, axis))
    whole[...] = g.real if g.dtype.kind == "c" != dtype.kind else g
    return whole
