"""Arrays for the results of collectives, reused when nobody holds them.

New memory costs a page fault per 4 KiB, which for large arrays takes longer than the reduction. The
reference count of an array tells whether the caller still holds it, or a view of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array, array_namespace
from ndistribute.ownership import ArrayOwner

__all__ = ["Outputs"]

# The allocator reuses the memory of smaller arrays.
SMALL_BYTES = 128 * 1024
# The most sizes, and the most arrays per size, that are kept.
MOST_KEPT = 8


class Outputs:
    """Provides arrays for results."""

    def __init__(self) -> None:
        self._kept = functools.lru_cache(maxsize=MOST_KEPT)(_nothing_yet)

    def like(self, inputs: Sequence[Array]) -> list[Array]:
        """Return uninitialised arrays of the same sizes and dtypes."""
        made = []
        for array in inputs:
            if type(array) is not np.ndarray:
                made.append(array_namespace(array).empty(array.size, array.dtype))
            elif array.nbytes < SMALL_BYTES:
                made.append(np.empty(array.size, array.dtype))
            else:
                made.append(self._large(array.size, array.dtype))
        return made

    def _large(self, size: int, dtype: np.dtype[Any]) -> Array:
        owners = self._kept(size, dtype)
        for owner in owners:
            if not owner.is_shared():
                return owner.array
        made = np.empty(size, dtype)
        if len(owners) < MOST_KEPT:
            owners.append(ArrayOwner(made))
        return made


def _nothing_yet(size: int, dtype: np.dtype[Any]) -> list[ArrayOwner]:
    return []
