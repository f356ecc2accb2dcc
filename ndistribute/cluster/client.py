"""A client of one server: opens its session, cuts what is long, and asks again what got lost.

To ask again is safe: a change carries an origin, under which the server makes it once. So a server
that is killed and comes back on its address is to its clients no more than slow, up to the
deadline that each call has.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ndistribute.cluster.conversation import Conversation
from ndistribute.cluster.guard import UnknownSessionError
from ndistribute.cluster.replies import Reply, decode_reply
from ndistribute.cluster.requests import Request, encode_request
from ndistribute.cluster.rpc import GrpcTransport
from ndistribute.cluster.service import covered_bytes
from ndistribute.cluster.tensors import Buffer, MalformedError
from ndistribute.cluster.transfers import Limits, Pieces
from ndistribute.cluster.transport import (
    NoRoomError,
    TransferLostError,
    Transport,
    UnreachableError,
)
from ndistribute.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from ndistribute.trust.secret import find_secret
from ndistribute.trust.tls import tls_files

__all__ = ["Client", "connect"]

_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # Seconds before asking again; the last one repeats.
_FAREWELL_SECONDS = 1.0
_PASSING = (UnreachableError, UnknownSessionError, NoRoomError, TransferLostError)


def connect(
    address: str,
    name: str,
    *,
    audience: str = "",
    timeout: float = 60.0,
    environ: Mapping[str, str] = os.environ,
) -> Client:
    """Return a client of the server at an address, which need not be up yet.

    Args:
        address: ``host:port``.
        name: what this process is, such as ``"worker:1"``; something random is appended, since a
            process that is started again is another client.
        audience: which server it should be, such as ``"ps:0"``; empty: any of the job.
        timeout: seconds that a call may take, unless it has its own.
        environ: where the secret and the TLS files are named.

    Raises:
        AuthenticationError: there is no secret.
        MissingDependencyError: gRPC is not installed.
    """
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
    ) -> None:
        self.name = name
        self.address = transport.address
        self._transport = transport
        self._audience = audience
        self._timeout = timeout
        self._beat = beat_seconds
        self._limits = limits or Limits()
        most = self._limits.message_bytes
        self._conversation = Conversation(transport, secret, name, audience, most)
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._live, name=f"ndistribute {name}", daemon=True)
        self._heart.start()

    @property
    def server(self) -> bytes:
        """Return the incarnation of the server last spoken to, empty before the first call.

        A server that was started again is another incarnation.
        """
        session = self._conversation.session
        return session.server if session else b""

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

    def call(self, message: Sequence[Buffer], timeout: float | None = None) -> memoryview:
        """Return what the server answers to a message; see ``request``."""
        pieces, start = Pieces(message), time.monotonic()
        if not 0 < len(pieces) <= self._limits.message_bytes:
            raise ValueError(
                f"A message of {len(pieces)} bytes: the limit is {self._limits.message_bytes}."
            )
        covered = covered_bytes(message, len(pieces))
        deadline = start + (self._timeout if timeout is None else timeout)
        pauses = iter(_PAUSES)
        problem: Exception | None = None
        while True:
            try:
                answer = self._conversation.ask(pieces, covered, deadline)
                if answer is not None:
                    return answer
                problem, pause = None, _PAUSES[0]
            except (*_PASSING, TimeoutError) as error:
                # That time ran out while it tried once more says less than why it tried again.
                if not (isinstance(error, TimeoutError) and isinstance(problem, UnreachableError)):
                    problem = error
                pause = next(pauses, _PAUSES[-1])
            pause = min(pause, deadline - time.monotonic())
            if pause <= 0 or self._closing.wait(timeout=pause):
                raise self._gave_up(problem, time.monotonic() - start) from problem

    def close(self) -> None:
        """Say good-bye to the server, and hold nothing any more; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._heart.join(timeout=_FAREWELL_SECONDS)
        try:
            if self._conversation.session is not None:
                self._conversation.tell("Leave", time.monotonic() + _FAREWELL_SECONDS)
        except (DistributeError, MalformedError, TimeoutError):
            pass  # The server is gone, and so it needs no good-bye.
        finally:
            self._transport.close()

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
        while not self._closing.wait(timeout=self._beat):
            if self._conversation.session is not None:
                deadline = time.monotonic() + max(self._beat, _FAREWELL_SECONDS)
                try:
                    self._conversation.tell("Ping", deadline)
                except (DistributeError, MalformedError, TimeoutError):
                    continue  # The next call of this client says what is wrong.

    def _gave_up(self, problem: Exception | None, seconds: float) -> DistributeError:
        who = f"{self._audience or 'the server'} at {self.address}"
        if self._closing.is_set():
            return WorkerLostError(f"This client of {who} was closed while a call was on its way.")
        if isinstance(problem, UnreachableError):
            return WorkerLostError(
                f"{self.name} did not reach {who} in {seconds:.1f} s: {problem} Check that it "
                "runs, and that both use TLS or neither; a longer timeout waits for its return."
            )
        if isinstance(problem, UnknownSessionError):
            return AuthenticationError(f"{who} let {self.name} in and knew it no more: {problem}")
        why = f": {problem}" if problem is not None and str(problem) else ""
        return CollectiveTimeoutError(f"{who} did not answer {self.name} in {seconds:.1f} s{why}.")
