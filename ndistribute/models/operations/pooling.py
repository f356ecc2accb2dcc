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
        count = _images_of_block(x)
        for start in range(0, len(x), count):
            block = slice(start, start + count)
            _max_pool_gradient(x[block], y[block], g[block], change[block], windows)
        return change

    return y, [vjp]


def _max_pool_gradient(x: Array, y: Array, g: Array, change: Array, windows: Windows) -> None:
    """Add the gradient of some images, which is zero at first."""
    xp = array_namespace(x)
    free, hits = xp.ones(y.shape, bool), xp.empty(y.shape, bool)  # Windows without a gradient yet.
    buffer = xp.empty(y.shape, g.dtype)
    for offset in windows.offsets():
        rest, hit, share = (one[offset.outer] for one in (free, hits, buffer))
        xp.equal(x[offset.inner], y[offset.outer], out=hit)
        hit &= rest
        rest ^= hit
        share[...] = hit  # NumPy multiplies by booleans in a slower loop.
        share *= g[offset.outer]
        if windows.overlap:
            share += change[offset.inner]
        change[offset.inner] = share


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


def _images_of_block(x: Array) -> int:
    """Return the number of images that fit in the cache of a core; all of those on a GPU."""
    if not isinstance(x, np.ndarray):
        return max(1, len(x))
    return max(1, _BLOCK_BYTES // max(1, x[:1].nbytes))


_BLOCK_BYTES = 1 << 20
