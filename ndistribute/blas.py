"""Limits on BLAS threads, for replicas or processes that compute at the same time.

If every replica uses as many BLAS threads as there are cores, the threads compete: two replicas of
512 x 512 products ran at 0.8 of the speed of one, and at 2.0 with one BLAS thread each. The setting
applies to the whole process, so this module keeps all current limits and applies the smallest.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


class _BlasThreads:
    """The BLAS libraries of this process, their own numbers of threads, and the current limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: list[int] = []
        self._modules = -1
        self._libraries: list[Any] = []
        self._own: dict[str, int] = {}  # By file, the number of threads without a limit.

    def unlock_in_fork(self) -> None:
        """Forget that another thread, which a forked process does not have, held the lock."""
        self._lock = threading.Lock()

    def add(self, threads: int) -> None:
        with self._lock:
            if not self._limits:
                self._own.clear()
            self._limits.append(threads)
            self._apply()

    def remove(self, threads: int) -> None:
        with self._lock:
            self._limits.remove(threads)
            self._apply()

    def _apply(self) -> None:
        # A search takes milliseconds; a new library can only have been loaded with a new module.
        if self._modules != len(sys.modules):
            from threadpoolctl import ThreadpoolController

            found = ThreadpoolController().select(user_api="blas")
            self._libraries = list(found.lib_controllers)
            self._modules = len(sys.modules)
        for library in self._libraries:
            if library.filepath not in self._own:
                self._own[library.filepath] = library.get_num_threads()
            if hasattr(library, "clear_controlling_thread"):
                # Otherwise, only the thread that set the number first can change it.
                library.clear_controlling_thread(force=True)
            library.set_num_threads(min([self._own[library.filepath], *self._limits]))


_blas = _BlasThreads()
os.register_at_fork(after_in_child=_blas.unlock_in_fork)


class _Limited(AbstractContextManager[None]):
    """One limit. Unlike a generator, it runs nothing if the interpreter ends within the block."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        _blas.add(self._threads)

    def __exit__(self, *error: object) -> None:
        _blas.remove(self._threads)


def core_numbers() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(core_numbers())


def cores_of_one(own: Sequence[int], everyone: Sequence[Sequence[int]]) -> int:
    """Return how many of its `own` cores are a process's share, at least 1.

    `everyone` has the numbers of the cores of all processes that compute on its host.

    >>> cores_of_one([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1, 2, 3]])
    2
    >>> cores_of_one([0, 1], [[0, 1], [2, 3]])  # Each is bound to cores of its own.
    2
    """
    return max(1, int(sum(1 / sum(core in some for some in everyone) for core in own)))


def set_by_user(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if an environment variable sets the number of BLAS threads."""
    return any(environ.get(name) for name in (*THREAD_VARIABLES, "MKL_NUM_THREADS"))


def limited_blas(threads: int | None) -> AbstractContextManager[None]:
    """Limit the number of BLAS threads in a ``with`` block; None sets no limit."""
    return nullcontext() if threads is None else _Limited(threads)


def shared_blas(
    sharing: int, environ: Mapping[str, str] = os.environ
) -> AbstractContextManager[None]:
    """Limit BLAS in a ``with`` block to the share of one of the processes that compute on its host.

    No limit is set for a single process, or if an environment variable sets the number of threads.
    """
    free = sharing < 2 or set_by_user(environ)
    return limited_blas(None if free else max(1, cores() // sharing))
