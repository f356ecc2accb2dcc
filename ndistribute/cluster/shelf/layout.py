"""What lies where in a shelf: a page about the whole, then versions and data of variables.

Places are dealt out and never taken back, so what was said about one stays true as long as the file
is there.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEAD_BYTES", "MAGIC", "SEQUENCE", "WANTED", "WORD_BYTES", "Layout", "Place", "Region"]

MAGIC = b"ndshelf1"
WORD_BYTES = 8
# The words of the first page, by number; each on a cache line of its own.
SEQUENCE, WANTED = 8, 16
HEAD_BYTES = 4096

_LINE_BYTES = 64
_VERSIONS = 512  # So many words of versions are taken at a time, so they lie close together.
# Memory that is not written to costs nothing, so there may be much of it.
_REGION_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Say where a variable lies.

    Args:
        slot: the number of the word, from the file's start, that is its version.
        offset: where its data begins, in bytes from the file's start.
        nbytes: how long its data is.
    """

    slot: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the file that is mapped as a whole: no variable lies in two."""

    offset: int
    nbytes: int


class Layout:
    """Deal out places in a file that grows.

    Attributes:
        regions: the file, cut where it grew.

    >>> layout = Layout()
    >>> layout.place(100), layout.place(8)
    (Place(slot=512, offset=8192, nbytes=100), Place(slot=513, offset=8320, nbytes=8))
    """

    def __init__(self) -> None:
        self.regions = [Region(0, _REGION_BYTES)]
        self._next = HEAD_BYTES
        self._slots = range(0)

    @property
    def size(self) -> int:
        """Return how long the file is."""
        return self.regions[-1].offset + self.regions[-1].nbytes

    def place(self, nbytes: int) -> Place:
        """Return a place that nobody has, where data begins on a cache line."""
        if not self._slots:
            first = self._take(_VERSIONS * WORD_BYTES) // WORD_BYTES
            self._slots = range(first, first + _VERSIONS)
        slot, self._slots = self._slots[0], self._slots[1:]
        return Place(slot, self._take(nbytes), nbytes)

    def _take(self, nbytes: int) -> int:
        if self._next + nbytes > self.size:
            self._next = self.size
            # Each as large as all before it: so there are few, however large the file.
            room = max(self.size, -(-nbytes // HEAD_BYTES) * HEAD_BYTES)
            self.regions.append(Region(self.size, room))
        start = self._next
        self._next += -(-nbytes // _LINE_BYTES) * _LINE_BYTES
        return start
