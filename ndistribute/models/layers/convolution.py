"""Convolution and pooling of images and sequences, channels last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.exports import export as _export
from ndistribute.models import activations, operations
from ndistribute.models.layers.arguments import Pair, as_floats, lengths, one_of, positive
from ndistribute.models.layers.core import KernelLayer
from ndistribute.models.layers.layer import IMAGES, SEQUENCES, Layer


class Conv2D(KernelLayer):
    """A layer that convolves images of shape ``(height, width, channels)``.

    Args:
        filters: the number of channels of the output.
        kernel_size: the height and width of the kernel; an integer for both.
        strides: the distance from one window to the next, in each direction.
        padding: ``"valid"`` uses only windows inside the image; with ``"same"``, the output has the
            size of the image, divided by the strides.
        dilation_rate: the distance between the elements of a window, in each direction.
        groups: the number of groups of channels; each group has its own ``filters / groups``
            filters.
        activation: a name, such as ``"relu"``, a function, or None.
        use_bias: whether to add a bias.
        options: as for `Dense`; the kernel has the shape
            ``(*kernel_size, channels / groups, filters)``.

    Raises:
        ValueError: an argument is invalid, or `filters` is not a multiple of `groups`.

    >>> layer = Conv2D(8, 3, padding="same", activation="relu")
    >>> layer(np.zeros((2, 6, 6, 3), np.float32)).shape, layer.kernel.shape
    ((2, 6, 6, 8), (3, 3, 3, 8))
    """

    axes = IMAGES

    def __init__(
        self,
        filters: int,
        kernel_size: Pair,
        strides: Pair = 1,
        padding: str = "valid",
        dilation_rate: Pair = 1,
        groups: int = 1,
        activation: str | Callable[[Any], Any] | None = None,
        use_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(activation, use_bias, **options)
        kind, rank = type(self).__name__, len(self.axes) - 2
        self.filters = positive(filters, f"{kind}: filters")
        self.kernel_size = lengths(kernel_size, f"{kind}: kernel_size", rank)
        self.strides = lengths(strides, f"{kind}: strides", rank)
        known = "valid", "same", *(["causal"] if rank == 1 else [])
        self.padding = one_of(str(padding).lower(), f"{kind}: padding", known)
        self.dilation_rate = lengths(dilation_rate, f"{kind}: dilation_rate", rank)
        self.groups = positive(groups, f"{kind}: groups")
        if self.filters % self.groups:
            raise ValueError(
                f"{kind}: filters={filters} is not a multiple of groups={groups}: each group needs "
                "the same number of filters."
            )

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernel and the bias."""
        channels = input_shape[-1]
        if channels % self.groups:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}; its {channels} channels "
                f"are not a multiple of groups={self.groups}."
            )
        self.add_kernel(*self.kernel_size, channels // self.groups, self.filters)

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, height, width, filters)``."""
        return self._convolve(inputs, self.kernel, self.groups, self.bias, self.activation)

    def _convolve(self, inputs: Any, kernel: Any, groups: int, bias: Any, activation: Any) -> Any:
        x = as_floats(inputs, self.kernel)
        padding, lines, steps = self.padding, self.strides, self.dilation_rate
        if self.axes is SEQUENCES:  # An image of one line.
            if padding == "causal":
                before = (self.kernel_size[0] - 1) * steps[0]
                x, padding = np.pad(x, ((0, 0), (before, 0), (0, 0))), "valid"
            x, kernel, lines, steps = x[:, None], kernel[None], (1, *lines), (1, *steps)
        options: Any = {"strides": lines, "dilation": steps, "padding": padding, "groups": groups}
        y = operations.conv2d(x, kernel, bias, activation, **options)
        return y[:, 0] if self.axes is SEQUENCES else y


class Conv1D(Conv2D):
    """A layer that convolves sequences of shape ``(steps, channels)``.

    The arguments are those of `Conv2D`, with one number each. The padding ``"causal"`` pads only
    before the sequence and keeps its length, so no output depends on later steps.

    >>> layer = Conv1D(8, 3, padding="causal")
    >>> layer(np.zeros((2, 6, 3), np.float32)).shape, layer.kernel.shape
    ((2, 6, 8), (3, 3, 8))
    """

    axes = SEQUENCES


class DepthwiseConv2D(Conv2D):
    """A layer that convolves each channel of an image with its own filters.

    Args:
        kernel_size: as for `Conv2D`, as are `strides`, `padding` and `dilation_rate`.
        depth_multiplier: the number of filters of a channel.
        options: as for `Conv2D`; `depthwise_initializer` and `depthwise_regularizer` are those of
            the kernel, of shape ``(*kernel_size, channels, depth_multiplier)``.

    >>> layer = DepthwiseConv2D(3, depth_multiplier=2)
    >>> layer(np.zeros((2, 6, 6, 3), np.float32)).shape, layer.kernel.shape
    ((2, 4, 4, 6), (3, 3, 3, 2))
    """

    def __init__(
        self,
        kernel_size: Pair,
        strides: Pair = 1,
        padding: str = "valid",
        depth_multiplier: int = 1,
        **options: Any,
    ) -> None:
        options = {name.replace("depthwise_", "kernel_"): options[name] for name in options}
        super().__init__(depth_multiplier, kernel_size, strides, padding, **options)

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernel and the bias."""
        channels = input_shape[-1]
        self.add_kernel(*self.kernel_size, channels, self.filters, outputs=channels * self.filters)

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, height, width, channels * depth_multiplier)``."""
        return self._by_channel(inputs, self.bias, self.activation)

    def _by_channel(self, inputs: Any, *after: Any) -> Any:
        rows, columns, channels, count = self.kernel.shape
        kernel = as_operand(self.kernel).reshape(rows, columns, 1, channels * count)
        return self._convolve(inputs, kernel, channels, *after)


class SeparableConv2D(DepthwiseConv2D):
    """A layer that convolves each channel by itself, and then mixes the channels of each element.

    Args:
        filters: the number of channels of the output.
        kernel_size: as for `DepthwiseConv2D`, as are `strides`, `padding` and `depth_multiplier`.
        options: as for `DepthwiseConv2D`; `pointwise_initializer` and `pointwise_regularizer` are
            those of the second kernel.

    >>> layer = SeparableConv2D(8, 3)
    >>> layer(np.zeros((2, 6, 6, 3), np.float32)).shape, layer.pointwise_kernel.shape
    ((2, 4, 4, 8), (1, 1, 3, 8))
    """

    weights_of_kind: ClassVar = {
        **DepthwiseConv2D.weights_of_kind,
        "pointwise_kernel": "glorot_uniform",
    }

    def __init__(
        self,
        filters: int,
        kernel_size: Pair,
        strides: Pair = 1,
        padding: str = "valid",
        **options: Any,
    ) -> None:
        super().__init__(kernel_size, strides, padding, **options)
        self.outputs = positive(filters, "SeparableConv2D: filters")

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernels and the bias."""
        channels, count = input_shape[-1], input_shape[-1] * self.filters
        self.kernel = self.add_weight("kernel", (*self.kernel_size, channels, self.filters))
        self.pointwise_kernel = self.add_weight("pointwise_kernel", (1, 1, count, self.outputs))
        self.add_bias(self.outputs)

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, height, width, filters)``."""
        y = self._by_channel(inputs, None, activations.linear)
        return operations.conv2d(y, self.pointwise_kernel, self.bias, self.activation)


class Conv2DTranspose(Conv2D):
    """A layer that computes a transposed convolution: each element of the input adds a window.

    Args:
        filters: as for `Conv2D`, like all other arguments; `dilation_rate` and `groups` must be 1.
            The output is `strides` times as large as the input, or larger with the padding
            ``"valid"``.
        options: as for `Conv2D`; the kernel has the shape ``(*kernel_size, filters, channels)``.

    >>> layer = Conv2DTranspose(8, 3, strides=2, padding="same")
    >>> layer(np.zeros((2, 6, 6, 3), np.float32)).shape, layer.kernel.shape
    ((2, 12, 12, 8), (3, 3, 8, 3))
    """

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernel and the bias."""
        if self.groups != 1 or self.dilation_rate != (1, 1):
            raise ValueError(f"{self.name}: groups and dilation_rate must be 1.")
        self.add_kernel(*self.kernel_size, self.filters, input_shape[-1], outputs=self.filters)

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, height, width, filters)``."""
        x = as_floats(inputs, self.kernel)
        y = operations.conv2d_transpose(x, self.kernel, self.strides, self.padding)
        return self.activation(y if self.bias is None else y + self.bias)


class MaxPool2D(Layer):
    """A layer that takes the largest element of each window of an image.

    Args:
        pool_size: the height and width of a window; an integer for both.
        strides: the distance from one window to the next; None means `pool_size`.
        padding: ``"valid"`` or ``"same"``, as in `Conv2D`.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> MaxPool2D()(np.arange(16.0).reshape(1, 4, 4, 1)).ravel()
    array([ 5.,  7., 13., 15.], dtype=float32)
    """

    axes = IMAGES
    _pool: ClassVar[Callable[..., Any]] = staticmethod(operations.max_pool2d)

    def __init__(
        self,
        pool_size: Pair = 2,
        strides: Pair | None = None,
        padding: str = "valid",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        kind, rank = type(self).__name__, len(self.axes) - 2
        self.pool_size = lengths(pool_size, f"{kind}: pool_size", rank)
        steps = self.pool_size if strides is None else strides
        self.strides = lengths(steps, f"{kind}: strides", rank)
        self.padding = one_of(str(padding).lower(), f"{kind}: padding", ("valid", "same"))

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, height, width, channels)``."""
        if self.axes is IMAGES:
            return self._pool(inputs, self.pool_size, self.strides, self.padding)
        sizes = (1, *self.pool_size), (1, *self.strides)
        return self._pool(inputs[:, None], *sizes, self.padding)[:, 0]


class AveragePool2D(MaxPool2D):
    """A layer that takes the mean of each window of an image; padding does not count.

    Its arguments are those of `MaxPool2D`.

    >>> AveragePool2D()(np.arange(16.0).reshape(1, 4, 4, 1)).ravel()
    array([ 2.5,  4.5, 10.5, 12.5], dtype=float32)
    """

    _pool = staticmethod(operations.average_pool2d)


class MaxPool1D(MaxPool2D):
    """A layer that takes the largest element of each window of a sequence; see `MaxPool2D`."""

    axes = SEQUENCES


class AveragePool1D(AveragePool2D):
    """A layer that takes the mean of each window of a sequence; padding does not count."""

    axes = SEQUENCES


class GlobalAveragePool2D(Layer):
    """A layer that takes the mean of each channel of an image.

    Args:
        keepdims: whether the result keeps the other axes, with length 1.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> GlobalAveragePool2D()(np.ones((2, 4, 4, 3))).shape
    (2, 3)
    """

    axes = IMAGES
    _reduce: ClassVar[Callable[..., Any]] = staticmethod(np.mean)

    def __init__(self, keepdims: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.keepdims = bool(keepdims)

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """Return the output, of shape ``(batch, channels)``; a mean leaves out masked steps."""
        axes = tuple(range(1, len(self.axes) - 1))
        if mask is None or self._reduce is not np.mean:
            return self._reduce(inputs, axis=axes, keepdims=self.keepdims)
        weights = mask[..., None].astype(inputs.dtype)
        count = np.maximum(weights.sum(axis=axes, keepdims=self.keepdims), 1)
        return np.sum(inputs * weights, axis=axes, keepdims=self.keepdims) / count

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return None: no time steps are left."""


class GlobalMaxPool2D(GlobalAveragePool2D):
    """A layer that takes the largest element of each channel; see `GlobalAveragePool2D`."""

    _reduce = staticmethod(np.max)


class GlobalAveragePool1D(GlobalAveragePool2D):
    """A layer that takes the mean of each channel of a sequence; see `GlobalAveragePool2D`."""

    axes = SEQUENCES


class GlobalMaxPool1D(GlobalMaxPool2D):
    """A layer that takes the largest element of each channel of a sequence."""

    axes = SEQUENCES


_export(vars())
