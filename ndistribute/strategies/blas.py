"""Share the cores between replicas: fewer BLAS threads for each while several compute at once.

With as many BLAS threads as cores in every replica, they fight for the cores: two replicas of
512 x 512 products ran at 0.8 of the speed of one, and at 2.0 with one BLAS thread each. The
setting belongs to the process, so it is counted here: the first in lowers it, the last out
restores it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["cores", "limited_blas"]


class _BlasThreads:
    """The BLAS libraries of this process and the number of threads that each had."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._modules = -1
        self._libraries: list[Any] = []
        self._before: list[tuple[Any, int]] = []

    def lower(self, threads: int) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._find()
            for library in self._libraries:
                before = library.get_num_threads()
                if before > threads:
                    self._before.append((library, before))
                    library.set_num_threads(threads)

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for library, before in self._before:
                    library.set_num_threads(before)
                self._before.clear()

    def _find(self) -> None:
        # A search takes milliseconds; another library can only have come with another module.
        if self._modules == len(sys.modules):
            return
        from threadpoolctl import ThreadpoolController

        found = ThreadpoolController().select(user_api="blas")
        self._libraries = list(found.lib_controllers)
        self._modules = len(sys.modules)


_blas = _BlasThreads()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def limited_blas(replicas: int) -> Iterator[None]:
    """Give each of several concurrent replicas its share of the cores for a ``with`` block."""
    if replicas == 1:
        yield
        return
    _blas.lower(max(1, cores() // replicas))
    try:
        yield
    finally:
        _blas.restore()
