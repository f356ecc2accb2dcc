"""The way by a socket of the host, and how servers and clients find out that the other is gone."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ndistribute.cluster.wire import lifelines, near, near_line, near_server
from ndistribute.cluster.wire.client import connect
from ndistribute.cluster.wire.guard import UnknownSessionError
from ndistribute.cluster.wire.near import NearTransport
from ndistribute.cluster.wire.near_line import Line
from ndistribute.cluster.wire.tensors import PART_BYTES, MalformedError
from ndistribute.cluster.wire.transfers import Limits
from ndistribute.cluster.wire.transport import UnreachableError
from ndistribute.errors import CollectiveTimeoutError
from tests.cluster.desks import (
    SECRET,
    EchoDesk,
    client_of,
    client_process,
    make_call,
    server_process,
    serving,
    stop,
)
from tests.faults.tasks import wait_until

grpc = pytest.importorskip("grpc")

near_client = functools.partial(client_of, near=True)


@pytest.fixture(scope="module", autouse=True)
def _grpc_is_up() -> Iterator[None]:
    """Let gRPC open, before any test counts them, the files that it keeps."""
    with contextlib.closing(grpc.insecure_channel("127.0.0.1:1")):
        with serving() as server, client_of(server.port) as client:
            client.call([b"echo"])
        yield


def address_of(server) -> bytes:
    return server._service.near_address


def stranger(server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(address_of(server))
    return sock


def is_ended(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@pytest.mark.parametrize("size", [0, 1, 65_400, 65_536, 70_000, 5_000_000])
def test_messages_of_any_size_go_by_the_socket_in_one_piece(size):
    data = os.urandom(size)
    with serving() as server, near_client(server.port) as client:
        assert client.call([b"echo", data[: size // 2], data[size // 2 :]])[4:] == data
        assert client.is_near
        assert server._service.inbox.waiting_bytes == 0


def test_what_is_longer_than_a_part_is_cut_there_too(monkeypatch):
    monkeypatch.setattr(near, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(near_server, "_NEAR", near_server.Door(1 << 20, shares_threads=False))
    data = os.urandom(5_000_000)
    with serving() as server, near_client(server.port) as client:
        assert client.call([b"echo", data])[4:] == data
        assert server._service.inbox.waiting_bytes == server._service.outbox.waiting_bytes == 0


def test_a_message_of_very_many_buffers_arrives():
    data = [b"%06d" % k for k in range(5000)]
    with serving() as server, near_client(server.port) as client:
        assert client.call([b"echo", *data])[4:] == b"".join(data)


def test_there_is_no_way_near_where_it_is_not_wanted():
    with serving(near=False) as server, near_client(server.port) as client:
        client.call([b"echo"])
        assert not client.is_near
    environ = {"NDISTRIBUTE_SECRET": SECRET.decode(), "NDISTRIBUTE_NEAR": "0"}
    with serving() as server, connect(f"127.0.0.1:{server.port}", "w", environ=environ) as client:
        client.call([b"echo"])
        assert not client.is_near


def test_who_does_not_get_through_near_stays_with_the_network():
    with serving() as server:
        server._service.near_address = b"\0nobody listens here"
        with near_client(server.port) as client:
            assert bytes(client.call([b"echo"])) == b"echo"
            assert not client.is_near


def test_another_user_is_let_in_by_neither_end(monkeypatch):
    with serving() as server:
        monkeypatch.setattr(Line, "of_this_user", False)
        with pytest.raises(UnreachableError, match="Another user"):
            NearTransport(address_of(server))
        with near_client(server.port) as client:
            client.call([b"echo"])
            assert not client.is_near
        with stranger(server) as sock:
            assert is_ended(sock)


def test_more_calls_at_once_than_connections_go_by_the_network(monkeypatch):
    monkeypatch.setattr(near, "_MOST_LINES", 3)  # One of them is the lifeline.
    desk = EchoDesk()
    with (
        serving(desk) as server,
        near_client(server.port) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        calls = [pool.submit(client.call, [b"wait"]) for _ in range(6)]
        wait_until(lambda: len(desk.waiting) == 6, seconds=5.0)
        assert client.is_near
        client.call([b"wake"])
        assert {bytes(call.result(timeout=10)) for call in calls} == {b"woken"}


def test_a_message_without_room_is_refused_and_the_next_one_is_not():
    limits = Limits(waiting_bytes=1_000_000)
    with serving(limits=limits) as server, near_client(server.port) as client:
        with pytest.raises(CollectiveTimeoutError, match="do not fit"):
            client.call([b"echo", bytes(2_000_000)], timeout=0.1)
        assert bytes(client.call([b"echo"])) == b"echo"
        assert server._service.inbox.waiting_bytes == 0


def test_a_token_serves_once_whichever_way_it_goes():
    desk = EchoDesk()
    with serving(desk) as server, near_client(server.port) as client:
        client.call([b"keep", b"once"])
        opened = client._connection._opened
        token, _ = opened.session.token("Ping")
        with contextlib.closing(NearTransport(address_of(server))) as thief:
            for method in ("Call", "Greet", "Prove"):
                with pytest.raises(UnknownSessionError):
                    thief.call(method, token, [b""], 5)
            with pytest.raises(MalformedError):
                thief.call("Ping", token, [b"nonsense"], 5)
            with pytest.raises(UnknownSessionError):
                thief.call("Ping", token, [b"nonsense"], 5)
        client.call([b"echo"])
    assert desk.kept == [b"once"]


def test_malformed_frames_by_the_hundred_stop_nothing():
    head = near_line._REQUEST.pack(near_line._MAGIC, 4, 56, False, 1.0, 1 << 62)
    huge = head + b"Call" + bytes(56)
    with serving() as server, near_client(server.port) as client:
        client.call([b"echo"])
        for k in range(300):
            with stranger(server) as sock, contextlib.suppress(OSError):
                sock.sendall([secrets.token_bytes(1 + k * 40), huge, huge[:30]][k % 3])
                sock.shutdown(socket.SHUT_WR)
                assert is_ended(sock)
            if k % 30 == 0:
                assert bytes(client.call([b"echo"], timeout=5)) == b"echo"
        assert client.is_near
        wait_until(lambda: len(server._near._lines) <= 3, seconds=5.0)


def test_strangers_who_say_nothing_hold_little_and_not_for_long(monkeypatch):
    monkeypatch.setattr(near_server, "FIRST_CALL_SECONDS", 0.3)
    monkeypatch.setattr(near_server, "MAXIMUM_STRANGERS", 8)
    with serving() as server, near_client(server.port) as client, contextlib.ExitStack() as stack:
        client.call([b"echo"])
        socks = [stack.enter_context(stranger(server)) for _ in range(40)]
        socks[0].sendall(b"NDN1")
        assert len(server._near._lines) <= 8 + 3
        assert bytes(client.call([b"echo"], timeout=5)) == b"echo"
        assert all(is_ended(sock) for sock in socks)
        assert client.is_near


def test_a_server_without_room_for_another_connection_is_reached_by_the_network(monkeypatch):
    monkeypatch.setattr(near_server, "MAXIMUM_CONNECTIONS", 3)
    with serving() as server, near_client(server.port, "one") as one:
        one.call([b"echo"])
        with near_client(server.port, "two") as two:
            assert bytes(two.call([b"echo"])) == b"echo"
            assert bytes(two.call([b"echo", bytes(PART_BYTES + 1)]))
            assert not two.is_near
        assert one.is_near


@pytest.mark.parametrize("way", ["near", "far"])
def test_a_client_that_is_killed_is_noticed_at_once(way, monkeypatch):
    monkeypatch.setattr(lifelines, "GRACE_SECONDS", 0.2)
    desk = EchoDesk()
    with serving(desk, silence_seconds=60) as server, client_process(server.port, way) as process:
        start = time.monotonic()
        process.kill()
        assert desk.departed.wait(timeout=5)
        assert time.monotonic() - start < 2
    assert (desk.left, desk.died) == ([], ["doomed"])


@pytest.mark.parametrize("way", ["near", "far"])
def test_a_client_that_is_stopped_is_noticed_by_its_silence_and_may_come_again(way):
    desk = EchoDesk()
    with serving(desk, silence_seconds=0.8) as server, client_process(server.port, way) as process:
        stop(process)
        assert not desk.departed.wait(timeout=0.5)
        assert desk.departed.wait(timeout=5)
        assert desk.died == ["doomed"]
        process.send_signal(signal.SIGCONT)
        assert make_call(process) == way


def test_a_lifeline_that_the_network_ends_is_no_death_as_long_as_the_client_speaks(monkeypatch):
    monkeypatch.setattr(lifelines, "GRACE_SECONDS", 0.5)
    desk = EchoDesk()
    with serving(desk, silence_seconds=60) as server, client_of(server.port) as client:
        client.call([b"echo"])
        opened = client._connection._opened
        first = opened.lifeline
        for _ in range(2):
            ended = opened.lifeline
            ended.cancel()
            wait_until(lambda ended=ended: opened.lifeline is not ended, seconds=5.0)
        assert not desk.departed.wait(timeout=0.6)
        assert client._connection._opened is opened
        assert opened.lifeline is not first


@pytest.mark.parametrize("way", ["near", "far"])
def test_a_client_that_says_good_bye_did_not_die(way):
    desk = EchoDesk()
    with serving(desk, silence_seconds=60) as server:
        with client_of(server.port, near=way == "near") as client:
            client.call([b"echo"])
            client.call([b"echo", bytes(100_000)])
        assert (desk.left, desk.died) == (["worker:0"], [])
        wait_until(lambda: not server._near._lines, seconds=5.0)
    assert desk.closed


@pytest.mark.parametrize("way", ["near", "far"])
def test_a_probe_tells_whether_the_same_server_answers(way):
    with serving() as server, client_of(server.port, near=way == "near") as client:
        assert not client.probe(timeout=5.0)  # It was not spoken to.
        client.call([b"echo"])
        assert client.probe(timeout=5.0)
        server.close()
        start = time.monotonic()
        assert not client.probe(timeout=20.0)
        assert time.monotonic() - start < 5
        with serving(address=f"127.0.0.1:{server.port}"):
            known = client._connection.last_server
            while client._connection.last_server == known:
                assert not client.probe(timeout=5.0)
            assert client.probe(timeout=5.0)


def test_a_server_that_is_stopped_answers_no_probe_and_one_that_comes_back_is_found_near():
    with server_process() as (first, port), near_client(port) as client:
        client.call([b"echo"])
        known = client._connection._opened.near.address
        stop(first)
        assert not client.probe(timeout=0.1)
        first.send_signal(signal.SIGCONT)
        assert client.probe(timeout=5.0)
        assert client.server
        first.kill()
        first.wait(timeout=10)
        assert not client.server  # Although nobody called it.
        assert not client.probe(timeout=1.0)
        with server_process(port):
            assert bytes(client.call([b"echo"])) == b"echo"
            assert client.is_near
            assert client._connection._opened.near.address != known


def test_a_file_is_handed_over_near_and_nowhere_else():
    desk = EchoDesk()
    with (
        serving(desk) as server,
        near_client(server.port) as client,
        client_of(server.port, "far") as far,
    ):
        assert client.shared_file() is None
        desk.file = os.memfd_create("shelf")
        try:
            os.write(desk.file, b"what both see")
            ours = client.shared_file()
            assert ours is not None
            assert ours != desk.file
            assert not os.get_inheritable(ours)
            assert os.pread(ours, 100, 0) == b"what both see"
            os.close(ours)
            assert far.shared_file() is None
            assert bytes(client.call([b"echo"])) == b"echo"
        finally:
            os.close(desk.file)


@pytest.mark.parametrize("way", ["near", "far"])
def test_an_answer_may_come_late_and_from_any_thread(way):
    desk = EchoDesk()
    with (
        serving(desk) as server,
        client_of(server.port, near=way == "near") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        for k in range(20):
            late = pool.submit(client.call, [b"late", b"%d" % k])
            assert desk.owes.wait(timeout=10)
            desk.catch_up()
            assert bytes(late.result(timeout=10)) == b"late%d" % k


def test_an_answer_that_nobody_waits_for_any_more_is_dropped(monkeypatch):
    monkeypatch.setattr("ndistribute.cluster.wire.service.HOLD_SECONDS", 0.02)
    desk = EchoDesk()
    with (
        serving(desk) as server,
        near_client(server.port) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        late = pool.submit(client.call, [b"late"])
        wait_until(lambda: len(desk.owed) >= 2, seconds=5.0)  # It asked again.
        desk.deliver(desk.owed[:1])
        assert bytes(client.call([b"echo"])) == b"echo"
        while not late.done():
            desk.catch_up()
        assert bytes(late.result()) == b"late"


def test_a_call_ends_in_time_although_another_one_opens_the_session(monkeypatch):
    with serving() as server, near_client(server.port) as client, ThreadPoolExecutor(1) as pool:
        introduce, begun, go_on = (
            client._connection._introduced,
            threading.Event(),
            threading.Event(),
        )

        def slow(deadline):
            begun.set()
            go_on.wait(timeout=10)
            return introduce(deadline)

        monkeypatch.setattr(client._connection, "_introduced", slow)
        first = pool.submit(client.call, [b"echo"])
        assert begun.wait(timeout=10)
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="did not let this client in"):
            client.call([b"echo"], timeout=0.1)
        assert not client.probe(timeout=0.1)
        assert time.monotonic() - start < 2
        go_on.set()
        assert bytes(first.result(timeout=10)) == b"echo"
