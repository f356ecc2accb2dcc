"""Whether anybody else still holds an array, or a view of it, by its reference count.

Memory that nobody else sees can be written in place; what somebody holds must stay as it is. NumPy
and CuPy keep the array that owns the memory alive for every view of it, so its count tells. Where
an interpreter does not count that way, every array is taken for shared, and is copied.
"""

from __future__ import annotations

import sys

import numpy as np

from ndistribute.device import Array

__all__ = ["COUNTS_TELL", "ArrayOwner"]


class ArrayOwner:
    """Hold an array that owns its memory, and know whether others see that memory.

    Args:
        array: kept nowhere else by who makes this.

    >>> owner = ArrayOwner(np.zeros(4))
    >>> row = owner.array[:1][...]
    >>> owner.is_shared()
    True
    >>> del row
    >>> owner.is_shared()
    False
    """

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    def is_shared(self, own_views: int = 0) -> bool:
        """Return True if somebody may hold the array, or a view of it.

        Args:
            own_views: how many views of it the owner keeps itself.
        """
        return _UNSHARED is None or sys.getrefcount(self.array) != _UNSHARED + own_views


def _unshared_count() -> int | None:
    """Return the count of an array that its owner alone holds, None if counts do not tell.

    Measured rather than written down: what the interpreter itself holds differs between versions.
    """
    owner = ArrayOwner(np.zeros(2))
    alone = sys.getrefcount(owner.array)
    view = owner.array[:1].view()
    held = sys.getrefcount(owner.array)
    del view
    counts = held == alone + 1 and sys.getrefcount(owner.array) == alone
    return alone if counts else None


_UNSHARED = _unshared_count()
COUNTS_TELL = _UNSHARED is not None
"""Whether this interpreter's counts tell who holds an array; else all are taken for shared."""
