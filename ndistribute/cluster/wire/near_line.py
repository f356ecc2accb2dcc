"""One end of a connection between two processes of a host, and how calls are framed on it.

A request is a frame of fixed size that says how long the rest is: the method's name, the token and
the body; an answer is a frame, and the body or what went wrong. The body of a long request does not
follow: it lies in memory that the client shares. A connection carries one call at a time, so that
nobody waits behind another's, and a client uses as many as it has calls on their way.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ndistribute.cluster.wire.guard import UnknownSessionError
from ndistribute.cluster.wire.near_socket import NearSocket
from ndistribute.cluster.wire.near_tray import ReceiverTray, SenderTray
from ndistribute.cluster.wire.pieces import nbytes_of
from ndistribute.cluster.wire.tensors import HEAD_LIMIT_BYTES, Buffer, MalformedError
from ndistribute.cluster.wire.transport import NoRoomError, TransferLostError, UnreachableError
from ndistribute.errors import AuthenticationError, DistributeError

__all__ = ["LARGEST_BODY", "PART_BYTES", "Call", "Line"]

PART_BYTES = 64 << 20
LARGEST_BODY = PART_BYTES + HEAD_LIMIT_BYTES + 65536
# Magic, bytes of method and of token, whether the body is laid, seconds, bytes of the body.
_REQUEST = struct.Struct("<4sBB?xdQ")
_ANSWER = struct.Struct("<4sB3xQ")  # magic, which error or none, bytes of the body
_MAGIC = b"NDN1"
_FIRST_BYTES = 65536  # Read at once: most calls come with one look.
# The place in the list is the number on the wire, from 1; the last stands for any other.
_ERRORS: tuple[type[Exception], ...] = (
    UnknownSessionError,
    AuthenticationError,
    MalformedError,
    NoRoomError,
    TransferLostError,
    UnreachableError,
    DistributeError,
)


class Call(NamedTuple):
    """A call whose body has not been read yet."""

    method: str
    token: bytes
    seconds: float
    start: int
    nbytes: int
    laid: bool


class Line(NearSocket):
    """Send and receive calls on a connected socket; one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._buffer = memoryview(bytearray(_FIRST_BYTES))
        self._filled = 0
        self._sender = SenderTray()
        self._receiver: ReceiverTray | None = None

    def request(
        self, method: str, token: bytes, body: Sequence[Buffer], seconds: float, deadline: float
    ) -> None:
        """Send a call."""
        name = method.encode()
        nbytes = sum(map(nbytes_of, body))
        file = self._sender.lay(body, nbytes) if nbytes > _FIRST_BYTES else None
        laid = file is not None
        head = _REQUEST.pack(_MAGIC, len(name), len(token), laid, seconds, nbytes) + name + token
        self.send([head] if laid else [head, *body], deadline, None if file == -1 else file)

    def answer(self, body: Sequence[Buffer], file: int | None = None) -> None:
        """Send the answer to a call, and with it a descriptor where there is one."""
        head = _ANSWER.pack(_MAGIC, 0, sum(map(nbytes_of, body)))
        self.send([head, *body], math.inf, file)

    def refuse(self, error: Exception) -> None:
        """Send what went wrong with a call."""
        kind = next((k for k, kind in enumerate(_ERRORS) if isinstance(error, kind)), -1)
        text = f"{error}".encode()[:2048]
        self.send([_ANSWER.pack(_MAGIC, kind % len(_ERRORS) + 1, len(text)), text], math.inf)

    def receive_call(self, deadline: float) -> Call:
        """Return the next call, of which all but the body is here.

        Raises:
            MalformedError: what came is none.
            UnreachableError: the connection ended.
            TimeoutError: nothing came in time.
        """
        self._fill(_REQUEST.size, deadline)
        magic, name, token, laid, seconds, nbytes = _REQUEST.unpack_from(self._buffer)
        start = _REQUEST.size + name + token
        if magic != _MAGIC or nbytes > LARGEST_BODY or not 0.0 <= seconds < math.inf:
            raise MalformedError(f"No call begins like this, or a body of {nbytes} bytes.")
        self._fill(start, deadline)
        if self._filled > start + (0 if laid else nbytes):
            raise MalformedError("More came than one call.")
        words = self._buffer[_REQUEST.size : start]
        method = bytes(words[:name]).decode(errors="replace")
        return Call(method, bytes(words[name:]), seconds, start, nbytes, laid)

    def receive_body(self, call: Call) -> Buffer:
        """Return the body of a call that is welcome; it may change once that is answered."""
        if not call.laid:
            return self._rest(call.start, call.nbytes, math.inf)
        self._filled = 0
        file = self.take_file()
        if file is not None:
            try:
                self._receiver = ReceiverTray(file)
            finally:
                os.close(file)
        if self._receiver is None:
            raise MalformedError("A body lies in memory that did not come.")
        return self._receiver.read(call.nbytes)

    def skip_body(self, call: Call) -> None:
        """Read the body of a call that is not welcome, and keep nothing of it."""
        left = 0 if call.laid else call.nbytes - (self._filled - call.start)
        while left > 0:
            left -= self.receive(self._buffer[: min(left, len(self._buffer))], math.inf)
        self._filled = 0

    def receive_answer(self, deadline: float) -> Buffer:
        """Return the answer to the call that was sent, or raise what went wrong with it."""
        self._fill(_ANSWER.size, deadline)
        magic, kind, nbytes = _ANSWER.unpack_from(self._buffer)
        if magic != _MAGIC or kind > len(_ERRORS) or nbytes > LARGEST_BODY:
            raise MalformedError(f"No answer begins like this, or one of {nbytes} bytes.")
        body = self._rest(_ANSWER.size, nbytes, deadline)
        if kind:
            raise _ERRORS[kind - 1](bytes(body).decode(errors="replace"))
        return body

    def wait_for_end(self) -> None:
        """Return when the other end is gone, or says anything."""
        with contextlib.suppress(UnreachableError):
            self.receive(self._buffer[:1], math.inf)

    def close(self) -> None:
        """Hold nothing any more."""
        super().close()
        self._sender.close()
        self._receiver = None

    def _rest(self, start: int, nbytes: int, deadline: float) -> Buffer:
        """Return what follows in a frame, of which the first may be here already."""
        here, self._filled = self._filled - start, 0
        if here == nbytes:
            return bytes(self._buffer[start : start + nbytes])
        if here > nbytes:
            raise MalformedError("More came than one answer.")
        data = np.empty(nbytes, np.uint8).data
        data[:here] = self._buffer[start : start + here]
        while here < nbytes:
            here += self.receive(data[here:], deadline, socket.MSG_WAITALL)
        return data

    def _fill(self, nbytes: int, deadline: float) -> None:
        while self._filled < nbytes:
            self._filled += self.receive_with_file(self._buffer[self._filled :], deadline)
