"""What gRPC runs when a call comes: it finds a handler by the call's name and token alone.

gRPC's module is handed in, since it is optional and ``rpc.py`` alone knows it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ndistribute.cluster.wire.guard import INTRODUCTIONS, UnknownSessionError
from ndistribute.cluster.wire.service import FAR, Service
from ndistribute.cluster.wire.session import Session
from ndistribute.cluster.wire.tensors import MalformedError
from ndistribute.cluster.wire.transport import NoRoomError, TransferLostError, UnreachableError
from ndistribute.errors import AuthenticationError

__all__ = ["CODES", "PREFIX", "TOKEN", "Handlers"]

PREFIX = "/ndistribute/"
TOKEN = "token-bin"
# The first that fits is what a caller is told; the names are gRPC's.
CODES: tuple[tuple[type[Exception], str], ...] = (
    (UnknownSessionError, "FAILED_PRECONDITION"),
    (AuthenticationError, "UNAUTHENTICATED"),
    (MalformedError, "INVALID_ARGUMENT"),
    (NoRoomError, "RESOURCE_EXHAUSTED"),
    (TransferLostError, "ABORTED"),
    (UnreachableError, "UNAVAILABLE"),
    (Exception, "DATA_LOSS"),  # gRPC itself never says so: a fault of this package.
)
_log = logging.getLogger("ndistribute")


class Handlers:
    """Find what runs a call, by its name and token alone."""

    def __init__(self, grpc: ModuleType, service: Service) -> None:
        self._grpc = grpc
        self._service = service
        self._lock = threading.Lock()
        self._stays: set[Callable[[None], None]] = set()  # Each ends the lifeline of a client.

    def service(self, details: Any) -> Any:
        """Return gRPC's handler of a call; None turns it down."""
        method = details.method.removeprefix(PREFIX)
        token = next((value for key, value in details.invocation_metadata if key == TOKEN), b"")
        if method in INTRODUCTIONS:
            # As if a stream of messages came: so nobody waits for one that a stranger holds back.
            return self._grpc.stream_unary_rpc_method_handler(
                lambda messages, context: self._answer(
                    context, lambda seconds: self._service.guard.introduce(method, token)
                )
            )
        try:
            session, counter = self._service.guard.admit(method, token)
        except AuthenticationError:
            return None

        def run(body: bytes, context: Any) -> bytes:
            run = functools.partial(self._service.run, session, method, counter, body, door=FAR)
            return self._answer(context, lambda seconds: b"".join(run(seconds)))

        if method == "Stay":
            return self._grpc.unary_stream_rpc_method_handler(_Stay(self, session, run))
        return self._grpc.unary_unary_rpc_method_handler(run)

    def stay(self, session: Session, end: Callable[[None], None], context: Any) -> None:
        """Keep the lifeline of a client, until one of the two ends it."""
        with self._lock:
            self._stays.add(end)
        if not context.add_callback(lambda: self._ended(session, end)):
            self._ended(session, end)

    def close(self) -> None:
        """End all lifelines."""
        with self._lock:
            stays, self._stays = self._stays, set()
        for end in stays:
            end(None)

    def _ended(self, session: Session, end: Callable[[None], None]) -> None:
        with self._lock:
            self._stays.discard(end)
        self._service.lifelines.ended(session, sure=False)

    def _answer(self, context: Any, run: Callable[[float], bytes]) -> bytes:
        seconds = context.time_remaining()
        try:
            return run(3600.0 if seconds is None else seconds)
        except Exception as error:
            code = next(code for kind, code in CODES if isinstance(error, kind))
            if code == "DATA_LOSS":
                _log.exception("a call failed")
            context.set_code(getattr(self._grpc.StatusCode, code))
            context.set_details(f"{error}"[:2048])
            return b""


class _Stay:
    """Begin a client's lifeline, in gRPC's manner of calls that hold no thread while they last."""

    experimental_non_blocking = True

    def __init__(
        self, handlers: Handlers, session: Session, check: Callable[[bytes, Any], bytes]
    ) -> None:
        self._handlers = handlers
        self._session = session
        self._check = check

    def __call__(
        self, body: bytes, context: Any, send_response_callback: Callable[[None], None]
    ) -> None:
        if self._check(body, context):
            self._handlers.stay(self._session, send_response_callback, context)
        else:
            send_response_callback(None)
