"""Layers that change the size of images, channels last, or their values for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.context import current_trace
from ndistribute.models.layers.convolution import SpatialLayer, lengths
from ndistribute.models.layers.core import random_generator
from ndistribute.models.layers.layer import Layer

Sides = int | Sequence[int] | Sequence[Sequence[int]]


class ZeroPadding2D(SpatialLayer):
    """A layer that adds rows and columns of zeros around an image.

    Args:
        padding: the number on each side; or two, of rows and of columns; or a pair for each, of
            those before and after.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> ZeroPadding2D(((1, 0), (2, 2)))(np.ones((1, 4, 4, 3))).shape
    (1, 5, 8, 3)
    """

    def __init__(self, padding: Sides = 1, **options: Any) -> None:
        super().__init__(**options)
        self.padding = _sides(padding, f"{type(self).__name__}: padding")

    def call(self, inputs: Any) -> Any:
        """Return the larger images."""
        return np.pad(inputs, ((0, 0), *self.padding, (0, 0)))


class Cropping2D(SpatialLayer):
    """A layer that leaves out rows and columns around an image.

    Args:
        cropping: as `padding` of `ZeroPadding2D`.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Cropping2D(1)(np.ones((1, 4, 4, 3))).shape
    (1, 2, 2, 3)
    """

    def __init__(self, cropping: Sides = 0, **options: Any) -> None:
        super().__init__(**options)
        self.cropping = _sides(cropping, f"{type(self).__name__}: cropping")

    def call(self, inputs: Any) -> Any:
        """Return the smaller images."""
        (above, below), (left, right) = self.cropping
        height, width = inputs.shape[1:3]
        if above + below >= height or left + right >= width:
            raise ValueError(f"{self.name}: images of {height} x {width} have nothing left.")
        return inputs[:, above : height - below, left : width - right]


class UpSampling2D(SpatialLayer):
    """A layer that repeats each row and each column of an image.

    Args:
        size: how often: an integer, or one for the rows and one for the columns.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> UpSampling2D((2, 3))(np.ones((1, 4, 4, 3))).shape
    (1, 8, 12, 3)
    """

    def __init__(self, size: int | Sequence[int] = 2, **options: Any) -> None:
        super().__init__(**options)
        self.size = lengths(size, "UpSampling2D: size", 2)

    def call(self, inputs: Any) -> Any:
        """Return the larger images."""
        return np.repeat(np.repeat(inputs, self.size[0], axis=1), self.size[1], axis=2)


class Rescaling(Layer):
    """A layer that computes ``inputs * scale + offset``.

    >>> Rescaling(1 / 255)(np.array([[0, 255]])).tolist()
    [[0.0, 1.0]]
    """

    def __init__(self, scale: float, offset: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.scale, self.offset = scale, offset

    def call(self, inputs: Any) -> Any:
        """Return the scaled input."""
        floats = inputs.astype(self.compute_dtype)
        return floats * np.asarray(self.scale, floats.dtype) + np.asarray(self.offset, floats.dtype)


class CenterCrop(SpatialLayer):
    """A layer that cuts the middle out of an image.

    Args:
        height: the height of the result.
        width: its width.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> CenterCrop(2, 3)(np.ones((1, 4, 5, 3))).shape
    (1, 2, 3, 3)
    """

    def __init__(self, height: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.height, self.width = lengths((height, width), f"{type(self).__name__}: size", 2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the smaller images."""
        rest = inputs.shape[1] - self.height, inputs.shape[2] - self.width
        if min(rest) < 0:
            size = f"{self.height} x {self.width}"
            raise ValueError(f"{self.name}: images of shape {inputs.shape[1:]} are below {size}.")
        y, x = self._corner(rest, training)
        return inputs[:, y : y + self.height, x : x + self.width]

    def _corner(self, rest: tuple[int, int], training: bool) -> tuple[int, int]:
        return rest[0] // 2, rest[1] // 2


class RandomCrop(CenterCrop):
    """A layer that cuts a random part out of the images of a batch, the middle out of training.

    A call that says nothing of `training`, such as in `Dataset.map`, counts as training. Its
    arguments are those of `CenterCrop`. Every replica draws from its own generator; a compiled
    step, whose shapes and slices are fixed, refuses it.
    """

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the smaller images."""
        return super().call(inputs, training)

    def _corner(self, rest: tuple[int, int], training: bool) -> tuple[int, int]:
        if not training:
            return super()._corner(rest, training)
        if current_trace() is not None:
            raise ValueError(f"{self.name}: crop before a compiled step, such as in Dataset.map.")
        y, x = (int(random_generator().random((), dtype=np.float32) * (n + 1)) for n in rest)
        return y, x


class RandomFlip(SpatialLayer):
    """A layer that mirrors each image with a probability of one half, none out of training.

    A call that says nothing of `training`, such as in `Dataset.map`, counts as training. Every
    replica draws from its own generator.

    Args:
        mode: ``"horizontal"``, ``"vertical"``, or ``"horizontal_and_vertical"``.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> RandomFlip("horizontal")(np.ones((1, 4, 4, 3))).shape
    (1, 4, 4, 3)
    """

    _axes: ClassVar = {"horizontal": (2,), "vertical": (1,), "horizontal_and_vertical": (1, 2)}

    def __init__(self, mode: str = "horizontal_and_vertical", **options: Any) -> None:
        super().__init__(**options)
        if mode not in self._axes:
            raise ValueError(f"RandomFlip: mode must be one of {[*self._axes]}, got {mode!r}.")
        self.mode = mode

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the images, in training some of them mirrored."""
        for axis in self._axes[self.mode] if training else ():
            flips = random_generator().random((inputs.shape[0], 1, 1, 1), dtype=np.float32) < 0.5
            inputs = np.where(flips, np.flip(inputs, axis), inputs)
        return inputs


def _sides(value: Sides, what: str) -> tuple[tuple[int, int], ...]:
    """Return the numbers before and after, of rows and of columns."""
    pairs = list(value) if isinstance(value, Sequence) else [value, value]
    sides = [tuple(each) if isinstance(each, Sequence) else (each, each) for each in pairs]
    fits = len(sides) == 2 and all(len(side) == 2 and min(side) >= 0 for side in sides)
    if not fits:
        raise ValueError(
            f"{what} must be an integer, 0 or more, or two of them, or two pairs, got {value!r}."
        )
    return tuple((int(before), int(after)) for before, after in sides)
