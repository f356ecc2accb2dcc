"""Derivatives of averages, order statistics, statistics without NaN, and sums along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import as_axes, zeros
from ndistribute.device import Array, array_namespace, to_host

__all__ = ["COMPOSED", "COMPOSED_BY_NAME", "RULES"]

Value = Any  # a tracked or plain array, or a number
Vjp = Callable[[Array], Array]


def _quantile(scale: float = 1, nan: bool = False) -> Callable[..., Vjp]:
    """Return the rule of `quantile`, or of `percentile`, whose levels are divided by `scale`."""

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
            xp = array_namespace(rows)
            ranks, line = xp.argsort(rows, axis=1), xp.arange(len(rows))
            counts = np.sum(~np.isnan(rows), axis=1) if nan else np.full(len(rows), count)
            change, parts = zeros(g, rows.shape, a.dtype), g.reshape(levels.size, -1)
            for places, part in zip(_places(counts, levels, method), parts, strict=True):
                below = np.floor(places).astype(np.intp)
                share = xp.asarray((places - below).astype(a.dtype))
                above = xp.asarray(np.minimum(below + 1, count - 1))
                change[line, ranks[line, xp.asarray(below)]] += part * (1 - share)
                change[line, ranks[line, above]] += part * share
            back = [order.index(k) for k in range(len(order))]
            return np.transpose(change.reshape(turned.shape), back)

        return vjp

    return maker


def _places(counts: Array, levels: Array, method: Any) -> Array:
    """Return for each level, and each number of sorted elements, between which two it lies."""
    distinct, which = np.unique(to_host(counts), return_inverse=True)
    # All methods interpolate between two neighbours, so the quantile of 0, 1, 2 ... tells.
    places = [np.quantile(np.arange(max(1, n)), levels, method=method) for n in distinct]
    return np.stack(places, -1)[:, which]


def _median(quantile: Callable[..., Vjp]) -> Callable[..., Vjp]:
    return lambda result, a, axis=None, *_, **__: quantile(result, a, 0.5, axis)


def _partition(out: Array, a: Array, kth: Any, axis: Any = -1, *args: Any, **kwargs: Any) -> Vjp:
    along, shape = (0, (a.size,)) if axis is None else (axis, a.shape)

    def vjp(g: Array) -> Array:
        # The same elements in another order: the smallest comes from the smallest, and so on.
        source, target = (
            np.argsort(one.reshape(shape), axis=along, kind="stable") for one in (a, out)
        )
        ordered = np.take_along_axis(g, target, along)
        back = np.argsort(source, axis=along)
        return np.take_along_axis(ordered, back, along).reshape(a.shape)

    return vjp


def _cumprod(result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None) -> Vjp:
    """Return the rule that walks back along the axis, and divides by nothing that may be 0."""
    along, shape = (0, (a.size,)) if axis is None else (axis, a.shape)

    def vjp(g: Array) -> Array:
        change = zeros(g, shape, a.dtype)
        g, products, factors, target = (
            np.moveaxis(one.reshape(shape), along, 0) for one in (g, result, a, change)
        )
        total = 0
        for k in range(len(g) - 1, -1, -1):
            total = g[k] + (total * factors[k + 1] if k + 1 < len(g) else 0)
            target[k] = total * products[k - 1] if k else total
        return change.reshape(a.shape)

    return vjp


def _average(
    a: Value, axis: Any = None, weights: Value = None, returned: bool = False, keepdims: Any = False
) -> Value:
    if weights is None and not returned:
        return np.mean(a, axis=axis, keepdims=keepdims)
    if returned or np.shape(weights) != np.shape(a):
        return NotImplemented
    total = np.sum(a * weights, axis=axis, keepdims=keepdims)
    return total / np.sum(weights, axis=axis, keepdims=keepdims)


def _diff(a: Value, n: int = 1, axis: int = -1) -> Value:
    if not -np.ndim(a) <= axis < np.ndim(a):
        return NotImplemented
    lead = (slice(None),) * (axis % np.ndim(a))
    for _ in range(n):
        a = a[(*lead, slice(1, None))] - a[(*lead, slice(None, -1))]
    return a


def _cumulative_sum(
    x: Value, /, *, axis: Any = None, dtype: Any = None, out: Any = None, include_initial: Any = 0
) -> Value:
    return NotImplemented if include_initial else np.cumsum(x, axis=axis, dtype=dtype)


def _filled(function: Callable[..., Value], fill: float) -> Callable[..., Value]:
    """Return a function that computes with a number in the place of each NaN."""
    return lambda a, *args, **kwargs: function(np.where(np.isnan(a), fill, a), *args, **kwargs)


def _nan_extreme(function: Callable[..., Value], fill: float) -> Callable[..., Value]:
    def extreme(a: Value, axis: Any = None, out: Any = None, keepdims: Any = False) -> Value:
        if np.isnan(a).all(axis).any():
            return NotImplemented
        return function(np.where(np.isnan(a), fill, a), axis, keepdims=keepdims)

    return extreme


def _nanmean(
    a: Value, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False
) -> Value:
    present = np.sum(~np.isnan(a), axis=axis, keepdims=keepdims)
    return np.nansum(a, axis, dtype, keepdims=keepdims) / present.astype(a.dtype)


def _nanvar(
    a: Value,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: int = 0,
    keepdims: Any = False,
) -> Value:
    missing = np.isnan(a)
    count = np.sum(~missing, axis=axis, keepdims=keepdims) - ddof
    apart = np.where(missing, 0, a - np.nanmean(a, axis=axis, keepdims=True))
    count = np.where(count > 0, count, np.nan).astype(a.dtype)
    return np.sum(np.square(apart), axis, dtype, keepdims=keepdims) / count


def _cov(
    m: Value, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: Any = None
) -> Value:
    if y is not None:
        return NotImplemented
    rows = np.atleast_2d(m)
    if not rowvar and np.ndim(m) == 2:
        rows = rows.T
    rows = rows.astype(np.result_type(rows.dtype, np.float64))
    rows = rows - np.mean(rows, axis=1, keepdims=True)
    count = rows.shape[1] - (int(not bias) if ddof is None else ddof)
    return np.squeeze(np.matmul(rows, np.conj(rows.T)) / count)


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.cumprod: (_cumprod,),
    np.median: (_median(_quantile()),),
    np.nanmedian: (_median(_quantile(nan=True)),),
    np.nanpercentile: (_quantile(100, nan=True),),
    np.nanquantile: (_quantile(nan=True),),
    np.partition: (_partition,),
    np.percentile: (_quantile(100),),
    np.quantile: (_quantile(),),
}

COMPOSED: dict[Any, Callable[..., Value]] = {
    np.average: _average,
    np.cov: _cov,
    np.diff: _diff,
    np.nancumprod: _filled(np.cumprod, 1),
    np.nancumsum: _filled(np.cumsum, 0),
    np.nanmax: _nan_extreme(np.max, -math.inf),
    np.nanmean: _nanmean,
    np.nanmin: _nan_extreme(np.min, math.inf),
    np.nanprod: _filled(np.prod, 1),
    np.nanstd: lambda *args, **kwargs: np.sqrt(np.nanvar(*args, **kwargs)),
    np.nansum: _filled(np.sum, 0),
    np.nanvar: _nanvar,
    np.ptp: lambda a, axis=None, out=None, keepdims=False: (
        np.max(a, axis=axis, keepdims=keepdims) - np.min(a, axis=axis, keepdims=keepdims)
    ),
}

# Younger than NumPy 2.0, the oldest version that is supported.
COMPOSED_BY_NAME: dict[str, Callable[..., Value]] = {"cumulative_sum": _cumulative_sum}
