"""The backend for replicas on distinct GPUs, of one or several processes: NCCL through CuPy.

The replicas of a process meet on the host, and the last to arrive launches the kernels of all of
them: all GPUs of the process get their kernels, or none does. Other processes may make a different
call or none, and NCCL's kernels would wait for them. So the processes compare their calls on the
host while the GPUs work, and then wait for the GPUs. A failure on one process aborts the kernels on
all processes. The arguments of NCCL calls are computed first as plain data, which needs neither a
GPU nor CuPy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.collective.backend import Arrays, Backend, Begin, Call, Combine, T, Update
from ndistribute.collective.control_plane import ControlPlane, WaitMonitor
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish, reduce_arrays
from ndistribute.collective.step_tracker import BEFORE_ALL
from ndistribute.collective.threads import Rendezvous
from ndistribute.collective.workers import Workers
from ndistribute.devices import Array, array_namespace, nccl_module
from ndistribute.errors import CollectiveTimeoutError, MissingDependencyError, WorkerLostError
from ndistribute.stream import Stream, settle
from ndistribute.timeline import span

_log = logging.getLogger("ndistribute")

_POLL_SECONDS = (10e-6, 200e-6)  # the first pause and the longest: short waits end promptly
_CONNECT_SECONDS = 120.0  # to connect the GPUs of one process, when a strategy is made
_END_SECONDS = 2.0  # NCCL may wait for other processes, which may be lost.


def make_nccl_backends(
    rendezvous: Rendezvous, streams: Sequence[Stream], workers: Workers | None = None
) -> list[NcclBackend]:
    """Return the backends of this process's replicas in one NCCL group with all other replicas.

    The GPUs of several processes connect at the first collective.

    Raises:
        MissingDependencyError: CuPy or NCCL is not installed.
        WorkerLostError: NCCL cannot connect the GPUs.
    """
    group = _Group(rendezvous, streams, workers)
    if workers is None:
        group.connect(Call(0, "connect", timeout=_CONNECT_SECONDS))
    return [NcclBackend(group, index) for index in range(len(streams))]


# NCCL's types for NumPy's dtypes; integers wrap in the same way in wider types.
_ELEMENTS = {name: name for name in "int8 uint8 int32 uint32 int64 uint64 float32 float64".split()}
_ELEMENTS |= {"bool": "uint8", "int16": "int32", "uint16": "uint32"}
_ELEMENTS |= {"complex64": "float32", "complex128": "float64"}
# NumPy's sum and product of booleans are `or` and `and`.
_OF_BOOLEANS = {"SUM": "MAX", "PROD": "MIN"}
_REFUSED = {"f": ("MIN", "MAX"), "c": ("MIN", "MAX", "PROD")}

# A method of a communicator and its arguments without the stream; constants are names.
Launch = tuple[str, *tuple[int | str, ...]]
Launches = Sequence[Sequence[Launch]]  # The launches of each replica.


class Wire(NamedTuple):
    """How NCCL reduces an array: cast to `dtype`, as `words` values of type `elements` per item."""

    dtype: np.dtype[Any]
    elements: str
    words: int
    op: str


def reduction_wire(op: ReduceOp, dtype: Any) -> Wire | None:
    """Return the type and the operation with which NCCL computes the same as NumPy.

    None means that each replica must gather and reduce by itself. NCCL has no products, minima and
    maxima of complex numbers. Its minima and maxima of floats ignore NaN, unlike NumPy's.

    >>> reduction_wire(ReduceOp.SUM, np.float16)
    Wire(dtype=dtype('float32'), elements='NCCL_FLOAT32', words=1, op='NCCL_SUM')
    >>> reduction_wire(ReduceOp.PROD, np.bool_)
    Wire(dtype=dtype('bool'), elements='NCCL_UINT8', words=1, op='NCCL_MIN')
    """
    wide = accumulation_dtype(op, dtype)
    name = "SUM" if op is ReduceOp.MEAN else op.name
    if wide.name not in _ELEMENTS or name in _REFUSED.get(wide.kind, ()):
        return None
    elements = _ELEMENTS[wide.name]
    if wide.kind == "b":
        name = _OF_BOOLEANS.get(name, name)
    elif wide.kind in "iu":
        wide = np.dtype(elements)
    words = 2 if wide.kind == "c" else 1
    return Wire(wide, f"NCCL_{elements.upper()}", words, f"NCCL_{name}")


def gather_launches(nbytes: Sequence[int], rank: int, source: int, target: int) -> list[Launch]:
    """Return one rank's launches of an all-gather; with unequal sizes, a broadcast per rank.

    `nbytes` has the bytes that each rank contributes; `source` and `target` are addresses.

    >>> gather_launches([8, 0, 4], rank=2, source=500, target=100)
    [('broadcast', 100, 100, 8, 'NCCL_UINT8', 0), ('broadcast', 500, 108, 4, 'NCCL_UINT8', 2)]
    """
    if not any(nbytes):
        return []
    if len(set(nbytes)) == 1:
        return [("allGather", source, target, nbytes[0], "NCCL_UINT8")]
    starts = itertools.accumulate(nbytes, initial=target)
    return [
        ("broadcast", source if root == rank else start, start, count, "NCCL_UINT8", root)
        for root, (start, count) in enumerate(zip(starts, nbytes, strict=False))
        if count
    ]


def _stage(
    op: ReduceOp, source: Array, output: Array, size: int
) -> tuple[list[Launch], Callable[[], None]]:
    """Return the launches of a reduction over `size` replicas, and a function that completes it.

    All memory is allocated here, so no replica can fail between the meeting and the launch.
    """
    wire = reduction_wire(op, source.dtype)
    if wire is None:
        parts = array_namespace(source).empty((size, source.size), source.dtype)
        launches = gather_launches([source.nbytes] * size, 0, _address(source), _address(parts))
        return launches, lambda: reduce_arrays(op, list(parts), out=output)
    cast = source.astype(wire.dtype, copy=False)
    total = output if output.dtype == wire.dtype else cast
    count = cast.size * wire.words
    launch = "allReduce", _address(cast), _address(total), count, wire.elements, wire.op

    # This keeps `cast` alive: a launch has only its address.
    def complete(kept: Array = cast) -> None:
        finish(op, total, size)
        if total is not output:
            output[...] = total

    return [launch] if count else [], complete


def _address(array: Array) -> int:
    return int(array.data.ptr)


class NcclBackend(Backend):
    """The backend of one replica on a GPU.

    NCCL chooses the order of sums: all replicas hold the same bits, but a sum in replica order may
    have other bits.
    """

    def __init__(self, group: _Group, index: int) -> None:
        self.rank = group.first + index
        self.size = group.size
        self._group, self._index = group, index
        self._stream = group.streams[index]
        self.device = self._stream.device
        self._exchange = functools.partial(group.rendezvous.exchange, index)

    def abort(self, cause: BaseException) -> None:
        self._group.abort(cause)

    def close(self) -> None:
        self._group.close()

    def merge(self, call: Call, value: Any, combine: Combine[T]) -> T:
        """Run `combine` once, after the GPUs have finished the work of all replicas."""

        def settled(values: Sequence[Any]) -> T:
            combined = combine(values)
            settle(self._group.streams)  # Other streams may use the result at once.
            return combined

        self._group.drain([self._index], call)
        return self._exchange(call, value, settled)

    def all_reduce(
        self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp, begin: Begin | None = None
    ) -> Any:
        """Reduce all leaves in one launch; then run `begin` once, and return its result."""
        launch = functools.partial(self._group.launch, call, begin=begin)
        with self._stream.use():
            with span("pack", call.title):
                pairs = zip(inputs, outputs, strict=True)
                staged = [_stage(op, source, output, self.size) for source, output in pairs]
            launches = [launch for leaf, _ in staged for launch in leaf]
            prepared = self._exchange(call, launches, launch)
            for _, complete in staged:
                complete()
        return prepared

    def reduce_update(self, call: Call, inputs: Arrays, op: ReduceOp, update: Update) -> Any:
        """Reduce; each replica updates the whole copy on its GPU."""
        with self._stream.use():
            totals = [array_namespace(source).empty_like(source) for source in inputs]
            prepared = self.all_reduce(call, inputs, totals, op, update.begin)
            with span("update", call.title):
                for leaf, total in enumerate(totals):
                    update.apply(prepared, leaf, 0, total.size, total)
        self.merge(call, None, lambda _: None)
        return prepared

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        """Concatenate the rows of all replicas; the last to arrive allocates memory for all."""
        gather = functools.partial(self._group.gather, call)
        return self._exchange(call, inputs, gather)[self._index]

    def broadcast(self, call: Call, buffers: Arrays, root: int) -> None:
        """Copy from the root's GPU."""
        places = [(_address(buffer), buffer.nbytes) for buffer in buffers if buffer.size]
        launches = [("broadcast", at, at, size, "NCCL_UINT8", root) for at, size in places]
        self._exchange(call, launches, functools.partial(self._group.launch, call))


class _Group:
    """The state that the replicas of one process share: rendezvous, streams and communicators.

    With one process, a launch returns when it is enqueued in the replicas' streams. With several
    processes, it returns when the GPUs are done and all processes have made the same call. After
    each recovery of the processes, the GPUs connect again.
    """

    def __init__(
        self, rendezvous: Rendezvous, streams: Sequence[Stream], workers: Workers | None
    ) -> None:
        self.rendezvous = rendezvous
        self.streams = tuple(streams)
        self._peers = None if workers is None else workers.peers
        self._host = None if workers is None else workers.backend
        counts = (len(streams),) if workers is None else workers.replica_counts
        self.first = sum(counts[: workers.rank]) if workers is not None else 0
        self.size = sum(counts)
        self._generation = 0
        self._comms = _Communicators(b"", (), 0, 0)  # Nothing is connected.
        # The function that ends the communicators, with a deadline.
        self.close: Callable[[], Any] = lambda: None

    def launch(
        self, call: Call, everyone: Launches, begin: Begin | None = None, compared: bool = False
    ) -> Any:
        """Enqueue each replica's launches in its stream, all of them or none.

        `begin` runs after the reduction, so that a failure changes no variable. `compared` is
        True if the calls of all processes have been compared.
        """
        deadline = time.monotonic() + call.timeout
        with self._guarded():
            if not self._is_connected:
                # NCCL must not wait for a process that makes a different call.
                if not compared:
                    self._compare(call)
                self.connect(_rest(call, deadline))
                compared = True
            if any(everyone):
                self._comms.enqueue(everyone)
            # If the calls differ, the kernels wait or mix up data until they are aborted; nobody
            # has used their results, and the inputs are unchanged.
            if not compared:
                self._compare(_rest(call, deadline))
            if self._peers is not None or begin is not None:
                with span("reduce", call.title):
                    self.drain(range(len(self.streams)), _rest(call, deadline))
            if begin is None:
                return None
            prepared = begin()
            settle(self.streams)
            return prepared

    def gather(self, call: Call, everyone: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Allocate and launch an all-gather of matrices; return the results of each replica."""
        deadline = time.monotonic() + call.timeout
        joined: list[list[Array]] = [[] for _ in everyone]
        launches: list[list[Launch]] = [[] for _ in everyone]
        with self._guarded():
            counts = np.array([[len(rows) for rows in matrix] for matrix in everyone], np.int64)
            if self._host is not None:  # This also compares the calls.
                (counts,) = self._host.all_gather(call, [counts])
            for index, matrices in enumerate(everyone):
                for matrix, rows in zip(matrices, counts.T.tolist(), strict=True):
                    with self.streams[index].use():
                        shape = sum(rows), matrix.shape[1]
                        whole = array_namespace(matrix).empty(shape, matrix.dtype)
                    sizes = [count * matrix.shape[1] * matrix.dtype.itemsize for count in rows]
                    part = sizes, self.first + index, _address(matrix), _address(whole)
                    launches[index] += gather_launches(*part)
                    joined[index].append(whole)
            self.launch(_rest(call, deadline), launches, compared=True)
        return joined

    def drain(self, indices: Sequence[int], call: Call) -> None:
        """Wait until these replicas' streams are done."""
        with self._guarded():
            check = self._watch(call)
            for index in indices:
                pause, longest = _POLL_SECONDS
                while not self.streams[index].is_done:
                    self._comms.check(index)
                    check()
                    time.sleep(pause)
                    pause = min(2 * pause, longest)

    def abort(self, cause: BaseException) -> None:
        """Make the waits of all replicas and processes raise, and abort their kernels."""
        self.rendezvous.abort(cause)
        if self._peers is not None:  # Otherwise the kernels end by themselves.
            self._disconnect(cause)

    def connect(self, call: Call) -> None:
        """Connect the GPUs of all processes; all processes call this together."""
        self._comms.end("abort")  # These are communicators of an earlier generation.
        self.close()
        peers, check = self._peers, self._watch(call)
        unique_id = b"" if peers is not None and peers.rank else _make_unique_id()
        if peers is not None:
            self._generation = peers.generation
            # A key per generation, because an earlier exchange may have failed halfway.
            key = f"nccl {peers.generation}"
            unique_id = peers.exchange(key, unique_id, call.timeout)[0]
        comms = _Communicators(unique_id, self.streams, self.first, self.size)
        # Also at exit, while CUDA still works.
        self.close = weakref.finalize(self, _end_orderly, comms, peers)
        self._comms = comms
        comms.connect(check)

    @property
    def _is_connected(self) -> bool:
        """Return True if the GPUs are connected, which is the same in all processes."""
        current = self._peers is None or self._generation == self._peers.generation
        return current and bool(self._comms.open)

    def _compare(self, call: Call) -> None:
        """Compare the calls of all processes in a reduction on the host."""
        if self._host is not None:
            nothing = np.zeros(1, np.int8)
            self._host.all_reduce(call, [nothing], [nothing.copy()], ReduceOp.SUM)

    def _watch(self, call: Call) -> Callable[[], None]:
        """Return a function that raises if a process failed or the deadline has passed."""
        deadline = time.monotonic() + call.timeout
        if self._peers is not None:
            patience = WaitMonitor(self._peers, call)
            return lambda: patience.check(tuple)  # No rank is missing: all have launched.

        def check() -> None:
            if time.monotonic() > deadline:
                what = f"the GPUs did not finish within {call.timeout:g} s."
                how = "Work that takes longer needs CommunicationOptions(timeout_seconds=...)."
                raise call.error(CollectiveTimeoutError, f"{what} {how}")

        return check

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """If the call fails, abort it on all processes and GPUs."""
        try:
            if self._peers is not None:
                self._peers.check()
            yield
        except BaseException as error:
            self._disconnect(error)
            raise

    def _disconnect(self, cause: BaseException) -> None:
        """Abort the communicators; the next launch connects the GPUs again."""
        if self._peers is not None:
            # This comes first, also for processes in an earlier call: NCCL may need all processes
            # to abort.
            self._peers.abort(cause, after=BEFORE_ALL)
        self._comms.end("abort")


class _Communicators(threading.Thread):
    """A thread that connects this process's GPUs with all other GPUs, and ends the communicators.

    NCCL waits without a deadline for the other processes when it connects and when it ends. So both
    happen on this thread, and callers wait for it with a deadline. If a connection is made after
    the deadline, the thread ends it. The thread lives as long as the communicators, because no
    thread can start at exit.
    """

    def __init__(self, unique_id: bytes, streams: Sequence[Stream], first: int, size: int) -> None:
        super().__init__(name="ndistribute-nccl", daemon=True)
        self.open: Sequence[Any] = ()  # One per stream while connected.
        self._group = unique_id, streams, first, size
        self._error: BaseException | None = None
        self._mutex = threading.Lock()  # Held while NCCL uses `open`.
        self._is_connected = threading.Event()
        self._endings: queue.SimpleQueue[str] = queue.SimpleQueue()  # The first error counts.

    def connect(self, check: Callable[[], None]) -> None:
        """Wait until the GPUs are connected, or `check` raises."""
        self.start()
        try:
            while not self._is_connected.wait(timeout=0.005):
                check()
        except BaseException:
            self.end("abort")
            raise
        if self._error is not None:
            gpus = ", ".join(str(stream.device) for stream in self._group[1])
            raise WorkerLostError(
                f"NCCL cannot connect {gpus} with the other GPUs: {self._error}. NCCL_DEBUG=INFO "
                "says more; to do without NCCL, pass nd.HierarchicalCopyAllReduce() or, where "
                "there are several workers, CommunicationOptions(implementation='ring')."
            ) from self._error

    def enqueue(self, everyone: Launches) -> None:
        """Enqueue the launches of all GPUs in their streams, as one NCCL group."""
        library = nccl_module()
        with self._mutex, _failures_named():
            if not self.open:
                raise WorkerLostError("NCCL was aborted: another replica or worker failed.")
            library.groupStart()
            try:
                for comm, stream, launches in zip(self.open, self._group[1], everyone, strict=True):
                    for method, *args in launches:
                        values = [getattr(library, a) if isinstance(a, str) else a for a in args]
                        getattr(comm, method)(*values, stream.pointer)
            finally:
                library.groupEnd()

    def check(self, index: int) -> None:
        """Raise the asynchronous error of a GPU's communicator, if any."""
        with self._mutex, _failures_named():
            for comm in self.open[index : index + 1]:
                comm.check_async_error()

    def end(self, how: str) -> None:
        """Destroy or abort the communicators; stop waiting if NCCL takes too long."""
        # The abort releases a thread that hangs in NCCL with the mutex.
        held = self._mutex.acquire(timeout=_END_SECONDS)
        self.open = ()
        self._endings.put(how)
        if held:
            self._mutex.release()
        # A finalizer may call this method on the thread itself.
        if self._is_connected.is_set() and threading.current_thread() is not self:
            self.join(timeout=_END_SECONDS)
            if self.is_alive():
                _log.warning("NCCL takes more than %g s to %s", _END_SECONDS, how)

    def run(self) -> None:
        unique_id, streams, first, size = self._group
        comms: list[Any] = []
        try:
            # NCCL needs a group here, because each communicator waits for all others.
            nccl_module().groupStart()
            try:
                for rank, stream in enumerate(streams, first):
                    with stream.use():
                        comms.append(_make_communicator(size, unique_id, rank))
            finally:
                nccl_module().groupEnd()
        except BaseException as error:
            self._error = error
            self._endings.put("abort")
        with self._mutex:
            if self._endings.empty():
                self.open = comms
        self._is_connected.set()
        how = self._endings.get()
        for comm in comms:
            getattr(comm, how)()


def _end_orderly(comms: _Communicators, peers: ControlPlane | None) -> None:
    # Destroying needs all processes; processes of a broken group may have aborted.
    comms.end("destroy" if peers is None or peers.cause is None else "abort")


def _make_unique_id() -> bytes:
    """Return the unique id with which all processes connect."""
    with _failures_named():
        # CuPy 14 returns bytes; CuPy 13 a tuple of C's chars, which may be negative.
        return bytes(char % 256 for char in nccl_module().get_unique_id())


def _make_communicator(size: int, unique_id: bytes, rank: int) -> Any:
    """Return a communicator on the current device, for any version of CuPy."""
    chars = struct.unpack(f"{len(unique_id)}b", unique_id)
    for form in (unique_id, chars, tuple(unique_id)):  # CuPy 14; CuPy 13 on x86 and on Arm
        with contextlib.suppress(TypeError, OverflowError):
            return nccl_module().NcclCommunicator(size, form, rank)
    raise MissingDependencyError("this CuPy has an unknown form of NCCL's ids: use CuPy 13 or 14.")


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    """Raise errors of NCCL as `WorkerLostError`."""
    # CuPy raises KeyError for newer error numbers of NCCL.
    try:
        yield
    except (nccl_module().NcclError, KeyError) as error:
        raise WorkerLostError(f"NCCL failed: {error}") from error


def _rest(call: Call, deadline: float) -> Call:
    """Return a call that waits until the deadline; messages round its seconds up to tenths."""
    left = math.ceil(10 * (deadline - time.monotonic())) / 10
    return call._replace(timeout=max(0.0, left))
