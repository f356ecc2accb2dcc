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
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.collective.control import ControlPlane, WaitMonitor
from ndistribute.collective.ring import Handle
from ndistribute.device import Array
from ndistribute.errors import (
    CollectiveTimeoutError,
    DistributeError,
    MissingDependencyError,
    WorkerLostError,
)

__all__ = ["MpiTransport", "exchange_over_mpi", "mpi_rank_and_size"]

_HOT_SECONDS = 50e-6
_YIELD_SECONDS = 2e-3
_SLEEP_SECONDS = (50e-6, 1e-3)
_CHECK_SECONDS = 0.02
_GRACE_SECONDS = 0.5
# A message that was never received waits for ever. After so many failures its tag comes again, and
# what has it is refused, for its header names another generation.
_GENERATIONS = 4096
_START_SECONDS = 300.0
_LEAVE_SECONDS = 5.0  # after a failure
_PATIENT_SECONDS = 24 * 3600.0  # Others may work on, and end the job if one of them fails.
_FINALIZE_SECONDS = 30.0  # when all others have come to it


class MpiTransport:
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

    def __init__(self, peers: ControlPlane) -> None:
        here = _world()
        if (peers.rank, peers.size) != (here.rank, here.size):
            raise DistributeError(
                f"worker {peers.rank} of {peers.size} is rank {here.rank} of {here.size} in MPI: "
                "start as many processes with mpiexec as the cluster has workers, in that order.",
                rank=peers.rank,
            )
        self._peers = peers
        self._data, self._tag = here.data, here.tag_of(peers)
        self._byte = _mpi().BYTE
        self._error = _mpi().Exception
        self._pending: list[_Transfer] = []
        self._lent: list[Array] = []
        self._patience: WaitMonitor | None = None

    def begin(self, patience: WaitMonitor) -> None:
        """Start a call."""
        self._patience = patience

    # Memory is noted before MPI is told of it: an interrupt in between loses the request alone.

    def isend(self, peer: int, *arrays: Array) -> Handle:
        """Begin to send arrays, which stay unchanged until the handle is done."""
        for array in arrays:
            data = array.view(np.uint8)
            self._lent.append(data)
            transfer = _Transfer(peer, self._data.Isend([data, self._byte], peer, self._tag))
            self._pending.append(transfer)
        return transfer

    def irecv(self, peer: int, array: Array, then: Callable[[], None] | None = None) -> Handle:
        """Begin to receive into an array."""
        data = array.view(np.uint8)
        self._lent.append(data)
        request = self._data.Irecv([data, self._byte], peer, self._tag)
        transfer = _Transfer(peer, request, then, receives=True)
        self._pending.append(transfer)
        return transfer

    def wait(self, handle: Handle) -> None:
        """Wait until a message is done, and push all others on meanwhile."""
        self._wait([handle])

    def end(self) -> None:
        """Wait until all messages of the call are done."""
        self._wait(self._pending)
        self._pending.clear()
        self._lent.clear()

    def close(self) -> None:
        """Forget every message: what still comes of failed calls finds nobody who has its tag."""
        here = _world()
        here.lent += self._lent
        here.orphans += self._pending
        here.orphans[:] = [transfer for transfer in here.orphans if not transfer.is_given_up()]
        self._lent.clear()
        self._pending.clear()
        self._patience = None

    def _wait(self, handles: Sequence[Any]) -> None:
        start = time.monotonic()
        check_at = start + _CHECK_SECONDS
        pause, longest = _SLEEP_SECONDS
        while not self._advance(handles):
            now = time.monotonic()
            if now >= check_at or self._peers.is_alarmed:
                check_at = now + _CHECK_SECONDS
                self._check()
            self._advance(self._pending)
            if now - start > _YIELD_SECONDS:
                time.sleep(pause)
                pause = min(2 * pause, longest)
            elif now - start > _HOT_SECONDS:
                os.sched_yield()
        if len(self._pending) > 32:
            self._pending = [transfer for transfer in self._pending if not transfer.done]

    def _advance(self, transfers: Sequence[_Transfer]) -> bool:
        """Ask MPI for each message, and return True if all are done."""
        try:
            return min([transfer.test() for transfer in transfers], default=True)
        except self._error as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> DistributeError:
        """Return the error for a failure inside MPI, unless something else explains it."""
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            self._check()
            for transfer in self._pending:
                # Another call's message may be too long for its place; its header says so.
                with contextlib.suppress(self._error):
                    transfer.test()
            time.sleep(0.002)
        return WorkerLostError(f"MPI failed on worker {self._peers.rank}: {error}.")

    def _check(self) -> None:
        if self._patience is not None:
            self._patience.check(self._missing)

    def _missing(self) -> Sequence[int]:
        """Return the ranks that owe this one something, or else do not take what it sends."""
        waiting = [transfer for transfer in self._pending if not transfer.done]
        owing = [transfer.peer for transfer in waiting if transfer.receives]
        return sorted(set(owing or [transfer.peer for transfer in waiting]))


class _Transfer:
    """A message on its way."""

    __slots__ = ("_request", "_then", "done", "peer", "receives")

    def __init__(
        self,
        peer: int,
        request: Any,
        then: Callable[[], None] | None = None,
        *,
        receives: bool = False,
    ) -> None:
        self.peer = peer
        self.receives = receives
        self.done = False
        self._request = request
        self._then = then

    def test(self) -> bool:
        """Ask MPI whether it is done."""
        if not self.done and self._request.Test():
            self.done = True
            if self._then is not None:
                self._then()
        return self.done

    def is_given_up(self) -> bool:
        """Take back what MPI lets one take back, and return True if it lets go of the buffer."""
        if self.done or not self._request:
            return True
        try:
            if self.receives:
                self._request.Cancel()
            return bool(self._request.Test())
        except _mpi().Exception:
            return True


def mpi_rank_and_size() -> tuple[int, int]:
    """Return this process's place in `COMM_WORLD`, and how many processes there are.

    Raises:
        MissingDependencyError: mpi4py or an MPI library is not installed.
    """
    everyone = _mpi().COMM_WORLD
    return everyone.Get_rank(), everyone.Get_size()


def exchange_over_mpi(blob: bytes) -> list[bytes]:
    """Return what every process passed, in rank order. Every process must call it.

    Raises:
        MissingDependencyError: mpi4py or an MPI library is not installed.
        CollectiveTimeoutError: not all processes came in time.
    """
    here = _world()
    here.exchanges += 1
    own = np.frombuffer(blob, np.uint8)
    lengths = np.zeros(here.size, np.int64)
    _finish(here.control.Iallgather(np.array([own.size], np.int64), lengths))
    joined = np.empty(int(lengths.sum()), np.uint8)
    starts = [0, *np.cumsum(lengths).tolist()]
    counts = (lengths.tolist(), starts[:-1])
    _finish(here.control.Iallgatherv(own, [joined, counts, _mpi().BYTE]))
    return [joined[a:b].tobytes() for a, b in itertools.pairwise(starts)]


class _World:
    """Be this process in MPI, with its own communicators, apart from those of the program."""

    def __init__(self) -> None:
        self.rank, self.size = mpi_rank_and_size()
        self.exchanges = 0
        self.orphans: list[_Transfer] = []  # MPI may still read their buffers.
        self.lent: list[Array] = []  # And these, of requests that may have been lost.
        self.control = self._duplicate()
        self.data = self._duplicate()
        # How many exchanges there had been when a group was first seen: its number.
        self.groups: weakref.WeakKeyDictionary[ControlPlane, int] = weakref.WeakKeyDictionary()

    def tag_of(self, peers: ControlPlane) -> int:
        """Return a tag for a group's generation, which messages of the last ones do not have."""
        number = self.groups.setdefault(peers, self.exchanges)
        tag = number * _GENERATIONS + peers.generation % _GENERATIONS
        return int(tag % (self.data.Get_attr(_mpi().TAG_UB) + 1))

    def _duplicate(self) -> Any:
        comm, request = _mpi().COMM_WORLD.Idup()
        _finish(request)
        comm.Set_errhandler(_mpi().ERRORS_RETURN)
        return comm


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
    if _world.cache_info().currsize:
        comm = _world().control
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
