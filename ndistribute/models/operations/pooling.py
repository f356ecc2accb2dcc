"""Pooling of images, channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient, untrack
from ndistribute.autodiff.custom import fused
from ndistribute.autodiff.rules.placing import added, as_operand
from ndistribute.devices import Array, array_namespace, as_array
from ndistribute.models.operations.epilogue import wide
from ndistribute.models.operations.windows import Pair, Windows

_BLOCK_BYTES = 1 << 19  # Half of the cache of a core, as measured.


def max_pool2d(x: Any, size: Pair, strides: Pair | None = None, padding: str = "valid") -> Any:
    """Return the largest element of each window; of equal ones, the first has the gradient.

    The padding is never the largest.

    >>> max_pool2d(np.arange(16.0).reshape(1, 4, 4, 1), (2, 2)).ravel()
    array([ 5.,  7., 13., 15.])
    """
    return _max_pool(x, windows=Windows.over(x.shape[1:3], size, strides or size, padding))


def average_pool2d(x: Any, size: Pair, strides: Pair | None = None, padding: str = "valid") -> Any:
    """Return the mean of each window, without the padding.

    >>> average_pool2d(np.arange(16.0).reshape(1, 4, 4, 1), (2, 2)).ravel()
    array([ 2.5,  4.5, 10.5, 12.5])
    """
    return _average_pool(x, windows=Windows.over(x.shape[1:3], size, strides or size, padding))


def _plain_max_pool(x: Any, *, windows: Windows) -> Any:
    """Return the elements that are the first largest ones of their windows, by their index."""
    values = untrack(x)
    xp = array_namespace(values)
    numbers = xp.arange(x.size).reshape(x.shape)
    best = xp.full((len(x), *windows.count, x.shape[3]), np.nan)
    index = xp.zeros(best.shape, int)
    for offset in windows.offsets:
        higher = ~(best[offset.outer] >= values[offset.inner])  # NaN at first.
        index[offset.outer][higher] = numbers[offset.inner][higher]
        best[offset.outer][higher] = values[offset.inner][higher]
    return np.ravel(x)[index]


@fused(_plain_max_pool)
def _max_pool(x: Any, *, windows: Windows) -> Any:
    x = as_array(x)
    xp, first = array_namespace(x), windows.offsets[0]
    shape = (len(x), *windows.count, x.shape[3])
    lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    y = x[first.inner].copy() if first.is_whole else xp.full(shape, lowest, x.dtype)
    for offset in windows.offsets[first.is_whole :]:
        part = y[offset.outer]
        xp.maximum(part, x[offset.inner], out=part)

    def vjp(g: Array) -> Array:
        change = (xp.empty if windows.tile else xp.zeros)(x.shape, g.dtype)
        count = max(1, len(x))
        if isinstance(x, np.ndarray):  # What fits in the cache of a core.
            count = max(1, _BLOCK_BYTES // max(1, x[:1].nbytes))
        for start in range(0, len(x), count):
            block = slice(start, start + count)
            _max_pool_gradient(x[block], y[block], g[block].copy(), change[block], windows)
        return change

    return y, [vjp]


def _max_pool_gradient(x: Array, y: Array, rest: Array, change: Array, windows: Windows) -> None:
    """Add the gradient of some images, zero at first; `rest` is what no element has got yet."""
    xp = array_namespace(x)
    hits, shares = xp.empty(y.shape, bool), xp.empty_like(rest)
    for offset in windows.offsets:
        hit, share, left = (array[offset.outer] for array in (hits, shares, rest))
        if windows.tile and offset is windows.offsets[-1]:
            change[offset.inner] = left
            return
        xp.equal(x[offset.inner], y[offset.outer], out=hit)
        share[...] = hit  # NumPy multiplies by booleans in a slower loop.
        share *= left
        left -= share
        if windows.overlap:
            share += change[offset.inner]
        change[offset.inner] = share


@custom_gradient
def _average_pool(x: Any, *, windows: Windows) -> Any:
    x = as_operand(x)
    xp, images = array_namespace(untrack(x)), wide(x)
    dtype = images.dtype if images.dtype.kind in "fc" else np.dtype(np.float64)
    y = xp.zeros((len(x), *windows.count, x.shape[3]), dtype)
    counts = xp.zeros((*windows.count, 1), dtype)
    for offset in windows.offsets:
        y = added(y, offset.outer, images[offset.inner], distinct=True)
        counts[offset.outer[1:]] += 1
    y /= counts

    def vjp(g: Array) -> Array:
        change, share = xp.zeros(x.shape, dtype), g / counts
        for offset in windows.offsets:
            change = added(change, offset.inner, share[offset.outer], distinct=True)
        return change

    return y.astype(x.dtype, copy=False) if x.dtype.kind not in "iub" else y, [vjp]
