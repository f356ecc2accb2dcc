"""An imitation of NCCL between real processes, over sockets and host memory.

It waits where NCCL waits, for ever: for a rank that does not connect, for one that launches
nothing or something else, for one that died. Only `abort` ends that. What is launched is done by
threads that stand for the GPUs, later than the launch returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.collective.fake_nccl import FakeError, FakeNccl

_ID_LENGTH = 128
_LENGTH = struct.Struct("<Q")


class WorldNccl:
    """Play `cupy.cuda.nccl` in one of several processes."""

    NcclError = FakeError
    available = True

    def __init__(self) -> None:
        for name in dir(FakeNccl):
            if name.startswith("NCCL_"):
                setattr(self, name, getattr(FakeNccl, name))
        self.comms: list[WorldComm] = []
        self.launched: list[str] = []
        self.fail_connecting = False
        self.current_device: Callable[[], int] = lambda: 0
        self._group = threading.local()  # As NCCL's groups belong to the thread that starts them.

    def get_unique_id(self) -> tuple[int, ...]:
        """Return an address, as 128 signed bytes, where a thread of this process connects ranks."""
        door = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve, args=(door,), daemon=True).start()
        text = str(door.getsockname()[1]).encode().ljust(_ID_LENGTH, b"\0")
        return struct.unpack(f"{_ID_LENGTH}b", text)

    def NcclCommunicator(  # noqa: N802
        self,
        ndev: int,
        commId: tuple[int, ...],  # noqa: N803
        rank: int,
    ) -> WorldComm:
        assert isinstance(commId, tuple)
        assert len(commId) == _ID_LENGTH
        comm = WorldComm(self, ndev, rank)
        self.comms.append(comm)
        self._group.connecting.append((comm, commId))
        return comm

    def groupStart(self) -> None:  # noqa: N802
        assert not hasattr(self._group, "connecting"), "a group in a group"
        self._group.connecting = []
        self._group.queued = {}

    def groupEnd(self) -> None:  # noqa: N802
        connecting, queued = self._group.connecting, self._group.queued
        del self._group.connecting, self._group.queued
        if connecting and self.fail_connecting:
            raise FakeError("no route to the others")
        for comm, unique_id in connecting:
            comm.knock(unique_id)
        for comm, _ in connecting:
            comm.await_others()
        for comm, calls in queued.items():
            self.launched += [method for method, _ in calls]
            comm.launch(calls)

    def enqueue(self, comm: WorldComm, method: str, args: tuple[Any, ...]) -> None:
        self._group.queued.setdefault(comm, []).append((method, args))

    def is_idle(self) -> bool:
        """Say whether the GPUs of this process have done all that was launched."""
        return all(comm.is_idle for comm in self.comms)


class WorldComm:
    """One rank's communicator, and the GPU that does what it is asked."""

    def __init__(self, world: WorldNccl, ndev: int, rank: int) -> None:
        self.state = "connecting"
        self._failure: str | None = None
        self._world = world
        self._ndev = ndev
        self._rank = rank
        self.device = world.current_device()
        self._line = socket.socket()
        self._gpu: threading.Thread | None = None
        self._aborted = threading.Event()

    @property
    def is_idle(self) -> bool:
        return self._gpu is None or not self._gpu.is_alive()

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method not in ("allReduce", "allGather", "broadcast"):
            raise AttributeError(method)

        def enqueue(*args: Any) -> None:
            assert self.state == "open", f"{method} on a communicator that is {self.state}"
            self._world.enqueue(self, method, args)

        return enqueue

    def knock(self, unique_id: tuple[int, ...]) -> None:
        port = struct.pack(f"{_ID_LENGTH}b", *unique_id).rstrip(b"\0")
        self._line.connect(("127.0.0.1", int(port)))
        _send(self._line, (self._rank, self._ndev))

    def await_others(self) -> None:
        assert _receive(self._line) == "all are here"
        self.state = "open"

    def launch(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        assert self.is_idle, "launched before the last launch was waited for"
        self._gpu = threading.Thread(target=self._work, args=(calls,), daemon=True)
        self._gpu.start()

    def check_async_error(self) -> None:
        assert self.state in ("open", "aborted")
        if self._failure is not None:
            raise FakeError(self._failure)

    def lose_link(self, failure: str | None = None) -> None:
        """Fail what is launched from now on."""
        self._failure = failure
        with contextlib.suppress(OSError):  # One that has ended has no link to lose.
            self._line.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        self.state = "aborted"
        self._aborted.set()
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        if self._gpu is not None:
            self._gpu.join(timeout=30.0)
        self._line.close()

    def await_end(self, seconds: float) -> str:
        """Wait until the communicator was aborted; return its state."""
        self._aborted.wait(timeout=seconds)
        return self.state

    def destroy(self) -> None:
        assert self.is_idle, "destroyed while the GPU works"
        self.state = "destroyed"
        self._line.close()

    def _work(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        try:
            for method, args in calls:
                self._do(method, *args)
        except (OSError, EOFError):
            while not self._aborted.wait(timeout=60.0):
                pass  # A kernel whose peer is gone spins.

    def _do(self, method: str, source: int, target: int, count: int, *rest: Any) -> None:
        dtype, *how = rest[:-1]  # The last one is the stream.
        assert isinstance(rest[-1], int)
        given = ctypes.string_at(source, count * np.dtype(dtype).itemsize)
        _send(self._line, ((method, count, dtype, *how), given))
        result = _receive(self._line)
        ctypes.memmove(target, result, len(result))


def _serve(door: socket.socket) -> None:
    """Connect the ranks and do their reductions, as the wires between the GPUs would."""
    lines: dict[int, socket.socket] = {}
    ndev = 1
    with door, contextlib.suppress(OSError, EOFError):
        while len(lines) < ndev:
            line, _ = door.accept()
            rank, ndev = _receive(line)
            assert rank not in lines, "two ranks of one number"
            lines[rank] = line
        in_order = [lines[rank] for rank in range(ndev)]
        for line in in_order:
            _send(line, "all are here")
        while True:
            heads, parts = zip(*map(_receive, in_order), strict=True)
            if len(set(heads)) > 1:
                _receive(in_order[0])  # Nothing good comes of it: wait until it is aborted.
            for line, result in zip(in_order, _results(heads[0], parts), strict=True):
                _send(line, result)
    for line in lines.values():
        with contextlib.suppress(OSError):
            line.close()


def _results(head: tuple[Any, ...], parts: Sequence[bytes]) -> list[bytes]:
    method, _, dtype, *how = head
    if method == "allGather":
        return [b"".join(parts)] * len(parts)
    if method == "broadcast":
        return [parts[how[0]]] * len(parts)
    total = np.frombuffer(parts[0], dtype).copy()
    for part in parts[1:]:
        how[0](total, np.frombuffer(part, dtype), out=total)
    return [total.tobytes()] * len(parts)


def _send(line: socket.socket, value: Any) -> None:
    payload = pickle.dumps(value)
    line.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(line: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return pickle.loads(_exactly(line, length))


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise EOFError("the other end is gone")
        data += part
    return data
