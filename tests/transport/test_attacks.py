"""Strangers, and somebody on the wire, disturb nobody: good clients do not notice them."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ndistribute.errors import DistributeError
from ndistribute.transport.address import unix_name
from ndistribute.transport.codec import Array, Decoder, MalformedError, Record
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.handshake import Hello
from ndistribute.transport.rpc import RpcServer
from tests.transport.ends import (
    CREDENTIALS,
    NOTES,
    SECONDS,
    Child,
    Note,
    client_of,
    knock_near,
    serving,
    shake,
    soon,
    wait_until,
)

FRAMES = int(os.environ.get("FAULTS_FRAMES", "10000"))
SEED = 20240229
SERVE = "(server := RpcServer('127.0.0.1:0', CREDENTIALS, 'ps:0', {'echo': Echo()})).port"
GREETING = b"NDST" + struct.pack("!Hc32s", 2, b"C", bytes(32))
HEADER = struct.Struct("<HBBIQIIQ")
HELLO = Hello(name="worker:9", purpose="echo")


@contextlib.contextmanager
def calling(address: str) -> Iterator[Callable[[], int]]:
    """Let good clients call all the time; fail if one call is refused or takes long."""
    done, slowest, counts = threading.Event(), [0.0], [0]
    problems: list[Exception] = []

    def call(end: Connection) -> None:
        try:
            while not done.wait(0.001):
                began = time.monotonic()
                array = np.full(1 + counts[0] % 5000, 1.0)
                end.send(Note("", (array,)), counts[0], soon())
                assert end.receive(soon())[1].arrays[0].sum() == array.size
                slowest[0] = max(slowest[0], time.monotonic() - began)
                counts[0] += 1
            end.close()
        except Exception as error:
            problems.append(error)

    ends = []
    for unix in ("1", "0"):
        with mock.patch.dict(os.environ, NDISTRIBUTE_UNIX_SOCKETS=unix):
            ends.append(connect(address, CREDENTIALS, HELLO, NOTES, deadline=soon()))
    assert [end.is_unix for end in ends] == [True, False]
    threads = [threading.Thread(target=call, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    try:
        yield lambda: counts[0]
    finally:
        done.set()
        for thread in threads:
            thread.join(30.0)
    assert not problems
    assert slowest[0] < 5.0


def resident_kilobytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


def admitted_within(address: str, seconds: float) -> None:
    """Fail if a good client does not get in and out in time."""
    began = time.monotonic()
    with contextlib.closing(client_of(address)) as client:
        assert client.call(Note("here"), seconds).text == "here"
    assert time.monotonic() - began < seconds


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


def spoilt(draw: random.Random) -> Iterator[bytes]:
    """Yield frames that no client sends, of every kind in turn."""
    control = b"\x93\xa4Note\xa4text\x91\x93\x00\xa5uint8\x91\x40"
    frame = HEADER.pack(0x444E, 1, 0, 1, 7, len(control), 0, 64) + struct.pack("<Q", 64)
    frame += control + bytes(64)
    while True:
        changed = bytearray(frame)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(frame) - 64)] = draw.randrange(256)
        yield bytes(changed)
        yield frame[: draw.randrange(len(frame))]
        yield draw.randbytes(draw.randrange(1, 500))
        yield HEADER.pack(0x444E, 1, draw.randrange(8), *[draw.getrandbits(30)] * 3, 0, 1 << 34)
        yield HEADER.pack(0x444E, 1, 2, 1, 1, len(control), 0, 64) + struct.pack("<Q", 64) + control


def knock(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


@pytest.mark.timeout(180)
def test_malformed_frames_by_the_thousand_disturb_nobody():
    draw = random.Random(SEED)
    with Child() as server:
        address = f"127.0.0.1:{server.run(SERVE)}"
        with calling(address) as count:
            before, files = resident_kilobytes(server.pid), os.listdir(f"/proc/{server.pid}/fd")
            for frames, share in ((malformed(draw), 0.6), (spoilt(draw), 0.4)):
                for number in range(int(FRAMES * share)):
                    sock = knock_near(unix_name(address)) if number % 2 else knock(address)
                    with contextlib.suppress(OSError):
                        if share == 0.4:
                            sock, _ = shake(sock, hello=HELLO)
                        sock.sendall(next(frames))
                    sock.close()
            assert count() > 50
            wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= len(files) + 2)
            assert resident_kilobytes(server.pid) - before < 64 * 1024
            assert int(server.run("threading.active_count()")) < 12
        admitted_within(address, 2.0)


def test_more_idle_connections_than_there_are_descriptors_keep_nobody_out():
    with Child() as server, contextlib.ExitStack() as stack:
        server.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))")
        address = f"127.0.0.1:{server.run(SERVE)}"
        for number in range(1200):
            sock = stack.enter_context(knock(address))
            with contextlib.suppress(OSError):
                sock.sendall(GREETING[: number % 40])
        admitted_within(address, 2.0)
        assert server.run("len([open('/dev/null') for _ in range(300)])") == "300"


def test_a_process_without_descriptors_left_serves_again_when_it_has_some():
    with Child() as server, contextlib.ExitStack() as stack:
        server.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))")
        address = f"127.0.0.1:{server.run(SERVE)}"
        server.run("files = []")
        for line in ("files.append(open('/dev/null'))",) * 60:
            if server.run(line).startswith("OSError"):
                break
        for _ in range(20):
            stack.enter_context(knock(address))
        with contextlib.closing(client_of(address)) as client, pytest.raises(DistributeError):
            client.call(Note("no room"), 0.5)
        server.run("files.clear()")
        admitted_within(address, 3.0)


FLOOD = """
import itertools, socket, sys, time
_, port, rate, data, wait = sys.argv
rate, data = float(rate), bytes.fromhex(data)
held = []
print("begun", flush=True)
begin = time.monotonic()
for number in itertools.count():
    try:
        sock = socket.create_connection(("127.0.0.1", int(port)), timeout=1)
        sock.sendall(data)
        if wait == "answer":
            sock.recv(39)
            sock.sendall(bytes(32))
    except OSError:
        pass
    held.append(sock)
    if len(held) > 200:
        held.pop(0).close()
    time.sleep(max(0.0, begin + number / rate - time.monotonic()))
"""


@contextlib.contextmanager
def flooded(address: str, data: bytes, wait: str, rate: float) -> Iterator[None]:
    """Let two processes connect and send so often a second together."""
    port = address.rpartition(":")[2]
    words = [sys.executable, "-c", FLOOD, port, str(rate / 2), data.hex(), wait]
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            flood = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            stack.callback(flood.kill)
            assert flood.stdout is not None
            assert flood.stdout.readline() == b"begun\n"
        yield


def test_a_flood_does_not_keep_a_good_client_out(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_UNIX_SOCKETS", "0")
    with Child({"NDISTRIBUTE_UNIX_SOCKETS": "0"}) as server:
        address = f"127.0.0.1:{server.run(SERVE)}"
        wrong_secret, greeting_only = (GREETING, "answer"), (GREETING, "no")
        silent, dripping = (b"", "no"), (GREETING[:5], "no")
        for data, wait in (wrong_secret, greeting_only, silent, dripping):
            with flooded(address, data, wait, 1700):
                for _ in range(5):
                    admitted_within(address, 2.0)


class Between:
    """Pass bytes between a client and a server, and change the one at a position of one side.

    Args:
        server: the server's address.
        side: whose bytes are changed: 0 the client's, 1 the server's.
        position: which byte arrives with another value; -1 for none.
    """

    def __init__(self, server: str, side: int, position: int) -> None:
        self._server, self._side, self._position = server, side, position
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = [0, 0]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(SECONDS)
        self._listener.close()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = knock(self._server)
        with client, server, selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, (0, server))
            selector.register(server, selectors.EVENT_READ, (1, client))
            with contextlib.suppress(OSError):
                while ready := selector.select(SECONDS):
                    for key, _ in ready:
                        side, other = key.data
                        data = bytearray(key.fileobj.recv(65536))  # type: ignore[union-attr]
                        if not data:
                            return
                        at = self._position - self.passed[side]
                        if side == self._side and 0 <= at < len(data):
                            data[at] ^= 1
                        self.passed[side] += len(data)
                        other.sendall(data)


class Job(Record):
    """A request that holds a pickle, as a coordinator sends it."""

    code: bytes
    arrays: tuple[Array, ...] = ()


class Runs:
    """A service that unpickles what it is sent, and keeps a record of that."""

    requests = Job
    sealed = True

    def __init__(self) -> None:
        self.read: list[bytes] = []

    def connected(self, peer: object) -> None: ...

    def disconnected(self, peer: object, died: bool) -> None: ...

    def handle(self, peer: object, call: int, request: Job) -> Job:
        self.read.append(request.code)
        return Job(pickle.dumps(pickle.loads(request.code)))


@pytest.mark.parametrize("side", [0, 1], ids=["request", "reply"])
def test_no_pickle_is_read_of_which_a_byte_was_changed(side, monkeypatch):
    """Whoever sits between two ends of a sealed connection can cut it, and nothing else."""
    runs, code = Runs(), pickle.dumps({"a": [1, 2, 3]})
    monkeypatch.setenv("NDISTRIBUTE_UNIX_SOCKETS", "0")
    server = RpcServer("127.0.0.1:0", CREDENTIALS, "worker:0", {"run": runs})

    def converse(position: int) -> tuple[list[int], bytes | Exception]:
        between = Between(f"127.0.0.1:{server.port}", side, position)
        hello, kinds = Hello(name="chief", purpose="run"), Decoder(Job)
        with contextlib.closing(between):
            end = connect(
                between.address,
                CREDENTIALS,
                hello,
                kinds,
                deadline=soon(5),
                sealed=True,
            )
            started = list(between.passed)
            try:
                end.send(Job(code), 1)
                return started, end.receive(soon(0.3))[1].code
            except Exception as error:
                return started, error
            finally:
                end.abort("enough")
                end.close()

    try:
        started, reply = converse(-1)
        assert reply == code
        refused = 0
        for position in range(started[side], started[side] + HEADER.size + 32 + len(code), 3):
            _, outcome = converse(position)
            refused += isinstance(outcome, MalformedError | ConnectionLostError | TimeoutError)
            assert outcome == code or isinstance(outcome, Exception)
        assert refused >= len(code) // 3
        assert set(runs.read) == {code}
    finally:
        server.close()


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def nobody() -> Iterator[Child]:
    """Yield a process of another user of this host."""
    with Child() as child:
        child.run("os.setgid(65534)")
        child.run("os.setuid(65534)")
        assert child.run("os.getuid()") == "65534"
        yield child


@root_only
def test_another_user_of_this_host_is_refused_although_it_knows_the_secret():
    with serving() as (echo, address), nobody() as other:
        said = other.run(f"shake(knock_near({unix_name(address)!r}), hello=Hello(purpose='echo'))")
        assert said.startswith("ConnectionResetError")
        assert not echo.here
        admitted_within(address, 2.0)
        assert len(echo.here) == 1


@root_only
def test_nobody_turns_to_a_socket_that_another_user_has_put_in_its_place():
    with serving(environ={"NDISTRIBUTE_UNIX_SOCKETS": "0"}) as (_, address), nobody() as other:
        other.run("trap = socket.socket(socket.AF_UNIX)")
        other.run(f"trap.bind({unix_name(address)!r})")
        other.run("trap.listen()")
        with contextlib.closing(client_of(address)) as client:
            assert client.call(Note("here"), SECONDS).text == "here"
            assert not client._connection.is_unix
        assert other.run("trap.accept()[0].recv(100)") == "b''"
