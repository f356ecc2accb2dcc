"""Copies of arrays in memory that was used before: to touch new memory costs more than to copy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ndistribute.cluster.wire.tensors import Array

__all__ = ["SpareArrays"]

_LEAST_BYTES = 1 << 16  # Less than this the allocator keeps by itself.


class SpareArrays:
    """Keep arrays that nobody uses any more for the next copies; not safe for threads.

    >>> spare = SpareArrays()
    >>> copy = spare.copy_of(np.zeros(10_000))
    >>> spare.keep([copy])
    >>> spare.copy_of(np.ones(10_000)) is copy, copy[0]
    (True, np.float64(1.0))
    """

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._most_bytes = 0

    def copy_of(self, array: Array) -> Array:
        """Return a copy of an array, contiguous."""
        for index, spare in enumerate(self._arrays):
            if (spare.shape, spare.dtype) == (array.shape, array.dtype):
                del self._arrays[index]
                np.copyto(spare, array)
                return spare
        return array.copy(order="C")

    def keep(self, arrays: Iterable[Array]) -> None:
        """Keep copies that nobody uses any more: in all at most twice what came at once so far."""
        large = [array for array in arrays if array.nbytes >= _LEAST_BYTES]
        self._most_bytes = max(self._most_bytes, _nbytes(large))
        self._arrays += large
        while _nbytes(self._arrays) > 2 * self._most_bytes:
            del self._arrays[0]


def _nbytes(arrays: Iterable[Array]) -> int:
    return sum(array.nbytes for array in arrays)
