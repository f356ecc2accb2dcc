"""Derivatives of the products of matrices.

Every product of a gradient here is a BLAS call where the forward product was one: operands are made
contiguous enough first, and a stack of matrices that meets one matrix becomes a single product.
Other products are written again in terms of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.fit import fit
from ndistribute.device import Array, as_array

__all__ = ["COMPOSED", "COMPOSED_BY_NAME", "RULES", "RightFactor"]

Value = Any  # a tracked or plain array, or a number
Vjp = Callable[[Array], Array]


class RightFactor:
    """The gradient of the right factor of a product of two matrices: in most models, the weights.

    Args:
        x: the left factor.
    """

    __slots__ = ("_x",)

    def __init__(self, x: Array) -> None:
        self._x = x

    def __call__(self, g: Array) -> Array:
        return self._x.T @ _blas(g)

    def into(self, g: Array, memory: Callable[[Any, tuple[int, ...]], Array | None]) -> Array:
        """Return the gradient in the memory that a function offers, if it offers any."""
        here = type(g) is np.ndarray
        out = memory(g.dtype, (self._x.shape[1], g.shape[1])) if here else None
        return np.matmul(self._x.T, _blas(g), out=out)


def _matmul_x(out: Array, x: Array, y: Array) -> Vjp:
    shape, dtype = x.shape, x.dtype
    if x.ndim == 2 == y.ndim and dtype == out.dtype:
        return lambda g: _blas(g) @ y.T
    if y.ndim == 1:
        if x.ndim == 1:
            return lambda g: fit(g * y, shape, dtype)
        return lambda g: fit(g[..., None] * y, shape, dtype)
    if x.ndim == 1:
        return lambda g: fit(np.matmul(y, _blas(g)[..., None])[..., 0], shape, dtype)
    return lambda g: fit(np.matmul(_blas(g), np.swapaxes(y, -1, -2)), shape, dtype)


def _matmul_y(out: Array, x: Array, y: Array) -> Vjp:
    shape, dtype = y.shape, y.dtype
    if x.ndim == 2 == y.ndim and dtype == out.dtype:
        return RightFactor(x)
    if x.ndim == 1:
        if y.ndim == 1:
            return lambda g: fit(g * x, shape, dtype)
        return lambda g: fit(x[:, None] * g[..., None, :], shape, dtype)
    if y.ndim == 1:
        return lambda g: fit(_rows(x).T @ g.reshape(-1), shape, dtype)
    if y.ndim == 2:
        return lambda g: fit(_rows(x).T @ _rows(_blas(g)), shape, dtype)
    return lambda g: fit(np.matmul(np.swapaxes(x, -1, -2), _blas(g)), shape, dtype)


def _dot_x(out: Array, x: Array, y: Any) -> Vjp:
    y = as_array(y)
    shape, dtype, y_ndim = x.shape, x.dtype, y.ndim
    if x.ndim == 0 or y_ndim == 0:
        return lambda g: fit(g * y, shape, dtype)
    if y_ndim <= 2:
        return _matmul_x(out, x, y)

    def vjp(g: Array) -> Array:
        first = np.moveaxis(y, -2, 0)
        free = range(len(shape) - 1, g.ndim)
        return fit(np.tensordot(g, first, (list(free), list(range(1, y_ndim)))), shape, dtype)

    return vjp


def _dot_y(out: Array, x: Any, y: Array) -> Vjp:
    x = as_array(x)
    shape, dtype, x_ndim = y.shape, y.dtype, x.ndim
    if y.ndim == 0 or x_ndim == 0:
        return _dot_x(out, y, x)
    if y.ndim <= 2:
        return _matmul_y(out, x, y)

    def vjp(g: Array) -> Array:
        lead = list(range(x_ndim - 1))
        return fit(np.moveaxis(np.tensordot(x, g, (lead, lead)), 0, -2), shape, dtype)

    return vjp


def _blas(g: Array) -> Array:
    """Return an operand that BLAS takes; a broadcast view would fall back to a slow loop."""
    return np.ascontiguousarray(g) if 0 in g.strides else g


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _outer(a: Value, b: Value) -> Value:
    return np.ravel(a)[:, None] * np.ravel(b)[None, :]


def _vecdot(x1: Value, x2: Value, axis: int = -1) -> Value:
    return np.sum(x1 * x2, axis=axis)


def _vdot(a: Value, b: Value) -> Value:
    return np.sum(np.ravel(np.conj(a)) * np.ravel(b))


def _inner(a: Value, b: Value) -> Value:
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return a * b
    return np.tensordot(a, b, axes=(-1, -1))


def _tensordot(a: Value, b: Value, axes: Any = 2) -> Value:
    """Move the summed axes together and multiply two matrices."""
    ndim_a, ndim_b = np.ndim(a), np.ndim(b)
    if isinstance(axes, int):
        axes = (list(range(ndim_a - axes, ndim_a)), list(range(axes)))
    first, second = ([axis] if np.ndim(axis) == 0 else list(axis) for axis in axes)
    first = [int(axis) % ndim_a for axis in first]
    second = [int(axis) % ndim_b for axis in second]
    rest_a = [axis for axis in range(ndim_a) if axis not in first]
    rest_b = [axis for axis in range(ndim_b) if axis not in second]
    lengths_a, lengths_b = np.shape(a), np.shape(b)
    summed = math.prod(lengths_a[axis] for axis in first)
    out_a, out_b = [lengths_a[axis] for axis in rest_a], [lengths_b[axis] for axis in rest_b]
    left = np.reshape(np.transpose(a, rest_a + first), (math.prod(out_a), summed))
    right = np.reshape(np.transpose(b, second + rest_b), (summed, math.prod(out_b)))
    return np.reshape(np.matmul(left, right), (*out_a, *out_b))


def _matvec(x1: Value, x2: Value) -> Value:
    return np.matmul(x1, x2[..., None])[..., 0]


def _vecmat(x1: Value, x2: Value) -> Value:
    return np.matmul(np.conj(x1)[..., None, :], x2)[..., 0, :]


def _cross(
    a: Value, b: Value, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None
) -> Value:
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = np.moveaxis(a, axisa, -1), np.moveaxis(b, axisb, -1)
    if not np.shape(a)[-1] == np.shape(b)[-1] == 3:
        return NotImplemented
    # The components that follow, in the circle x y z x.
    a1, a2, b1, b2 = (np.roll(x, -k, -1) for x in (a, b) for k in (1, 2))
    return np.moveaxis(a1 * b2 - a2 * b1, -1, axisc)


def _kron(a: Value, b: Value) -> Value:
    ndim = max(np.ndim(a), np.ndim(b))
    long_a, long_b = ((1,) * (ndim - np.ndim(x)) + np.shape(x) for x in (a, b))
    blocks = np.reshape(a, [n for pair in long_a for n in (pair, 1)])
    blocks = blocks * np.reshape(b, [n for pair in long_b for n in (1, pair)])
    return np.reshape(blocks, [m * n for m, n in zip(long_a, long_b, strict=True)])


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.matmul: (_matmul_x, _matmul_y),
    np.dot: (_dot_x, _dot_y),
    np.linalg.matmul: (_matmul_x, _matmul_y),
}

COMPOSED: dict[Any, Callable[..., Value]] = {
    np.cross: _cross,
    np.inner: _inner,
    np.kron: _kron,
    np.linalg.cross: lambda x1, x2, /, *, axis=-1: _cross(x1, x2, axis=axis),
    np.linalg.outer: _outer,
    np.linalg.tensordot: _tensordot,
    np.linalg.vecdot: _vecdot,
    np.outer: _outer,
    np.tensordot: _tensordot,
    np.vdot: _vdot,
    np.vecdot: _vecdot,
}

# Younger than NumPy 2.0.
COMPOSED_BY_NAME: dict[str, Callable[..., Value]] = {"matvec": _matvec, "vecmat": _vecmat}
