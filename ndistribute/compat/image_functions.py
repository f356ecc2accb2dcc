"""`tf.image`: functions of images whose last axes are rows, columns and channels.

The tables of names adapt them: the first argument is a tensor, and so is the result.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ndistribute.compat.array_functions import saturate_cast
from ndistribute.compat.random_numbers import generator
from ndistribute.errors import InvalidArgumentError


def convert_image_dtype(image: Any, dtype: Any, saturate: bool = False) -> Any:
    """Return an image of another dtype; 1.0 becomes the largest number of an integer dtype."""
    old, new = np.dtype(image.dtype), np.dtype(dtype)
    if old == new or (old.kind == new.kind == "f"):
        return image.astype(new)
    if old.kind == "f":
        scaled = image * np.asarray(np.iinfo(new).max + 0.5, old)
        return saturate_cast(scaled, new) if saturate else scaled.astype(new)
    if new.kind == "f":
        return image.astype(new) * np.asarray(1 / np.iinfo(old).max, new)
    sizes = [int(np.iinfo(kind).max) + 1 for kind in (old, new)]
    if sizes[0] > sizes[1]:
        return (image // np.asarray(sizes[0] // sizes[1], old)).astype(new)
    return image.astype(new) * np.asarray(sizes[1] // sizes[0], new)


def _in_floats(change: Any) -> Any:
    """Return a function of images that computes in floats, and returns the image's dtype."""

    @functools.wraps(change)
    def call(image: Any, *args: Any, **options: Any) -> Any:
        if image.dtype.kind == "f":
            return change(image, *args, **options)
        changed = change(convert_image_dtype(image, np.float32), *args, **options)
        return convert_image_dtype(changed, image.dtype, saturate=True)

    return call


@_in_floats
def adjust_brightness(image: Any, delta: Any) -> Any:
    """Return an image with a number added to its floats."""
    return image + delta


@_in_floats
def adjust_contrast(images: Any, contrast_factor: Any) -> Any:
    """Return images in which each distance to the mean of a channel is multiplied."""
    mean = np.mean(images, (-3, -2), keepdims=True)
    return (images - mean) * contrast_factor + mean


@_in_floats
def adjust_saturation(image: Any, saturation_factor: Any) -> Any:
    """Return a colour image with its saturation multiplied."""
    value = np.max(image, -1, keepdims=True)
    low = np.min(image, -1, keepdims=True)
    spread = np.where(np.greater(value, low), value - low, np.ones_like(value))
    greatest = np.where(np.greater(value, low), value / spread, np.ones_like(value))
    return value - (value - image) * np.minimum(saturation_factor, greatest)


@_in_floats
def rgb_to_grayscale(images: Any) -> Any:
    """Return images with one channel instead of three."""
    return np.sum(images * np.asarray([0.2989, 0.587, 0.114], images.dtype), -1, keepdims=True)


def grayscale_to_rgb(images: Any) -> Any:
    """Return images with three channels instead of one."""
    if images.shape[-1] != 1:
        raise InvalidArgumentError(
            f"grayscale_to_rgb: expected images with one channel, got {images.shape[-1]}."
        )
    return np.repeat(images, 3, -1)


def flip_left_right(image: Any) -> Any:
    """Return images with their columns reversed."""
    return np.flip(image, -2)


def flip_up_down(image: Any) -> Any:
    """Return images with their rows reversed."""
    return np.flip(image, -3)


def rot90(image: Any, k: int = 1) -> Any:
    """Return images turned counter-clockwise by right angles."""
    return np.rot90(image, k, (-3, -2))


def crop_to_bounding_box(
    image: Any, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Any:
    """Return a part of images."""
    height, width = image.shape[-3:-1]
    bottom, right = offset_height + target_height, offset_width + target_width
    if min(offset_height, offset_width) < 0 or bottom > height or right > width:
        raise ValueError(
            f"crop_to_bounding_box: the box from {offset_height} x {offset_width} to {bottom} x "
            f"{right} is not inside an image of {height} x {width}."
        )
    return image[..., offset_height:bottom, offset_width:right, :]


def pad_to_bounding_box(
    image: Any, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Any:
    """Return images with zeros around them."""
    height, width = image.shape[-3:-1]
    below, right = target_height - offset_height - height, target_width - offset_width - width
    if min(offset_height, offset_width, below, right) < 0:
        size = f"{target_height} x {target_width}"
        raise ValueError(
            f"pad_to_bounding_box: an image of {height} x {width} at {offset_height} x "
            f"{offset_width} does not fit into {size}."
        )
    outer = ((0, 0),) * (image.ndim - 3)
    return np.pad(image, (*outer, (offset_height, below), (offset_width, right), (0, 0)))


def resize_with_crop_or_pad(image: Any, target_height: int, target_width: int) -> Any:
    """Return images of another size: cropped to their middle, or with zeros around them."""
    height, width = image.shape[-3:-1]
    rows, columns = min(height, target_height), min(width, target_width)
    image = crop_to_bounding_box(image, (height - rows) // 2, (width - columns) // 2, rows, columns)
    offsets = (target_height - rows) // 2, (target_width - columns) // 2
    return pad_to_bounding_box(image, *offsets, target_height, target_width)


def central_crop(image: Any, central_fraction: float) -> Any:
    """Return the middle of images."""
    if not 0 < central_fraction <= 1:
        raise ValueError(f"central_fraction must be in (0, 1], got {central_fraction}.")
    sides = image.shape[-3:-1]
    kept = [side - 2 * int((side - side * central_fraction) / 2) for side in sides]
    return resize_with_crop_or_pad(image, *kept)


def resize(
    images: Any,
    size: Any,
    method: str = "bilinear",
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
) -> Any:
    """Return images of another size: as float32, or in their dtype with nearest neighbours."""
    if antialias or method not in ("bilinear", "nearest"):
        how = f"antialias={antialias}" if antialias else f"method {method!r}"
        raise NotImplementedError(f"tf.image.resize: {how}. Use 'bilinear', 'nearest' or Pillow.")
    lengths, wanted = images.shape[-3:-1], [int(length) for length in size]
    if preserve_aspect_ratio:
        scale = min(new / old for new, old in zip(wanted, lengths, strict=True))
        wanted = [max(round(old * scale), 1) for old in lengths]
    if method == "bilinear":
        images = images.astype(np.float32)
    for axis, old, new in zip((-3, -2), lengths, wanted, strict=True):
        if old == new:
            continue
        at = (np.arange(new) + 0.5) * (old / new)
        if method == "nearest":
            images = np.take(images, np.minimum(at.astype(np.int64), old - 1), axis)
            continue
        at = np.clip(at - 0.5, 0, old - 1)
        first = at.astype(np.int64)
        share = (at - first).astype(np.float32).reshape(-1, *(1,) * (-axis - 1))
        low = np.take(images, first, axis)
        images = low + (np.take(images, np.minimum(first + 1, old - 1), axis) - low) * share
    return images


def per_image_standardization(image: Any) -> Any:
    """Return images with a mean of 0 and a variance of 1."""
    image, axes = image.astype(np.float32), (-3, -2, -1)
    least = 1 / np.sqrt(np.float32(np.prod(image.shape[-3:])))
    centred = image - np.mean(image, axes, keepdims=True)
    return centred / np.maximum(np.std(image, axes, keepdims=True), least)


def total_variation(images: Any) -> Any:
    """Return the sum of the absolute differences of neighbours, for each image."""
    rows = np.abs(images[..., 1:, :, :] - images[..., :-1, :, :])
    columns = np.abs(images[..., 1:, :] - images[..., :-1, :])
    return np.sum(rows, (-3, -2, -1)) + np.sum(columns, (-3, -2, -1))


def sobel_edges(image: Any) -> Any:
    """Return the gradients of images along rows and columns, in a last axis of length two."""
    borders = ((0, 0),) * (image.ndim - 3) + ((1, 1), (1, 1), (0, 0))
    padded = np.pad(image, borders, "reflect")

    def thirds(array: Any, axis: int) -> list[Any]:
        length = image.shape[axis]
        return [np.take(array, np.arange(k, k + length), axis) for k in range(3)]

    def change(along: int, across: int) -> Any:
        before, _, after = thirds(padded, along)
        left, middle, right = thirds(after - before, across)
        return left + 2 * middle + right

    return np.stack([change(-3, -2), change(-2, -3)], -1)


def resize_with_pad(
    image: Any, target_height: int, target_width: int, method: str = "bilinear"
) -> Any:
    """Return images of another size; zeros around them keep their proportions."""
    height, width = image.shape[-3:-1]
    scale = min(target_height / height, target_width / width)
    exact = min(height * scale, target_height), min(width * scale, target_width)
    image = resize(image, [max(int(length), 1) for length in exact], method)
    offsets = int(target_height - exact[0]) // 2, int(target_width - exact[1]) // 2
    return pad_to_bounding_box(image, *offsets, target_height, target_width)


def random_crop(value: Any, size: Any, seed: Any = None) -> Any:
    """Return a part of some size at a random position."""
    free = [old - int(new) for old, new in zip(value.shape, size, strict=True)]
    if min(free) < 0:
        raise InvalidArgumentError(
            f"random_crop: size {[*size]} is larger than the shape {value.shape}."
        )
    rng = generator(seed)
    starts = [int(rng.integers(0, most + 1)) for most in free]
    return value[tuple(slice(k, k + int(n)) for k, n in zip(starts, size, strict=True))]


def _flipping(flip: Any) -> Any:
    """Return a function that flips each image at random."""

    def call(image: Any, seed: Any = None) -> Any:
        drawn = np.asarray(generator(seed).random(image.shape[:-3])) < 0.5
        return np.where(drawn[..., None, None, None], flip(image), image)

    return call


def _between(adjust: Any) -> Any:
    """Return a function that adjusts an image by a random number between two bounds."""

    def call(image: Any, lower: float, upper: float, seed: Any = None) -> Any:
        if not 0 <= lower < upper:
            raise ValueError(f"lower must be 0 or more, and below upper: got {lower} and {upper}.")
        return adjust(image, float(generator(seed).uniform(lower, upper)))

    return call


def random_brightness(image: Any, max_delta: float, seed: Any = None) -> Any:
    """Return an image with a random number of limited size added."""
    if max_delta < 0:
        raise ValueError(f"max_delta must be 0 or more, got {max_delta}.")
    return adjust_brightness(image, float(generator(seed).uniform(-max_delta, max_delta)))


random_flip_left_right, random_flip_up_down = _flipping(flip_left_right), _flipping(flip_up_down)
random_contrast, random_saturation = _between(adjust_contrast), _between(adjust_saturation)
