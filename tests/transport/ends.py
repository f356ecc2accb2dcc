"""Both ends of connections for tests: pairs of them, servers, and processes at the other end."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.transport.codec import Array, Decoder, Record
from ndistribute.transport.connection import Connection
from ndistribute.transport.handshake import Accepted, Hello, authenticate
from ndistribute.transport.rpc import Client, RpcServer
from ndistribute.transport.secret import Credentials, TlsFiles, tls_context
from tests.processes import ROOT, wait_until

SECONDS = 40.0
CREDENTIALS = Credentials(b"a secret of the job", "a job")
STRANGER = Credentials(b"a secret of another", "a job")
# What a client sends first, without the random bytes that it should hold.
GREETING = b"NDST" + struct.pack("!Hc32s", 2, b"C", bytes(32))


class Note(Record):
    """What is sent in tests."""

    text: str = ""
    arrays: tuple[Array, ...] = ()


NOTES: Decoder[Note] = Decoder(Note)


def soon(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what calls return, or raise, that run at the same time on a thread each."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        errors = [future.exception(timeout=60) for future in futures]
        pairs = zip(futures, errors, strict=True)
        return [future.result() if error is None else error for future, error in pairs]


def sockets(unix: bool = False) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection, as the system makes it."""
    if unix:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=SECONDS)
        server, _ = listener.accept()
    server.settimeout(SECONDS)
    return server, client


def accepted(own: str, other: str) -> Accepted:
    """Return the outcome of a handshake, with keys as its two ends have them."""
    return Accepted(Hello(name=other), f"to {own}".encode(), f"to {other}".encode())


def one_end(sock: socket.socket, name: str, kinds: Decoder[Any] = NOTES, **more: Any) -> Connection:
    """Return a connection on a socket whose other end the test plays itself."""
    return Connection(sock, accepted(name, {"a": "b", "b": "a"}[name]), kinds, **more)


@contextlib.contextmanager
def pair(
    kind: str = "tcp", tls: TlsFiles | None = None, **more: Any
) -> Iterator[tuple[Connection, Connection]]:
    """Yield the two ends of a connection over ``"tcp"``, ``"tls"`` or ``"unix"``."""
    one, other = sockets(kind == "unix")
    if kind == "tls":
        assert tls is not None
        served, joined = (tls_context(tls, server=server) for server in (True, False))
        one, other = at_once(
            lambda: served.wrap_socket(one, server_side=True), lambda: joined.wrap_socket(other)
        )
    ends = one_end(one, "a", **more), one_end(other, "b", **more)
    try:
        yield ends
    finally:
        at_once(ends[0].close, ends[1].close)


def knock(address: str) -> socket.socket:
    """Return a socket that is connected to an address over TCP."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def knock_near(name: bytes) -> socket.socket:
    """Return a socket that is connected to the Unix socket of that name."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # With a timeout of Python's, connecting fails at once while the listener's backlog is full.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SECONDS), 0))
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        raise
    sock.settimeout(SECONDS)
    return sock


def malformed(draw: random.Random) -> Iterator[bytes]:
    """Yield what strangers send, of every kind in turn."""
    while True:
        yield draw.randbytes(4) + GREETING[4:]
        yield GREETING + draw.randbytes(32) + b"+\xff\xff" + draw.randbytes(9)
        yield GREETING[: draw.randrange(1, len(GREETING))]
        yield GREETING + draw.randbytes(draw.randrange(32))
        yield draw.randbytes(draw.randrange(1, 2000))
        yield GREETING[:4] + draw.randbytes(35)
        yield b"\x16\x03\x01" + draw.randbytes(60)
        yield b""


def shake(
    sock: socket.socket,
    credentials: Credentials = CREDENTIALS,
    hello: Hello = Hello(name="me"),  # noqa: B008 (frozen)
    seconds: float = SECONDS,
) -> tuple[socket.socket, Accepted]:
    return authenticate(sock, credentials, hello, deadline=soon(seconds))


def authority(folder: Path) -> TlsFiles:
    """Return the files of a certificate of an authority of its own."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes".split()
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    openssl("req", *key, "-keyout", "key.pem", "-out", "request", "-subj", "/CN=worker")
    openssl(*"x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem".split())
    return TlsFiles(*(str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem")))


def tls_environ(files: TlsFiles) -> dict[str, str]:
    """Return what names these files in the environment of a process."""
    names = {"CERT": files.cert, "KEY": files.key, "CA": files.ca}
    return {f"NDISTRIBUTE_TLS_{name}": path for name, path in names.items()}


def forked(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a fork of this process, or the text of what it raises."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # That threads run is the point.
        pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.write(writing, repr(function()).encode())
        except BaseException as error:
            os.write(writing, repr(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], SECONDS)[0], "the fork hangs"
        return ast.literal_eval(os.read(reading, 65536).decode())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


def open_files() -> list[str]:
    """Return what this process has open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return links


def open_sockets() -> int:
    """Return how many sockets, shared memory and selectors this process has open."""
    kinds = ("socket:", "/memfd:", "anon_inode:[eventpoll]")
    return sum(link.startswith(kinds) for link in open_files())


class Echo:
    """A service that answers with what it is asked, or does what the text says."""

    requests = Note
    macs = False

    def __init__(self) -> None:
        self.here: list[str] = []
        self.gone: list[tuple[str, bool, float]] = []  # Who, whether it died, and when.
        self.entered, self.leave = threading.Event(), threading.Event()

    def connected(self, peer: Any) -> None:
        self.here.append(peer.name)

    def handle(self, peer: Any, call: int, request: Note) -> Note | None:
        if request.text == "wait":
            self.entered.set()
            self.leave.wait(SECONDS)
        elif request.text == "never":
            self.entered.set()
            return None
        elif request.text == "fail":
            raise LookupError("never heard of it")
        elif request.text == "unsendable":
            return Note(arrays=(np.array([None]),))
        return Note(request.text, request.arrays)

    def disconnected(self, peer: Any, died: bool) -> None:
        self.gone.append((peer.name, died, time.monotonic()))


@contextlib.contextmanager
def serving(
    credentials: Credentials = CREDENTIALS, port: int = 0, environ: Mapping[str, str] = os.environ
) -> Iterator[tuple[Echo, str]]:
    """Serve an `Echo`, and yield it with its address."""
    echo = Echo()
    server = RpcServer(f"127.0.0.1:{port}", credentials, "ps:0", {"echo": echo}, environ=environ)
    try:
        yield echo, f"127.0.0.1:{server.port}"
    finally:
        echo.leave.set()
        server.close()


def client_of(
    address: str, credentials: Credentials = CREDENTIALS, name: str = "worker:0", **more: Any
) -> Client:
    """Return a client of an `Echo`."""
    return Client(address, credentials, name=name, purpose="echo", replies=Note, **more)


class Child:
    """A process that runs the lines that it is given, with this module's names."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.ends"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        )

    def run(self, line: str) -> str:
        """Let it evaluate an expression or run a statement; return what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().rstrip("\n")

    def signal(self, number: int) -> None:
        """Send a signal; if it is SIGSTOP, return once all threads have stopped."""
        self._process.send_signal(number)
        tasks = Path(f"/proc/{self._process.pid}/task")
        if number == signal.SIGSTOP:
            wait_until(lambda: {_state(each) for each in tasks.iterdir()} == {"T"})

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _serve_lines() -> None:
    names: dict[str, Any] = {**globals()}
    for line in sys.stdin:
        try:
            print(eval(line, names), flush=True)
        except SyntaxError:
            exec(line, names)
            print("done", flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)


def _state(task: Path) -> str:
    """Return the state of a thread, such as T of one that is stopped."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    _serve_lines()
