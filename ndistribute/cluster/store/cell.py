"""`Cell`: an array with a version, that is read and changed without a reader seeing a change.

A read lends the array itself. While somebody holds what was lent, or a view of it, the next change
is made in a copy; else it is made in place.
"""

from __future__ import annotations

import sys

import numpy as np

from ndistribute.cluster.tensors import Array

__all__ = ["Cell", "owned"]


class Cell:
    """Hold a variable.

    >>> cell = Cell(owned(np.array([1.0, 2.0])))
    >>> before = cell.lend()
    >>> cell.open()[:] = 0
    >>> before, cell.lend()
    (array([1., 2.]), array([0., 0.]))
    """

    __slots__ = ("_lent", "array", "version")

    def __init__(self, array: Array, version: int = 1) -> None:
        self.array = array
        self.version = version
        self._lent = False

    @property
    def shared(self) -> bool:
        """Return whether a reader may still see the array."""
        if self._lent:
            # Views keep the array that owns the memory alive, so they are counted. Two references
            # are our own: the attribute and the argument.
            self._lent = sys.getrefcount(self.array) > 2
        return self._lent

    def lend(self) -> Array:
        """Return the value, which will never change."""
        self._lent = True
        view = self.array.view()
        view.flags.writeable = False
        return view

    def open(self) -> Array:
        """Return the array to change in place; no reader has it."""
        if self.shared:
            self.replace(self.array.copy())
        return self.array

    def replace(self, array: Array) -> None:
        """Hold another array, which nobody else may hold."""
        self.array = array
        self._lent = False


def owned(array: Array) -> Array:
    """Return a copy that owns its memory, is contiguous and of this machine's byte order."""
    return np.array(array, array.dtype.newbyteorder("="), order="C", copy=True)
