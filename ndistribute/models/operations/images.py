"""Convolutions of images as matrix products, and pooling, channels last.

A `Windows` tells which elements of the input each window covers. So an operation is a loop over the
few offsets inside a window, and each offset is a slice of all images.

A product takes the columns of a block of images: a matrix with one row for each window. A block
fits the cache of a core. The backward pass computes the columns again, so a step need not keep
them. Source: Chellapilla et al., "High Performance Convolutional Neural Networks for Document
Processing", 2006.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient, untrack
from ndistribute.autodiff.custom import fused
from ndistribute.autodiff.rules.placing import added, as_operand
from ndistribute.autodiff.rules.unbroadcast import zeros
from ndistribute.devices import Array, array_namespace, as_array, jax_module
from ndistribute.exports import export as _export
from ndistribute.models.activations import InPlace
from ndistribute.models.operations.rows import Epilogue, KernelRule, in_place, operands, wide

Pair = tuple[int, int]

# The size of the columns of a block: the cache of a core, or a small part of the memory of a GPU.
_HOST_BYTES, _GPU_BYTES = 1 << 20, 1 << 28
_POOLED_BYTES = 1 << 19  # Half of the cache of a core, as measured.
_MOST_BLOCKS = 16  # In a compiled step, which compiles each offset.
_MOST_OFFSETS = 25  # The elements of a window up to which elementwise operations are faster.


@dataclass(frozen=True)
class Offset:
    """The elements at one offset inside all windows that are not in the padding."""

    at: Pair  # The row and the column inside the window.
    inner: tuple[slice, slice, slice]  # Their index in the images, channels left out.
    outer: tuple[slice, slice, slice]  # That of their windows, in an array with one of each.
    is_whole: bool  # Whether all windows have an element there.


@dataclass(frozen=True)
class Windows:
    """The windows over images of one size; in each pair, the vertical number comes first.

    >>> Windows.over((5, 5), (3, 3), (2, 2), "same").count
    (3, 3)
    """

    image: Pair
    size: Pair
    strides: Pair  # The distance from one window to the next.
    dilation: Pair  # The distance between the elements of a window.
    before: Pair  # The padding above and to the left of an image.
    count: Pair  # The number of windows.

    @classmethod
    @functools.lru_cache(maxsize=256)
    def over(
        cls, image: Pair, size: Pair, strides: Pair, padding: str, dilation: Pair = (1, 1)
    ) -> Windows:
        """Return the windows inside an image, for the padding ``"valid"``.

        For ``"same"`` there is a window for each stride of the image. As in TensorFlow, the padding
        is divided evenly, and an odd row or column of padding comes at the end.
        """
        if padding not in ("valid", "same"):
            raise ValueError(f"padding must be 'valid' or 'same', got {padding!r}.")
        before, count = [], []
        for length, window, stride, gap in zip(image, size, strides, dilation, strict=True):
            extent = (window - 1) * gap + 1
            same = padding == "same"
            number = -(-length // stride) if same else (length - extent) // stride + 1
            before.append(max(0, (number - 1) * stride + extent - length) // 2 if same else 0)
            if number < 1:
                raise ValueError(
                    f"a window of {size[0]} x {size[1]} with dilation {dilation} does not fit into "
                    f"images of {image[0]} x {image[1]}: use padding='same', a smaller window, or "
                    "fewer layers that shrink the images."
                )
            count.append(number)
        return cls(image, size, strides, dilation, (before[0], before[1]), (count[0], count[1]))

    @functools.cached_property
    def extents(self) -> Pair:
        """The height and width of the part of an image that a window covers."""
        (rows, columns), (dy, dx) = self.size, self.dilation
        return (rows - 1) * dy + 1, (columns - 1) * dx + 1

    @functools.cached_property
    def padded(self) -> Pair:
        """The height and width that windows cover, padding included."""
        y, x = (
            max(self.image[k] + self.before[k], (self.count[k] - 1) * self.strides[k] + extent)
            for k, extent in enumerate(self.extents)
        )
        return y, x

    @functools.cached_property
    def padding(self) -> list[Pair]:
        """The padding before and after the image, in each direction."""
        lengths = zip(self.before, self.padded, self.image, strict=True)
        return [(before, padded - before - length) for before, padded, length in lengths]

    @functools.cached_property
    def overlap(self) -> bool:
        """Whether an element may belong to several windows."""
        return self.extents[0] > self.strides[0] or self.extents[1] > self.strides[1]

    @functools.cached_property
    def tile(self) -> bool:
        """Whether each element belongs to exactly one window."""
        covered = tuple(n * stride for n, stride in zip(self.count, self.strides, strict=True))
        return self.extents == self.size == self.strides and covered == self.image

    @functools.cached_property
    def reversed(self) -> Windows:
        """The windows over the result, for strides of 1, which the gradient of an image sums."""
        y, x = (extent - 1 - n for extent, n in zip(self.extents, self.before, strict=True))
        return Windows(self.count, self.size, (1, 1), self.dilation, (y, x), self.image)

    @functools.cached_property
    def offsets(self) -> tuple[Offset, ...]:
        """The offsets inside a window, row by row, without those that are only in the padding."""
        offsets = []
        for row in range(self.size[0]):
            inner_y, outer_y = self._slices(0, row)
            for column in range(self.size[1]):
                inner_x, outer_x = self._slices(1, column)
                length = outer_y.stop - outer_y.start, outer_x.stop - outer_x.start
                if min(length) > 0:
                    every = slice(None)
                    inner, outer = (every, inner_y, inner_x), (every, outer_y, outer_x)
                    offsets.append(Offset((row, column), inner, outer, length == self.count))
        return tuple(offsets)

    def _slices(self, axis: int, offset: int) -> tuple[slice, slice]:
        """Return the slices of an axis of the images, and of the windows, for an offset."""
        stride, start = self.strides[axis], offset * self.dilation[axis] - self.before[axis]
        first = max(0, -(start // stride))  # The first window whose element is in the image.
        last = min(self.count[axis], (self.image[axis] - 1 - start) // stride + 1)
        inner = slice(start + first * stride, max(0, start + (last - 1) * stride + 1), stride)
        return inner, slice(first, last)


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
    xp = array_namespace(images, weights)
    if hasattr(weights, "on_device"):
        product, gradients = _compiled_conv2d(images, weights, windows, groups)
        end = Epilogue(product.reshape(-1, weights.shape[-1]), bias, rule)
        end.finish(product.reshape(-1, weights.shape[-1]))

        def joint(g: Array) -> list[Array]:
            return [*gradients(end.before(g).reshape(product.shape)), end.of_bias(g)]

        return product.astype(dtype, copy=False), joint
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

    rule_of_kernel = KernelRule(of_kernel, kernel, weights)
    return y.astype(dtype, copy=False), [of_x, rule_of_kernel, after.of_bias]


def _compiled_conv2d(images: Any, weights: Any, windows: Windows, groups: int) -> tuple[Any, Any]:
    """Return the product of a compiled step, and the function of its gradients.

    XLA on CPUs takes up to 20 times as long for groups of one channel as elementwise operations do,
    and up to 4 times as long for the gradient of a kernel as a sum over blocks that fit the cache.
    """
    jax, kind = jax_module(), type(weights)
    x, kernel = getattr(images, "value", images), weights.value
    on_cpu = jax.default_backend() == "cpu"
    convolve = functools.partial(_conv2d_of_jax, windows=windows, groups=groups)
    by_offsets = functools.partial(_product_of_offsets, windows=windows)
    is_narrow = on_cpu and kernel.shape[2] == 1 and groups in (1, kernel.shape[3])
    is_narrow &= len(windows.offsets) <= _MOST_OFFSETS
    product = kind((by_offsets if is_narrow else convolve)(x, kernel))

    def gradients(g: Any) -> list[Any]:
        blocks = (x.nbytes + g.nbytes) // _HOST_BYTES if on_cpu else 1
        blocks = max(1, min(blocks, len(x), _MOST_BLOCKS))
        of_kernel: Any = 0
        ends = [len(x) * k // blocks for k in range(blocks + 1)]
        for block in map(slice, ends, ends[1:]):
            pull = jax.linear_transpose(functools.partial(convolve, x[block]), kernel)
            of_kernel += pull(g.value[block])[0]
        of_images = by_offsets if is_narrow and groups > 1 else convolve
        pull = jax.linear_transpose(lambda part: of_images(part, kernel), x)
        return [kind(pull(g.value)[0]), kind(of_kernel)]

    return product, gradients


def _conv2d_of_jax(images: Any, kernel: Any, *, windows: Windows, groups: int) -> Any:
    return jax_module().lax.conv_general_dilated(
        images,
        kernel,
        windows.strides,
        windows.padding,
        rhs_dilation=windows.dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _product_of_offsets(images: Any, kernel: Any, *, windows: Windows) -> Any:
    """Return the product with a kernel of one channel for each filter."""
    padding, zero = [(0, 0), *windows.padding, (0, 0)], np.zeros((), images.dtype)
    padded = jax_module().lax.pad(images, zero, [(*pair, 0) for pair in padding])
    ends = [(n - 1) * stride + 1 for n, stride in zip(windows.count, windows.strides, strict=True)]
    total: Any = 0
    for offset in windows.offsets:
        y, x = (at * gap for at, gap in zip(offset.at, windows.dilation, strict=True))
        part = padded[:, y : y + ends[0] : windows.strides[0], x : x + ends[1] : windows.strides[1]]
        total = total + part * kernel[offset.at][0]
    return _computed_once(total)


def _computed_once(value: Any) -> Any:
    """Return a value of JAX that XLA does not compute again in each operation that reads it."""
    names = vars(jax_module().experimental.layout)
    constrain = names.get("with_layout_constraint") or names["with_dll_constraint"]  # In JAX 0.6.
    layout = names.get("DeviceLocalLayout") or names["Layout"]
    return constrain(value, layout(tuple(range(value.ndim))))


def differentiated(function: Callable[..., Any], *boxes: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the result of a JAX function in a compiled step, and the function of its gradients.

    Arguments may be None; the result is an array or a list.
    """
    jax = jax_module()
    kind = next(type(box) for box in boxes if hasattr(box, "on_device"))
    result, pull = jax.vjp(function, *(getattr(box, "value", box) for box in boxes))

    def gradients(g: Any) -> list[Any]:
        if isinstance(result, list):
            pairs = zip(result, g, strict=True)
            g = [kind(jax.numpy.zeros_like(y)) if dy is None else dy for y, dy in pairs]
        changes = pull(jax.tree.map(lambda dy: getattr(dy, "value", dy), g))
        return [None if change is None else kind(change) for change in changes]

    return jax.tree.map(kind, result), gradients


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
        shape, group = (self._groups, len(source), *self._shape), self._shape[-1] * channel
        strides = group, image, row * sy, column * sx, row * dy, column * dx, channel
        view = xp.lib.stride_tricks.as_strided(source, shape, strides)
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


def conv2d_transpose(x: Any, kernel: Any, strides: Any, padding: str) -> Any:
    """Return the transposed convolution: the gradient that `conv2d` has for its images.

    The kernel has the shape ``(height, width, filters, channels)``, the result the size of the
    images times the strides, and more for the padding ``"valid"`` where windows are larger.
    """
    sizes = zip(x.shape[1:3], kernel.shape[:2], strides, strict=True)
    valid = padding == "valid"
    height, width = (n * stride + max(size - stride, 0) * valid for n, size, stride in sizes)
    windows = Windows.over((height, width), kernel.shape[:2], strides, padding)
    in_jax = hasattr(as_array(kernel), "on_device")
    return (_plain_transpose if in_jax else _transpose)(x, kernel, windows=windows)


def _plain_transpose(x: Any, kernel: Any, *, windows: Windows) -> Any:
    y = zeros(x, (len(x), *windows.image, kernel.shape[2]))
    for offset in windows.offsets:
        part = np.einsum("nhwc,fc->nhwf", x[offset.outer], kernel[offset.at])
        y = added(y, offset.inner, part.astype(y.dtype), distinct=True)
    return y


@fused(_plain_transpose)
def _transpose(x: Any, kernel: Any, *, windows: Windows) -> Any:
    dtype, rows, weights = operands(as_array(x), as_array(kernel))
    xp, shape = array_namespace(rows), (len(rows), *windows.image, weights.shape[2])
    y = _Columns(xp.empty(shape, rows.dtype), windows, 1).spread(rows, weights)

    def of_x(g: Array) -> Array:
        change = xp.empty(rows.shape, rows.dtype)
        _Columns(wide(g), windows, 1).times(weights, change)
        return change

    def of_kernel(g: Array) -> Array:
        flat = rows.reshape(-1, rows.shape[3])
        return _Columns(wide(g), windows, 1).product(lambda part: flat[part], weights, None)

    return y.astype(dtype, copy=False), [of_x, of_kernel]


def max_pool2d(x: Any, size: Pair, strides: Pair | None = None, padding: str = "valid") -> Any:
    """Return the largest element of each window; among equals, the first gets the gradient.

    The padding is never the largest.

    >>> max_pool2d(np.arange(16.0).reshape(1, 4, 4, 1), (2, 2)).ravel()
    array([ 5.,  7., 13., 15.])
    """
    return _max_pool(x, windows=Windows.over(x.shape[1:3], size, strides or size, padding))


def average_pool2d(x: Any, size: Pair, strides: Pair | None = None, padding: str = "valid") -> Any:
    """Return the mean of each window; padding does not count.

    >>> average_pool2d(np.arange(16.0).reshape(1, 4, 4, 1), (2, 2)).ravel()
    array([ 2.5,  4.5, 10.5, 12.5])
    """
    return _average_pool(x, windows=Windows.over(x.shape[1:3], size, strides or size, padding))


def _sums_of_jax(images: Any, *, windows: Windows) -> Any:
    size, strides = (1, *windows.size, 1), (1, *windows.strides, 1)
    padding, zero = [(0, 0), *windows.padding, (0, 0)], np.zeros((), images.dtype)[()]
    lax = jax_module().lax
    return lax.reduce_window(images, zero, lax.add, size, strides, padding)


def _plain_max_pool(x: Any, *, windows: Windows) -> Any:
    """Return the first largest element of each window, by its index."""
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
    if windows.tile and hasattr(x, "on_device"):
        return _compiled_max_pool(x, windows)
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
        if isinstance(x, np.ndarray):  # The number of images that fits the cache of a core.
            count = max(1, _POOLED_BYTES // max(1, x[:1].nbytes))
        for start in range(0, len(x), count):
            block = slice(start, start + count)
            _max_pool_gradient(x[block], y[block], g[block].copy(), change[block], windows)
        return change

    return y, [vjp]


def _compiled_max_pool(x: Any, windows: Windows) -> tuple[Any, list[Any]]:
    """Return the same in a compiled step, for windows that tile the images, without writes."""
    (rows, columns), (height, width) = windows.size, windows.count
    tiles = x.reshape(len(x), height, rows, width, columns, -1)
    parts = [tiles[:, :, row, :, column] for row, column in np.ndindex(windows.size)]
    y = functools.reduce(np.maximum, parts)
    numbers = np.arange(len(parts), dtype=np.int32)
    best: Any = numbers[-1]  # This stays where all are NaN.
    for number, part in reversed([*zip(numbers[:-1], parts, strict=False)]):
        best = np.where(part == y, number, best)
    best = type(x)(_computed_once(best.value)) if len(parts) > 1 else np.zeros((), np.int32)

    def vjp(g: Any) -> Any:
        hits = best[:, :, None, :, None] == numbers.reshape(rows, 1, columns, 1)
        return np.where(hits, g[:, :, None, :, None], 0).reshape(x.shape)

    return y, [vjp]


def _max_pool_gradient(x: Array, y: Array, rest: Array, change: Array, windows: Windows) -> None:
    """Add the gradient of some images; `rest` is the part not yet passed to an element."""
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
    present = np.zeros((*windows.count, 1), dtype)
    for offset in windows.offsets:
        present[offset.outer[1:]] += 1
    counts = xp.asarray(present)
    if hasattr(images, "on_device"):  # In a compiled step; the loop below takes longer there.
        compiled = functools.partial(_sums_of_jax, windows=windows)
        sums, gradients = differentiated(compiled, images.astype(dtype))
        return (sums / counts).astype(x.dtype), lambda g: gradients(g.astype(dtype) / counts)
    y = xp.zeros((len(x), *windows.count, x.shape[3]), dtype)
    for offset in windows.offsets:
        y = added(y, offset.outer, images[offset.inner], distinct=True)
    y /= counts

    def vjp(g: Array) -> Array:
        change, share = xp.zeros(x.shape, dtype), g / counts
        for offset in windows.offsets:
            change = added(change, offset.inner, share[offset.outer], distinct=True)
        return change

    return y.astype(x.dtype, copy=False) if x.dtype.kind not in "iub" else y, [vjp]


_export(vars(), but="Offset Windows differentiated")
