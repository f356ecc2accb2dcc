"""Carries calls between processes by gRPC: the only file that knows it.

Calls are unary and their messages are bytes, so nothing is generated or compiled. A call that no
session admits is turned down before its message is awaited: strangers hold no thread and no
memory, however much they send.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from ndistribute.cluster.wire.certificates import name_of_certificate
from ndistribute.cluster.wire.guard import UnknownSessionError
from ndistribute.cluster.wire.near_server import NearServer
from ndistribute.cluster.wire.rpc_handlers import CODES, PREFIX, TOKEN, Handlers
from ndistribute.cluster.wire.service import Service
from ndistribute.cluster.wire.tensors import PART_BYTES, Buffer
from ndistribute.cluster.wire.transport import MAXIMUM_BODY_BYTES, UnreachableError
from ndistribute.errors import AuthenticationError, DistributeError, MissingDependencyError
from ndistribute.transport.listener import listen
from ndistribute.transport.tls import TlsFiles, tls_context

__all__ = ["GrpcServer", "GrpcTransport"]

_THREADS = 64  # Half of them may hold calls that wait for others, see Service.
_CALLS = (
    2048  # Those that clients keep open as long as they live are among them, and wait for none.
)
_CONNECT_SECONDS = 5.0
_STAY_SECONDS = 86400.0  # Then a lifeline is renewed.
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAXIMUM_BODY_BYTES),
    ("grpc.max_send_message_length", MAXIMUM_BODY_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # Else two servers share a port, and each gets half of the calls.
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_metadata_size", 4096),
    ("grpc.absolute_max_metadata_size", 8192),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
_CLIENT_OPTIONS = [
    *_OPTIONS,
    # A server that is stopped, or a host that is gone, is noticed while a call waits for it. What
    # became of its clients a server finds out by their silence.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 100),
]
_ERRORS: dict[str, type[Exception]] = {
    **{code: error for error, code in CODES},
    "UNIMPLEMENTED": UnknownSessionError,
    "DEADLINE_EXCEEDED": TimeoutError,
    "DATA_LOSS": DistributeError,
}


def _grpc() -> ModuleType:
    try:
        return importlib.import_module("grpc")
    except ImportError as error:
        raise MissingDependencyError(
            "Parameter servers are reached by gRPC, which is not installed: "
            "pip install 'ndistribute[ps]'"
        ) from error


class GrpcServer:
    """Listen at an address for the calls of a service; it is up when this returns.

    Args:
        service: what answers; closing this server closes it.
        address: ``host:port``, where to listen and nowhere else; port 0 means any free one.
        tls: this process's certificate, where the job uses TLS.
        near: whether clients of this host are to find a socket of the host besides.

    Raises:
        AuthenticationError: a TLS file is not what it should be.
        OSError: this process cannot listen there; it says why, and what to do.
    """

    def __init__(
        self, service: Service, address: str, tls: TlsFiles | None = None, *, near: bool = True
    ) -> None:
        grpc = _grpc()
        with listen(address) as probe:  # gRPC would not say what is wrong with an address.
            host, port = probe.getsockname()[:2]
        self._service = service
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ndistribute ps")
        self._handlers = Handlers(grpc, service)
        patience = ("grpc.keepalive_time_ms", int(2000 * service.silence_seconds))
        self._server = grpc.server(
            self._pool,
            handlers=[self._handlers],
            options=[*_SERVER_OPTIONS, patience],
            maximum_concurrent_rpcs=_CALLS,
        )
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self._server.add_insecure_port(where)
            else:
                self._server.add_secure_port(where, _server_credentials(grpc, tls))
        except RuntimeError as error:
            self._pool.shutdown(wait=False)
            raise OSError(f"cannot listen at {where}: another program took the port.") from error
        self.port = int(port)
        self._near = NearServer(service) if near and sys.platform == "linux" else None
        self._server.start()

    def close(self, timeout: float = 5.0) -> None:
        """Send away who waits and give the port back; a second call does nothing."""
        self._service.close(timeout)
        self._handlers.close()
        if self._near is not None:
            self._near.close(timeout)
        self._server.stop(grace=min(1.0, timeout)).wait(timeout=timeout)
        self._pool.shutdown(wait=False, cancel_futures=True)


class GrpcTransport:
    """Carry calls to the server at an address.

    Args:
        address: ``host:port``.
        tls: this process's certificate, where the job uses TLS.

    Raises:
        MissingDependencyError: gRPC is not installed.
    """

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        self._grpc = _grpc()
        self.address = address
        self.part_bytes = PART_BYTES
        self._tls = tls
        self._lock = threading.Lock()
        self._closed = False
        self._channel: Any = None
        self._methods: dict[str, Any] = {}

    def call(self, method: str, token: bytes, body: Sequence[Buffer], timeout: float) -> bytes:
        """Make a call: with one thread switch less than to begin it and wait."""
        call = self._method(method, timeout)
        try:
            answer: bytes = call(b"".join(body), timeout, metadata=((TOKEN, token),))
            return answer
        except self._grpc.RpcError as error:
            raise _translated(method, error) from None
        except ValueError as error:  # Another thread closed the channel in the meantime.
            raise UnreachableError(f"{error}.") from error

    def start(self, method: str, token: bytes, body: Sequence[Buffer], timeout: float) -> _Pending:
        """Begin a call."""
        call = self._method(method, timeout)
        try:
            future = call.future(b"".join(body), timeout, metadata=((TOKEN, token),))
        except ValueError as error:
            raise UnreachableError(f"{error}.") from error
        return _Pending(self._grpc, method, future)

    def stay(self, token: bytes, body: Sequence[Buffer], ended: Callable[[], None]) -> _Pending:
        """Begin the call that lasts as long as this client."""
        call = self._method("Stay", _CONNECT_SECONDS)
        try:
            stream = call(b"".join(body), _STAY_SECONDS, metadata=((TOKEN, token),))
        except ValueError as error:
            raise UnreachableError(f"{error}.") from error
        stream.add_done_callback(lambda _: ended())
        return _Pending(self._grpc, "Stay", stream)

    def close(self) -> None:
        """Give up what is on its way."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
            self._methods.clear()
        if channel is not None:
            channel.close()

    def _method(self, name: str, timeout: float) -> Any:
        with self._lock:
            if self._closed:
                raise UnreachableError("The transport is closed.")
            if self._channel is None:
                self._channel = self._connected(timeout)
            if name not in self._methods:
                kind = "unary_stream" if name == "Stay" else "unary_unary"
                self._methods[name] = getattr(self._channel, kind)(PREFIX + name)
            return self._methods[name]

    def _connected(self, timeout: float) -> Any:
        if self._tls is None:
            return self._grpc.insecure_channel(self.address, options=_CLIENT_OPTIONS)
        # Processes move among hosts, so certificates name none, and gRPC insists on a name: it is
        # given the one that the server's certificate has. What counts is who signed it.
        name = name_of_certificate(self.address, self._tls, timeout)
        key, chain, root = _read(self._tls)
        credentials = self._grpc.ssl_channel_credentials(root, key, chain)
        options = [*_CLIENT_OPTIONS, ("grpc.ssl_target_name_override", name)]
        return self._grpc.secure_channel(self.address, credentials, options=options)


class _Pending:
    """Stand for a call that gRPC carries."""

    def __init__(self, grpc: ModuleType, method: str, future: Any) -> None:
        self._grpc = grpc
        self._method = method
        self._future = future

    def result(self, timeout: float) -> bytes:
        """Return the answer."""
        try:
            body: bytes = self._future.result(
                timeout=timeout + 1.0
            )  # gRPC's own deadline is first.
            return body
        except self._grpc.FutureTimeoutError as error:
            raise TimeoutError(f"{self._method} took more than {timeout:.1f} s") from error
        except self._grpc.FutureCancelledError as error:
            raise UnreachableError("the call was cancelled.") from error
        except self._grpc.RpcError as error:
            raise _translated(self._method, error) from None

    def has_ended(self) -> bool:
        """Say whether the call ended."""
        return bool(self._future.done())

    def cancel(self) -> None:
        """Wait for it no more."""
        with contextlib.suppress(Exception):
            self._future.cancel()


def _translated(method: str, error: Any) -> Exception:
    """Return what the server said in gRPC's terms in ours."""
    code, details = error.code().name, str(error.details())
    if code == "UNIMPLEMENTED" and method == "Greet":
        return AuthenticationError(
            "Another program than a server of this job has the port: it speaks gRPC, and not "
            "of this. Check the addresses of the job."
        )
    return _ERRORS.get(code, UnreachableError)(details)


def _server_credentials(grpc: ModuleType, tls: TlsFiles) -> Any:
    tls_context(tls, server=True)  # What is wrong with the files is said now, and clearly.
    key, chain, root = _read(tls)
    return grpc.ssl_server_credentials([(key, chain)], root, require_client_auth=True)


def _read(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    return Path(tls.key).read_bytes(), Path(tls.cert).read_bytes(), Path(tls.ca).read_bytes()
