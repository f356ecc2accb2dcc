"""Replicas on the GPUs of several processes as one flat NCCL group.

Between processes a launch is no longer all or nothing: NCCL would wait in its kernels for whoever
makes another call or none. So the processes compare their calls on the host while the GPUs work,
the host waits until the GPUs are done, and whatever fails on one process ends the kernels on all.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ndistribute.collective.backend import Call
from ndistribute.collective.control import ControlPlane
from ndistribute.collective.nccl import NcclBackend, NcclGroup, await_stream, end_each
from ndistribute.collective.nccl_connect import abort_in_time, connected, make_unique_id
from ndistribute.collective.nccl_plan import Launch
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.collective.step_tracker import BEFORE_ALL
from ndistribute.collective.workers import Workers
from ndistribute.device import Array
from ndistribute.stream import Stream, settle
from ndistribute.timeline import span

__all__ = ["make_nccl_worker_backends"]


def make_nccl_worker_backends(
    rendezvous: Rendezvous, streams: Sequence[Stream], workers: Workers
) -> list[NcclBackend]:
    """Join the replicas of this process and those of all others in one NCCL group.

    NCCL connects them at their first collective.

    Args:
        rendezvous: where the replicas of this process meet.
        streams: the device and stream of each; the GPUs of all processes are distinct.
        workers: the processes; every one of them joins its replicas in this way.

    Returns:
        One backend for each replica of this process, in order; replicas are numbered in the order
        of the workers.

    Raises:
        MissingDependencyError: CuPy or NCCL is not installed.
    """
    group = _WorkersGroup(rendezvous, streams, workers)
    return [NcclBackend(group, index) for index in range(len(streams))]


class _WorkersGroup(NcclGroup):
    """What the replicas of one process share, where replicas of other processes take part.

    A launch returns when the GPUs have done it, and all processes are known to have made the same
    call. The communicators are of one generation of the processes: after each recovery new ones
    are made, from a new unique id.
    """

    def __init__(self, rendezvous: Rendezvous, streams: Sequence[Stream], workers: Workers) -> None:
        counts = workers.replica_counts
        super().__init__(rendezvous, streams, sum(counts[: workers.rank]), sum(counts))
        self._peers = workers.peers
        self._host = workers.backend
        self._generation = -1
        self._end.detach()
        weakref.finalize(self, _end_all, self._comms, workers.peers)

    def launch(self, call: Call, everyone: Sequence[Sequence[Launch]], timeout: float) -> None:
        """Launch, compare the calls of all processes meanwhile, and wait for the GPUs."""
        deadline = time.monotonic() + timeout
        with self._guarded():
            if not self._connected:
                # Who makes another call, or none, is not to be waited for inside NCCL.
                self._compare(call, deadline)
                self._connect(call, deadline)
                self._enqueue_any(everyone)
            else:
                # Should the calls differ, the kernels wait or mix up data until they are aborted,
                # but nobody has seen what they wrote, and the replicas' inputs are as they were.
                self._enqueue_any(everyone)
                self._compare(call, deadline)
            self._finish(call, deadline)

    def launch_update(
        self,
        call: Call,
        everyone: Sequence[Sequence[Launch]],
        prepare: Callable[[], Any],
        timeout: float,
    ) -> Any:
        """Reduce first, so that a failure elsewhere leaves all variables as they were."""
        self.launch(call, everyone, timeout)
        with self._guarded():
            prepared = prepare()
            settle(self.streams)
        return prepared

    def gather(
        self, call: Call, everyone: Sequence[Sequence[Array]], timeout: float
    ) -> list[list[Array]]:
        """Tell each other how many rows there are, which compares the calls, and gather."""
        with self._guarded():
            return super().gather(call, everyone, timeout)

    def drain(self, index: int, call: Call, timeout: float) -> None:
        """Wait until a replica's GPU has done what stands in its stream."""
        with self._guarded():
            self._await(index, call, timeout)

    def abort(self, cause: BaseException) -> None:
        """Release the replicas of this process, the other processes, and the GPUs of both."""
        self.rendezvous.abort(cause)
        self._disconnect(cause)

    @property
    def _connected(self) -> bool:
        """Say whether all processes are connected; all of them find the same."""
        return bool(self._comms) and self._generation == self._peers.generation

    def _compare(self, call: Call, deadline: float) -> None:
        """Meet the other processes; what they say of their calls is compared on the way."""
        outputs = [_NOTHING.copy()]
        self._host.all_reduce(call, [_NOTHING], outputs, ReduceOp.SUM, _left(deadline))

    def _connect(self, call: Call, deadline: float) -> None:
        """Make communicators with the other processes, each of which does so now."""
        abort_in_time(self._comms)
        generation = self._peers.generation
        left = _left(deadline)
        patience = self._peers.patience(call, left)
        own = make_unique_id() if self._peers.rank == 0 else []
        # A generation's own meeting: an exchange that failed half-way leaves nothing to the next.
        told = self._peers.exchange(f"nccl {generation}", json.dumps(own).encode(), left)
        self._comms[:] = connected(
            json.loads(told[0]),
            self.size,
            self.first,
            self.streams,
            lambda: patience.check(_nobody),
        )
        self._generation = generation

    def _count_rows(
        self, call: Call, everyone: Sequence[Sequence[Array]], timeout: float
    ) -> list[list[int]]:
        own = np.array([[len(rows) for rows in matrices] for matrices in everyone], np.int64)
        (counts,) = self._host.all_gather(call, [own], timeout)
        return [column.tolist() for column in counts.T]

    def _launch_gather(
        self, call: Call, everyone: Sequence[Sequence[Launch]], timeout: float
    ) -> None:
        """Launch what all processes are known to launch."""
        deadline = time.monotonic() + timeout
        if not self._connected:
            self._connect(call, deadline)
        self._enqueue_any(everyone)
        self._finish(call, deadline)

    def _enqueue_any(self, everyone: Sequence[Sequence[Launch]]) -> None:
        if any(everyone):
            self._enqueue(everyone)

    def _finish(self, call: Call, deadline: float) -> None:
        with span("reduce", call.title):
            for index in range(len(self.streams)):
                self._await(index, call, _left(deadline))

    def _await(self, index: int, call: Call, timeout: float) -> None:
        patience = self._peers.patience(call, timeout)

        def check() -> None:
            self._check_comm(index)
            patience.check(_nobody)

        await_stream(self.streams[index], check)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the call on all processes, and the kernels on all GPUs, when it fails on one."""
        with super()._guarded():
            self._peers.check()
            yield

    def _disconnect(self, cause: BaseException) -> None:
        # First, and also where others are in an earlier call: NCCL may abort on one process only
        # when all abort.
        self._peers.abort(cause, after=BEFORE_ALL)
        abort_in_time(self._comms)


def _end_all(comms: list[Any], peers: ControlPlane) -> None:
    # NCCL destroys on one process only when all do; a broken group's others may have aborted.
    end_each(comms, "destroy" if peers.cause is None else "abort")


def _left(deadline: float) -> float:
    """Return the seconds that are left, in tenths, for they stand in messages."""
    return max(0.0, math.ceil(10 * (deadline - time.monotonic())) / 10)


def _nobody() -> Sequence[int]:
    """Name no rank that has not come: whoever is waited for has launched the same."""
    return ()


_NOTHING = np.zeros(1, np.int8)
