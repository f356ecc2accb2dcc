"""Serves clients of this host through a socket of the host, whose random name a client is told.

Only processes of this user come in, and those who are told the name, by a call that is sealed. One
who says nothing, or nothing that a session admits, is sent away soon. Each connection has a
thread, which waits in the system for the next call and runs it itself: so a call costs two
switches between processes and none between threads.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import threading
import time

from ndistribute.cluster.wire.near_line import PART_BYTES, Call, Line
from ndistribute.cluster.wire.service import Door, Service
from ndistribute.cluster.wire.session import Session
from ndistribute.cluster.wire.tensors import Buffer
from ndistribute.cluster.wire.transport import NoRoomError
from ndistribute.errors import AuthenticationError, DistributeError

__all__ = ["NearServer"]

FIRST_CALL_SECONDS = 5.0
MAXIMUM_STRANGERS = 64
MAXIMUM_CONNECTIONS = 1024
_BACKLOG = 128
_PAUSE_SECONDS = 0.1  # When this process can open no more files.
_SMALL_BYTES = 65536
_THREAD = "ndistribute near"
_NEAR = Door(PART_BYTES, shares_threads=False)
_log = logging.getLogger("ndistribute")


class NearServer:
    """Listen for the clients of a service on this host; it is up when this returns.

    Args:
        service: what answers, and what tells clients the name; closed by others, and before this.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._lines: dict[Line, Session | None] = {}  # None: it has not shown a token yet.
        self._threads: set[threading.Thread] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"\0ndistribute-{secrets.token_hex(16)}".encode()  # No file: nothing to remove.
        self._listener.bind(address)
        self._listener.listen(_BACKLOG)
        self._accepting = threading.Thread(
            target=self._accept, name="ndistribute near", daemon=True
        )
        self._accepting.start()
        service.on_leave = self._hang_up
        service.near_address = address

    def close(self, timeout: float = 5.0) -> None:
        """End all connections; a second call does nothing."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            threads = [self._accepting, *self._threads]
            for line in self._lines:
                line.hang_up()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._listener.close()
        self._service.on_leave = lambda session, died: None

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # It is closed, or there are too many open files.
                self._closing.wait(timeout=_PAUSE_SECONDS)
                continue
            try:
                self._welcome(Line(sock))
            except Exception:
                sock.close()
                _log.exception("a connection of this host could not be served")

    def _welcome(self, line: Line) -> None:
        """Give a connection a thread, where there is room for one more."""
        with self._lock:
            strangers = sum(session is None for session in self._lines.values())
            room = strangers < MAXIMUM_STRANGERS and len(self._lines) < MAXIMUM_CONNECTIONS
            if not room or not line.of_this_user or self._closing.is_set():
                line.close()
                return
            thread = threading.Thread(target=self._serve, args=(line,), name=_THREAD, daemon=True)
            self._lines[line] = None
            self._threads.add(thread)
            thread.start()

    def _serve(self, line: Line) -> None:
        try:
            while self._one_call(line):
                pass
        except (DistributeError, TimeoutError, ValueError):
            pass  # The other end is gone, or does not speak like a client.
        except Exception:
            _log.exception("a connection of this host failed")
        finally:
            with self._lock:
                del self._lines[line]
                self._threads.discard(threading.current_thread())
                line.close()

    def _one_call(self, line: Line) -> bool:
        """Answer the next call; say whether there may be more."""
        known = self._lines[line]
        patience = math.inf if known else time.monotonic() + FIRST_CALL_SECONDS
        call = line.receive_call(patience)
        try:
            session, counter = self._service.guard.admit(call.method, call.token)
        except AuthenticationError as error:
            line.refuse(error)
            return False
        if known is None:
            with self._lock:
                self._lines[line] = known = session
        if known is not session:
            return False
        try:
            body = self._body(line, call)
            answer = self._service.run(session, call.method, counter, body, call.seconds, _NEAR)
            file = self._service.shared_file() if call.method == "File" else None
        except Exception as error:
            if not isinstance(error, DistributeError | ValueError):
                _log.exception("a call failed")
            line.refuse(error)
            return True
        if call.method == "Stay":
            self._stay(line, session)
            return False
        line.answer(answer, file)
        return True

    def _body(self, line: Line, call: Call) -> Buffer:
        """Return the body of a call, where there is room for it."""
        if call.nbytes <= _SMALL_BYTES:
            return line.receive_body(call)
        try:
            with self._service.inbox.room(call.nbytes):
                return line.receive_body(call)
        except NoRoomError:
            line.skip_body(call)
            raise

    def _stay(self, line: Line, session: Session) -> None:
        """Wait for the end of a client, which the system tells by its connection's."""
        line.wait_for_end()
        if not self._closing.is_set():
            self._service.lifelines.ended(session, sure=True)

    def _hang_up(self, session: Session, died: bool) -> None:
        """End the connections of a session that ended; its farewell may yet be answered."""
        with self._lock:
            for line, owner in self._lines.items():
                if owner is session:
                    line.hang_up(both_ways=died)
