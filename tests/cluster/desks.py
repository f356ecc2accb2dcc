"""A desk for the tests of the wire: it gives back what it gets, keeps it, or lets callers wait."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ndistribute.cluster.client import Client
from ndistribute.cluster.guard import Guard
from ndistribute.cluster.rpc import GrpcServer, GrpcTransport
from ndistribute.cluster.service import Service
from ndistribute.cluster.tensors import MalformedError
from ndistribute.cluster.transfers import Limits

ROOT = Path(__file__).parents[2]
SECRET = b"correct horse battery staple"


class EchoDesk:
    """Answer ``echo``, ``keep``, ``kept``, ``wait``, ``wake`` and ``boom``, each with a text."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.left: list[str] = []
        self.waiting: list[int] = []
        self.waits = threading.Event()
        self.departed = threading.Event()

    def read(self, message: memoryview) -> memoryview:
        if message[:4] not in (b"echo", b"keep", b"kept", b"wait", b"wake", b"boom"):
            raise MalformedError("no such word")
        return message

    def handle(self, client: str, ticket: int, request: memoryview):
        match bytes(request[:4]):
            case b"boom":
                raise RuntimeError("the desk broke")
            case b"keep":
                self.kept.append(bytes(request[4:]))
            case b"kept":
                return [(ticket, b"".join(self.kept) or b"-")]
            case b"wait":
                self.waiting.append(ticket)
                self.waits.set()
                return []
            case b"wake":
                woken, self.waiting = self.waiting, []
                return [(one, b"woken") for one in (*woken, ticket)]
        return [(ticket, request)]

    def leave(self, client: str):
        self.left.append(client)
        self.departed.set()
        return []

    def write(self, reply):
        return [bytes(reply[:4]), memoryview(reply)[4:]]


@contextlib.contextmanager
def serving(
    desk=None, *, limits=None, tls=None, address="127.0.0.1:0", **options
) -> Iterator[GrpcServer]:
    """Serve a desk on a port of this host."""
    guard = Guard(SECRET, options.pop("audience", ""))
    service = Service(guard, desk or EchoDesk(), limits or Limits(), **options)
    try:
        server = GrpcServer(service, address, tls)
    except BaseException:
        service.close()
        raise
    try:
        yield server
    finally:
        server.close()


def client_of(port: int, name: str = "worker:0", secret: bytes = SECRET, **options) -> Client:
    """Return a client of a port of this host."""
    transport = GrpcTransport(f"127.0.0.1:{port}", options.pop("tls", None))
    options.setdefault("timeout", 20.0)
    return Client(transport, secret, name, **options)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def start_python(
    program: str,
    *args: str,
    environ: Mapping[str, str] | None = None,
    stdin: bool = False,
) -> subprocess.Popen[str]:
    """Start a program, whose lines can be read."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
