"""Carries calls to a server of this host, through a socket of the host.

Faster than a network by far: a call costs two switches between processes, and what is long goes in
one piece. That this is the right server, and the right client, the seals of the calls prove, as
everywhere; this makes sure besides that no other user of the host is at the other end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ndistribute.cluster.wire.near_line import PART_BYTES, Line
from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.transport import UnreachableError

__all__ = ["NearTransport", "near_wanted"]

_MOST_LINES = 32
_CONNECT_SECONDS = 5.0


def near_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether processes of one host are to meet at a socket of the host.

    >>> near_wanted({}), near_wanted({"NDISTRIBUTE_NEAR": "0"})
    (True, False)
    """
    environ = os.environ if environ is None else environ
    return environ.get("NDISTRIBUTE_NEAR", "1") != "0"


class NearTransport:
    """Carry calls to a server of this host.

    Args:
        address: the name of the socket, as the server told it.

    Raises:
        UnreachableError: no process of this host and user listens there.
    """

    def __init__(self, address: bytes) -> None:
        self.address = address.decode(errors="replace")
        self.part_bytes = PART_BYTES
        self._name = address
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._idle.append(self._connected(time.monotonic() + _CONNECT_SECONDS))

    @property
    def is_crowded(self) -> bool:
        """Say whether as many calls are on their way as may be."""
        return len(self._busy) >= _MOST_LINES

    def call(self, method: str, token: bytes, body: Sequence[Buffer], timeout: float) -> Buffer:
        """Make a call."""
        return self.start(method, token, body, timeout).result(timeout)

    def call_for_file(
        self, method: str, token: bytes, body: Sequence[Buffer], timeout: float
    ) -> tuple[Buffer, int | None]:
        """Make a call whose answer may bring a descriptor, which is the caller's then."""
        return self.start(method, token, body, timeout).result_and_file(timeout)

    def start(self, method: str, token: bytes, body: Sequence[Buffer], timeout: float) -> _Pending:
        """Begin a call."""
        deadline = time.monotonic() + timeout
        line = self._borrowed(deadline)
        try:
            line.request(method, token, body, timeout, deadline)
        except BaseException:
            self.drop(line)
            raise
        return _Pending(self, line)

    def stay(self, token: bytes, body: Sequence[Buffer], ended: Callable[[], None]) -> _Pending:
        """Begin the call that lasts as long as this client; ``ended`` is never called."""
        return self.start("Stay", token, body, _CONNECT_SECONDS)

    def close(self) -> None:
        """Give up what is on its way; those who wait for it close what they hold."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for line in self._busy:
                line.hang_up()
        for line in idle:
            line.close()

    def _borrowed(self, deadline: float) -> Line:
        with self._lock:
            if self._closed:
                raise UnreachableError("The transport is closed.")
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
        line = self._connected(deadline)
        with self._lock:
            if not self._closed:
                self._busy.add(line)
                return line
        line.close()
        raise UnreachableError("The transport is closed.")

    def _connected(self, deadline: float) -> Line:
        try:
            line = Line(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError as error:  # Too many open files.
            raise UnreachableError(f"{error}.") from error
        try:
            line.connect(self._name, deadline)
            if not line.of_this_user:
                raise UnreachableError("Another user of this host has the server's socket.")
        except BaseException:
            line.close()
            raise
        return line

    def give_back(self, line: Line) -> None:
        """Keep a connection, whose call was answered, for the next one."""
        with self._lock:
            self._busy.discard(line)
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    def drop(self, line: Line) -> None:
        """End a connection on which an answer may come yet."""
        with self._lock:
            self._busy.discard(line)
            line.close()


class _Pending:
    """Stand for a call on a connection of its own."""

    def __init__(self, transport: NearTransport, line: Line) -> None:
        self._transport = transport
        self._line = line

    def result(self, timeout: float) -> Buffer:
        """Return the answer."""
        try:
            answer = self._line.receive_answer(time.monotonic() + timeout)
        except BaseException:
            self.cancel()
            raise
        self._transport.give_back(self._line)
        return answer

    def result_and_file(self, timeout: float) -> tuple[Buffer, int | None]:
        """Return the answer, and the descriptor that came with it."""
        try:
            answer = self._line.receive_answer(time.monotonic() + timeout)
            file = self._line.take_file()
        except BaseException:
            self.cancel()
            raise
        self._transport.give_back(self._line)
        return answer, file

    def has_ended(self) -> bool:
        """Say whether the server is gone, or answered what has no answer."""
        return self._line.has_ended()

    def cancel(self) -> None:
        """Wait for it no more."""
        self._transport.drop(self._line)
