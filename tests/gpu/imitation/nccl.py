"""Imitated NCCL between GPUs of one process or of several, over sockets and host memory.

It waits where NCCL waits, for ever: for a rank that does not connect, for one that launches
nothing or something else, for one that died. Only `abort` ends that. What is launched is done by
threads that stand for the GPUs; the stream that it stands in is not done before. Where all GPUs are
of one process, it is done when the group ends, for all else that a stream is given is done at once.
"""

import ctypes
import os
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from tests.gpu.imitation.real import check_call
from tests.gpu.imitation.world import current_world

_ID_LENGTH = 128
_LAUNCHES = ("allReduce", "allGather", "broadcast")


class FakeError(RuntimeError):
    """Stands for ``cupy.cuda.nccl.NcclError``."""


class FakeNccl:
    """Play ``cupy.cuda.nccl`` of a CuPy; the constants stand for NumPy's dtypes and functions."""

    available = True
    NcclError = FakeError
    NCCL_SUM, NCCL_PROD, NCCL_MIN, NCCL_MAX = np.add, np.multiply, np.minimum, np.maximum
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32 = np.int8, np.uint8, np.int32, np.uint32
    NCCL_INT64, NCCL_UINT64 = np.int64, np.uint64
    NCCL_FLOAT32, NCCL_FLOAT64 = np.float32, np.float64

    def __init__(self, cupy=14):
        self.cupy = cupy
        self.comms = []
        self.launched = []
        self.environ = {}  # as it was at the first call
        self.fail_connecting = self.fail_launching = ""
        self._doors = []
        self.group = threading.local()  # As NCCL's groups belong to the thread that starts them.

    def get_unique_id(self):
        """Return an address, in 128 chars, where a thread of this process connects ranks."""
        self.environ = self.environ or dict(os.environ)
        door = socket.create_server(("127.0.0.1", 0))
        self._doors.append(door)
        threading.Thread(target=_serve, args=(door,), daemon=True).start()
        text = str(door.getsockname()[1]).encode().ljust(_ID_LENGTH - 1, b"\0") + b"\xff"
        return text if self.cupy >= 14 else struct.unpack(f"{_ID_LENGTH}b", text)

    def NcclCommunicator(self, ndev, commId, rank):  # noqa: N802, N803
        check_call("cuda.nccl.NcclCommunicator", ndev, commId, rank)
        wanted = bytes if self.cupy >= 14 else tuple
        if type(commId) is not wanted:
            raise TypeError(f"Argument 'commId' has incorrect type (expected {wanted})")
        given = commId if isinstance(commId, bytes) else struct.pack(f"{_ID_LENGTH}b", *commId)
        assert len(given) == _ID_LENGTH
        comm = FakeComm(self, ndev, rank, int(given[:-1].rstrip(b"\0")))
        self.comms.append(comm)
        self.group.connecting.append(comm)
        return comm

    def groupStart(self):  # noqa: N802
        assert not hasattr(self.group, "connecting"), "a group in a group"
        self.group.connecting, self.group.queued = [], {}

    def groupEnd(self):  # noqa: N802
        connecting, queued = self.group.connecting, self.group.queued
        del self.group.connecting, self.group.queued
        if connecting and self.fail_connecting:
            for door in self._doors:
                door.shutdown(socket.SHUT_RDWR)
            raise FakeError(self.fail_connecting)
        if queued and self.fail_launching:
            raise FakeError(self.fail_launching)
        for comm in connecting:
            comm.knock()
        for comm in connecting:
            assert comm.line.recv() == "all are here"
            comm.state = "open"
        kernels = []
        for comm, calls in queued.items():
            self.launched += [method for method, _ in calls]
            kernels.append(comm.launch(calls))
        if all(len(kernels) == comm.ndev and not comm.has_lost_link for comm in queued):
            for kernel in kernels:
                kernel.join(timeout=30.0)


class FakeComm:
    """One rank's communicator, and the GPU that does what it is asked."""

    def __init__(self, library, ndev, rank, port):
        self.state = "connecting"
        self.device = current_world().device
        self.failure = None
        self.ndev = ndev
        self.has_lost_link = False
        self._library, self._rank, self._port = library, rank, port
        self.line = None
        self._ended = threading.Event()

    def __getattr__(self, method):
        if method not in _LAUNCHES:
            raise AttributeError(method)

        def enqueue(*args):
            check_call(f"cuda.nccl.NcclCommunicator.{method}", self, *args)
            assert self.state == "open", f"{method} on a communicator that is {self.state}"
            self._library.group.queued.setdefault(self, []).append((method, args))

        return enqueue

    def knock(self):
        self.line = Connection(socket.create_connection(("127.0.0.1", self._port)).detach())
        self.line.send((self._rank, self.ndev))

    def launch(self, calls):
        kernel = threading.Thread(target=self._work, args=(calls,))
        current_world().run_kernel(calls[0][1][-1], kernel)
        return kernel

    def check_async_error(self):
        assert self.state == "open", f"check_async_error while it is {self.state}"
        if self.failure is not None:
            raise FakeError(self.failure)

    def lose_link(self):
        """Let nothing that is launched from now on end, on any rank."""
        for comm in self._library.comms:
            comm.has_lost_link = True
        self._shut()

    def abort(self):
        self._end("aborted")

    def destroy(self):
        self._end("destroyed")

    def await_end(self, seconds):
        """Wait until the communicator was aborted or destroyed; return its state."""
        self._ended.wait(timeout=seconds)
        return self.state

    def _end(self, state):
        self.state = state
        self._ended.set()
        self._shut()
        if self.line is not None:
            self.line.close()

    def _shut(self):
        with suppress(OSError, AttributeError):  # One that has ended has no link to lose.
            link = socket.fromfd(self.line.fileno(), socket.AF_INET, socket.SOCK_STREAM)
            with link:
                link.shutdown(socket.SHUT_RDWR)

    def _work(self, calls):
        try:
            for method, (source, target, count, dtype, *how, _) in calls:
                given = ctypes.string_at(source, count * np.dtype(dtype).itemsize)
                self.line.send(((method, count, dtype, *how), given))
                result = self.line.recv()
                ctypes.memmove(target, result, len(result))
        except (OSError, EOFError, TypeError):  # A closed connection has no number to read from.
            self._ended.wait(timeout=60.0)  # A kernel whose peer is gone spins.


def _serve(door):
    """Connect the ranks and do their reductions, as the links between the GPUs would."""
    lines = {}
    ndev = 1
    with door, suppress(OSError, EOFError):
        while len(lines) < ndev:
            line = Connection(door.accept()[0].detach())
            rank, ndev = line.recv()
            assert rank not in lines, "two ranks of one number"
            lines[rank] = line
        in_order = [lines[rank] for rank in range(ndev)]
        for line in in_order:
            line.send("all are here")
        while True:
            heads, parts = zip(*[line.recv() for line in in_order], strict=True)
            if len(set(heads)) > 1:
                in_order[0].recv()  # Nothing good comes of it: wait until it is aborted.
            for line, result in zip(in_order, _results(heads[0], parts), strict=True):
                line.send(result)
    for line in lines.values():
        line.close()


def _results(head, parts):
    method, _, dtype, *how = head
    if method == "allGather":
        return [b"".join(parts)] * len(parts)
    if method == "broadcast":
        return [parts[how[0]]] * len(parts)
    total = np.frombuffer(parts[0], dtype).copy()
    for part in parts[1:]:
        how[0](total, np.frombuffer(part, dtype), out=total)
    return [total.tobytes()] * len(parts)
