"""Conversion of gradients to the shape and dtype of their values, and other helpers of all rules.

The forward pass broadcasts and promotes dtypes implicitly; the reverse is a sum and a cast. Rules
whose gradient may differ end with it, so a float32 model never computes in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.devices import Array, array_namespace

Shape = tuple[int, ...]
Vjp = Callable[[Array], Array]  # from the gradient of a result to that of an argument

_GEMV_SIZE = 1 << 16
_HOST = (np.ndarray, np.generic)


def identity(g: Array) -> Array:
    """Return a gradient unchanged."""
    return g


def unbroadcast(g: Array, shape: Shape, dtype: Any) -> Array:
    """Return a gradient summed over the axes of broadcasting and cast, or itself if it fits.

    >>> unbroadcast(np.ones((4, 3)), (3,), np.dtype(np.float32))
    array([4., 4., 4.], dtype=float32)
    """
    if g.shape != shape:
        g = _sum_to(g, shape)
    if g.dtype != dtype:
        # A real value has a real gradient.
        g = (g.real if g.dtype.kind == "c" != dtype.kind else g).astype(dtype)
    return g


def unbroadcasting(x: Array, out: Array) -> Vjp:
    """Return the function from a gradient of the shape and dtype of `out` to that of `x`.

    The forward pass selects it, so the backward pass needs no checks for a gradient that fits.
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
        raise ValueError(f"a gradient of shape {long} does not fit a value of shape {shape}.")
    return total.astype(g.dtype, copy=False)


def lead_sum(g: Array) -> Array:
    """Return the sum of the rows of a matrix.

    The product with ones is a GEMV, which took 0.6 of the time of `sum` for 256 x 512 float32, and
    a larger part for 32 x 512.
    """
    large = g.size >= _GEMV_SIZE and type(g) is np.ndarray
    if large and g.dtype.char in "fd" and g.flags.c_contiguous:
        return np.ones(len(g), g.dtype) @ g
    return g.sum(axis=0, dtype=wide(g.dtype)).astype(g.dtype, copy=False)


def wide(dtype: Any) -> Any:
    """Return the dtype in which to sum: float32 for 16-bit floats, otherwise None, the same."""
    return np.float32 if dtype.itemsize == 2 else None


def as_axes(axis: Any, ndim: int) -> Shape:
    """Return the axes of an `axis` argument, counted from 0.

    >>> as_axes(None, 2), as_axes(-1, 3), as_axes((0, -1), 3)
    ((0, 1), (2,), (0, 2))
    """
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, Sequence) else (axis,)
    return tuple([int(number) % ndim for number in axes]) if ndim else ()


def kept_shape(shape: Shape, axis: Any) -> Shape:
    """Return the shape of a reduction that keeps its axes with length 1."""
    if axis is None:
        return (1,) * len(shape)
    axes = as_axes(axis, len(shape))
    return tuple([1 if k in axes else n for k, n in enumerate(shape)])


def spread(g: Array, shape: Shape, dtype: Any, axis: Any) -> Array:
    """Return the gradient of a reduction repeated along the reduced axes.

    It is a contiguous array, because matrix products of views with stride 0 do not use BLAS.
    """
    if 0 < g.ndim < len(shape):
        g = g.reshape(kept_shape(shape, axis))
    if hasattr(g, "placed"):  # A tracked array.
        return unbroadcast(np.broadcast_to(g, shape), shape, dtype)
    whole = zeros(g, shape, dtype)
    whole[...] = g.real if g.dtype.kind == "c" != dtype.kind else g
    return whole


def add_at(total: Array, index: Any, values: Array) -> None:
    """Add values at an index in place; repeated indices add repeatedly."""
    xp = np if isinstance(total, np.ndarray) else array_namespace(total)
    xp.add.at(total, index, values)


def zeros(like: Array, shape: Shape, dtype: Any = None) -> Array:
    """Return zeros on the device of another array, in its dtype unless one is given."""
    if dtype is None:
        dtype = like.dtype
    if isinstance(like, _HOST):
        # `zeros_like` takes three times as long for small arrays.
        return np.zeros(shape, dtype)
    if not shape:  # CuPy takes no axes for the shape of the other array.
        return np.zeros_like(like, dtype=dtype, shape=(1,)).reshape(shape)
    return np.zeros_like(like, dtype=dtype, shape=shape)


def refuse_complex(a: Array) -> None:
    """Raise a `NotImplementedError`, which becomes the refusal of the call, for a complex array."""
    if a.dtype.kind == "c":
        raise NotImplementedError("complex arguments")
