"""Convolution and pooling of images, channels last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.models import operations
from ndistribute.models.layers.core import KernelLayer, positive
from ndistribute.models.layers.layer import Layer

Pair = int | Sequence[int]


class Conv2D(KernelLayer):
    """A layer that convolves images of shape ``(height, width, channels)``.

    Args:
        filters: the number of channels of the output.
        kernel_size: the height and width of the kernel; an integer for both.
        strides: the distance from one window to the next, in each direction.
        padding: ``"valid"`` for windows inside the image; ``"same"`` for an output of the size of
            the image, divided by the strides.
        dilation_rate: the distance between the elements of a window, in each direction.
        groups: the number of groups of channels; each has ``filters / groups`` filters of its own.
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
        self.filters = positive(filters, "Conv2D: filters")
        self.kernel_size = _pair(kernel_size, "Conv2D: kernel_size")
        self.strides = _pair(strides, "Conv2D: strides")
        self.padding = _padding(padding, "Conv2D")
        self.dilation_rate = _pair(dilation_rate, "Conv2D: dilation_rate")
        self.groups = positive(groups, "Conv2D: groups")
        if self.filters % self.groups:
            raise ValueError(
                f"Conv2D: filters={filters} is not a multiple of groups={groups}: each group needs "
                "the same number of filters."
            )

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernel and the bias."""
        _check_images(self, input_shape)
        channels = input_shape[-1]
        if channels % self.groups:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}; its {channels} channels "
                f"are not a multiple of groups={self.groups}."
            )
        self.add_kernel(*self.kernel_size, channels // self.groups, self.filters)

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, height, width, filters)``."""
        _check_images(self, inputs.shape)
        x = self.checked(inputs, self.kernel.shape[2] * self.groups, "channels")
        options: Any = {"strides": self.strides, "dilation": self.dilation_rate}
        options |= {"padding": self.padding, "groups": self.groups}
        return operations.conv2d(x, self.kernel, self.bias, self.activation, **options)


class _ImageLayer(Layer):
    """The base class of layers of images without variables."""

    def build(self, input_shape: Sequence[int]) -> None:
        """Check that the inputs are images."""
        _check_images(self, input_shape)


class MaxPool2D(_ImageLayer):
    """A layer that takes the largest element of each window of an image.

    Args:
        pool_size: the height and width of a window; an integer for both.
        strides: the distance from one window to the next; None means `pool_size`.
        padding: ``"valid"`` or ``"same"``, as in `Conv2D`.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> MaxPool2D()(np.arange(16.0).reshape(1, 4, 4, 1)).ravel()
    array([ 5.,  7., 13., 15.], dtype=float32)
    """

    _pool: ClassVar[Callable[..., Any]] = staticmethod(operations.max_pool2d)

    def __init__(
        self,
        pool_size: Pair = 2,
        strides: Pair | None = None,
        padding: str = "valid",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        kind = type(self).__name__
        self.pool_size = _pair(pool_size, f"{kind}: pool_size")
        self.strides = self.pool_size if strides is None else _pair(strides, f"{kind}: strides")
        self.padding = _padding(padding, kind)

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, height, width, channels)``."""
        return self._pool(inputs, self.pool_size, self.strides, self.padding)


class AveragePool2D(MaxPool2D):
    """A layer that takes the mean of each window of an image, without the padding.

    Its arguments are those of `MaxPool2D`.

    >>> AveragePool2D()(np.arange(16.0).reshape(1, 4, 4, 1)).ravel()
    array([ 2.5,  4.5, 10.5, 12.5], dtype=float32)
    """

    _pool = staticmethod(operations.average_pool2d)


class GlobalAveragePool2D(_ImageLayer):
    """A layer that takes the mean of each channel of an image.

    >>> GlobalAveragePool2D()(np.ones((2, 4, 4, 3))).shape
    (2, 3)
    """

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(images, channels)``."""
        return np.mean(inputs, axis=(1, 2))


def _check_images(layer: Layer, shape: Sequence[int]) -> None:
    if len(shape) != 4:
        raise ValueError(
            f"{layer.name}: the input has shape {tuple(shape)}, but images have four axes, "
            "(images, height, width, channels). Write x[..., np.newaxis] for one channel."
        )


def _pair(value: Pair, what: str) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{what} must be an integer or two of them, got {value!r}.")
    return positive(values[0], what), positive(values[1], what)


def _padding(padding: str, kind: str) -> str:
    name = str(padding).lower()
    if name not in ("valid", "same"):
        raise ValueError(f"{kind}: padding must be 'valid' or 'same', got {padding!r}.")
    return name
