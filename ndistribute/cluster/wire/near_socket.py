"""A connection between two processes of a host: bytes, open files, and waits that end in time."""

from __future__ import annotations

import array
import contextlib
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.transport import UnreachableError

__all__ = ["NearSocket"]

_SOCKET_BYTES = 4 << 20
_LOOK_SECONDS = 1.0  # After so long a wait looks at its deadline; shorter ones cost a call more.
_STEP_SECONDS = 0.02
_TIMEVAL = struct.Struct("@ll")
_PEER = struct.Struct("3i")
_FILE_ROOM = socket.CMSG_SPACE(struct.calcsize("i"))


class NearSocket:
    """Send and receive on a connected socket, which is closed with this; one thread at a time.

    Deadlines are on the clock of ``time.monotonic``; after one that passed ``TimeoutError`` is
    raised, and ``UnreachableError`` once the connection has ended.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._patience = -1.0
        self._file: int | None = None
        sock.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # As far as the host lets it.
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)

    @property
    def of_this_user(self) -> bool:
        """Say whether the process at the other end belongs to this one's user."""
        peer = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return bool(_PEER.unpack(peer)[1] == os.geteuid())

    def connect(self, name: bytes, deadline: float) -> None:
        """Connect to the socket of a name."""
        self._attempt(deadline, self._sock.connect, name)

    def send(self, buffers: Sequence[Buffer], deadline: float, file: int | None = None) -> None:
        """Send buffers one after the other, and with the first bytes a descriptor, if given."""
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        beside = []
        if file is not None:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))]
        while left:
            # The system takes no more than 1024 at once.
            sent: int = self._attempt(deadline, self._sock.sendmsg, left[:512], beside)
            beside = []
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def receive(self, view: memoryview, deadline: float, flags: int = 0) -> int:
        """Receive some bytes, and return how many."""
        return self._some(self._attempt(deadline, self._sock.recv_into, view, 0, flags))

    def receive_with_file(self, view: memoryview, deadline: float) -> int:
        """Receive like ``receive``, and keep a descriptor that comes along for ``take_file``."""
        count, others, *_ = self._attempt(
            deadline, self._sock.recvmsg_into, [view], _FILE_ROOM, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in others:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for file in array.array("i", data[: len(data) - len(data) % 4]):
                    self._drop_file()
                    self._file = file
        return self._some(count)

    def take_file(self) -> int | None:
        """Return the descriptor that came last, which is the caller's then."""
        file, self._file = self._file, None
        return file

    def has_ended(self) -> bool:
        """Say whether the other end is gone, or said anything; any thread may ask."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def hang_up(self, both_ways: bool = True) -> None:
        """End the connection, while another thread may be using it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR if both_ways else socket.SHUT_RD)

    def close(self) -> None:
        """Hold nothing any more."""
        self._sock.close()
        self._drop_file()

    def _drop_file(self) -> None:
        file = self.take_file()
        if file is not None:
            os.close(file)

    @staticmethod
    def _some(count: int) -> int:
        if count == 0:
            raise UnreachableError("the connection ended.")
        return count

    def _attempt(self, deadline: float, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Return what an operation on the socket gives, once it has to wait no more."""
        while True:
            self._look_at(deadline)
            try:
                return operation(*arguments)
            except BlockingIOError:  # It waited as long as it was told to.
                continue
            except OSError as error:
                raise UnreachableError(f"{error}.") from error

    def _look_at(self, deadline: float) -> None:
        """See to it that the next wait is no longer than it may be."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server of this host did not answer in time")
        patience = 0.0
        if left != math.inf:  # In steps, for to tell the system costs more than to wait too long.
            patience = min(math.ceil(left / _STEP_SECONDS) * _STEP_SECONDS, _LOOK_SECONDS)
        if patience != self._patience:
            self._patience = patience
            value = _TIMEVAL.pack(*divmod(math.ceil(patience * 1e6), 1_000_000))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._sock.setsockopt(socket.SOL_SOCKET, option, value)
