"""The windows of convolutions and pooling over images, channels last.

A `Windows` says which elements of the input each window covers, so that an operation is a loop over
the few offsets inside a window, each a slice of all images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Offset", "Windows"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Offset:
    """The elements at one offset inside all windows that are not in the padding.

    Attributes:
        at: the row and the column inside the window.
        inner: the index of the elements in the images, of shape ``(images, height, width, ...)``.
        outer: the index of their windows, in an array of one row and column for each window.
        is_whole: whether all windows have an element there.
    """

    at: Pair
    inner: tuple[slice, slice, slice]
    outer: tuple[slice, slice, slice]
    is_whole: bool


@dataclass(frozen=True)
class Windows:
    """The windows over images of one size.

    Attributes:
        image: the height and width of an image.
        size: the height and width of a window.
        strides: the distance from one window to the next, in each direction.
        dilation: the distance between the elements of a window, in each direction.
        before: the padding above and to the left of an image.
        count: the number of windows in each direction.

    >>> Windows.over((5, 5), (3, 3), (2, 2), "same").count
    (3, 3)
    """

    image: Pair
    size: Pair
    strides: Pair
    dilation: Pair
    before: Pair
    count: Pair

    @classmethod
    def over(
        cls, image: Pair, size: Pair, strides: Pair, padding: str, dilation: Pair = (1, 1)
    ) -> Windows:
        """Return the windows over images.

        Args:
            image: the height and width of an image.
            size: the height and width of a window.
            strides: the distance from one window to the next.
            padding: ``"valid"`` for the windows inside the image; ``"same"`` for one window for
                each stride of the image, with the padding divided evenly, and the odd row or column
                at the end, as in TensorFlow.
            dilation: the distance between the elements of a window.

        Raises:
            ValueError: the padding is unknown, or an image is smaller than a window.
        """
        if padding not in ("valid", "same"):
            raise ValueError(f"padding must be 'valid' or 'same', got {padding!r}.")
        before, count = [], []
        for length, window, stride, gap in zip(image, size, strides, dilation, strict=True):
            extent = (window - 1) * gap + 1
            if padding == "same":
                number = -(-length // stride)
                before.append(max(0, (number - 1) * stride + extent - length) // 2)
            else:
                number = (length - extent) // stride + 1
                before.append(0)
            if number < 1:
                raise ValueError(
                    f"a window of {size[0]} x {size[1]} with dilation {dilation} does not fit into "
                    f"images of {image[0]} x {image[1]}: use padding='same', a smaller window, or "
                    "fewer layers that shrink the images."
                )
            count.append(number)
        return cls(image, size, strides, dilation, (before[0], before[1]), (count[0], count[1]))

    @property
    def padded(self) -> Pair:
        """The height and width that windows cover, padding included."""
        y, x = (
            max(length + before, (count - 1) * stride + (window - 1) * gap + 1)
            for length, before, count, stride, window, gap in zip(
                self.image,
                self.before,
                self.count,
                self.strides,
                self.size,
                self.dilation,
                strict=True,
            )
        )
        return y, x

    @property
    def overlap(self) -> bool:
        """Whether an element may belong to several windows."""
        extents = [(n - 1) * gap + 1 for n, gap in zip(self.size, self.dilation, strict=True)]
        return any(n > stride for n, stride in zip(extents, self.strides, strict=True))

    def reversed(self) -> Windows:
        """Return the windows over the result, for strides of 1, that cover each image element.

        The gradient of a convolution is a convolution over them, with a reversed kernel.
        """
        before = [
            (n - 1) * gap - start
            for n, gap, start in zip(self.size, self.dilation, self.before, strict=True)
        ]
        y, x = before
        return Windows(self.count, self.size, (1, 1), self.dilation, (y, x), self.image)

    def offsets(self) -> Iterator[Offset]:
        """Yield the offsets inside a window, row by row; those only in the padding are left out."""
        for row in range(self.size[0]):
            inner_y, outer_y = self._slices(0, row)
            for column in range(self.size[1]):
                inner_x, outer_x = self._slices(1, column)
                found = outer_y.stop - outer_y.start, outer_x.stop - outer_x.start
                if min(found) > 0:
                    every = slice(None)
                    inner, outer = (every, inner_y, inner_x), (every, outer_y, outer_x)
                    yield Offset((row, column), inner, outer, found == self.count)

    def _slices(self, axis: int, offset: int) -> tuple[slice, slice]:
        """Return the slices of an axis of the images, and of the windows, for an offset."""
        stride, start = self.strides[axis], offset * self.dilation[axis] - self.before[axis]
        first = max(0, -(start // stride))  # The first window whose element is in the image.
        last = min(self.count[axis], (self.image[axis] - 1 - start) // stride + 1)
        inner = slice(start + first * stride, max(0, start + (last - 1) * stride + 1), stride)
        return inner, slice(first, last)
