"""`Shelf`: memory in which a server keeps variables, so that processes of its host can read them.

It is an anonymous file: it has no name that could be left behind, and the system frees it with the
last process that maps it. It grows and never shrinks. docs: `shelf_reader`, for the other side.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os

import numpy as np

from ndistribute.cluster.shelf.layout import (
    HEAD_BYTES,
    MAGIC,
    SEQUENCE,
    WANTED,
    WORD_BYTES,
    Layout,
    Region,
)
from ndistribute.cluster.shelf.sequence import Sequence
from ndistribute.cluster.shelf.shelved import Shelved
from ndistribute.cluster.shelf.turns import WriterTurns
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Shelf", "make_shelf"]

_PATIENCE_SECONDS = 0.05
_log = logging.getLogger("ndistribute")


class Shelf:
    """Hold arrays and their versions in memory that others may read.

    Not safe for threads, but for `shared_file`.

    Args:
        patience: the longest that a change waits for readers, in seconds.

    Raises:
        OSError: the system has no such memory.

    >>> shelf = Shelf()
    >>> held = shelf.put(np.array([1.0, 2.0]), version=1)
    >>> shelf.begin()
    >>> held.array[...] = [2.0, 3.0]
    >>> held.version += 1
    >>> shelf.end()
    >>> held.array.tolist(), held.version
    ([2.0, 3.0], 2)
    >>> shelf.close()
    """

    def __init__(self, patience: float = _PATIENCE_SECONDS) -> None:
        self._layout = Layout()
        self._regions: list[tuple[Region, memoryview]] = []
        self._fd = os.memfd_create("ndistribute-shelf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._grow()
            # One that made the file shorter would kill all who map it.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            head = self._regions[0][1]
            head[: len(MAGIC)] = MAGIC
            words = head[:HEAD_BYTES].cast("Q")
            self._turns = WriterTurns(self._fd, words[WANTED : WANTED + 1], patience)
            self._sequence = Sequence(words[SEQUENCE : SEQUENCE + 1])
            # Theirs is open for reading alone, and has locks of its own.
            self._shared = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._fd)
            raise

    def shared_file(self) -> int | None:
        """Return the file as a reader may have it, which stays the shelf's; None once closed."""
        return self._shared if self._shared >= 0 else None

    def put(self, array: Array, version: int) -> Shelved:
        """Copy an array to a place of its own, which readers do not know yet.

        Args:
            array: of a dtype without Python objects.
            version: its version.

        Raises:
            OSError: there is no memory.
        """
        place = self._layout.place(array.nbytes)
        self._grow()
        word = self._memory(place.slot * WORD_BYTES, WORD_BYTES).cast("Q")
        memory = self._memory(place.offset, place.nbytes)
        held: Array = np.ndarray(array.shape, array.dtype.newbyteorder("="), memory)
        held[...] = array
        word[0] = version
        return Shelved(place, held, word)

    def begin(self) -> None:
        """Begin to change what is here; `end` must follow."""
        self._turns.take()
        self._sequence.begin()

    def end(self) -> None:
        """Say that all changes since `begin` are made."""
        self._sequence.end()
        self._turns.give()

    def close(self) -> None:
        """Let readers know that the shelf is no more; a second call does nothing.

        Arrays that somebody still holds stay.
        """
        if self._fd < 0:
            return
        self._turns.leave()
        os.close(self._fd)
        os.close(self._shared)
        self._fd = self._shared = -1
        self._regions.clear()
        del self._turns, self._sequence  # They would keep the memory.

    def _grow(self) -> None:
        """Make the file as long as the layout says, and map what is new: the rest never moves."""
        for region in self._layout.regions[len(self._regions) :]:
            os.ftruncate(self._fd, region.offset + region.nbytes)
            mapped = mmap.mmap(self._fd, region.nbytes, offset=region.offset)
            self._regions.append((region, memoryview(mapped)))

    def _memory(self, offset: int, nbytes: int) -> memoryview:
        region, memory = next(item for item in reversed(self._regions) if item[0].offset <= offset)
        return memory[offset - region.offset : offset - region.offset + nbytes]


def make_shelf() -> Shelf | None:
    """Return a shelf; None where the system, which is another than Linux then, has none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return Shelf()
    except OSError as error:
        _log.info("Variables are not shared with processes of this host: %s", error)
        return None
