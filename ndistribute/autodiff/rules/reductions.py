"""Derivatives of the functions that reduce axes, and of those that run along one.

The gradient of a reduction is spread over the axes that it reduced. Arguments that change which
elements take part (`where`, `initial`) have no rule; they fail when the gradient is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import kept_shape, spread, unbroadcast, wide
from ndistribute.device import Array

__all__ = ["RULES", "exclusive_product"]

Vjp = Callable[[Array], Array]


def _sum(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    shape, own_dtype = a.shape, a.dtype
    return lambda g: spread(g, shape, own_dtype, axis)


def _mean(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    shape, own_dtype = a.shape, a.dtype
    count = max(1, a.size // max(1, result.size))
    if own_dtype.itemsize == 2:  # In which a count may be infinite.
        return lambda g: spread(g / np.float32(count), shape, own_dtype, axis)
    return lambda g: spread(g / count, shape, own_dtype, axis)


def _extreme(result: Array, a: Array, axis: Any = None, out: Any = None, keepdims: Any = 0) -> Vjp:
    """Return the rule of max and min: elements that tie share the gradient."""
    shape = a.shape

    def vjp(g: Array) -> Array:
        kept = g.shape if g.ndim == len(shape) else kept_shape(shape, axis)
        holds = np.equal(a, result.reshape(kept))
        if (
            isinstance(a, np.ndarray)
            and np.count_nonzero(holds) == result.size
            and holds.any(axis=axis).all()
        ):
            # No ties, as nearly always. On a GPU the question would cost more than it saves.
            return g.reshape(kept) * holds
        share = holds.astype(a.dtype)
        # Beside a NaN nothing holds.
        share /= np.maximum(share.sum(axis=axis, keepdims=True, dtype=wide(a.dtype)), 1)
        share *= g.reshape(kept)
        return share

    return vjp


def _variance(
    result: Array,
    a: Array,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = 0,
    *,
    correction: Any = None,
) -> Vjp:
    _real(a)
    count = max(1, a.size // max(1, result.size))
    with np.errstate(divide="ignore"):  # NumPy has warned of the value.
        scale = np.divide(2.0, count - (ddof if correction is None else correction))

    def vjp(g: Array) -> Array:
        change = a - a.mean(axis=axis, keepdims=True, dtype=wide(a.dtype)).astype(a.dtype)
        change *= (g * scale).astype(a.dtype).reshape(kept_shape(a.shape, axis))
        return change

    return vjp


def _deviation(result: Array, a: Array, *args: Any, **kwargs: Any) -> Vjp:
    variance = _variance(result, a, *args, **kwargs)
    return lambda g: variance(g / (2 * result))


def _prod(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    def vjp(g: Array) -> Array:
        zero = np.equal(a, 0)
        factors = np.where(zero, np.ones_like(a), a)
        product = factors.prod(axis=axis, keepdims=True)
        zeros = zero.sum(axis=axis, keepdims=True)
        change = exclusive_product(product, factors, zeros, zero)
        change *= g.reshape(kept_shape(a.shape, axis))
        return change

    return vjp


def exclusive_product(product: Array, factors: Array, zeros: Array, zero: Array) -> Array:
    """Return for each of some factors the product of all the others.

    A quotient fails at zeros, so they are taken out and counted: beside two zeros everything is 0,
    beside one of them only the zero itself sees the product of the rest.

    Args:
        product: of all `factors`.
        factors: with 1 in the place of zeros.
        zeros: how many zeros there are among all the factors.
        zero: which of these factors are zeros.

    >>> zero = np.array([False, True, False])
    >>> exclusive_product(np.float64(10), np.array([2.0, 1.0, 5.0]), np.int64(1), zero)
    array([ 0., 10.,  0.])
    """
    others = product / factors
    others *= np.equal(zeros, zero)
    return others


def _cumsum(result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None) -> Vjp:
    shape, own_dtype = a.shape, a.dtype

    def vjp(g: Array) -> Array:
        along = 0 if axis is None else axis
        change = np.flip(np.cumsum(np.flip(g, along), along, wide(g.dtype)), along)
        return unbroadcast(change.reshape(shape), shape, own_dtype)

    return vjp


def _sort(result: Array, a: Array, axis: Any = -1, kind: Any = None, **kwargs: Any) -> Vjp:
    along = 0 if axis is None else axis
    flat = a.reshape(-1) if axis is None else a
    # Stable, so that equal elements get their gradients in a fixed order.
    order = np.argsort(flat, axis=along, kind="stable")

    def vjp(g: Array) -> Array:
        back = np.argsort(order, axis=along, kind="stable")
        return np.take_along_axis(g, back, along).reshape(a.shape)

    return vjp


def _real(a: Array) -> None:
    if a.dtype.kind == "c":
        raise NotImplementedError("complex arguments")


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.sum: (_sum,),
    np.mean: (_mean,),
    np.max: (_extreme,),
    np.min: (_extreme,),
    np.amax: (_extreme,),
    np.amin: (_extreme,),
    np.var: (_variance,),
    np.std: (_deviation,),
    np.prod: (_prod,),
    np.cumsum: (_cumsum,),
    np.sort: (_sort,),
}
