"""Derivatives of reductions, order statistics, and other functions along an axis.

The gradient of a reduction is repeated along the reduced axes. Calls with `where` or `initial` have
no rule, and raise when their gradient is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.placing import added, is_tracked
from ndistribute.autodiff.rules.unbroadcast import (
    Vjp,
    as_axes,
    kept_shape,
    refuse_complex,
    spread,
    unbroadcast,
    wide,
    zeros,
)
from ndistribute.devices import Array, array_namespace, to_host


def _sum(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    shape, own_dtype = a.shape, a.dtype
    return lambda g: spread(g, shape, own_dtype, axis)


def _mean(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    shape, own_dtype = a.shape, a.dtype
    count: Any = max(1, a.size // max(1, result.size))
    if own_dtype.itemsize == 2:  # A count may overflow in it.
        count = np.float32(count)
    return lambda g: spread(g / count, shape, own_dtype, axis)


def _extreme(result: Array, a: Array, axis: Any = None, out: Any = None, keepdims: Any = 0) -> Vjp:
    """Return the rule of max and min, in which equal extremes share the gradient."""
    shape = a.shape

    def vjp(g: Array) -> Array:
        kept = g.shape if g.ndim == len(shape) else kept_shape(shape, axis)
        holds = np.equal(a, result.reshape(kept))
        if (
            isinstance(a, np.ndarray)
            and np.count_nonzero(holds) == result.size
            and holds.any(axis=axis).all()
        ):
            # The common case without ties. On a GPU this check costs more than it saves.
            return g.reshape(kept) * holds
        share = holds.astype(a.dtype)
        # With a NaN in the slice, no element is equal to the result.
        share /= np.maximum(share.sum(axis=axis, keepdims=True, dtype=wide(a.dtype)), 1)
        return share * g.reshape(kept)

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
    refuse_complex(a)
    count = max(1, a.size // max(1, result.size))
    with np.errstate(divide="ignore"):  # The forward pass has warned already.
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
        # Division fails for zeros, so 1 replaces them and they are counted. With two zeros all
        # products of the others are 0; with one, only that of this zero is not.
        zero = np.equal(a, 0)
        if is_tracked(a) and zero.any():
            raise NotImplementedError("the product has a factor of 0")
        factors = np.where(zero, np.ones_like(a), a)
        others = factors.prod(axis=axis, keepdims=True) / factors
        others *= np.equal(zero.sum(axis=axis, keepdims=True), zero)
        others *= g.reshape(kept_shape(a.shape, axis))
        return others

    return vjp


def _cumsum(result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None) -> Vjp:
    shape, own_dtype = a.shape, a.dtype

    def vjp(g: Array) -> Array:
        along = 0 if axis is None else axis
        change = np.flip(np.cumsum(np.flip(g, along), along, wide(g.dtype)), along)
        return unbroadcast(change.reshape(shape), shape, own_dtype)

    return vjp


def _cumprod(result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None) -> Vjp:
    """Return the rule, a loop in reverse along the axis without any division."""
    along, shape = (0, (a.size,)) if axis is None else (axis, a.shape)

    def vjp(g: Array) -> Array:
        g, products, factors = (np.moveaxis(one.reshape(shape), along, 0) for one in (g, result, a))
        total, rows = 0, []
        for k in range(len(g) - 1, -1, -1):
            total = g[k] + (total * factors[k + 1] if k + 1 < len(g) else 0)
            rows.append(total * products[k - 1] if k else total)
        change = np.stack(rows[::-1], along) if rows else zeros(g, shape)
        return unbroadcast(change.reshape(a.shape), a.shape, a.dtype)

    return vjp


def _sort(out: Array, a: Array, axis: Any = -1, *args: Any, **kwargs: Any) -> Vjp:
    """Return the rule of `sort` and `partition`: sorting both arrays matches their elements."""
    along, shape = (0, (a.size,)) if axis is None else (axis, a.shape)

    def vjp(g: Array) -> Array:
        # Stable, so that the order of the gradients of equal elements is fixed.
        source, target = (
            np.argsort(one.reshape(shape), axis=along, kind="stable") for one in (a, out)
        )
        back = np.argsort(source, axis=along)
        ordered = np.take_along_axis(g, target, along)
        return np.take_along_axis(ordered, back, along).reshape(a.shape)

    return vjp


def _quantile(scale: float = 1, nan: bool = False) -> Callable[..., Vjp]:
    """Return the rule of `quantile`, or with a `scale` of 100, of `percentile`."""

    def maker(
        result: Array,
        a: Array,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        method: Any = "linear",
        keepdims: Any = False,
    ) -> Vjp:
        axes, levels = as_axes(axis, a.ndim), np.ravel(q) / scale
        order = (*(k for k in range(a.ndim) if k not in axes), *axes)
        count = math.prod(a.shape[k] for k in axes)
        if not a.size:
            raise NotImplementedError("an empty array")

        def vjp(g: Array) -> Array:
            turned = np.transpose(a, order)
            rows = turned.reshape(-1, count)
            xp = array_namespace(getattr(rows, "value", rows))
            ranks, line = xp.argsort(rows, axis=1), xp.arange(len(rows))
            counts = np.sum(~np.isnan(rows), axis=1) if nan else np.full(len(rows), count)
            change, parts = zeros(g, rows.shape, a.dtype), g.reshape(levels.size, -1)
            for places, part in zip(_places(counts, levels, method), parts, strict=True):
                below = np.floor(places).astype(np.intp)
                share = xp.asarray((places - below).astype(a.dtype))
                above = xp.asarray(np.minimum(below + 1, count - 1))
                for one, part_of in ((xp.asarray(below), 1 - share), (above, share)):
                    where = line, ranks[line, one]
                    change = added(change, where, part * part_of, distinct=True)
            return np.transpose(change.reshape(turned.shape), np.argsort(order).tolist())

        return vjp

    return maker


def _places(counts: Array, levels: Array, method: Any) -> Array:
    """Return the fractional index of each level in sorted rows of the given lengths."""
    distinct, which = np.unique(to_host(counts), return_inverse=True)
    # All methods interpolate between neighbours, so the quantile of 0, 1, 2 ... is the index.
    places = [np.quantile(np.arange(max(1, n)), levels, method=method) for n in distinct]
    return np.stack(places, -1)[:, which]


def _median(quantile: Callable[..., Vjp]) -> Callable[..., Vjp]:
    return lambda result, a, axis=None, *_, **__: quantile(result, a, 0.5, axis)


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.sum: (_sum,),
    np.mean: (_mean,),
    **dict.fromkeys((np.max, np.min, np.amax, np.amin), (_extreme,)),
    np.var: (_variance,),
    np.std: (_deviation,),
    np.prod: (_prod,),
    np.cumsum: (_cumsum,),
    np.cumprod: (_cumprod,),
    np.sort: (_sort,),
    np.partition: (lambda out, a, kth, axis=-1, *_, **__: _sort(out, a, axis),),
    np.median: (_median(_quantile()),),
    np.nanmedian: (_median(_quantile(nan=True)),),
    np.quantile: (_quantile(),),
    np.nanquantile: (_quantile(nan=True),),
    np.percentile: (_quantile(100),),
    np.nanpercentile: (_quantile(100, nan=True),),
}
