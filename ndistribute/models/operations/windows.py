"""The windows of convolutions and pooling over images, channels last.

A `Windows` says which elements of the input each window covers, so that an operation is a loop over
the few offsets inside a window, each a slice of all images.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class Offset:
    """The elements at one offset inside all windows that are not in the padding."""

    at: Pair  # The row and the column inside the window.
    inner: tuple[slice, slice, slice]  # Their index in the images, channels left out.
    outer: tuple[slice, slice, slice]  # That of their windows, in an array with one of each.
    is_whole: bool  # Whether all windows have an element there.


@dataclass(frozen=True)
class Windows:
    """The windows over images of one size; heights, or what is vertical, come first.

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

        For ``"same"`` there is one for each stride of the image, with the padding divided evenly,
        and the odd row or column at the end, as in TensorFlow.
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
