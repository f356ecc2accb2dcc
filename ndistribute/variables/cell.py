"""One array in one memory space, read as snapshots and updated in place when nobody holds one.

A read hands out a read-only view. The array's reference count says whether a view, or a view of it,
is still held: if so the next update goes into a fresh array, else it happens where the array is.
"""

from __future__ import annotations

import sys

import numpy as np

from ndistribute.device import Array, Device, copy_to, is_gpu_array
from ndistribute.stream import working_on

__all__ = ["Cell"]


class Cell:
    """Hold an array that readers see as it was when they read it.

    Args:
        initial: the value; copied.
        device: in whose memory it lives.

    >>> cell = Cell(np.zeros(2), Device("cpu:0"))
    >>> before = cell.read()
    >>> cell.writable()[...] = 1
    >>> before, cell.read()
    (array([0., 0.]), array([1., 1.]))
    """

    __slots__ = ("_array", "_device", "_fixed", "_view")

    def __init__(self, initial: Array, device: Device) -> None:
        self._device = device
        with working_on(device):
            # The copy owns its memory, so NumPy makes it the base of every view of a view.
            self._hold(copy_to(initial, device).copy(order="C"))

    def read(self) -> Array:
        """Return a snapshot: read-only, and never changed afterwards.

        CuPy has no read-only arrays; there the snapshot is the reader's promise.
        """
        # Each reader gets a view of its own, for he may set its shape or its flags.
        return self._view.view()

    def writable(self, *, keep: bool = True) -> Array:
        """Return the array to update, a fresh one where a snapshot is still held.

        Args:
            keep: whether the update needs the present values.
        """
        if self._fixed or _holders(self) != _UNHELD:
            with working_on(self._device):
                self._hold(self._array.copy() if keep else _empty_like(self._array))
        return self._array

    def replace(self, array: Array) -> None:
        """Hold another array of this memory as it is; it never changes, whoever else has it."""
        self._hold(array, fixed=True)

    def _hold(self, array: Array, *, fixed: bool = False) -> None:
        self._array = array
        self._fixed = fixed
        self._view = array.view()
        if not is_gpu_array(array):
            self._view.flags.writeable = False


def _holders(cell: Cell) -> int:
    return sys.getrefcount(cell._array)


def _empty_like(array: Array) -> Array:
    return array.copy() if is_gpu_array(array) else np.empty_like(array)


# Measured rather than written down: what the interpreter itself holds differs between versions.
_UNHELD = _holders(Cell(np.zeros(1), Device("cpu:0")))
