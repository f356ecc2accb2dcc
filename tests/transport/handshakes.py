"""Both ends of a handshake over real connections, with somebody between them where wanted."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ndistribute.transport.handshake import TlsFiles, authenticate

SECRET = b"a secret of the job"
WRONG_SECRET = b"a secret of another"
SECONDS = 5.0
GREETING_BYTES = 39


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the accepted and the connecting end of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=SECONDS)
        server, _ = listener.accept()
        server.settimeout(SECONDS)
    with client, server:
        yield server, client


def receive(sock: socket.socket, count: int) -> bytes:
    """Return so many bytes, or fewer where the other end stops."""
    data = b""
    while len(data) < count and (part := sock.recv(count - len(data))):
        data += part
    return data


def outcome(
    sock: socket.socket,
    secret: bytes,
    *,
    server: bool,
    hello: bytes | None = None,
    tls: TlsFiles | None = None,
    seconds: float = SECONDS,
) -> Any:
    """Return the hello that one end got, or its exception."""
    if hello is None:
        hello = b"I serve" if server else b"I join"
    deadline = time.monotonic() + seconds
    try:
        used, theirs = authenticate(sock, secret, hello, server=server, deadline=deadline, tls=tls)
    except Exception as error:
        return error
    used.close()
    return theirs


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what calls return that run at the same time, each on a thread."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return results


def shake(
    server_secret: bytes = SECRET,
    client_secret: bytes = SECRET,
    *,
    server: dict[str, Any] | None = None,
    client: dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Return the outcomes of the accepting and the connecting end."""
    with connection() as (accepted, connected):
        served, joined = at_once(
            lambda: outcome(accepted, server_secret, server=True, **(server or {})),
            lambda: outcome(connected, client_secret, server=False, **(client or {})),
        )
    return served, joined


class Between:
    """Pass bytes on, keep a record of them, and meddle with what one side sends.

    Args:
        side: whose bytes are meddled with, ``"client"`` or ``"server"``.
        cut: after how many bytes the connection is lost.
        flip: the index of a byte that arrives with another value.
    """

    def __init__(self, side: str = "", cut: int | None = None, flip: int | None = None) -> None:
        self._side = side
        self._cut = cut
        self._flip = flip
        self.seen = {"client": b"", "server": b""}

    def shake(self, seconds: float = SECONDS) -> tuple[Any, Any]:
        with connection() as (server, to_server), connection() as (to_client, client):
            served, joined, _ = at_once(
                lambda: outcome(server, SECRET, server=True, seconds=seconds),
                lambda: outcome(client, SECRET, server=False, seconds=seconds),
                lambda: self._pass_on(
                    {"client": (to_client, to_server), "server": (to_server, to_client)}
                ),
            )
        return served, joined

    def _pass_on(self, ways: dict[str, tuple[socket.socket, socket.socket]]) -> None:
        with selectors.DefaultSelector() as selector, contextlib.suppress(ConnectionError):
            for side, (source, _) in ways.items():
                selector.register(source, selectors.EVENT_READ, side)
            while ready := selector.select(SECONDS):
                for key, _ in ready:
                    source, sink = ways[key.data]
                    data = source.recv(65536)
                    lost = not data or not self._forward(key.data, data, sink)
                    if lost:
                        for sock in (source, sink):
                            sock.close()
                        return

    def _forward(self, side: str, data: bytes, sink: socket.socket) -> bool:
        start = len(self.seen[side])
        self.seen[side] += data
        if (
            side == self._side
            and self._flip is not None
            and start <= self._flip < start + len(data)
        ):
            changed = bytearray(data)
            changed[self._flip - start] ^= 1
            data = bytes(changed)
        if side == self._side and self._cut is not None:
            data = data[: max(0, self._cut - start)]
            sink.sendall(data)
            return start + len(data) < self._cut
        sink.sendall(data)
        return True
