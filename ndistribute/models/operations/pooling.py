"""Pooling of images, channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient
from ndistribute.device import Array, array_namespace, as_array
from ndistribute.models.operations.epilogue import wide
from ndistribute.models.operations.windows import Pair, Windows

__all__ = ["average_pool2d", "max_pool2d"]


def max_pool2d(x: Any, size: Pair, strides: Pair | None = None, padding: str = "valid") -> Any:
    """Return the largest element of each window; of equal ones, the first has the gradient.

    Args:
        x: images of shape ``(images, height, width, channels)``.
        size: the height and width of a window.
        strides: the distance from one window to the next; None means `size`.
        padding: ``"valid"`` or ``"same"``, see `Windows.over`; the padding is never the largest.

    >>> max_pool2d(np.arange(16.0).reshape(1, 4, 4, 1), (2, 2)).ravel()
    array([ 5.,  7., 13., 15.])
    """
    return _max_pool(x, windows=Windows.over(x.shape[1:3], size, strides or size, padding))


def average_pool2d(x: Any, size: Pair, strides: Pair | None = None, padding: str = "valid") -> Any:
    """Return the mean of each window, without the padding.

    Args:
        x: images of shape ``(images, height, width, channels)``.
        size: the height and width of a window.
        strides: the distance from one window to the next; None means `size`.
        padding: ``"valid"`` or ``"same"``, see `Windows.over`.

    >>> average_pool2d(np.arange(16.0).reshape(1, 4, 4, 1), (2, 2)).ravel()
    array([ 2.5,  4.5, 10.5, 12.5])
    """
    return _average_pool(x, windows=Windows.over(x.shape[1:3], size, strides or size, padding))


@custom_gradient
def _max_pool(x: Any, *, windows: Windows) -> Any:
    x = as_array(x)
    xp, offsets = array_namespace(x), list(windows.offsets())
    shape = (len(x), *windows.count, x.shape[3])
    first = offsets[0]
    y = x[first.inner].copy() if first.is_whole else xp.full(shape, _lowest(x.dtype), x.dtype)
    for offset in offsets[first.is_whole :]:
        part = y[offset.outer]
        xp.maximum(part, x[offset.inner], out=part)

    def vjp(g: Array) -> Array:
        change = xp.zeros(x.shape, g.dtype)
        free = xp.ones(shape, bool)  # Windows whose largest element was not found yet.
        for offset in offsets:
            hit = x[offset.inner] == y[offset.outer]
            rest = free[offset.outer]
            hit &= rest
            rest ^= hit
            if windows.overlap:
                change[offset.inner] += g[offset.outer] * hit
            else:
                xp.multiply(g[offset.outer], hit, out=change[offset.inner])
        return change

    return y, [vjp]


@custom_gradient
def _average_pool(x: Any, *, windows: Windows) -> Any:
    x = as_array(x)
    xp, images, offsets = array_namespace(x), wide(x), list(windows.offsets())
    dtype = images.dtype if images.dtype.kind in "fc" else np.dtype(np.float64)
    y = xp.zeros((len(x), *windows.count, x.shape[3]), dtype)
    counts = xp.zeros((*windows.count, 1), dtype)
    for offset in offsets:
        y[offset.outer] += images[offset.inner]
        counts[offset.outer[1:]] += 1
    y /= counts

    def vjp(g: Array) -> Array:
        change, share = xp.zeros(x.shape, dtype), g / counts
        for offset in offsets:
            change[offset.inner] += share[offset.outer]
        return change

    return y.astype(x.dtype, copy=False) if x.dtype.kind not in "iub" else y, [vjp]


def _lowest(dtype: Any) -> Any:
    return -np.inf if dtype.kind not in "iu" else np.iinfo(dtype).min
