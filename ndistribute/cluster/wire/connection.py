"""A client's session with a server: how it is opened, by what it goes, and what keeps it alive.

A session begins over the network. The server then tells by a sealed call where it listens for
clients of its own host, and who gets through there goes that way from then on; who does not stays
with the network. Last the client makes a call that has no end as long as it lives.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from ndistribute.cluster.wire.bodies import read_answer, request_body
from ndistribute.cluster.wire.guard import UnknownSessionError
from ndistribute.cluster.wire.near import NearTransport
from ndistribute.cluster.wire.opened import Opened, Sent
from ndistribute.cluster.wire.session import Introduction, Session
from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.transport import Envelope, Transport, UnreachableError

__all__ = ["Connection"]

_NOTHING = Envelope(0, 0, 0, 0)


class Connection:
    """Make calls of one server, in a session that is opened when it is needed.

    Args:
        transport: what carries calls to begin with, wherever the server is.
        secret: the job's secret.
        name: no other client of the server has it.
        audience: which server it should be; empty: any of the job.
        near: whether to go by a socket of this host where the server is here.
        on_end: called, by any thread, when the server may believe that this client died.
    """

    def __init__(
        self,
        transport: Transport,
        secret: bytes,
        name: str,
        audience: str,
        near: bool,
        on_end: Callable[[], None],
    ) -> None:
        self.last_server = b""
        """The incarnation of the server last spoken to; empty before the first call."""
        self._transport = transport
        self._secret = secret
        self._name = name
        self._audience = audience
        self._near = near
        self._on_end = on_end
        self._opening, self._lock = threading.Lock(), threading.Lock()
        self._opened: Opened | None = None
        self._former: list[Opened] = []
        self._shunned = b""  # The incarnation to which the way near did not work.

    @property
    def server(self) -> bytes:
        """Return the incarnation of the server; empty without a session, or when it is gone.

        That it is gone the system tells at once where it is on this host.
        """
        opened = self._opened
        if opened is None:
            return b""
        gone = opened.near is not None and opened.lifeline and opened.lifeline.has_ended()
        return b"" if gone else opened.session.server

    @property
    def is_open(self) -> bool:
        """Say whether there is a session."""
        return self._opened is not None

    @property
    def is_near(self) -> bool:
        """Say whether calls go by a socket of this host."""
        opened = self._opened
        return opened is not None and opened.near is not None

    def opened(self, deadline: float) -> Opened:
        """Return the session, a new one where the server knows none."""
        opened = self._opened
        if opened is not None:
            return opened
        if not self._opening.acquire(timeout=left_until(deadline)):
            raise TimeoutError("the server did not let this client in so far")
        try:
            return self._opened or self._open(deadline)
        finally:
            self._opening.release()

    def exchange(
        self,
        opened: Opened,
        road: Transport,
        method: str,
        envelope: Envelope,
        deadline: float,
        covered: bytes = b"",
        others: Sequence[Buffer] = (),
    ) -> tuple[Envelope, memoryview]:
        """Make a call, and return what its answer carries.

        Raises:
            Exception: those of a ``Transport``.
        """
        session = opened.session
        token, counter, body = request_body(session, method, envelope, covered, others)
        try:
            answer = road.call(method, token, body, left_until(deadline))
        except Exception as error:
            self._notice(opened, road, error)
            raise
        opened.near_served |= road is opened.near
        return read_answer(session, method, counter, answer)

    def begin(
        self,
        opened: Opened,
        road: Transport,
        method: str,
        envelope: Envelope,
        deadline: float,
        others: Sequence[Buffer] = (),
    ) -> Sent:
        """Make a call of which the answer is awaited later, by ``end``."""
        token, counter, body = request_body(opened.session, method, envelope, b"", others)
        try:
            pending = road.start(method, token, body, left_until(deadline))
        except Exception as error:
            self._notice(opened, road, error)
            raise
        return Sent(pending, opened, road, method, counter, deadline)

    def end(self, sent: Sent) -> tuple[Envelope, memoryview]:
        """Return what the answer to a call carries."""
        try:
            body = sent.pending.result(left_until(sent.deadline))
        except Exception as error:
            self._notice(sent.opened, sent.road, error)
            raise
        return read_answer(sent.opened.session, sent.method, sent.counter, body)

    def tell(self, method: str, deadline: float) -> None:
        """Make a call that has nothing to carry; a first one opens the session."""
        opened = self.opened(deadline)
        self.exchange(opened, opened.road, method, _NOTHING, deadline)

    def tend(self, deadline: float) -> None:
        """Tell the server that this client lives, and renew what would tell that it does not."""
        opened = self.opened(deadline)
        self.exchange(opened, opened.road, "Ping", _NOTHING, deadline)
        if opened.lifeline_ended.is_set():
            opened.lifeline_ended.clear()
            self._stay(opened)

    def shared_file(self, deadline: float) -> int | None:
        """Return a new descriptor of the server's shared memory, where there is one to be had."""
        opened = self.opened(deadline)
        near = opened.near
        if near is None:
            return None
        token, counter, body = request_body(opened.session, "File", _NOTHING)
        try:
            answer, file = near.call_for_file("File", token, body, left_until(deadline))
        except Exception as error:
            self._notice(opened, near, error)
            raise
        try:
            read_answer(opened.session, "File", counter, answer)
        except BaseException:
            if file is not None:
                os.close(file)
            raise
        return file

    def close(self) -> None:
        """Hold nothing any more; the transport is closed too."""
        self._transport.close()  # First: it ends the wait of who opens a session just now.
        with self._opening, self._lock:
            opened, self._opened = self._opened, None
            former, self._former = self._former, []
        for one in (*former, *filter(None, [opened])):
            one.close()

    def _open(self, deadline: float) -> Opened:
        session = self._introduced(deadline)
        opened = Opened(session, self._transport)
        try:
            if self._near and session.server != self._shunned:
                opened.near = self._found_near(opened, deadline)
            self._stay(opened)
        except BaseException:
            opened.close()
            raise
        with self._lock:
            self.last_server, self._opened = session.server, opened
            former, self._former = self._former, []
        for one in former:  # Only now, lest the server takes the end of a lifeline for a death.
            one.close()
        return opened

    def _introduced(self, deadline: float) -> Session:
        def ask(method: str, token: bytes) -> bytes:
            return bytes(self._transport.call(method, token, (), left_until(deadline)))

        introduction = Introduction(self._secret, self._name, self._audience)
        challenge = ask("Greet", introduction.greeting)
        return introduction.finish(ask("Prove", introduction.prove(challenge)))

    def _found_near(self, opened: Opened, deadline: float) -> NearTransport | None:
        _, address = self.exchange(opened, opened.far, "Near", _NOTHING, deadline)
        try:
            return NearTransport(bytes(address)) if len(address) else None
        except (UnreachableError, TimeoutError):
            return None  # It is on another host, in another container, or of another user.

    def _stay(self, opened: Opened) -> None:
        """Begin the call that lasts as long as this client."""

        def ended() -> None:
            opened.lifeline_ended.set()
            if opened is self._opened:
                self._on_end()

        token, _, body = request_body(opened.session, "Stay", _NOTHING)
        opened.lifeline = opened.road.stay(token, body, ended)

    def _notice(self, opened: Opened, road: Transport, error: Exception) -> None:
        """Open a session anew after a call that failed, where that may help."""
        unreached = isinstance(error, UnreachableError) and road is opened.near
        if not unreached and not isinstance(error, UnknownSessionError):
            return
        with self._lock:
            if unreached and not opened.near_served:  # The server has no room for more that way.
                self._shunned = opened.session.server
            if self._opened is opened:
                self._opened = None
                self._former.append(opened)


def left_until(deadline: float) -> float:
    """Return the seconds until a deadline, some even when it has passed."""
    return max(0.001, deadline - time.monotonic())
