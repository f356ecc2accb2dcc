"""Derivatives of the products of matrices.

Every product of a gradient here is a BLAS call where the forward product was one: operands are made
contiguous enough first, and a stack of matrices that meets one matrix becomes a single product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.fit import fit
from ndistribute.device import Array, as_array

__all__ = ["RULES", "RULES_BY_NAME", "RightFactor"]

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


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.matmul: (_matmul_x, _matmul_y),
    np.dot: (_dot_x, _dot_y),
}

# Younger than NumPy 1.26.
RULES_BY_NAME: dict[str, tuple[Callable[..., Vjp], ...]] = {
    "linalg.matmul": (_matmul_x, _matmul_y),
}
