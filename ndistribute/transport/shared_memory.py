"""Memory of one process that others of its host map: an anonymous file, passed by its descriptor.

It has no name that could be left behind, and the system frees it with the last process that maps
it. It can not shrink, so that whoever reads it is never killed for it; its memory is taken when it
is made, so that its owner is not either. A `MessageBuffer` carries the long parts of messages:
through a socket the system copies them in and out in small pieces, for which both ends wait in
turn. `ReusedMemory` is what other messages are received into.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

from ndistribute.transport.codec import Array, Buffer, MalformedError

__all__ = ["ALIGNMENT", "MessageBuffer", "ReusedMemory", "map_memory", "padded"]

ALIGNMENT = 64
_LEAST_BYTES = 1 << 20  # A buffer grows by doubling from here.
_MOST_BYTES = 128 << 20  # Longer messages go through the socket, so that no buffer takes more.
_REUSED_BYTES = 1 << 16  # Memory for smaller arrays the allocator keeps by itself.
_KEPT_BYTES = 256 << 20  # Lengths that never come again must not use up the host's memory.


def padded(nbytes: int) -> int:
    """Return a length with what is needed to begin the next part aligned.

    >>> padded(1), padded(64)
    (64, 64)
    """
    return nbytes + -nbytes % ALIGNMENT


def make_memory(name: str, nbytes: int) -> tuple[int, Array]:
    """Return a descriptor of new shared memory, which the caller closes, and its bytes.

    Raises:
        OSError: the system has no memory of this kind, or not so much.
    """
    file = os.memfd_create(f"ndistribute-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return file, np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
    except BaseException:
        os.close(file)
        raise


def map_memory(file: int) -> memoryview:
    """Return the bytes of another process's memory, to be read.

    Args:
        file: its descriptor; it may be closed afterwards.

    Raises:
        MalformedError: it is something else, or its owner could make it shorter.
    """
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return memoryview(mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise MalformedError(f"a file came that is no shared memory: {error}.") from error
    raise MalformedError("memory came that its owner can make shorter.")


class MessageBuffer:
    """Lay the parts of messages in shared memory, each message in the place of the one before.

    The user knows when the reader is done with one, and lays no other before.

    >>> buffer = MessageBuffer()
    >>> file = buffer.lay([b"to ", b"read"])
    >>> memory = map_memory(file)
    >>> bytes(memory[:3]), bytes(memory[64:68]), buffer.lay([b"again"])
    (b'to ', b'read', -1)
    >>> buffer.close()
    """

    def __init__(self) -> None:
        self._file = -1
        self._memory: Array = np.empty(0, np.uint8)

    def lay(self, parts: Sequence[Buffer]) -> int | None:
        """Lay a message, its parts aligned.

        Returns:
            A descriptor that the reader has to be given, which stays this object's; -1 where it
            has it already; None where the message does not fit, or there is no such memory.
        """
        views = [np.frombuffer(part, np.uint8) for part in parts]
        nbytes = sum(padded(len(view)) for view in views)
        if nbytes > _MOST_BYTES:
            return None
        file = -1
        if nbytes > len(self._memory):
            self.close()
            size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
            try:
                file, self._memory = make_memory("messages", size)
            except (AttributeError, OSError):  # Another system than Linux, or no memory.
                return None
            self._file = file
        start = 0
        for view in views:
            np.copyto(self._memory[start : start + len(view)], view)
            start += padded(len(view))
        return file

    def close(self) -> None:
        """Give the memory back; a reader keeps what it has mapped."""
        file, self._file = self._file, -1
        self._memory = np.empty(0, np.uint8)
        if file >= 0:
            os.close(file)

    def __bool__(self) -> bool:
        return self._file >= 0


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
