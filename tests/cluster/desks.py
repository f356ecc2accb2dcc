"""A desk for the tests of the wire: it gives back what it gets, keeps it, or lets callers wait."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ndistribute.cluster.wire.client import Client
from ndistribute.cluster.wire.guard import Guard
from ndistribute.cluster.wire.rpc import GrpcServer, GrpcTransport
from ndistribute.cluster.wire.service import Service
from ndistribute.cluster.wire.tensors import MalformedError
from ndistribute.cluster.wire.transfers import Limits

ROOT = Path(__file__).parents[2]
SECRET = b"correct horse battery staple"


SERVER = """
import sys
from tests.cluster.desks import serving
with serving(address=f"127.0.0.1:{sys.argv[1]}", silence_seconds=float(sys.argv[2])) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
CLIENT = """
import sys
from tests.cluster.desks import client_of
client = client_of(int(sys.argv[1]), "doomed", beat_seconds=0.1, near=sys.argv[2] == "near")
for _ in sys.stdin:
    client.call([b"echo"])
    print("near" if client.is_near else "far", flush=True)
"""


class EchoDesk:
    """Answer ``echo``, ``keep``, ``kept``, ``wait``, ``wake``, ``late`` and ``boom``, with a text.

    What came ``late`` is answered by whoever calls ``catch_up``, from any thread.
    """

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.left: list[str] = []
        self.died: list[str] = []
        self.waiting: list[int] = []
        self.waits = threading.Event()
        self.departed = threading.Event()
        self.owed: list[tuple[int, memoryview]] = []
        self.owes = threading.Event()
        self.file: int | None = None
        self.closed = False

    def bind(self, deliver) -> None:
        self.deliver = deliver

    def read(self, message: memoryview) -> memoryview:
        if message[:4] not in (b"echo", b"keep", b"kept", b"wait", b"wake", b"late", b"boom"):
            raise MalformedError("no such word")
        return message

    def handle(self, client: str, ticket: int, request: memoryview):
        match bytes(request[:4]):
            case b"boom":
                raise RuntimeError("the desk broke")
            case b"keep":
                self.kept.append(bytes(request[4:]))
            case b"late":
                self.owed.append((ticket, bytes(request)))
                self.owes.set()
                return []
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

    def catch_up(self) -> None:
        self.owes.clear()
        owed, self.owed = self.owed, []
        self.deliver(owed)

    def leave(self, client: str, died: bool):
        (self.died if died else self.left).append(client)
        self.departed.set()
        return []

    def write(self, reply):
        return [bytes(reply[:4]), memoryview(reply)[4:]]

    def shared_file(self) -> int | None:
        return self.file

    def close(self) -> None:
        self.closed = True


@contextlib.contextmanager
def serving(
    desk=None, *, limits=None, tls=None, address="127.0.0.1:0", near=True, **options
) -> Iterator[GrpcServer]:
    """Serve a desk on a port of this host."""
    guard = Guard(SECRET, options.pop("audience", ""))
    service = Service(guard, desk or EchoDesk(), limits or Limits(), **options)
    try:
        server = GrpcServer(service, address, tls, near=near)
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
    options.setdefault("near", False)
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


@contextlib.contextmanager
def server_process(port: int = 0, silence: float = 5.0):
    """Run a server in a process of its own; yield the process and the port."""
    with _ended(start_python(SERVER, str(port), str(silence), stdin=True)) as process:
        yield process, int(process.stdout.readline())


@contextlib.contextmanager
def client_process(port: int, way: str):
    """Run a client, ``near`` or ``far``, in a process; each line it gets makes it call."""
    with _ended(start_python(CLIENT, str(port), way, stdin=True)) as process:
        assert make_call(process) == way
        yield process


def make_call(process) -> str:
    """Let the process of a client make a call, and return by what way it went."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def stop(process) -> None:
    """Stop a process, and wait until it is."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@contextlib.contextmanager
def _ended(process):
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
        process.stdin.close()
