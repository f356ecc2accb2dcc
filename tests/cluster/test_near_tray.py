"""Long messages between processes of a host lie in memory that both see."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ndistribute.cluster.wire import near_line
from ndistribute.cluster.wire.near_line import Line
from ndistribute.cluster.wire.near_tray import ReceiverTray, SenderTray
from ndistribute.cluster.wire.tensors import MalformedError
from tests.cluster.desks import client_of, serving

Ends = tuple[Line, Line]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return two ends of a connection."""
    client, server = map(Line, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield client, server
    client.close()
    server.close()


def soon() -> float:
    return time.monotonic() + 10


def brought(ends: Ends, body: bytes) -> bytes:
    """Return what arrives of a call, and check that its answer comes back."""
    client, server = ends
    client.request("Call", b"token", [body[:100], body[100:]], 1.0, soon())
    call = server.receive_call(soon())
    assert (call.method, call.token, call.nbytes) == ("Call", b"token", len(body))
    found = bytes(server.receive_body(call))
    server.answer([b"done"])
    assert client.receive_answer(soon()) == b"done"
    return found


def test_short_and_long_calls_follow_each_other_and_longer_ones_get_more_memory(ends):
    for size in (10, 70_000, 3_000_000, 2_000_000, 0, 100, 9_000_000):
        body = os.urandom(size)
        assert brought(ends, body) == body


def test_where_the_system_has_no_such_memory_the_socket_carries_it_all(ends, monkeypatch):
    def refuse(*args: object) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    body = os.urandom(100_000)
    assert brought(ends, body) == body


def test_a_body_in_memory_that_never_came_is_refused_and_the_next_call_served(ends):
    client, server = ends
    head = near_line._REQUEST.pack(near_line._MAGIC, 4, 5, True, 1.0, 100_000)
    client.send([head + b"Calltoken"], soon())
    call = server.receive_call(soon())
    with pytest.raises(MalformedError, match="did not come"):
        server.receive_body(call)
    server.refuse(MalformedError("refused"))
    with pytest.raises(MalformedError, match="refused"):
        client.receive_answer(soon())
    body = os.urandom(100_000)
    assert brought(ends, body) == body


def test_a_call_that_is_not_welcome_leaves_its_memory_to_the_next_one(ends):
    client, server = ends
    client.request("Call", b"token", [bytes(100_000)], 1.0, soon())
    server.skip_body(server.receive_call(soon()))
    body = os.urandom(90_000)
    assert brought(ends, body) == body


def test_files_that_nobody_asked_for_are_closed(ends):
    client, server = ends
    before = len(os.listdir("/proc/self/fd"))
    for k in range(20):
        with open(os.devnull) as file:
            head = near_line._REQUEST.pack(near_line._MAGIC, 4, 5, False, 1.0, 0)
            client.send([head + b"Calltoken"], soon(), file.fileno())
        call = server.receive_call(soon())
        assert server.receive_body(call) == b""
        assert len(os.listdir("/proc/self/fd")) <= before + 1, k


def test_memory_that_its_owner_can_shorten_is_refused(tmp_path):
    file = os.memfd_create("short", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 20)
    with open(tmp_path / "plain", "wb") as plain:
        for number in (file, plain.fileno()):
            with pytest.raises(MalformedError):
                ReceiverTray(number)
    os.close(file)


def test_a_message_longer_than_its_memory_is_refused():
    sender = SenderTray()
    file = sender.lay([b"x" * 100], 100)
    assert file is not None
    receiver = ReceiverTray(file)
    with pytest.raises(MalformedError, match="can not lie"):
        receiver.read(2 << 20)
    sender.close()
    assert receiver.read(100).tobytes() == b"x" * 100


def test_many_long_messages_at_once_do_not_mix():
    bodies = [os.urandom(300_000 + k) for k in range(24)]
    with (
        serving() as server,
        client_of(server.port, near=True) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = pool.map(lambda body: bytes(client.call([b"echo", body])[4:]), bodies)
        assert list(answers) == bodies
        assert client.is_near
