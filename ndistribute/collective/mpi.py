"""The transport over MPI, and what a group needs of MPI to come together and to end.

Nothing blocks inside MPI: every operation is begun and then polled, so that each wait has a
deadline and learns at once that another process failed. MPI's own reductions are not used: they
have no fixed order of sums, compare no calls and can not be given up when a rank fails. mpi4py is
imported here and nowhere else, when MPI is first asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.collective.control import ControlPlane
from ndistribute.collective.polling import PollingTransport
from ndistribute.collective.ring import Handle
from ndistribute.device import Array
from ndistribute.errors import CollectiveTimeoutError, DistributeError, MissingDependencyError

__all__ = ["MpiTransport", "exchange_over_mpi"]

_SHORTEST_SLEEP, _LONGEST_SLEEP = 50e-6, 1e-3
# A message that was never received waits for ever. After so many failures its tag comes again, and
# what has it is refused, for its header names another generation.
_GENERATIONS = 4096
_START_SECONDS = 300.0
_LEAVE_SECONDS = 5.0  # after a failure
_PATIENT_SECONDS = 24 * 3600.0  # Others may work on, and end the job if one of them fails.
_FINALIZE_SECONDS = 30.0  # when all others have come to it


class MpiTransport(PollingTransport):
    """Carry messages over MPI.

    Args:
        peers: the processes of the group, with the ranks that they have in `COMM_WORLD`.

    Raises:
        MissingDependencyError: mpi4py or an MPI library is not installed.
        DistributeError: the group is not the one that MPI started.
    """

    # Measured with 2 processes on 2 cores and MPICH, 16 and 64 MiB: 2.4 and 7.4 ms in blocks of
    # 512 KiB, 1.8 and 6.9 ms of 1 MiB; its own Allreduce: 2.7 and 29 ms.
    block_bytes = 1024 * 1024
    spin_seconds = 2e-3  # MPI wakes nobody.

    def __init__(self, peers: ControlPlane) -> None:
        super().__init__(peers)
        here = _world()
        if (peers.rank, peers.size) != (here.rank, here.size):
            raise DistributeError(
                f"worker {peers.rank} of {peers.size} is rank {here.rank} of {here.size} in MPI: "
                "start as many processes with mpiexec as the cluster has workers, in that order.",
                rank=peers.rank,
            )
        self._comm, self._tag = here.comm, here.tag_of(peers)
        self._byte = _mpi().BYTE
        self._error = _mpi().Exception
        self._pending: list[_Transfer] = []

    # Memory is noted before MPI is told of it: an interrupt in between loses the request alone.

    def isend(self, peer: int, *arrays: Array) -> Handle:
        """Begin to send arrays, which stay unchanged until the handle is done."""
        for array in arrays:
            data = array.view(np.uint8)
            transfer = _Transfer(peer, data)
            self._pending.append(transfer)
            transfer.request = self._comm.Isend([data, self._byte], peer, self._tag)
        return transfer

    def irecv(self, peer: int, array: Array, then: Callable[[], None] | None = None) -> Handle:
        """Begin to receive into an array."""
        data = array.view(np.uint8)
        transfer = _Transfer(peer, data, True, then)
        self._pending.append(transfer)
        transfer.request = self._comm.Irecv([data, self._byte], peer, self._tag)
        return transfer

    def close(self) -> None:
        """Forget every message: what still comes of failed calls finds nobody who has its tag."""
        if _mpi().Is_finalized():  # At exit, it lets go of everything by itself.
            return
        orphans = _world().orphans
        orphans += self._pending
        orphans[:] = [transfer for transfer in orphans if not transfer.is_given_up()]
        self._pending = []

    def _waiting(self) -> list[_Transfer]:
        return self._pending

    def _advance(self) -> bool:
        before = len(self._pending)
        try:
            self._pending = [transfer for transfer in self._pending if not transfer.test()]
        except self._error as error:
            reason = f"MPI failed on worker {self._peers.rank}: {error}."
            raise self._lost(reason, look=self._test_all) from error
        return len(self._pending) < before

    def _test_all(self) -> None:
        """Take what is here: another call's message may be too long, and its header says so."""
        for transfer in self._pending:
            with contextlib.suppress(self._error):
                transfer.test()

    def _sleep(self, idle: float) -> None:
        # In proportion, so that waking late never adds much to the wait.
        time.sleep(min(max(_SHORTEST_SLEEP, idle / 20), _LONGEST_SLEEP))


@dataclass(slots=True, eq=False)
class _Transfer:
    """A message on its way, and the memory that MPI uses until it is done."""

    peer: int
    data: Array
    receives: bool = False
    then: Callable[[], None] | None = None
    request: Any = None
    done: bool = False

    def test(self) -> bool:
        """Ask MPI whether it is done."""
        if not self.done and self.request.Test():
            self.done = True
            if self.then is not None:
                self.then()
        return self.done

    def is_given_up(self) -> bool:
        """Take back what MPI lets one take back, and return True if it lets go of the memory."""
        if self.request is None:  # It was lost, and MPI may have been told.
            return False
        try:
            if self.receives and self.request:
                self.request.Cancel()
            return bool(self.request.Test())
        except _mpi().Exception:
            return True


def exchange_over_mpi(blob: bytes) -> list[bytes]:
    """Return what every process passed, in rank order. Every process must call it.

    Raises:
        MissingDependencyError: mpi4py or an MPI library is not installed.
        CollectiveTimeoutError: not all processes came in time.
    """
    here = _world()
    here.exchanges += 1
    lengths = np.empty(here.size, np.int64)
    _finish(here.comm.Iallgather(np.array([len(blob)], np.int64), lengths))
    blobs = np.empty((here.size, lengths.max()), np.uint8)
    own = np.frombuffer(blob.ljust(lengths.max()), np.uint8)
    _finish(here.comm.Iallgather(own, blobs))
    return [row[:length].tobytes() for row, length in zip(blobs, lengths, strict=True)]


class _World:
    """Be this process in MPI, with a communicator of its own, apart from those of the program."""

    def __init__(self) -> None:
        self.comm, request = _mpi().COMM_WORLD.Idup()
        _finish(request)
        self.comm.Set_errhandler(_mpi().ERRORS_RETURN)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.exchanges = 0
        self.orphans: list[_Transfer] = []  # MPI may still use their memory.
        # How many exchanges there had been when a group was first seen: its number.
        self.groups: weakref.WeakKeyDictionary[ControlPlane, int] = weakref.WeakKeyDictionary()

    def tag_of(self, peers: ControlPlane) -> int:
        """Return a tag for a group's generation, which messages of the last ones do not have."""
        number = self.groups.setdefault(peers, self.exchanges)
        tag = number * _GENERATIONS + peers.generation % _GENERATIONS
        return int(tag % (self.comm.Get_attr(_mpi().TAG_UB) + 1))


@functools.cache
def _world() -> _World:
    """Return this process's place in MPI; the first call waits for all other processes."""
    return _World()


@functools.cache
def _mpi() -> Any:
    """Return the module `mpi4py.MPI`."""
    missing = MissingDependencyError(
        "communication over MPI needs mpi4py and an MPI library: pip install 'ndistribute[mpi]'."
    )
    try:
        import mpi4py
    except ImportError as error:
        raise missing from error
    ours = "mpi4py.MPI" not in sys.modules
    if ours:
        # Finalising waits for all other processes, so it is done here, where that has a deadline.
        mpi4py.rc.finalize = False
        mpi4py.rc.thread_level = "serialized"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise missing from error
    if ours:
        atexit.register(_leave, MPI)
    return MPI


def _finish(request: Any, seconds: float = _START_SECONDS) -> None:
    """Poll an operation until it is done."""
    deadline = time.monotonic() + seconds
    pause = _SHORTEST_SLEEP
    while not request.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"MPI: not all processes came within {seconds:g} s. Do all of them run the same "
                "script?",
                op="start",
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)


def _leave(library: Any) -> None:
    """End MPI when all processes are about to; alone where others do not come after a failure.

    Without the others MPI would wait for ever. A process that ends without it makes `mpiexec` end
    the others as well, which is right after a failure, but only then.
    """
    comm = library.COMM_WORLD
    failed = hasattr(sys, "last_value")
    if _world.cache_info().currsize:
        comm = _world().comm
        failed = failed or any(peers.cause is not None for peers in _world().groups)
    try:
        _finish(comm.Ibarrier(), _LEAVE_SECONDS if failed else _PATIENT_SECONDS)
    except CollectiveTimeoutError:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Nothing in Python runs while MPI waits: for a process that was stopped or lost on its way out.
    faulthandler.dump_traceback_later(_FINALIZE_SECONDS, exit=True, file=2)
    library.Finalize()
    faulthandler.cancel_dump_traceback_later()
