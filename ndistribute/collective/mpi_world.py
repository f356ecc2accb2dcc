"""What a group needs from MPI: to come together over it, and to leave it without a hang.

mpi4py is imported here and nowhere else, when MPI is first asked for. The communicators are our
own, so that nothing of ours is taken for a message of the program.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import time
import weakref
from typing import Any

import numpy as np

from ndistribute.collective.control import ControlPlane
from ndistribute.errors import CollectiveTimeoutError, MissingDependencyError

__all__ = ["World", "exchange_over_mpi", "finish", "mpi", "mpi_rank_and_size", "world"]

_START_SECONDS = 300.0
_LEAVE_SECONDS = 5.0  # after a failure
_PATIENT_SECONDS = 3600.0
_SLEEP_SECONDS = (50e-6, 1e-3)


def mpi_rank_and_size() -> tuple[int, int]:
    """Return this process's place in `COMM_WORLD`, and how many processes there are.

    Raises:
        MissingDependencyError: mpi4py or an MPI library is not installed.
    """
    everyone = mpi().COMM_WORLD
    return everyone.Get_rank(), everyone.Get_size()


def exchange_over_mpi(blob: bytes) -> list[bytes]:
    """Return what every process passed, in rank order. Every process must call it.

    Raises:
        MissingDependencyError: mpi4py or an MPI library is not installed.
        CollectiveTimeoutError: not all processes came in time.
    """
    here = world()
    here.exchanges += 1
    own = np.frombuffer(blob, np.uint8)
    lengths = np.zeros(here.size, np.int64)
    finish(here.control.Iallgather(np.array([own.size], np.int64), lengths))
    joined = np.empty(int(lengths.sum()), np.uint8)
    starts = [0, *np.cumsum(lengths).tolist()]
    counts = (lengths.tolist(), starts[:-1])
    finish(here.control.Iallgatherv(own, [joined, counts, mpi().BYTE]))
    return [joined[a:b].tobytes() for a, b in itertools.pairwise(starts)]


class World:
    """Be this process in MPI, with its own communicators, apart from those of the program."""

    def __init__(self) -> None:
        self.rank, self.size = mpi_rank_and_size()
        self.exchanges = 0
        self.groups: weakref.WeakSet[ControlPlane] = weakref.WeakSet()
        self.orphans: list[Any] = []  # MPI may still read their buffers.
        self.lent: list[Any] = []  # And these, of requests that may have been lost.
        self.control = self._duplicate()
        self.data = self._duplicate()
        self.data.Set_errhandler(mpi().ERRORS_RETURN)

    def _duplicate(self) -> Any:
        comm, request = mpi().COMM_WORLD.Idup()
        finish(request)
        return comm


@functools.cache
def world() -> World:
    """Return this process's place in MPI; the first call waits for all other processes."""
    return World()


@functools.cache
def mpi() -> Any:
    """Return the module `mpi4py.MPI`.

    Raises:
        MissingDependencyError: mpi4py or an MPI library is not installed.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise _missing() from error
    ours = "mpi4py.MPI" not in sys.modules
    if ours:
        # Finalising waits for all other processes, so it is done here, where that has a deadline.
        mpi4py.rc.finalize = False
        mpi4py.rc.thread_level = "serialized"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise _missing() from error
    if ours:
        atexit.register(_leave, MPI)
    return MPI


def _missing() -> MissingDependencyError:
    return MissingDependencyError(
        "communication over MPI needs mpi4py and an MPI library: pip install 'ndistribute[mpi]'."
    )


def finish(request: Any, seconds: float = _START_SECONDS) -> None:
    """Poll an operation until it is done."""
    deadline = time.monotonic() + seconds
    pause, longest = _SLEEP_SECONDS
    while not request.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"MPI: not all processes came within {seconds:g} s. Do all of them run the same "
                "script?",
                op="start",
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _leave(library: Any) -> None:
    """End MPI when all processes are about to; alone where others do not come after a failure.

    Without the others MPI would wait for ever. A process that ends without it makes `mpiexec` end
    the others as well, which is right after a failure, but only then.
    """
    comm = library.COMM_WORLD
    failed = hasattr(sys, "last_value")
    if world.cache_info().currsize:
        comm = world().control
        failed = failed or any(peers.cause is not None for peers in world().groups)
    try:
        finish(comm.Ibarrier(), _LEAVE_SECONDS if failed else _PATIENT_SECONDS)
    except CollectiveTimeoutError:
        if failed:
            return
    library.Finalize()
