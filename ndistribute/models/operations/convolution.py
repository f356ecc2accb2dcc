"""Convolutions of images as matrix products, channels last.

A product takes the columns of a block of images: a matrix with one row for each window. A block
fits the cache of a core, and the backward pass makes the columns again, so a step keeps none.
Source: Chellapilla et al., "High Performance Convolutional Neural Networks for Document
Processing", 2006.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from ndistribute.autodiff.custom import fused
from ndistribute.autodiff.rules.placing import added
from ndistribute.autodiff.rules.unbroadcast import zeros
from ndistribute.devices import Array, array_namespace, as_array
from ndistribute.models.activations import InPlace
from ndistribute.models.operations.epilogue import Epilogue, KernelRule, in_place, operands
from ndistribute.models.operations.windows import Pair, Windows

# The size of the columns of a block: the cache of a core, or a small part of the memory of a GPU.
_HOST_BYTES, _GPU_BYTES = 1 << 20, 1 << 28


def conv2d(
    x: Any,
    kernel: Any,
    bias: Any,
    activation: Callable[[Any], Any],
    *,
    strides: Pair = (1, 1),
    padding: str = "valid",
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Any:
    """Return the activation of a convolution (without flipping the kernel) plus a bias.

    The images have the shape ``(images, height, width, channels)``, the kernel ``(height, width,
    channels / groups, filters)``. The padding is explained at `Windows.over`.
    """
    rule, after = in_place(activation)
    windows = Windows.over(x.shape[1:3], kernel.shape[:2], strides, padding, dilation)
    return after(_conv2d(x, kernel, bias, windows=windows, groups=groups, rule=rule))


def _plain_conv2d(
    x: Any, kernel: Any, bias: Any, *, windows: Windows, groups: int, rule: InPlace | None
) -> Any:
    images, weights = (array.reshape(*array.shape[:-1], groups, -1) for array in (x, kernel))
    y = zeros(x, (len(x), *windows.count, groups, weights.shape[-1]))
    for offset in windows.offsets:
        part = np.einsum("nhwgc,cgf->nhwgf", images[offset.inner], weights[offset.at])
        y = added(y, offset.outer, part.astype(y.dtype), distinct=True)
    return Epilogue.plain(y.reshape(*y.shape[:3], -1), bias, rule)


@fused(_plain_conv2d)
def _conv2d(
    x: Any, kernel: Any, bias: Any, *, windows: Windows, groups: int, rule: InPlace | None
) -> Any:
    dtype, images, weights = operands(as_array(x), as_array(kernel))
    xp = array_namespace(images)
    columns = _Columns(images, windows, groups)
    filters = weights.shape[-1]
    shape = len(images), *windows.count, filters
    y = xp.empty(shape, images.dtype)
    after = Epilogue(y.reshape(-1, filters), bias, rule)
    columns.times(weights, y, after.finish)

    def of_x(g: Array) -> Array:
        g = after.before(g).reshape(y.shape)
        if windows.strides != (1, 1):
            return columns.spread(g, weights)
        change = xp.empty(images.shape, g.dtype)
        _Columns(g, windows.reversed, groups).times(_reversed(weights, groups), change)
        return change

    def of_kernel(g: Array, out: Array | None) -> Array:
        return columns.product(lambda rows: after.part(g, rows), weights, out)

    return y.astype(dtype, copy=False), [
        of_x,
        KernelRule(of_kernel, kernel, weights),
        after.of_bias,
    ]


class _Columns:
    """The columns of images: for each window a row with its elements, by groups of channels."""

    def __init__(self, images: Array, windows: Windows, groups: int) -> None:
        self._images, self._windows, self._groups = images, windows, groups
        channels = images.shape[3] // groups
        self._shape = (*windows.count, *windows.size, channels)  # For an image and a group.
        size = prod(self._shape) * groups * images.dtype.itemsize
        budget = _HOST_BYTES if isinstance(images, np.ndarray) else _GPU_BYTES
        self._block = min(max(1, budget // max(1, size)), max(1, len(images)))
        # Without padding and copies, the images are the columns.
        self._plain = (
            windows.size == windows.strides == (1, 1) and windows.count == windows.image
        ) and groups == 1

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """Yield slices of the images and their columns, which are valid until the next ones."""
        if self._plain:
            for block in self._slices():
                yield block, self._images[block].reshape(1, -1, self._images.shape[3])
            return
        xp, windows = array_namespace(self._images), self._windows
        memory = xp.empty((self._groups, self._block, *self._shape), self._images.dtype)
        elements = prod(self._shape[2:])
        source, inside = self._images, None
        if windows.padded != windows.image:
            (above, left), (height, width) = windows.before, windows.image
            source = xp.zeros((self._block, *windows.padded, source.shape[3]), source.dtype)
            inside = source[:, above : above + height, left : left + width]
        image, row, column, channel = source.strides
        (sy, sx), (dy, dx) = windows.strides, windows.dilation
        view = xp.lib.stride_tricks.as_strided(
            source,
            (self._groups, len(source), *self._shape),
            (
                *(self._shape[-1] * channel, image, row * sy, column * sx),
                *(row * dy, column * dx, channel),
            ),
        )
        for block in self._slices():
            filled = memory[:, : len(self._images[block])]
            if inside is None:
                filled[...] = view[:, block]
            else:
                inside[: filled.shape[1]] = self._images[block]
                filled[...] = view[:, : filled.shape[1]]
            yield block, filled.reshape(self._groups, -1, elements)

    def times(
        self, kernel: Array, out: Array, finish: Callable[[Array], None] | None = None
    ) -> None:
        """Write the product with a kernel, and finish each block while it is in the cache."""
        filters = kernel.shape[-1]
        matrix = _grouped(kernel.reshape(-1, filters), self._groups)
        for block, matrices in self.blocks():
            rows = out[block].reshape(-1, filters)
            array_namespace(out).matmul(matrices, matrix, out=_grouped(rows, self._groups))
            if finish is not None:
                finish(rows)

    def product(self, rows: Callable[[slice], Array], kernel: Array, out: Array | None) -> Array:
        """Return the gradient of the kernel from rows of that of the product."""
        xp, filters, windows = array_namespace(kernel), kernel.shape[-1], self._windows.count
        total = xp.empty(kernel.shape, kernel.dtype) if out is None else out
        if not len(self._images):
            total[...] = 0
        target, part = _grouped(total.reshape(-1, filters), self._groups), None
        for block, matrices in self.blocks():
            some = rows(slice(block.start * prod(windows), block.stop * prod(windows)))
            factors = matrices.transpose(0, 2, 1), _grouped(some, self._groups)
            if block.start == 0:
                xp.matmul(*factors, out=target)
            else:
                part = xp.matmul(*factors, out=part)
                target += part
        return total

    def spread(self, g: Array, kernel: Array) -> Array:
        """Return the gradient of the images from that of the product."""
        xp, groups, channels = array_namespace(g), self._groups, self._images.shape[3]
        change = xp.zeros(self._images.shape, g.dtype)
        matrices = _grouped(kernel.reshape(-1, *kernel.shape[2:]), groups).swapaxes(-1, -2)
        memory = xp.empty((self._block, *self._windows.count, channels), g.dtype)
        offsets = self._windows.offsets
        for block in self._slices():
            rows = _grouped(g[block].reshape(-1, g.shape[-1]), groups)
            part, target = memory[: len(g[block])], change[block]
            flat = _grouped(part.reshape(-1, channels), groups)
            for offset in offsets:
                row, column = offset.at
                xp.matmul(rows, matrices[:, row * self._windows.size[1] + column], out=flat)
                target[offset.inner] += part[offset.outer]
        return change

    def _slices(self) -> Iterator[slice]:
        for start in range(0, len(self._images), self._block):
            yield slice(start, start + self._block)


def _grouped(matrix: Array, groups: int) -> Array:
    """Return a view whose last axis is divided into groups, which come first."""
    parts = matrix.reshape(*matrix.shape[:-1], groups, -1)
    return parts.transpose(parts.ndim - 2, *range(parts.ndim - 2), parts.ndim - 1)


def _reversed(kernel: Array, groups: int) -> Array:
    """Return the kernel of the gradient: turned around, from filters to channels."""
    height, width, channels, _ = kernel.shape
    parts = kernel[::-1, ::-1].reshape(height, width, channels, groups, -1)
    return parts.transpose(0, 1, 4, 3, 2).reshape(height, width, -1, groups * channels)
