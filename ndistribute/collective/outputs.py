"""The arrays that a replica gets its results in, used again once nobody holds them.

Fresh memory costs a page fault for every four kilobytes, which for large arrays is more than the
reduction itself. An array's reference count says whether the caller still has it, or a view of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array, array_namespace
from ndistribute.ownership import ArrayOwner

__all__ = ["Outputs"]

# Below this the allocator keeps memory by itself.
SMALL_BYTES = 128 * 1024
# Shapes that a step reduces in turn; what was not asked for this long is given back.
MOST_KEPT = 8


class Outputs:
    """Hand out arrays for results."""

    def __init__(self) -> None:
        self._kept = functools.lru_cache(maxsize=MOST_KEPT)(_nothing_yet)

    def like(self, inputs: Sequence[Array]) -> list[Array]:
        """Return arrays of these sizes and dtypes, whose values are whatever was there."""
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
