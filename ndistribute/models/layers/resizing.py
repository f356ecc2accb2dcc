"""Layers that change the size of images, channels last, or their values for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.context import current_trace
from ndistribute.devices import array_namespace
from ndistribute.exports import export as _export
from ndistribute.models.layers.arguments import (
    check_axes,
    lengths,
    on_device,
    one_of,
    random_generator,
)
from ndistribute.models.layers.layer import IMAGES, Layer

Factor = float | Sequence[float]
Sides = int | Sequence[int] | Sequence[Sequence[int]]


class ZeroPadding2D(Layer):
    """A layer that adds rows and columns of zeros around an image.

    Args:
        padding: the number on each side; or two numbers, for rows and columns; or two pairs, for
            the rows and columns before and after.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> ZeroPadding2D(((1, 0), (2, 2)))(np.ones((1, 4, 4, 3))).shape
    (1, 5, 8, 3)
    """

    axes = IMAGES

    def __init__(self, padding: Sides = 1, **options: Any) -> None:
        super().__init__(**options)
        self.padding = _sides(padding, f"{type(self).__name__}: padding")

    def call(self, inputs: Any) -> Any:
        """Return the larger images."""
        return np.pad(inputs, ((0, 0), *self.padding, (0, 0)))


class Cropping2D(Layer):
    """A layer that leaves out rows and columns around an image.

    Args:
        cropping: as `padding` of `ZeroPadding2D`.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Cropping2D(1)(np.ones((1, 4, 4, 3))).shape
    (1, 2, 2, 3)
    """

    axes = IMAGES

    def __init__(self, cropping: Sides = 0, **options: Any) -> None:
        super().__init__(**options)
        self.cropping = _sides(cropping, f"{type(self).__name__}: cropping")

    def call(self, inputs: Any) -> Any:
        """Return the smaller images."""
        (above, below), (left, right) = self.cropping
        height, width = inputs.shape[1:3]
        if above + below >= height or left + right >= width:
            raise ValueError(
                f"{self.name}: cropping {self.cropping} leaves nothing of images of {height} x "
                f"{width}."
            )
        return inputs[:, above : height - below, left : width - right]


class UpSampling2D(Layer):
    """A layer that repeats each row and each column of an image.

    Args:
        size: the number of repetitions: an integer, or one for rows and one for columns.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> UpSampling2D((2, 3))(np.ones((1, 4, 4, 3))).shape
    (1, 8, 12, 3)
    """

    axes = IMAGES

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

    supports_masking = True

    def __init__(self, scale: float, offset: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.scale, self.offset = scale, offset

    def call(self, inputs: Any) -> Any:
        """Return the scaled input."""
        floats = inputs.astype(self.compute_dtype)
        return floats * np.asarray(self.scale, floats.dtype) + np.asarray(self.offset, floats.dtype)


class _ImageLayer(Layer):
    """The base class of layers for images, or for one image, as `Dataset.map` may pass it.

    A call that says nothing of `training`, such as in `Dataset.map`, counts as training. Every
    replica draws from its own generator.
    """

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the changed images; random changes are made in training."""
        if inputs.ndim == 3:
            return self._changed(inputs[None], training)[0]
        check_axes(f"{self.name}: the input", inputs.shape, IMAGES)
        return self._changed(inputs, training)

    def _changed(self, images: Any, training: bool) -> Any:
        raise NotImplementedError


class _RandomLayer(_ImageLayer):
    """The base class of layers that make random changes; see `RandomFlip`."""

    def __init__(self, *args: Any, seed: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seed, self._generators = seed, dict[int, Any]()  # Of the replicas.

    def _drawn(self, like: Any, low: float, high: float) -> Any:
        """Return a random number for each element, with the axes of places in images."""
        if self.seed is not None and current_trace() is not None:
            what = f"{self.name}: with a seed, a compiled step would draw its numbers only once"
            raise ValueError(
                f"{what}: leave out seed, or call the layer before the step, such as in "
                "Dataset.map."
            )
        rng = random_generator(self.seed, self._generators)
        drawn = on_device(rng.random((len(like), 1, 1), dtype=np.float32))
        return drawn * (high - low) + low


class CenterCrop(_ImageLayer):
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

    def _changed(self, images: Any, training: bool) -> Any:
        rest = images.shape[1] - self.height, images.shape[2] - self.width
        if min(rest) < 0:
            size = f"{self.height} x {self.width}"
            raise ValueError(
                f"{self.name}: images of shape {images.shape[1:]} are smaller than {size}."
            )
        y, x = self._corner(rest, training)
        return images[:, y : y + self.height, x : x + self.width]

    def _corner(self, rest: tuple[int, int], training: bool) -> tuple[int, int]:
        return rest[0] // 2, rest[1] // 2


class RandomCrop(_RandomLayer, CenterCrop):
    """A layer that in training crops a random part of a batch's images, and otherwise the middle.

    The arguments are those of `CenterCrop`, and `seed` as for `RandomFlip`. A call without
    `training` counts as training. In a compiled step the layer raises an error, because shapes and
    slices are fixed there.
    """

    def _corner(self, rest: tuple[int, int], training: bool) -> tuple[int, int]:
        if not training:
            return super()._corner(rest, training)
        if current_trace() is not None:
            raise ValueError(
                f"{self.name} cannot crop at random in a compiled step: call it before the step, "
                "such as in Dataset.map."
            )
        shares = self._drawn(rest, 0, 1).ravel()
        y, x = (int(share * (n + 1)) for n, share in zip(rest, shares, strict=True))
        return y, x


class RandomFlip(_RandomLayer):
    """A layer that in training mirrors each image with a probability of one half.

    A call that says nothing of `training`, such as in `Dataset.map`, counts as training. Every
    replica draws from its own generator.

    Args:
        mode: ``"horizontal"``, ``"vertical"``, or ``"horizontal_and_vertical"``.
        options: `seed`, an integer that all random layers for images accept. A layer with a seed
            has its own generators, which start over in each program. So two layers with the same
            seed change their images in the same way. Also `name`, `trainable` and `dtype`, see
            `Layer`.

    >>> RandomFlip("horizontal")(np.ones((1, 4, 4, 3))).shape
    (1, 4, 4, 3)
    """

    _axes: ClassVar = {"horizontal": (2,), "vertical": (1,), "horizontal_and_vertical": (1, 2)}

    def __init__(self, mode: str = "horizontal_and_vertical", **options: Any) -> None:
        super().__init__(**options)
        self.mode = one_of(mode, "RandomFlip: mode", self._axes)

    def _changed(self, images: Any, training: bool) -> Any:
        for axis in self._axes[self.mode] if training else ():
            flips = self._drawn(images, 0, 1)[..., None] < 0.5
            images = np.where(flips, np.flip(images, axis), images)
        return images


class RandomContrast(_RandomLayer):
    """A layer that in training changes the contrast of images, relative to their mean.

    Args:
        factor: distances from the mean are multiplied by a number from ``1 - factor`` to ``1 +
            factor``; or a pair with the value for each end.
        value_range: the smallest and the largest value of the result.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> float(RandomContrast((0.5, -0.5))(np.array([[[[1.0], [3.0]]]])).max())
    2.5
    """

    def __init__(
        self, factor: Factor, value_range: Sequence[float] = (0, 255), **options: Any
    ) -> None:
        super().__init__(**options)
        ends = (-factor[0], factor[1]) if isinstance(factor, Sequence) else factor
        self.factor = _range(ends, "RandomContrast: factor")
        self.value_range = value_range

    def _changed(self, images: Any, training: bool) -> Any:
        images = images.astype(self.compute_dtype)
        if not training:
            return images
        amounts = self._drawn(images, *self.factor)[..., None].astype(images.dtype)
        mean = np.mean(images, axis=(1, 2), keepdims=True)
        low, high = self.value_range
        return np.clip((images - mean) * (1 + amounts) + mean, low, high)


class Resizing(_ImageLayer):
    """A layer that changes the height and width of images.

    Args:
        height: the height of the result.
        width: its width.
        interpolation: ``"bilinear"`` or ``"nearest"``.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Resizing(1, 2)(np.arange(8.0).reshape(1, 2, 4, 1)).ravel().tolist()
    [2.5, 4.5]
    """

    def __init__(
        self, height: int, width: int, interpolation: str = "bilinear", **options: Any
    ) -> None:
        super().__init__(**options)
        self.height, self.width = lengths((height, width), f"{type(self).__name__}: size", 2)
        self.interpolation = one_of(interpolation, f"{self.name}: interpolation", _INTERPOLATIONS)

    def _changed(self, images: Any, training: bool) -> Any:
        images, xp = images.astype(self.compute_dtype), array_namespace(untrack(images))
        sizes = zip((self.height, self.width), images.shape[1:3], strict=True)
        y, x = ((xp.arange(n) + 0.5) * (length / n) - 0.5 for n, length in sizes)
        return _sampled(images, y[None, :, None], x[None, None], self.interpolation)


class _Warp(_RandomLayer):
    """The base class of layers that take each element of an image from another place in it."""

    def __init__(
        self,
        fill_mode: str = "reflect",
        interpolation: str = "bilinear",
        fill_value: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.fill_mode = one_of(fill_mode, f"{self.name}: fill_mode", _FOLDS)
        self.interpolation = one_of(interpolation, f"{self.name}: interpolation", _INTERPOLATIONS)
        self.fill_value = float(fill_value)

    def _changed(self, images: Any, training: bool) -> Any:
        images = images.astype(self.compute_dtype)
        if not training:
            return images
        xp, (height, width) = array_namespace(untrack(images)), images.shape[1:3]
        middle = (height - 1) / 2, (width - 1) / 2
        y = xp.arange(height, dtype=np.float32)[None, :, None] - middle[0]
        x = xp.arange(width, dtype=np.float32)[None, None] - middle[1]
        y, x = self._sources(images, y, x)
        places = y + middle[0], x + middle[1]
        return _sampled(images, *places, self.interpolation, self.fill_mode, self.fill_value)

    def _sources(self, images: Any, y: Any, x: Any) -> tuple[Any, Any]:
        """Return the places from which elements are taken, relative to the middle."""
        raise NotImplementedError


class RandomRotation(_Warp):
    """A layer that in training turns images around their middle.

    Args:
        factor: the largest angle, in full turns, in both directions; or the two ends of the range.
            Positive angles turn counterclockwise.
        fill_mode: how to fill points outside of an image: ``"reflect"``, ``"wrap"``, ``"nearest"``,
            or ``"constant"`` for the `fill_value`.
        interpolation: ``"bilinear"`` or ``"nearest"``.
        fill_value: see `fill_mode`.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> RandomRotation((0.25, 0.25))(np.arange(4.0).reshape(1, 2, 2, 1)).round().ravel().tolist()
    [1.0, 3.0, 0.0, 2.0]
    """

    def __init__(self, factor: Factor, fill_mode: str = "reflect", **options: Any) -> None:
        super().__init__(fill_mode, **options)
        self.factor = _range(factor, "RandomRotation: factor")

    def _sources(self, images: Any, y: Any, x: Any) -> tuple[Any, Any]:
        angles = self._drawn(images, *self.factor) * (2 * np.pi)
        cos, sin = np.cos(angles), np.sin(angles)
        return cos * y + sin * x, cos * x - sin * y


class RandomZoom(_Warp):
    """A layer that in training zooms images in or out.

    Args:
        height_factor: the largest change, in both directions; or the two ends of the range.
            Positive numbers zoom out.
        width_factor: the same for the width; None: each image uses its change of the height.
        options: `fill_mode`, `interpolation` and `fill_value`, as for `RandomRotation`; and `name`,
            `trainable` and `dtype`, see `Layer`.

    >>> RandomZoom((1.0, 1.0), fill_mode="constant")(np.ones((1, 2, 2, 1))).ravel().tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    _needs_both: ClassVar[bool] = False

    def __init__(
        self, height_factor: Factor, width_factor: Factor | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        kind = type(self).__name__
        self.height_factor = _range(height_factor, f"{kind}: height_factor")
        is_same = width_factor is None and not self._needs_both
        self.width_factor = None if is_same else _range(width_factor, f"{kind}: width_factor")

    def _amounts(self, images: Any) -> tuple[Any, Any]:
        of_height, of_width = self._drawn(images, *self.height_factor), self.width_factor
        return of_height, of_height if of_width is None else self._drawn(images, *of_width)

    def _sources(self, images: Any, y: Any, x: Any) -> tuple[Any, Any]:
        of_height, of_width = self._amounts(images)
        return y * (1 + of_height), x * (1 + of_width)


class RandomTranslation(RandomZoom):
    """A layer that in training moves images vertically and horizontally.

    Args:
        height_factor: the largest move, as a share of the height, in both directions; or the two
            ends of the range. Positive numbers move images down.
        width_factor: the same for the width. Positive numbers move images to the right.
        options: as for `RandomZoom`.
    """

    _needs_both = True

    def _sources(self, images: Any, y: Any, x: Any) -> tuple[Any, Any]:
        of_height, of_width = self._amounts(images)
        return y - of_height * images.shape[1], x - of_width * images.shape[2]


_INTERPOLATIONS = "bilinear", "nearest"
_FOLDS: dict[str, Callable[[Any, int], Any]] = {
    "reflect": lambda k, n: np.minimum(k % (2 * n), 2 * n - 1 - k % (2 * n)),
    "wrap": lambda k, n: k % n,
    "nearest": lambda k, n: np.clip(k, 0, n - 1),
    "constant": lambda k, n: np.clip(k, 0, n - 1),
}
"""Which of n lines stands for a line, which may be outside."""


def _sampled(
    images: Any, y: Any, x: Any, interpolation: str, mode: str = "nearest", value: float = 0.0
) -> Any:
    """Return the elements at places between those of images, one row of places for each."""
    xp, (count, height, width, _) = array_namespace(untrack(images)), images.shape
    if interpolation == "nearest":
        y, x = np.floor(y + 0.5), np.floor(x + 0.5)
    rows, columns = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    number, fold, total = xp.arange(count)[:, None, None], _FOLDS[mode], 0
    for row in (rows, rows + 1):
        for column in (columns, columns + 1):
            weight = (1 - np.abs(y - row)) * (1 - np.abs(x - column))
            part = images[number, fold(row, height), fold(column, width)]
            if mode == "constant":
                is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                part = np.where(is_inside[..., None], part, value)
            total = total + part * weight[..., None].astype(images.dtype)
    return total


def _range(factor: Any, what: str) -> tuple[float, float]:
    """Return the two ends of a range; one number stands for the range from minus it to it."""
    ends = (-factor, factor) if isinstance(factor, int | float) else factor
    if not isinstance(ends, Sequence) or len(ends) != 2 or ends[0] > ends[1]:
        raise ValueError(
            f"{what} must be a number, 0 or more, or a pair (lower, upper), got {factor!r}."
        )
    return float(ends[0]), float(ends[1])


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


_export(vars(), but="Factor Sides")
