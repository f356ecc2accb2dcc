"""A client of one server: opens its session, cuts what is long, and asks again what got lost.

To ask again is safe: a change carries an origin, under which the server makes it once. So a server
that is killed and comes back on its address is to its clients no more than slow, up to the
deadline that each call has.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ndistribute.cluster.protocol.replies import Reply, decode_reply
from ndistribute.cluster.protocol.requests import Request, encode_request
from ndistribute.cluster.wire.connection import Connection
from ndistribute.cluster.wire.conversation import Conversation
from ndistribute.cluster.wire.giving_up import gave_up
from ndistribute.cluster.wire.guard import UnknownSessionError
from ndistribute.cluster.wire.near import near_wanted
from ndistribute.cluster.wire.pieces import Pieces
from ndistribute.cluster.wire.rpc import GrpcTransport
from ndistribute.cluster.wire.service import covered_bytes
from ndistribute.cluster.wire.tensors import Buffer, MalformedError
from ndistribute.cluster.wire.transfers import Limits
from ndistribute.cluster.wire.transport import (
    NoRoomError,
    TransferLostError,
    Transport,
    UnreachableError,
)
from ndistribute.errors import DistributeError
from ndistribute.transport.secret import find_secret
from ndistribute.transport.tls import tls_files

__all__ = ["Client", "connect"]

_PAUSES = (0.01, 0.02, 0.05, 0.1)  # Seconds before asking again; the last one repeats.
_FAREWELL_SECONDS = 1.0
_SILENT_SECONDS = 5.0  # After so long a wait for a server its user wants to know of it.
_log = logging.getLogger("ndistribute")
_PASSING = (UnreachableError, UnknownSessionError, NoRoomError, TransferLostError)


def connect(
    address: str,
    name: str,
    *,
    audience: str = "",
    timeout: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> Client:
    """Return a client of the server at an address, which need not be up yet.

    Args:
        address: ``host:port``.
        name: what this process is, such as ``"worker:1"``; something random is appended, since a
            process that is started again is another client.
        audience: which server it should be, such as ``"ps:0"``; empty: any of the job.
        timeout: seconds that a call may take, unless it has its own.
        environ: where the secret and the TLS files are named, and whether a server of this host
            is reached by a socket of the host (``NDISTRIBUTE_NEAR=0``: it is not).

    Raises:
        AuthenticationError: there is no secret.
        MissingDependencyError: gRPC is not installed.
    """
    environ = os.environ if environ is None else environ
    secret = find_secret([address], environ)
    transport = GrpcTransport(address, tls_files(environ))
    beat = float(environ.get("NDISTRIBUTE_HEARTBEAT_SECONDS", "10")) / 4
    return Client(
        transport,
        secret,
        f"{name}#{secrets.token_hex(6)}",
        audience=audience,
        timeout=timeout,
        beat_seconds=beat,
        near=near_wanted(environ),
    )


class Client:
    """Ask a server, from any number of threads at once.

    Args:
        transport: what carries the calls; the client closes it.
        secret: the job's secret.
        name: no other client of the server has it.
        audience: which server it should be; empty: any of the job.
        timeout: seconds that a call may take, unless it has its own.
        beat_seconds: how often the server hears that this client lives.
        limits: the longest message.
        near: whether to go by a socket of this host where the server is here.
    """

    def __init__(
        self,
        transport: Transport,
        secret: bytes,
        name: str,
        *,
        audience: str = "",
        timeout: float = 60.0,
        beat_seconds: float = 2.5,
        limits: Limits | None = None,
        near: bool = True,
    ) -> None:
        self.name = name
        self.address = transport.address
        self._who = f"{audience or 'the server'} at {self.address}"
        self._timeout = timeout
        self._beat = beat_seconds
        self._limits = limits or Limits()
        self._closing, self._wake = threading.Event(), threading.Event()
        self._connection = Connection(transport, secret, name, audience, near, self._wake.set)
        self._conversation = Conversation(self._connection, self._limits.message_bytes)
        self._heart = threading.Thread(target=self._live, name=f"ndistribute {name}", daemon=True)
        self._heart.start()

    @property
    def server(self) -> bytes:
        """Return the incarnation of the server; empty without a session with it.

        A server that was started again is another incarnation. Of one on this host that is gone
        there is none from that moment on, whether or not this client calls it.
        """
        return self._connection.server

    @property
    def is_near(self) -> bool:
        """Say whether calls go by a socket of this host."""
        return self._connection.is_near

    def request(self, request: Request, timeout: float | None = None) -> Reply:
        """Return what the server replies; it may be a ``Failure``.

        Args:
            request: one of ``requests``.
            timeout: seconds that it may take.

        Raises:
            AuthenticationError: client and server do not belong to one job.
            CollectiveTimeoutError: the server is there, and did not answer in time.
            WorkerLostError: the server was not reached in time.
            ValueError: the request or the reply is too long.
        """
        return decode_reply(self.call(encode_request(request), timeout), self._limits.message_bytes)

    def call(
        self, message: Sequence[Buffer], timeout: float | None = None, patience: float = math.inf
    ) -> memoryview:
        """Return what the server answers to a message; see ``request``.

        Args:
            message: in pieces.
            timeout: seconds that it may take.
            patience: for how many of them a server that is not reached is looked for.
        """
        pieces, start = Pieces(message), time.monotonic()
        if not 0 < len(pieces) <= self._limits.message_bytes:
            raise ValueError(
                f"A message of {len(pieces)} bytes: the limit is {self._limits.message_bytes}."
            )
        covered = covered_bytes(message, len(pieces))
        deadline = start + (self._timeout if timeout is None else timeout)
        pauses = iter(_PAUSES)
        problem: Exception | None = None
        missed, told = math.inf, False  # Since when the server is not reached.
        while True:
            try:
                answer = self._conversation.ask(pieces, covered, deadline)
                if answer is not None:
                    return answer
                problem, pause, missed = None, _PAUSES[0], math.inf
            except (*_PASSING, TimeoutError) as error:
                # That time ran out while it tried once more says less than why it tried again.
                if not (isinstance(error, TimeoutError) and isinstance(problem, _PASSING)):
                    problem = error
                pause = next(pauses, _PAUSES[-1])
                away = isinstance(error, UnreachableError)
                missed = min(missed, time.monotonic()) if away else math.inf
                if time.monotonic() - missed > _SILENT_SECONDS and not told:
                    told = True
                    _log.warning("%s waits for %s", self.name, self._who)
            pause = min(pause, min(deadline, missed + patience) - time.monotonic())
            if pause <= 0 or self._closing.wait(timeout=pause):
                gone = self._closing.is_set()
                raise gave_up(self.name, self._who, start, problem, closed=gone) from problem

    def probe(self, timeout: float) -> bool:
        """Say whether the very incarnation of the server last spoken to is there and answers.

        Args:
            timeout: seconds that it has.
        """
        known, deadline = self._connection.last_server, time.monotonic() + timeout
        for _ in range(3):  # By the socket of the host, by the network, in a new session.
            try:
                self._connection.tell("Ping", deadline)
            except (UnreachableError, UnknownSessionError):
                continue
            except (DistributeError, MalformedError, TimeoutError):
                return False
            return known == self.server != b""
        return False

    def shared_file(self, timeout: float | None = None) -> int | None:
        """Return a new descriptor of the server's shared memory, which is the caller's to close.

        Args:
            timeout: seconds that it may take.

        Returns:
            None where the server has none, is not on this host, or does not answer.

        Raises:
            AuthenticationError: client and server do not belong to one job.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        try:
            return self._connection.shared_file(deadline)
        except (*_PASSING, TimeoutError):
            return None

    def close(self) -> None:
        """Say good-bye to the server, and hold nothing any more; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._heart.join(timeout=_FAREWELL_SECONDS)
        try:
            if self._connection.is_open:
                self._connection.tell("Leave", time.monotonic() + _FAREWELL_SECONDS)
        except (DistributeError, MalformedError, TimeoutError):
            pass  # The server is gone, and so it needs no good-bye.
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self) -> None:
        """Let the server hear of this client, in time and whenever it may believe it dead."""
        while not self._closing.is_set():
            if self._wake.wait(timeout=self._beat):
                self._wake.clear()
                # A server that ends lifelines at once does not keep this thread busy.
                self._closing.wait(timeout=_PAUSES[0])
            if self._connection.last_server and not self._closing.is_set():
                try:
                    self._connection.tend(time.monotonic() + max(self._beat, _FAREWELL_SECONDS))
                except (DistributeError, MalformedError, TimeoutError):
                    continue  # The next call of this client says what is wrong.
