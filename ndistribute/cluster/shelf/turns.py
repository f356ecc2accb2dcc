"""Turns at a shelf: who reads lets a writer through, who writes lets those through who waited.

This is a courtesy between processes that are well: it spares readers to read again, and each gets
its turn however busy the others are. It protects nothing, for nobody waits long for one that was
stopped; what is true says the sequence. The locks are those of open files, so the system takes them
from a process that ends, however it ends.
"""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Callable

__all__ = ["ReaderTurns", "WriterTurns"]

# Bytes of the file that are locked, whatever is written there: by one who uses the data; by a
# reader who waits; by the writer as long as it lives.
_DATA, _WAITING, _ALIVE = 0, 1, 2
_FLOCK = struct.Struct("hhqqi4x")
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6


class WriterTurns:
    """Take the turns of the one process that writes.

    Args:
        fd: the file, open for writing as well; what opened it was opened for this alone.
        wanted: a word of the file, 1 while the writer waits or writes.
        patience: seconds to wait for readers. Once that was in vain none are waited for until
            nobody stands in the way any more.

    Raises:
        OSError: the system has no such locks.
    """

    def __init__(self, fd: int, wanted: memoryview, patience: float) -> None:
        self._fd = fd
        self._wanted = wanted
        self._patience = patience
        self._in_vain = False
        _try(fd, fcntl.F_WRLCK, _ALIVE)

    def take(self) -> None:
        """Begin a turn: let readers through who waited during the last one, then those at it."""
        deadline = time.monotonic() + (0.0 if self._in_vain else self._patience)
        served = _wait(lambda: not _held(self._fd, _WAITING), deadline)
        self._wanted[0] = 1
        mine = _wait(lambda: _try(self._fd, fcntl.F_WRLCK, _DATA), deadline)
        self._in_vain = not (served and mine)

    def give(self) -> None:
        """End a turn."""
        self._wanted[0] = 0
        _free(self._fd, _DATA)

    def leave(self) -> None:
        """Let readers know that nobody writes any more."""
        _free(self._fd, _ALIVE)


class ReaderTurns:
    """Take the turns of one who reads.

    Args:
        fd: the file; what opened it was opened for this alone.
        wanted: the same word as the writer's.
    """

    def __init__(self, fd: int, wanted: memoryview) -> None:
        self._fd = fd
        self._wanted = wanted

    @property
    def alone(self) -> bool:
        """Return whether the writer has ended, so what is read is of no use any more."""
        return not _held(self._fd, _ALIVE)

    def take(self, deadline: float) -> bool:
        """Begin a turn, and say whether that was possible before a deadline."""
        if self._free_now():
            return True
        try:
            _try(self._fd, fcntl.F_RDLCK, _WAITING)
            return _wait(self._free_now, deadline)
        finally:
            _free(self._fd, _WAITING)

    def give(self) -> None:
        """End a turn."""
        _free(self._fd, _DATA)

    def _free_now(self) -> bool:
        return not self._wanted[0] and _try(self._fd, fcntl.F_RDLCK, _DATA)


def _wait(ready: Callable[[], bool], deadline: float) -> bool:
    """Ask until it is so, and at least once; say whether it was before the deadline."""
    pause = _FIRST_PAUSE
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def _try(fd: int, kind: int, byte: int) -> bool:
    """Lock a byte, unless another holds it so that this is not possible."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _free(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, byte, 1, 0))


def _held(fd: int, byte: int) -> bool:
    """Return whether another holds a lock of a byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
