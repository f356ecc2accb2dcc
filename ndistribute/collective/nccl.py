"""The backend for replicas on distinct GPUs of one process: NVIDIA's NCCL, by way of CuPy.

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
from typing import Any, TypeVar

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.nccl_plan import Launch, Leaf, address, gather_launches, stage
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.device import Array, array_namespace
from ndistribute.errors import CollectiveTimeoutError, MissingDependencyError, WorkerLostError
from ndistribute.stream import Stream, settle

__all__ = ["NcclBackend", "make_nccl_backends", "nccl_available"]

T = TypeVar("T")

_POLL_SECONDS = (10e-6, 200e-6)  # the first pause and the longest: short waits end promptly


def nccl_available() -> bool:
    """Say whether CuPy and an NCCL library that it can load are installed."""
    try:
        _nccl()
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
    group = _Group(rendezvous, streams)
    group.connect()
    return [NcclBackend(group, rank) for rank in range(len(streams))]


class NcclBackend:
    """Move data between one replica's GPU and those of the others.

    A collective returns when it stands in the replica's stream: what the replica computes next
    waits for it on the GPU, not on the host. The order in which floats are summed is NCCL's: all
    replicas hold the same bits, but not those that summing in replica order would give.
    """

    def __init__(self, group: _Group, rank: int) -> None:
        self.rank = rank
        self.size = len(group.streams)
        self.owner, self.owners = 0, 1  # Each GPU has a memory of its own.
        self.device = group.streams[rank].device
        self._group = group
        self._stream = group.streams[rank]
        self._exchange = functools.partial(group.rendezvous.exchange, rank)

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once, when the GPUs have finished what the replicas had enqueued."""

        def settled(values: Sequence[Any]) -> T:
            combined = combine(values)
            settle(self._group.streams)  # The others may use it at once, on their own streams.
            return combined

        self._group.drain(self.rank, call, timeout)
        return self._exchange(call, value, settled, timeout)

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce all leaves in one launch."""
        with self._stream.use():
            leaves = stage(op, inputs, outputs, self.size)
            self._exchange(call, _launches(leaves), self._group.launch, timeout)
            for leaf in leaves:
                leaf.complete(self.size)

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce, and let each replica update all of the copy that its GPU holds."""

        def combine(everyone: Sequence[Any]) -> Any:
            prepared = prepare()
            settle(self._group.streams)  # It opens what every replica updates on its own GPU.
            self._group.launch(everyone)
            return prepared

        with self._stream.use():
            totals = [array_namespace(source).empty_like(source) for source in inputs]
            leaves = stage(op, inputs, totals, self.size)
            self._group.drain(self.rank, call, timeout)
            prepared = self._exchange(call, _launches(leaves), combine, timeout)
            for index, leaf in enumerate(leaves):
                leaf.complete(self.size)
                update(prepared, index, 0, leaf.output.size, leaf.output)
        self.merge(call, None, _nothing, timeout)
        return prepared

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join everyone's rows; the last to arrive knows how many, and allocates for all."""
        return self._exchange(call, inputs, self._group.gather, timeout)[self.rank]

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy from the root's GPU."""
        launches = [
            Launch("broadcast", (address(b), address(b), b.nbytes, "NCCL_UINT8", root))
            for b in buffers
            if b.size
        ]
        self._exchange(call, launches, self._group.launch, timeout)

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits on the host; what is on the GPUs ends by itself."""
        self._group.rendezvous.abort(cause)


class _Group:
    """What the replicas share: where they meet, their streams, and the NCCL communicators."""

    def __init__(self, rendezvous: Rendezvous, streams: Sequence[Stream]) -> None:
        self.rendezvous = rendezvous
        self.streams = tuple(streams)
        self._comms: list[Any] = []
        # Also at exit, while CUDA still works; a communicator must not outlive it.
        weakref.finalize(self, _each, self._comms, "destroy")

    def connect(self) -> None:
        """Make the communicators, one for each GPU."""
        nccl = _nccl()
        devices = [stream.device.index for stream in self.streams]
        try:
            self._comms[:] = nccl.NcclCommunicator.initAll(devices)
        except nccl.NcclError as error:
            raise WorkerLostError(
                f"NCCL can not connect the GPUs {devices}: {error}. To do without NCCL, pass "
                "cross_device_ops=nd.HierarchicalCopyAllReduce()."
            ) from error

    def launch(self, everyone: Sequence[Sequence[Launch]]) -> None:
        """Enqueue each replica's launches in its stream, all of them or none."""
        if not any(everyone):
            return
        if not self._comms:
            self.connect()
        nccl = _nccl()
        calls = [
            functools.partial(getattr(comm, method), *_named(nccl, args), stream.pointer)
            for comm, stream, launches in zip(self._comms, self.streams, everyone, strict=True)
            for method, args in launches
        ]
        with self._disconnecting_on_failure():
            nccl.groupStart()
            try:
                for enqueue in calls:
                    enqueue()
            finally:
                nccl.groupEnd()

    def gather(self, everyone: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Allocate and launch an all-gather of matrices; return what each replica gets."""
        leaves = list(zip(*everyone, strict=True))
        joined: list[list[Array]] = []
        launches: list[list[Launch]] = []
        for rank, stream in enumerate(self.streams):
            with stream.use():
                wholes = [_room_for(parts) for parts in leaves]
            joined.append(wholes)
            launches.append([])
            for parts, whole in zip(leaves, wholes, strict=True):
                sizes = [part.nbytes for part in parts]
                addresses = address(parts[rank]), address(whole)
                launches[rank] += gather_launches(sizes, rank, *addresses)
        self.launch(launches)
        return joined

    def drain(self, rank: int, call: Call, timeout: float) -> None:
        """Wait until a replica's GPU has done what stands in its stream."""
        deadline = time.monotonic() + timeout
        pause, longest = _POLL_SECONDS
        while not _is_done(self.streams[rank]):
            with self._disconnecting_on_failure():
                for comm in self._comms[rank : rank + 1]:
                    comm.check_async_error()
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(
                        f"{call.title}: the GPU of replica {rank} did not finish its work in "
                        f"{timeout:g} s. Work that takes longer needs "
                        "CommunicationOptions(timeout_seconds=...).",
                        rank=rank,
                        op=call.kind,
                        sequence=call.sequence,
                    )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    @contextlib.contextmanager
    def _disconnecting_on_failure(self) -> Iterator[None]:
        """Give the communicators up on an error, and their kernels; the next launch connects."""
        try:
            yield
        except BaseException as error:
            _each(self._comms, "abort")
            if isinstance(error, _nccl().NcclError):
                raise WorkerLostError(f"NCCL failed: {error}") from error
            raise


def _launches(leaves: Sequence[Leaf]) -> list[Launch]:
    return [launch for leaf in leaves for launch in leaf.launches]


def _named(nccl: Any, args: Sequence[int | str]) -> list[int]:
    return [getattr(nccl, arg) if isinstance(arg, str) else arg for arg in args]


def _room_for(parts: Sequence[Array]) -> Array:
    rows = sum(len(part) for part in parts)
    return array_namespace(parts[0]).empty((rows, *parts[0].shape[1:]), parts[0].dtype)


def _nothing(_: Sequence[Any]) -> None:
    return None


def _each(comms: list[Any], method: str) -> None:
    # Two replicas may find a failure at once: each communicator is popped, and ended, by one.
    with contextlib.suppress(IndexError):
        while True:
            getattr(comms.pop(0), method)()


def _is_done(stream: Stream) -> bool:
    import cupy

    with stream.use():
        return bool(cupy.cuda.get_current_stream().done)


@functools.cache
def _nccl() -> Any:
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
