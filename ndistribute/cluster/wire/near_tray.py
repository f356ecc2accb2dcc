"""Memory in which one process of a host lays a message, and another one reads it where it lies.

Through a socket the system copies a long message in and out, in small pieces for which both ends
wait in turn. Here the sender copies it once. The memory is anonymous and can not shrink, so its
sender can change numbers under the hands of who reads it, and do nothing else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

from ndistribute.cluster.wire.pieces import nbytes_of
from ndistribute.cluster.wire.tensors import Buffer, MalformedError

__all__ = ["ReceiverTray", "SenderTray"]

_LEAST_BYTES = 1 << 20  # The memory grows by doubling from here.


class SenderTray:
    """Lay messages one after the other, each in the place of the one before.

    >>> sender = SenderTray()
    >>> file = sender.lay([b"to ", b"read"], 7)
    >>> ReceiverTray(file).read(7).tobytes(), sender.lay([b"again"], 5)
    (b'to read', -1)
    >>> sender.close()
    """

    def __init__(self) -> None:
        self._file = -1
        self._memory = np.empty(0, np.uint8)

    def lay(self, body: Sequence[Buffer], nbytes: int) -> int | None:
        """Lay a message, and return the file that the receiver has to be given; -1: it has it.

        Args:
            body: the message.
            nbytes: its length.

        Returns:
            None where the system has no memory of this kind.
        """
        file = -1
        if nbytes > len(self._memory):
            try:
                file = self._grow(nbytes)
            except (AttributeError, OSError):  # Another system than Linux, or no memory.
                return None
        start = 0
        for buffer in body:
            stop = start + nbytes_of(buffer)
            np.copyto(self._memory[start:stop], np.frombuffer(buffer, np.uint8))
            start = stop
        return file

    def close(self) -> None:
        """Hold nothing any more; a receiver keeps what it has."""
        file, self._file = self._file, -1
        self._memory = np.empty(0, np.uint8)
        if file >= 0:
            os.close(file)

    def _grow(self, nbytes: int) -> int:
        self.close()
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        file = os.memfd_create("ndistribute-tray", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Taken now, for where it is missing later the process would be killed.
            os.posix_fallocate(file, 0, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return file


class ReceiverTray:
    """Read the messages that a sender lays.

    Args:
        file: what it gave; it may be closed afterwards.

    Raises:
        MalformedError: the file is none that a tray has.
    """

    def __init__(self, file: int) -> None:
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise MalformedError("memory came that its owner can make shorter.")
            size = os.fstat(file).st_size
            self._memory = memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise MalformedError(f"a file came that is no shared memory: {error}.") from error

    def read(self, nbytes: int) -> memoryview:
        """Return the message that lies there, valid until it is answered.

        Raises:
            MalformedError: there is no room for so much.
        """
        if nbytes > len(self._memory):
            raise MalformedError(f"{nbytes} bytes can not lie in {len(self._memory)}.")
        return self._memory[:nbytes]
