"""Sleep in one process until another one wakes it, through a number in shared memory: a futex.

The locks of Python and of the C library either do not reach other processes, or need an owner that
lives. Where the number of Linux's system call is unknown, a process wakes up regularly instead.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _NUMBERS.get(platform.machine()) if sys.maxsize > 1 << 32 else None
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_SLEEP_SECONDS = 1e-3  # Where nobody can wake this process.

_call = ctypes.CDLL(None).syscall
_word, _time = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_long * 2)
_call.argtypes = [ctypes.c_long, _word, ctypes.c_int, ctypes.c_uint32, _time]
_call.restype = ctypes.c_long


class Futex:
    """A count of wake-ups, at an offset in shared memory."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._count = ctypes.c_uint32.from_buffer(memory, offset)

    @property
    def count(self) -> int:
        return self._count.value

    def sleep(self, count: int, seconds: float) -> None:
        """Sleep for less than a second until a wake-up, unless the count is another one already."""
        if _NUMBER is None:
            time.sleep(min(seconds, _SLEEP_SECONDS))
            return
        left = (ctypes.c_long * 2)(0, int(seconds * 1e9))
        _call(_NUMBER, self._count, _WAIT, count, left)

    def wake(self) -> None:
        """Wake all processes that sleep."""
        self._count.value += 1  # Several processes may do so at once: any other number will do.
        if _NUMBER is not None:
            _call(_NUMBER, self._count, _WAKE, _ALL, None)
