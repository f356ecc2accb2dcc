"""What replicas on distinct GPUs of one process share: NVIDIA's NCCL, by way of CuPy.

The replicas meet on the host, and the last to arrive launches the operation on all GPUs as one
NCCL group: either every GPU gets its kernel or none does. A replica that passes something else,
raises or never comes is thus an error on the host, and no GPU is left waiting in a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ndistribute.collective.backend import Call
from ndistribute.collective.nccl_backend import NcclBackend
from ndistribute.collective.nccl_plan import Launch, rows_launches
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.device import Array, array_namespace, cupy_module
from ndistribute.errors import CollectiveTimeoutError, MissingDependencyError, WorkerLostError
from ndistribute.stream import Stream, settle

__all__ = [
    "NcclBackend",
    "NcclGroup",
    "await_stream",
    "end_each",
    "failures_named",
    "make_nccl_backends",
    "nccl_available",
    "nccl_library",
]

_POLL_SECONDS = (10e-6, 200e-6)  # the first pause and the longest: short waits end promptly


def nccl_available() -> bool:
    """Say whether CuPy and an NCCL library that it can load are installed."""
    try:
        nccl_library()
    except MissingDependencyError:
        return False
    return True


def make_nccl_backends(rendezvous: Rendezvous, streams: Sequence[Stream]) -> list[NcclBackend]:
    """Connect replicas through NCCL.

    Args:
        rendezvous: where they meet on the host.
        streams: the device and stream of each; the devices are distinct GPUs.

    Returns:
        One backend for each replica, in order.

    Raises:
        MissingDependencyError: CuPy or NCCL is not installed.
        WorkerLostError: NCCL can not connect the GPUs.
    """
    group = NcclGroup(rendezvous, streams)
    group.connect()
    return [NcclBackend(group, rank) for rank in range(len(streams))]


class NcclGroup:
    """What the replicas share: where they meet, their streams, and the NCCL communicators.

    A launch returns when it stands in the replicas' streams: what they compute next waits for it
    on the GPU, not on the host.

    Args:
        rendezvous: where the replicas of this process meet.
        streams: of these replicas.
        first: the number of the first of them among all replicas.
        size: how many replicas there are in all; None means those of this process.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        streams: Sequence[Stream],
        first: int = 0,
        size: int | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.streams = tuple(streams)
        self.first = first
        self.size = len(self.streams) if size is None else size
        self._comms: list[Any] = []
        # Also at exit, while CUDA still works; a communicator must not outlive it.
        self._end = weakref.finalize(self, end_each, self._comms, "destroy")

    def connect(self) -> None:
        """Make the communicators, one for each GPU."""
        devices = [stream.device.index for stream in self.streams]
        try:
            self._comms[:] = nccl_library().NcclCommunicator.initAll(devices)
        except nccl_library().NcclError as error:
            raise WorkerLostError(
                f"NCCL can not connect the GPUs {devices}: {error}. To do without NCCL, pass "
                "cross_device_ops=nd.HierarchicalCopyAllReduce()."
            ) from error

    def launch(self, call: Call, everyone: Sequence[Sequence[Launch]], timeout: float) -> None:
        """Enqueue each replica's launches in its stream, all of them or none."""
        if not any(everyone):
            return
        if not self._comms:
            self.connect()
        with self._guarded():
            self._enqueue(everyone)

    def launch_update(
        self,
        call: Call,
        everyone: Sequence[Sequence[Launch]],
        prepare: Callable[[], Any],
        timeout: float,
    ) -> Any:
        """Launch, and run `prepare` when no replica's GPU uses what it opens for updates."""
        for index in range(len(self.streams)):
            self.drain(index, call, timeout)
        prepared = prepare()
        settle(self.streams)
        self.launch(call, everyone, timeout)
        return prepared

    def gather(
        self, call: Call, everyone: Sequence[Sequence[Array]], timeout: float
    ) -> list[list[Array]]:
        """Allocate and launch an all-gather of matrices; return what each replica gets."""
        counts = self._count_rows(call, everyone, timeout)
        joined: list[list[Array]] = []
        launches: list[list[Launch]] = []
        for index, (stream, matrices) in enumerate(zip(self.streams, everyone, strict=True)):
            with stream.use():
                wholes = [_room_for(own, counts[leaf]) for leaf, own in enumerate(matrices)]
            joined.append(wholes)
            launches.append([])
            for own, whole, rows in zip(matrices, wholes, counts, strict=True):
                launches[index] += rows_launches(own, whole, rows, self.first + index)
        self._launch_gather(call, launches, timeout)
        return joined

    def drain(self, index: int, call: Call, timeout: float) -> None:
        """Wait until a replica's GPU has done what stands in its stream."""
        deadline = time.monotonic() + timeout

        def check() -> None:
            self._check_comm(index)
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"{call.title}: the GPU of replica {index} did not finish its work in "
                    f"{timeout:g} s. Work that takes longer needs "
                    "CommunicationOptions(timeout_seconds=...).",
                    rank=index,
                    op=call.kind,
                    sequence=call.sequence,
                )

        with self._guarded():
            await_stream(self.streams[index], check)

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits on the host; what is on the GPUs ends by itself."""
        self.rendezvous.abort(cause)

    def _count_rows(
        self, call: Call, everyone: Sequence[Sequence[Array]], timeout: float
    ) -> list[list[int]]:
        """Return for each leaf how many rows each replica has."""
        return [list(map(len, parts)) for parts in zip(*everyone, strict=True)]

    def _launch_gather(
        self, call: Call, everyone: Sequence[Sequence[Launch]], timeout: float
    ) -> None:
        self.launch(call, everyone, timeout)

    def _enqueue(self, everyone: Sequence[Sequence[Launch]]) -> None:
        nccl = nccl_library()
        calls = [
            functools.partial(getattr(comm, method), *_named(nccl, args), stream.pointer)
            for comm, stream, launches in zip(self._comms, self.streams, everyone, strict=True)
            for method, args in launches
        ]
        with failures_named():
            nccl.groupStart()
            try:
                for enqueue in calls:
                    enqueue()
            finally:
                nccl.groupEnd()

    def _check_comm(self, index: int) -> None:
        for comm in self._comms[index : index + 1]:
            with failures_named():
                comm.check_async_error()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Give the communicators up on an error, and their kernels; the next launch connects."""
        try:
            yield
        except BaseException as error:
            self._disconnect(error)
            raise

    def _disconnect(self, cause: BaseException) -> None:
        end_each(self._comms, "abort")


def await_stream(stream: Stream, check: Callable[[], None]) -> None:
    """Wait until a GPU has done what stands in a stream, unless `check` raises."""
    pause, longest = _POLL_SECONDS
    while not _is_done(stream):
        check()
        time.sleep(pause)
        pause = min(2 * pause, longest)


def end_each(comms: list[Any], method: str) -> None:
    """Take communicators from a list, and destroy or abort each."""
    # Two replicas may find a failure at once: each communicator is popped, and ended, by one.
    with contextlib.suppress(IndexError):
        while True:
            getattr(comms.pop(0), method)()


@contextlib.contextmanager
def failures_named() -> Iterator[None]:
    """Raise what NCCL reports as a `WorkerLostError`."""
    # CuPy has no name for the newer errors of NCCL, and fails to look their number up.
    try:
        yield
    except (nccl_library().NcclError, KeyError) as error:
        raise WorkerLostError(f"NCCL failed: {error}") from error


def _named(nccl: Any, args: Sequence[int | str]) -> list[int]:
    return [getattr(nccl, arg) if isinstance(arg, str) else arg for arg in args]


def _room_for(like: Array, rows: Sequence[int]) -> Array:
    return array_namespace(like).empty((sum(rows), *like.shape[1:]), like.dtype)


def _is_done(stream: Stream) -> bool:
    with stream.use():
        return bool(cupy_module().cuda.get_current_stream().done)


@functools.cache
def nccl_library() -> Any:
    """Return ``cupy.cuda.nccl``.

    Raises:
        MissingDependencyError: CuPy or NCCL is not installed.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingDependencyError(
            "GPU devices need CuPy: pip install 'ndistribute[cuda12]' or 'ndistribute[cuda13]'."
        ) from error
    if not nccl.available:
        raise MissingDependencyError(
            "CuPy finds no NCCL library: pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, "
            "whichever CUDA your CuPy is for."
        )
    return nccl
