"""The transport over MPI, and how a group starts and ends MPI.

No call blocks inside MPI: operations are started and then polled, so each wait has a deadline and
detects failures of other processes at once. MPI's own reductions are not used, because they do not
add in a fixed order, do not compare calls, and cannot be cancelled when a rank fails. Only this
file imports mpi4py, when MPI is first used.
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

from ndistribute.collective.control_plane import ControlPlane
from ndistribute.collective.tcp import Handle, Transport
from ndistribute.devices import Array
from ndistribute.errors import CollectiveTimeoutError, DistributeError, MissingDependencyError
from ndistribute.transport.waiting import WaitReport

_SHORTEST_SLEEP, _LONGEST_SLEEP = 50e-6, 1e-3
# A message that was never received stays in MPI. After this many failures its tag is used again;
# the header of the old message then names another generation and is refused.
_GENERATIONS = 4096
_START_SECONDS = 300.0
# MPI does not say which process failed.
_ABSENT = "other ranks of MPI, which have not made the same strategy yet"
_LEAVE_SECONDS = 5.0  # after a failure
# Other processes may still work, and end the job if one of them fails.
_PATIENT_SECONDS = 24 * 3600.0
_FINALIZE_SECONDS = 30.0  # when all processes have reached it


class MpiTransport(Transport):
    """Moves messages over MPI."""

    # Measured with 2 processes on 2 cores and MPICH, 16 and 64 MiB: 2.4 and 7.4 ms in blocks of
    # 512 KiB, 1.8 and 6.9 ms of 1 MiB; its own Allreduce: 2.7 and 29 ms.
    block_bytes = 1024 * 1024
    spin_seconds = 2e-3  # MPI does not wake a sleeping process.

    def __init__(self, peers: ControlPlane) -> None:
        super().__init__(peers)
        here = _world()
        if (peers.rank, peers.size) != (here.rank, here.size):
            what = f"worker {peers.rank} of {peers.size} is rank {here.rank} of {here.size} in MPI:"
            how = "start as many processes with mpiexec as the cluster has workers, in that order."
            raise DistributeError(f"{what} {how}", rank=peers.rank)
        self._comm, self._tag = here.comm, here.tag_of(peers)
        self._byte = _mpi().BYTE
        self._error = _mpi().Exception
        self._pending: list[_MpiTransfer] = []

    # A transfer is recorded before MPI gets its memory: an interrupt then loses only a request.

    def isend(self, peer: int, *arrays: Array) -> Handle:
        for array in arrays:
            data = array.view(np.uint8)
            transfer = _MpiTransfer(peer, data)
            self._pending.append(transfer)
            transfer.request = self._comm.Isend([data, self._byte], peer, self._tag)
        return transfer

    def irecv(self, peer: int, array: Array, then: Callable[[], None] | None = None) -> Handle:
        data = array.view(np.uint8)
        transfer = _MpiTransfer(peer, data, True, then)
        self._pending.append(transfer)
        transfer.request = self._comm.Irecv([data, self._byte], peer, self._tag)
        return transfer

    def close(self) -> None:
        """Drop all messages; messages of failed calls that arrive later match no tag."""
        if _mpi().Is_finalized():  # At exit, MPI has released everything.
            return
        orphans = _world().orphans
        orphans += self._pending
        orphans[:] = [transfer for transfer in orphans if not transfer.is_given_up()]
        self._pending = []

    def _waiting(self) -> list[_MpiTransfer]:
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
        """Complete messages that have arrived: a header may explain one that is too long."""
        for transfer in self._pending:
            with contextlib.suppress(self._error):
                transfer.test()

    def _sleep(self, idle: float) -> None:
        # The pause grows in proportion to the wait, so that waking late adds little.
        time.sleep(min(max(_SHORTEST_SLEEP, idle / 20), _LONGEST_SLEEP))


@dataclass(slots=True, eq=False)
class _MpiTransfer:
    """A pending message, and the memory that MPI uses until it is done."""

    peer: int
    data: Array
    receives: bool = False
    then: Callable[[], None] | None = None
    request: Any = None
    done: bool = False

    def test(self) -> bool:
        """Return True if the message is done."""
        if not self.done and self.request.Test():
            self.done = True
            if self.then is not None:
                self.then()
        return self.done

    def is_given_up(self) -> bool:
        """Cancel the message if MPI can; return True if MPI no longer uses its memory."""
        if self.request is None:  # After an interrupt, MPI may still use the memory.
            return False
        try:
            if self.receives and self.request:
                self.request.Cancel()
            return bool(self.request.Test())
        except _mpi().Exception:
            return True


def exchange_over_mpi(blob: bytes) -> list[bytes]:
    """Return the values of all processes in rank order; every process must call this."""
    here = _world()
    here.exchanges += 1
    lengths = np.empty(here.size, np.int64)
    _finish(here.comm.Iallgather(np.array([len(blob)], np.int64), lengths))
    blobs = np.empty((here.size, lengths.max()), np.uint8)
    padded = np.frombuffer(blob.ljust(lengths.max()), np.uint8)
    _finish(here.comm.Iallgather(padded, blobs))
    return [row[:length].tobytes() for row, length in zip(blobs, lengths, strict=True)]


class _World:
    """This process in MPI, with a communicator that the program does not use."""

    def __init__(self) -> None:
        self.comm, request = _mpi().COMM_WORLD.Idup()
        _finish(request)
        self.comm.Set_errhandler(_mpi().ERRORS_RETURN)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.exchanges = 0
        self.orphans: list[_MpiTransfer] = []  # MPI may still use their memory.
        # The number of a group is the number of exchanges before it.
        self.groups: weakref.WeakKeyDictionary[ControlPlane, int] = weakref.WeakKeyDictionary()

    def tag_of(self, peers: ControlPlane) -> int:
        """Return a tag for a group's generation, distinct from those of earlier generations."""
        number = self.groups.setdefault(peers, self.exchanges)
        tag = number * _GENERATIONS + peers.generation % _GENERATIONS
        return int(tag % (self.comm.Get_attr(_mpi().TAG_UB) + 1))


# Returns this process in MPI; the first call waits for all processes.
_world = functools.cache(_World)


@functools.cache
def _mpi() -> Any:
    """Return the module `mpi4py.MPI`."""
    what = "communication over MPI needs mpi4py and an MPI library: pip install 'ndistribute[mpi]'."
    missing = MissingDependencyError(what)
    try:
        import mpi4py
    except ImportError as error:
        raise missing from error
    ours = "mpi4py.MPI" not in sys.modules
    if ours:
        # Finalize waits for all processes; `_leave` calls it with a deadline.
        mpi4py.rc.finalize = False
        mpi4py.rc.thread_level = "serialized"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise missing from error
    if ours:
        atexit.register(_leave, MPI)
    return MPI


def _finish(request: Any, seconds: float = _START_SECONDS, absent: str = _ABSENT) -> None:
    """Poll an operation until it is done, or raise after a deadline; log which are `absent`."""
    deadline, report = time.monotonic() + seconds, WaitReport("this process")
    pause = _SHORTEST_SLEEP
    while not request.Test():
        if time.monotonic() > deadline:
            what = f"MPI: not all processes made the strategy within {seconds:g} s."
            raise CollectiveTimeoutError(f"{what} Check that all run the same script.", op="start")
        report.tell(absent)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)


def _leave(library: Any) -> None:
    """Finalize MPI together with all processes; give up if others are missing after a failure.

    Finalize would wait forever for missing processes. If a process ends without it, `mpiexec` also
    ends the other processes, which is right only after a failure.
    """
    comm = library.COMM_WORLD
    failed = hasattr(sys, "last_value")
    if _world.cache_info().currsize:
        comm = _world().comm
        failed = failed or any(peers.cause is not None for peers in _world().groups)
    try:
        _finish(comm.Ibarrier(), _LEAVE_SECONDS if failed else _PATIENT_SECONDS, "")
    except CollectiveTimeoutError:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Python code does not run while MPI waits, perhaps for a process that was stopped here.
    faulthandler.dump_traceback_later(_FINALIZE_SECONDS, exit=True, file=2)
    library.Finalize()
    faulthandler.cancel_dump_traceback_later()
