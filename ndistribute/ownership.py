"""Detection of other references to an array, or to a view of it, by its reference count.

Memory without other references can be written in place; other memory must not change. In NumPy and
CuPy, every view refers to the array that owns the memory, so its count includes them. On an
interpreter that counts differently, every array counts as shared and is copied.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ndistribute.devices import Array


class ArrayOwner:
    """The owner of an array that owns its memory, and to which nobody else keeps a reference."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    def is_shared(self, own_views: int = 0) -> bool:
        """Return True if others may refer to the array, or to a view but `own_views` of its own."""
        return _UNSHARED is None or sys.getrefcount(self.array) != _UNSHARED + own_views


def read_only(value: Any) -> Any:
    """Return a view of a NumPy array that cannot be written, and other values as they are."""
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _unshared_count() -> int | None:
    """Return the count of an array without other references, which depends on the interpreter."""
    owner = ArrayOwner(np.zeros(2))
    alone = sys.getrefcount(owner.array)
    view = owner.array[:1].view()
    held = sys.getrefcount(owner.array)
    del view
    counts = held == alone + 1 and sys.getrefcount(owner.array) == alone
    return alone if counts else None


_UNSHARED = _unshared_count()
COUNTS_INCLUDE_VIEWS = _UNSHARED is not None
"""Whether this interpreter's reference counts include views; if not, all arrays are shared."""
