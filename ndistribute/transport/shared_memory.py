"""Memory of one process that another one of its host maps: an anonymous file, passed by descriptor.

A `Ring` carries long messages: through a socket the system copies them in small pieces, for which
both ends wait in turn; here both copy at the same time, and what one has written is still in the
processor's cache when the other one reads it. `ReusedMemory` is what messages are received into.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

from ndistribute.transport.codec import Array, MalformedError

ALIGNMENT = 64
_CAPACITY = 4 << 20
_CHUNK_BYTES = 256 << 10  # Copied at once: the other end need not wait for more.
_REUSED_BYTES = 1 << 16  # Memory for smaller arrays the allocator keeps by itself.
_KEPT_BYTES = 256 << 20  # Lengths that never come again must not use up the host's memory.
_HEAD_BYTES = 128  # The two counters, each on a cache line of its own.
_SIZE = _HEAD_BYTES + _CAPACITY


def padded(nbytes: int) -> int:
    """Return a length with what is needed to begin the next part aligned."""
    return nbytes + -nbytes % ALIGNMENT


class Ring:
    """One end of a stream of bytes through a file of `make_file`, for one thread at a time."""

    def __init__(self, file: int, *, writes: bool) -> None:
        self._writes = writes
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            raise MalformedError(f"a file came that is no shared memory: {error}.") from error
        if not sealed or os.fstat(file).st_size != _SIZE:
            raise MalformedError(
                f"memory came that is not {_SIZE} bytes which its owner must keep."
            )
        memory = mmap.mmap(file, _SIZE)
        # How many bytes were written and read in all; each is written by one end alone.
        self._counts = memoryview(memory)[:_HEAD_BYTES].cast("Q")
        self._data: Array = np.frombuffer(memory, np.uint8, offset=_HEAD_BYTES)

    def move(self, data: Array) -> int:
        """Write the beginning of some bytes, or read it; return how many bytes moved."""
        written, read = self._counts[0], self._counts[8]
        held = written - read
        if not 0 <= held <= _CAPACITY:
            raise MalformedError(f"{held} bytes can not lie in memory of {_CAPACITY}.")
        position, most = (written, _CAPACITY - held) if self._writes else (read, held)
        start = position % _CAPACITY
        count = min(len(data), most, _CHUNK_BYTES, _CAPACITY - start)
        if count:
            place, part = self._data[start : start + count], data[:count]
            np.copyto(*((place, part) if self._writes else (part, place)))
            self._counts[0 if self._writes else 8] = position + count  # What was copied before.
        return count


def make_file(nbytes: int = _SIZE, *, take: bool = True) -> int:
    """Return a descriptor of new memory: an anonymous file, which can not shrink.

    Args:
        nbytes: how long it is; as long as a ring unless something else is asked for.
        take: whether all of it is taken at once, so that nobody is ever killed for using it.
    """
    file = os.memfd_create("ndistribute", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if take:
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return file
    except BaseException:
        os.close(file)
        raise


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
