"""`ShelfReader`: variables of a server of this host, read where they lie.

What was read at once was so at one moment: no part of it is from before a change and another from
after it. Nothing here can hold up the server or write to its memory.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ndistribute.cluster.shelf.layout import (
    HEAD_BYTES,
    MAGIC,
    SEQUENCE,
    WANTED,
    WORD_BYTES,
    Place,
)
from ndistribute.cluster.shelf.sequence import Sequence as Numbered
from ndistribute.cluster.shelf.turns import ReaderTurns
from ndistribute.cluster.wire.tensors import Array

__all__ = ["ShelfReader"]

_SECONDS = 0.25

Versions = tuple[int, ...]


class ShelfReader:
    """Read from a shelf, from any number of threads, one after the other.

    Args:
        fd: the file that the server shares; it may be closed afterwards.

    Raises:
        OSError: the file can not be mapped.
        ValueError: it is no shelf.

    >>> from ndistribute.cluster.shelf.shelf import Shelf
    >>> shelf = Shelf()
    >>> weights = shelf.put(np.array([1.0, 2.0]), version=5)
    >>> reader, copy = ShelfReader(shelf.shared_file()), np.empty(2)
    >>> reader.read([weights.place], [lambda: copy]), copy
    ((5,), array([1., 2.]))
    >>> reader.close()
    >>> shelf.close()
    """

    def __init__(self, fd: int) -> None:
        self._lock = threading.Lock()
        # Opened anew, so that its locks are this reader's and not those of whoever has a copy.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._map()
            if bytes(self._bytes[: len(MAGIC)]) != MAGIC:
                raise ValueError(f"file {fd} is no shelf of a parameter server.")
        except BaseException:
            os.close(self._fd)
            raise
        head = self._words[: HEAD_BYTES // WORD_BYTES]
        self._turns = ReaderTurns(self._fd, head[WANTED : WANTED + 1])
        self._sequence = Numbered(head[SEQUENCE : SEQUENCE + 1])

    def versions(self, slots: Sequence[int], timeout: float = _SECONDS) -> Versions | None:
        """Return the versions that variables had at one moment.

        Args:
            slots: of the variables.
            timeout: seconds that it may take.

        Returns:
            The versions; None: not in time, or the server is no more, so ask it.
        """

        def look(deadline: float) -> Versions | None:
            self._cover((max(slots, default=0) + 1) * WORD_BYTES)
            found = self._glance(lambda: self._words_at(slots))
            return found or self._in_turn(lambda: self._words_at(slots), deadline)

        return self._locked(timeout, look)

    def read(
        self,
        places: Sequence[Place],
        outs: Sequence[Callable[[], Array]],
        known: Sequence[int | None] | None = None,
        timeout: float = _SECONDS,
    ) -> Versions | None:
        """Copy those variables that changed, as they were at one moment.

        Args:
            places: where the variables lie.
            outs: for each what returns the array that it is copied to, contiguous and of as many
                bytes; called only if it has changed, and again if it is copied again.
            known: the version of each that need not be copied; None: there is none.
            timeout: seconds that it may take.

        Returns:
            The versions; None: not in time, or the server is no more, so ask it. Arrays that were
            called for hold anything then.

        Raises:
            ValueError: an array is not contiguous, or of another size.
        """
        known = (None,) * len(places) if known is None else tuple(known)
        slots = [place.slot for place in places]

        def copy() -> Versions:
            versions = self._words_at(slots)
            for place, out, old, new in zip(places, outs, known, versions, strict=True):
                if old != new:
                    self._copy(place, out())
            return versions

        def look(deadline: float) -> Versions | None:
            self._cover(max((place.offset + place.nbytes for place in places), default=0))
            self._cover((max(slots, default=0) + 1) * WORD_BYTES)
            found = self._glance(lambda: self._words_at(slots))
            # Most often nothing has changed, which is known without taking a turn.
            return found if found == known else self._in_turn(copy, deadline)

        return self._locked(timeout, look)

    def close(self) -> None:
        """Unmap the shelf; a second call does nothing, and nothing can be read any more."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
            del self._bytes, self._words, self._turns, self._sequence

    def _locked(self, timeout: float, look: Callable[[float], Versions | None]) -> Versions | None:
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(0.0, timeout)):
            return None
        try:
            if self._fd < 0 or self._turns.alone:
                return None
            return look(deadline)
        finally:
            self._lock.release()

    def _in_turn(self, look: Callable[[], Versions], deadline: float) -> Versions | None:
        """Look, again if the writer did not wait, at what is so at one moment."""
        while self._turns.take(deadline):
            try:
                found = self._glance(look)
            finally:
                self._turns.give()
            if found is not None or time.monotonic() >= deadline:
                return found
        return None

    def _glance(self, look: Callable[[], Versions]) -> Versions | None:
        """Look once, and return what was found if nobody was writing."""
        before = self._sequence.look()
        if before is None:
            return None
        found = look()
        return found if self._sequence.still(before) else None

    def _words_at(self, slots: Sequence[int]) -> Versions:
        words = self._words
        return tuple([words[slot] for slot in slots])

    def _copy(self, place: Place, out: Array) -> None:
        if out.nbytes != place.nbytes or not out.flags.c_contiguous:
            raise ValueError(
                f"a variable of {place.nbytes} bytes can not be copied to an array of "
                f"{out.nbytes} bytes and strides {out.strides}; it must be contiguous."
            )
        stored = self._bytes[place.offset : place.offset + place.nbytes]
        np.copyto(out.reshape(-1).view(np.uint8), stored)

    def _cover(self, end: int) -> None:
        """Map the file again if it has grown and something lies in what is new."""
        if end > len(self._bytes):
            self._map()
        if end > len(self._bytes):
            raise ValueError(f"the shelf has {len(self._bytes)} bytes, none at {end - 1}.")

    def _map(self) -> None:
        size = os.fstat(self._fd).st_size
        mapped = mmap.mmap(self._fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._words = memoryview(mapped).cast("Q")
