"""Memory for long messages, part of it shared between two processes on one host.

A `Ring` carries long messages through shared memory: an anonymous file, whose descriptor one end
sends to the other. A socket moves small pieces, for which both ends wait in turn. With a ring, both
ends copy at the same time, and the reader finds the data in the processor's cache. `ReusedMemory`
is the memory into which messages are received.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from ndistribute.ownership import ArrayOwner
from ndistribute.transport.codec import Array, MalformedError

ALIGNMENT = 64
_CAPACITY = 4 << 20
_CHUNK_BYTES = 256 << 10  # The size of a copy, so that the other end starts early.
_REUSED_BYTES = 1 << 16  # The allocator itself reuses the memory of smaller arrays.
_KEPT_BYTES = 256 << 20
_HEAD_BYTES = 128  # Two counters, each in a separate cache line.
_SIZE = _HEAD_BYTES + _CAPACITY


def padded(nbytes: int) -> int:
    """Return the length rounded up, so that the next part is aligned."""
    return nbytes + -nbytes % ALIGNMENT


class Ring:
    """One end of a byte stream through a file of `make_file`; one thread at a time may use it."""

    def __init__(self, file: int, *, writes: bool) -> None:
        self._writes = writes
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            raise MalformedError(f"the file that came is not shared memory: {error}.") from error
        if not sealed or os.fstat(file).st_size != _SIZE:
            what = f"memory came that is not {_SIZE} bytes, or that its owner can shrink."
            raise MalformedError(what)
        memory = mmap.mmap(file, _SIZE)
        # The total bytes written and read; each count has one writer.
        self._counts = memoryview(memory)[:_HEAD_BYTES].cast("Q")
        self._data: Array = np.frombuffer(memory, np.uint8, offset=_HEAD_BYTES)

    def move(self, data: Array) -> int:
        """Write or read as many bytes of `data` as possible now; return their number."""
        written, read = self._counts[0], self._counts[8]
        held = written - read
        if not 0 <= held <= _CAPACITY:
            raise MalformedError(f"{held} bytes do not fit in shared memory of {_CAPACITY} bytes.")
        position, most = (written, _CAPACITY - held) if self._writes else (read, held)
        start = position % _CAPACITY
        count = min(len(data), most, _CHUNK_BYTES, _CAPACITY - start)
        if count:
            place, part = self._data[start : start + count], data[:count]
            np.copyto(*((place, part) if self._writes else (part, place)))
            self._counts[0 if self._writes else 8] = position + count  # Only after the copy.
        return count


def make_file(nbytes: int = _SIZE, *, take: bool = True) -> int:
    """Return a descriptor of new shared memory: an anonymous file that cannot shrink.

    Args:
        nbytes: its length in bytes; by default that of a ring.
        take: whether to allocate all of it now, so that later writes cannot run out of memory.
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
    """Memory for arrays, which is reused when nobody holds the arrays.

    New memory costs a page fault per 4 KiB, which takes longer than filling it. When the arrays
    exceed `most` bytes, all are dropped, because some lengths never occur again.
    """

    def __init__(self, most: int = _KEPT_BYTES) -> None:
        self._most = most
        self._owners: dict[int, list[ArrayOwner]] = {}  # By length.
        self._total = 0

    def take(self, nbytes: int) -> memoryview:
        """Return memory of this length; it is not reused while a view of it exists."""
        if nbytes < _REUSED_BYTES:
            return np.empty(nbytes, np.uint8).data
        for owner in self._owners.get(nbytes, ()):
            if not owner.is_shared():
                return owner.array.data  # type: ignore[no-any-return]
        memory = np.empty(nbytes, np.uint8)
        if self._total + nbytes > max(self._most, 2 * nbytes):
            self.forget()
        self._total += nbytes
        self._owners.setdefault(nbytes, []).append(ArrayOwner(memory))
        return memory.data

    def forget(self) -> None:
        """Drop all memory; existing views keep the memory that they use."""
        self._owners.clear()
        self._total = 0
