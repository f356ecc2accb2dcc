"""Memory of one process that another one of its host maps: an anonymous file, passed by descriptor.

It has no name that could be left behind, and the system frees it with the last process that maps
it. It can not shrink, so that who uses it is never killed for it; its memory is taken when it is
made, so that its owner is not either. A `Ring` carries long messages: through a socket the system
copies them in small pieces, for which both ends wait in turn; here both copy at the same time, and
what one has written is still in the processor's cache when the other one reads it. `ReusedMemory`
is what messages are received into.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

from ndistribute.transport.codec import Array, MalformedError

__all__ = ["ALIGNMENT", "ReusedMemory", "Ring", "padded"]

ALIGNMENT = 64
_CAPACITY = 4 << 20
_CHUNK_BYTES = 256 << 10  # Copied at once: the other end need not wait for more.
_REUSED_BYTES = 1 << 16  # Memory for smaller arrays the allocator keeps by itself.
_KEPT_BYTES = 256 << 20  # Lengths that never come again must not use up the host's memory.
_HEAD_BYTES = 128  # The two counters, each on a cache line of its own.


def padded(nbytes: int) -> int:
    """Return a length with what is needed to begin the next part aligned.

    >>> padded(1), padded(64)
    (64, 64)
    """
    return nbytes + -nbytes % ALIGNMENT


class Ring:
    """Pass a stream of bytes from one process to another; each end belongs to one thread at a time.

    Args:
        file: a descriptor of the memory, which another process made; None: make it.

    Raises:
        MalformedError: the file is something else, or its owner could make it shorter.
        OSError: the system has no memory of this kind, or not so much.

    >>> here = Ring()
    >>> there = Ring(here.file)
    >>> there.read(np.empty(3, np.uint8)), here.write(np.arange(3, dtype=np.uint8))
    (0, 3)
    >>> got = np.empty(3, np.uint8)
    >>> there.read(got), got.tolist()
    (3, [0, 1, 2])
    >>> here.close(), there.close()
    (None, None)
    """

    def __init__(self, file: int | None = None) -> None:
        size = _HEAD_BYTES + _CAPACITY
        self.file = -1 if file is not None else _make_file(size)
        try:
            memory = mmap.mmap(self.file if file is None else _checked(file, size), size)
        except BaseException:
            self.close()
            raise
        # How many bytes were written and read in all; each is written by one end alone.
        self._counts = memoryview(memory)[:_HEAD_BYTES].cast("Q")
        self._data: Array = np.frombuffer(memory, np.uint8, offset=_HEAD_BYTES)

    def write(self, data: Array) -> int:
        """Copy from the beginning of some bytes what there is room for; return how much it is."""
        written, room = self._counts[0], _CAPACITY - self._held()
        return self._copy(data, written, room, 0)

    def read(self, data: Array) -> int:
        """Copy what is there to the beginning of some bytes; return how much it is."""
        return self._copy(data, self._counts[8], self._held(), 8)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last object that uses it."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def _held(self) -> int:
        held = self._counts[0] - self._counts[8]
        if not 0 <= held <= _CAPACITY:
            raise MalformedError(f"{held} bytes can not lie in memory of {_CAPACITY}.")
        return held

    def _copy(self, data: Array, position: int, most: int, counter: int) -> int:
        start = position % _CAPACITY
        count = min(len(data), most, _CHUNK_BYTES, _CAPACITY - start)
        if count:
            place, part = self._data[start : start + count], data[:count]
            np.copyto(*((place, part) if counter == 0 else (part, place)))
            self._counts[counter] = position + count  # After the copy: the other end looks at it.
        return count


def _make_file(nbytes: int) -> int:
    file = os.memfd_create("ndistribute-messages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return file
    except BaseException:
        os.close(file)
        raise


def _checked(file: int, nbytes: int) -> int:
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError as error:
        raise MalformedError(f"a file came that is no shared memory: {error}.") from error
    if not sealed or os.fstat(file).st_size != nbytes:
        raise MalformedError(f"memory came that is not {nbytes} bytes which its owner must keep.")
    return file


class ReusedMemory:
    """Memory for received arrays, used again once nobody holds them: new memory is slow."""

    def __init__(self) -> None:
        self._held: dict[int, list[Array]] = {}  # By length.
        self._total = 0

    def take(self, nbytes: int) -> memoryview:
        """Return memory of a length, which stays as it is as long as a view of it is held."""
        if nbytes < _REUSED_BYTES:
            return np.empty(nbytes, np.uint8).data
        held = self._held.get(nbytes, [])
        for index in range(len(held)):
            if _references(held, index) == _NO_VIEWS:
                return held[index].data
        memory = np.empty(nbytes, np.uint8)
        if self._total + nbytes > max(_KEPT_BYTES, 2 * nbytes):
            self.forget()
        self._total += nbytes
        self._held.setdefault(nbytes, []).append(memory)
        return memory.data

    def forget(self) -> None:
        """Give back what nobody holds."""
        self._held.clear()
        self._total = 0


def _references(arrays: Sequence[object], index: int) -> int:
    return sys.getrefcount(arrays[index])


# What the count is where only a list holds an array, in this version of Python.
_NO_VIEWS = _references([np.empty(0)], 0)
