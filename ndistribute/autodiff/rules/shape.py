"""Derivatives of the functions that move elements about: each moves the gradient back.

Most return a view of the gradient, at no cost; the backward pass knows that it does not own a view
and copies where it has to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.fit import as_axes, fit, zeros
from ndistribute.autodiff.rules.windows import moved
from ndistribute.device import Array

__all__ = ["RULES", "RULES_BY_NAME"]

Vjp = Callable[[Array], Array]


def _reshape(out: Array, a: Array, shape: Any = None, order: str = "C", **kwargs: Any) -> Vjp:
    return _reshaped_back(a, order)


def _ravel(out: Array, a: Array, order: str = "C") -> Vjp:
    return _reshaped_back(a, order)


def _reshaped_back(a: Array, order: str) -> Vjp:
    if order not in "CF":
        raise NotImplementedError(f"order={order!r}: use 'C' or 'F'")
    shape = a.shape
    return lambda g: g.reshape(shape, order=order)


def _same_elements(out: Array, a: Array, *args: Any, **kwargs: Any) -> Vjp:
    shape = a.shape
    return lambda g: g.reshape(shape)


def _transpose(out: Array, a: Array, axes: Any = None) -> Vjp:
    if axes is None:
        return np.transpose
    order = as_axes(axes, a.ndim)
    back = tuple(order.index(i) for i in range(a.ndim))
    return lambda g: np.transpose(g, back)


def _matrix_transpose(out: Array, x: Array) -> Vjp:
    return lambda g: np.swapaxes(g, -1, -2)


def _swapaxes(out: Array, a: Array, axis1: int, axis2: int) -> Vjp:
    return lambda g: np.swapaxes(g, axis1, axis2)


def _moveaxis(out: Array, a: Array, source: Any, destination: Any) -> Vjp:
    return lambda g: np.moveaxis(g, destination, source)


def _broadcast_to(out: Array, array: Array, *args: Any, **kwargs: Any) -> Vjp:
    shape, dtype = array.shape, array.dtype
    return lambda g: fit(g, shape, dtype)


def _flip(out: Array, m: Array, axis: Any = None) -> Vjp:
    return lambda g: np.flip(g, axis)


def _roll(out: Array, a: Array, shift: Any, axis: Any = None) -> Vjp:
    back = tuple(-s for s in shift) if isinstance(shift, Sequence) else -shift
    return lambda g: np.roll(g, back, axis)


def _repeat(out: Array, a: Array, repeats: Any, axis: Any = None) -> Vjp:
    if np.ndim(repeats):
        return moved(np.repeat, a, repeats, axis)
    shape = a.shape
    flat = (a.size,) if axis is None else shape
    along = 0 if axis is None else axis % a.ndim
    unfolded = (*flat[: along + 1], int(repeats), *flat[along + 1 :])
    return lambda g: g.reshape(unfolded).sum(axis=along + 1, dtype=g.dtype).reshape(shape)


def _triangle(function: Callable[..., Array]) -> Callable[..., Vjp]:
    def maker(out: Array, m: Array, k: int = 0) -> Vjp:
        return lambda g: function(g, k)

    return maker


def _diagonal(out: Array, a: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Vjp:
    shape = a.shape

    def vjp(g: Array) -> Array:
        whole = zeros(g, shape)
        matrices = np.moveaxis(whole, (axis1, axis2), (-2, -1))
        rows = np.arange(g.shape[-1]) + max(0, -offset)
        matrices[..., rows, rows + offset] = g
        return whole

    return vjp


def _diag(out: Array, v: Array, k: int = 0) -> Vjp:
    if v.ndim == 2:
        return _diagonal(out, v, k)
    return lambda g: np.diagonal(g, k)


def _trace(out: Array, a: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Vjp:
    diagonal = _diagonal(out, a, offset, axis1, axis2)
    length = a.diagonal(offset, axis1, axis2).shape[-1]
    return lambda g: diagonal(np.repeat(g[..., None], length, -1))


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.reshape: (_reshape,),
    np.ravel: (_ravel,),
    np.transpose: (_transpose,),
    np.swapaxes: (_swapaxes,),
    np.moveaxis: (_moveaxis,),
    np.squeeze: (_same_elements,),
    np.expand_dims: (_same_elements,),
    np.broadcast_to: (_broadcast_to,),
    np.flip: (_flip,),
    np.fliplr: (lambda out, m: np.fliplr,),
    np.flipud: (lambda out, m: np.flipud,),
    np.rot90: (lambda out, m, k=1, axes=(0, 1): lambda g: np.rot90(g, -k, axes),),
    np.roll: (_roll,),
    np.repeat: (_repeat,),
    np.tril: (_triangle(np.tril),),
    np.triu: (_triangle(np.triu),),
    np.diagonal: (_diagonal,),
    np.diag: (_diag,),
    np.trace: (_trace,),
}

# Younger than NumPy 1.26.
RULES_BY_NAME: dict[str, tuple[Callable[..., Vjp], ...]] = {
    "matrix_transpose": (_matrix_transpose,),
    "linalg.matrix_transpose": (_matrix_transpose,),
}
