"""Strangers, and somebody on the wire, disturb nobody: good clients do not notice them."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ndistribute.errors import DistributeError
from ndistribute.transport.address import unix_name
from ndistribute.transport.connection import Connection, connect
from ndistribute.transport.handshake import Hello
from tests.transport.ends import (
    CREDENTIALS,
    NOTES,
    SECONDS,
    Child,
    Note,
    client_of,
    knock,
    knock_near,
    malformed,
    serving,
    shake,
    soon,
    wait_until,
)

FRAMES = int(os.environ.get("FAULTS_FRAMES", "3000"))
SEED = 20240229
SERVE = "(server := RpcServer('127.0.0.1:0', CREDENTIALS, 'ps:0', {'echo': Echo()})).port"
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
