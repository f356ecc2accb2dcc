"""The arrays that a replica gets its results in, used again once nobody holds them.

Fresh memory costs a page fault for every four kilobytes, which for large arrays is more than the
reduction itself. An array's reference count says whether the caller still has it, or a view of it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array, array_namespace, is_gpu_array

__all__ = ["Outputs", "Slot", "is_unheld"]

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
        self._kept: OrderedDict[tuple[int, np.dtype[Any]], list[Slot]] = OrderedDict()

    def like(self, inputs: Sequence[Array]) -> list[Array]:
        """Return arrays of these sizes and dtypes, whose values are whatever was there."""
        return [
            np.empty(array.size, array.dtype)
            if array.nbytes < SMALL_BYTES and type(array) is np.ndarray
            else self._large_like(array)
            for array in inputs
        ]

    def _large_like(self, array: Array) -> Array:
        if is_gpu_array(array):
            return array_namespace(array).empty(array.size, array.dtype)
        key = (array.size, array.dtype)
        slots = self._kept.setdefault(key, [])
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        for slot in slots:
            if is_unheld(slot):
                return slot.array
        made = np.empty(array.size, array.dtype)
        if len(slots) < MOST_KEPT:
            slots.append(Slot(made))
        return made


class Slot:
    """A place that holds an array."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


def is_unheld(slot: Slot) -> bool:
    """Return True if nobody but the slot holds its array, or a view of it.

    >>> slot = Slot(np.zeros(3))
    >>> is_unheld(slot)
    True
    >>> view = slot.array[1:]
    >>> is_unheld(slot)
    False
    """
    return _holders(slot) == _UNHELD


def _holders(slot: Slot) -> int:
    return sys.getrefcount(slot.array)


# Measured rather than written down: what the interpreter itself holds differs between versions.
_UNHELD = _holders(Slot(np.zeros(1)))
