"""`Cell`: an array with a version, that is read and changed without a reader seeing a change.

One in memory of this process lends the array itself. While somebody holds what was lent, or a view
of it, the next change is made in a copy; else it is made in place. One on a shelf lends copies.
"""

from __future__ import annotations

import logging
import sys

import numpy as np

from ndistribute.cluster.shelf.shelf import Shelf
from ndistribute.cluster.shelf.shelved import Shelved
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Cell", "OwnCell", "make_cell", "owned"]

_log = logging.getLogger("ndistribute")


class OwnCell:
    """Hold a variable in memory of this process.

    >>> cell = OwnCell(owned(np.array([1.0, 2.0])))
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


Cell = OwnCell | Shelved


def make_cell(array: Array, version: int = 1, shelf: Shelf | None = None) -> Cell:
    """Return a cell that holds a copy of an array.

    Args:
        array: what it holds.
        version: its version.
        shelf: where to put it, if there is one and it has room.

    >>> make_cell(np.ones(2)).array
    array([1., 1.])
    """
    if shelf is not None:
        try:
            return shelf.put(array, version)
        except OSError as error:
            _log.warning("A variable is not shared with processes of this host: %s", error)
    return OwnCell(owned(array), version)


def owned(array: Array) -> Array:
    """Return a copy that owns its memory, is contiguous and of this machine's byte order."""
    return np.array(array, array.dtype.newbyteorder("="), order="C", copy=True)
