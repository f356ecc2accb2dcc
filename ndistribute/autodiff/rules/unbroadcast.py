"""Give a gradient the shape and dtype of the value that it belongs to.

Broadcasting and type promotion happen silently in the forward direction; their reverse is a sum
and a cast. Every rule ends here, which is why a float32 model never computes in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array, array_namespace

__all__ = [
    "add_at",
    "as_axes",
    "identity",
    "kept_shape",
    "lead_sum",
    "spread",
    "unbroadcast",
    "unbroadcasting",
    "wide",
    "zeros",
]

Shape = tuple[int, ...]


def identity(g: Array) -> Array:
    """Pass a gradient on as it is."""
    return g


def unbroadcast(g: Array, shape: Shape, dtype: Any) -> Array:
    """Sum a gradient over the axes that broadcasting added, and cast it.

    Returns:
        `g` itself where it fits already.

    Raises:
        ValueError: `shape` does not broadcast to that of `g`.

    >>> unbroadcast(np.ones((4, 3)), (3,), np.dtype(np.float32))
    array([4., 4., 4.], dtype=float32)
    """
    if g.shape != shape:
        g = _sum_to(g, shape)
    if g.dtype != dtype:
        # The imaginary part of a gradient says nothing about a real value.
        g = (g.real if g.dtype.kind == "c" != dtype.kind else g).astype(dtype)
    return g


def unbroadcasting(x: Array, out: Array) -> Callable[[Array], Array]:
    """Return the function from a gradient of the shape and dtype of `out` to that of `x`.

    Chosen on the way forward, so that a gradient that fits passes without a question.
    """
    shape, dtype = x.shape, x.dtype
    if dtype == out.dtype:
        if shape == out.shape:
            return identity
        if len(shape) == 1 and out.ndim == 2 and shape[0] == out.shape[1]:
            return lead_sum
    return lambda g: unbroadcast(g, shape, dtype)


def _sum_to(g: Array, shape: Shape) -> Array:
    long = g.shape
    lead = len(long) - len(shape)
    if lead == 1 == len(shape) and long[1] == shape[0]:
        return lead_sum(g)
    axes = [axis for axis, n in enumerate(long) if axis < lead or shape[axis - lead] != n]
    total = g.sum(axis=tuple(axes), dtype=wide(g.dtype), keepdims=True) if lead >= 0 else g
    if lead > 0 and total.shape[lead:] == shape:
        total = total.reshape(shape)
    if total.shape != shape:
        raise ValueError(f"a gradient of shape {long} does not belong to a value of {shape}.")
    return total.astype(g.dtype, copy=False)


def lead_sum(g: Array) -> Array:
    """Sum a matrix over its rows.

    A product with ones is a GEMV, which took 0.6 of the time of `sum` at 256 x 512 float32, and
    more than that at 32 x 512.
    """
    large = g.size >= _GEMV_SIZE and type(g) is np.ndarray
    if large and g.dtype.char in "fd" and g.flags.c_contiguous:
        return np.ones(len(g), g.dtype) @ g
    return g.sum(axis=0, dtype=wide(g.dtype)).astype(g.dtype, copy=False)


_GEMV_SIZE = 1 << 16
_HOST = (np.ndarray, np.generic)


def wide(dtype: Any) -> Any:
    """Return the dtype in which a sum runs: float32 for 16-bit floats, None for the same."""
    return np.float32 if dtype.itemsize == 2 else None


def as_axes(axis: Any, ndim: int) -> Shape:
    """Return the axes that an `axis` argument means, counted from 0.

    >>> as_axes(None, 2), as_axes(-1, 3), as_axes((0, -1), 3)
    ((0, 1), (2,), (0, 2))
    """
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, Sequence) else (axis,)
    return tuple([int(one) % ndim for one in axes]) if ndim else ()


def kept_shape(shape: Shape, axis: Any) -> Shape:
    """Return the shape of a reduction that keeps its axes with length 1."""
    if axis is None:
        return (1,) * len(shape)
    kept = list(shape)
    for one in as_axes(axis, len(shape)):
        kept[one] = 1
    return tuple(kept)


def spread(g: Array, shape: Shape, dtype: Any, axis: Any) -> Array:
    """Repeat the gradient of a reduction over the axes that it reduced.

    A real array, not a broadcast view: a matrix product of a view with stride 0 leaves BLAS.
    """
    whole = zeros(g, shape, dtype)
    if 0 < g.ndim < len(shape):
        g = g.reshape(kept_shape(shape, axis))
    whole[...] = g.real if g.dtype.kind == "c" != dtype.kind else g
    return whole


def add_at(total: Array, index: Any, values: Array) -> None:
    """Add values at an index, in place; what is named several times is added several times."""
    xp = np if isinstance(total, np.ndarray) else array_namespace(total)
    xp.add.at(total, index, values)


def zeros(like: Array, shape: Shape, dtype: Any = None) -> Array:
    """Return zeros in the memory of another array, in its dtype if none is given."""
    if dtype is None:
        dtype = like.dtype
    if isinstance(like, _HOST):
        # `zeros_like` takes three times as long for small arrays.
        return np.zeros(shape, dtype)
    return np.zeros_like(like, dtype=dtype, shape=shape)
