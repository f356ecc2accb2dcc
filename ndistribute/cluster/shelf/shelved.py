"""`Shelved`: a variable that lies on a shelf, where other processes read it.

It stays where it is. What a reader of this process is lent is a copy, so that it never changes.
"""

from __future__ import annotations

from ndistribute.cluster.shelf.layout import Place
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Shelved"]


class Shelved:
    """Hold a variable; what is written to it, is between its shelf's `begin` and `end`.

    Args:
        place: where it lies.
        array: its data there.
        word: its version there.

    Attributes:
        place: where it lies.
        array: the value itself, to look at.
        shared: that it need not be replaced to be changed.
    """

    __slots__ = ("_word", "array", "place")

    shared = False

    def __init__(self, place: Place, array: Array, word: memoryview) -> None:
        self.place = place
        self.array = array
        self._word = word

    @property
    def version(self) -> int:
        """Return the version."""
        version: int = self._word[0]
        return version

    @version.setter
    def version(self, version: int) -> None:
        self._word[0] = version

    def lend(self) -> Array:
        """Return a copy of the value."""
        copy = self.array.copy()
        copy.flags.writeable = False
        return copy

    def open(self) -> Array:
        """Return the array to change in place; readers see that it changes."""
        return self.array

    def replace(self, array: Array) -> None:
        """Hold the value of another array."""
        self.array[...] = array
