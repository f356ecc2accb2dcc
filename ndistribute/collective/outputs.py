"""The arrays that a replica gets its results in, used again once nobody holds them.

Fresh memory costs a page fault for every four kilobytes, which for large arrays is more than the
reduction itself. An array's reference count says whether the caller still has it, or a view of it.
"""

from __future__ import annotations

from collections import OrderedDict
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
    """Hand out arrays for results.

    >>> outputs = Outputs()
    >>> first = outputs.like([np.zeros(100_000)])[0]
    >>> address = first.ctypes.data
    >>> view = first[:10]
    >>> del first
    >>> outputs.like([np.zeros(100_000)])[0].ctypes.data == address
    False
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, np.dtype[Any]], list[ArrayOwner]] = OrderedDict()

    def like(self, inputs: Sequence[Array]) -> list[Array]:
        """Return arrays of these sizes and dtypes, whose values are whatever was there."""
        made = []
        for array in inputs:
            if type(array) is not np.ndarray:
                made.append(array_namespace(array).empty(array.size, array.dtype))
            elif array.nbytes < SMALL_BYTES:
                made.append(np.empty(array.size, array.dtype))
            else:
                made.append(self._large_like(array))
        return made

    def _large_like(self, array: Array) -> Array:
        key = (array.size, array.dtype)
        slots = self._kept.setdefault(key, [])
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        for slot in slots:
            if not slot.is_shared():
                return slot.array
        made = np.empty(array.size, array.dtype)
        if len(slots) < MOST_KEPT:
            slots.append(ArrayOwner(made))
        return made
