"""A gate lets peers in, whatever strangers do meanwhile, and leaves nothing when it closes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ndistribute.errors import AuthenticationError
from ndistribute.transport.admission import MAXIMUM_HANDSHAKES
from ndistribute.transport.gate import MAXIMUM_STRANGERS, Gate, listen
from ndistribute.transport.handshake import authenticate
from tests.transport.handshakes import SECRET, WRONG_SECRET, at_once, outcome, receive

GREETING = b"NDST" + struct.pack("!Hc32s", 1, b"C", bytes(32))
FRAMES = 10_000
SEED = 20240229


class House:
    """A gate whose visitors are collected."""

    def __init__(self, **options) -> None:
        self.visitors: queue.Queue[tuple[socket.socket, bytes]] = queue.Queue()
        listener = listen("127.0.0.1:0")
        self.address = listener.getsockname()
        self.gate = Gate(listener, SECRET, self.welcome, hello=b"house", **options)

    def welcome(self, sock: socket.socket, hello: bytes) -> None:
        self.visitors.put((sock, hello))

    def knock(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=5)

    def join(self, hello: bytes = b"me", secret: bytes = SECRET):
        return outcome(self.knock(), secret, server=False, hello=hello)

    def insist(self, seconds: float, hello: bytes = b"me") -> bytes:
        """Join as a peer does: again, when the connection is lost."""
        deadline = time.monotonic() + seconds
        while True:
            got = self.join(hello)
            if isinstance(got, bytes):
                return got
            assert isinstance(got, ConnectionError), got
            assert time.monotonic() < deadline

    def visitor(self) -> bytes:
        sock, hello = self.visitors.get(timeout=5)
        sock.close()
        return hello


@pytest.fixture
def house() -> Iterator[House]:
    with opened() as made:
        yield made


@contextlib.contextmanager
def opened(**options) -> Iterator[House]:
    made = House(**options)
    with made.gate:
        yield made
    while not made.visitors.empty():
        made.visitor()


@contextlib.contextmanager
def strangers(house: House, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(house.knock()) for _ in range(count)]
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
        yield socks


def hung_up(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_peer_gets_in_and_can_talk(house):
    sock, hello = authenticate(
        house.knock(), SECRET, b"me", server=False, deadline=time.monotonic() + 5
    )
    with sock:
        assert hello == b"house"
        visitor, name = house.visitors.get(timeout=5)
        with visitor:
            assert name == b"me"
            visitor.sendall(b"welcome")
            assert receive(sock, 7) == b"welcome"


def test_many_peers_at_once_get_in_and_each_is_told_so_once(house):
    names = {f"peer {number}".encode() for number in range(3 * MAXIMUM_HANDSHAKES)}
    joins = [lambda name=name: house.insist(10.0, name) for name in names]
    assert set(at_once(*joins)) == {b"house"}
    assert {house.visitor() for _ in names} == names
    assert house.visitors.empty()


def test_a_wrong_secret_keeps_one_out_and_nobody_else(house):
    error = house.join(secret=WRONG_SECRET)
    assert isinstance(error, AuthenticationError)
    assert "another secret" in str(error)
    assert house.join() == b"house"
    assert house.visitor() == b"me"
    assert house.visitors.empty()


@pytest.mark.parametrize("count", [200, MAXIMUM_STRANGERS + 100])
def test_a_crowd_that_is_silent_costs_no_thread_and_delays_nobody(house, count):
    threads = threading.active_count()
    with strangers(house, count):
        began = time.monotonic()
        assert house.join() == b"house"
        assert time.monotonic() - began < 2.0
        assert threading.active_count() <= threads + 1


@pytest.mark.parametrize("count", [200, MAXIMUM_STRANGERS + 100])
def test_a_crowd_that_stops_in_mid_handshake_makes_way(house, count):
    threads = threading.active_count()
    with strangers(house, count, GREETING):
        began = time.monotonic()
        assert house.insist(4.0) == b"house"
        assert time.monotonic() - began < 4.0
        assert threading.active_count() <= threads + MAXIMUM_HANDSHAKES


def test_the_oldest_of_too_many_makes_way(house):
    with strangers(house, MAXIMUM_STRANGERS + 20) as socks:
        assert all(hung_up(sock) for sock in socks[:20])
        socks[-1].settimeout(0.1)
        assert not hung_up(socks[-1])


@pytest.mark.parametrize("sent", [b"", GREETING])
def test_who_does_not_finish_in_time_is_dropped(sent):
    with opened(handshake_seconds=0.2) as house, strangers(house, 3, sent) as socks:
        began = time.monotonic()
        assert all(hung_up(sock) for sock in socks)
        assert 0.1 < time.monotonic() - began < 2.0
        assert house.join() == b"house"


def malformed(draw: random.Random) -> Iterator[bytes]:
    """Frames without end, of every kind in turn."""
    while True:
        yield draw.randbytes(4) + GREETING[4:]  # bad magic
        yield GREETING + draw.randbytes(32) + b"+\xff\xff" + draw.randbytes(9)  # huge length
        yield GREETING[: draw.randrange(1, len(GREETING))]  # short read
        yield GREETING + draw.randbytes(draw.randrange(32))  # short proof
        yield draw.randbytes(draw.randrange(1, 2000))  # random bytes
        yield GREETING[:4] + draw.randbytes(35)  # another version
        yield b"\x16\x03\x01" + draw.randbytes(60)  # half a hello of TLS


def test_malformed_frames_neither_stop_the_gate_nor_fill_the_memory(house, caplog):
    print("seed", SEED)
    frames = malformed(random.Random(SEED))
    sent, peers, threads = 0, 0, 0
    quiet = threading.active_count()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    for _ in range(FRAMES):
        with house.knock() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(next(frames))
            sent += 1
        if sent % 500 == 0:
            assert house.insist(4.0) == b"house"
            assert house.visitor() == b"me"
            peers += 1
        threads = max(threads, threading.active_count() - quiet)
    seconds = time.monotonic() - began
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sent == FRAMES
    assert peers >= FRAMES // 500
    assert house.visitors.empty()
    assert growth < 32 * 1024, f"{growth} KiB"
    assert threads <= MAXIMUM_HANDSHAKES + 1  # That of a peer who is just welcomed.
    assert 1 <= len(caplog.records) <= seconds + 2


def test_strangers_who_never_cease_do_not_keep_a_peer_out(house):
    done = threading.Event()

    def pester() -> None:
        draw = random.Random(SEED)
        crowd: list[socket.socket] = []
        while not done.is_set():
            with contextlib.suppress(OSError):
                crowd.append(house.knock())
                crowd[-1].sendall(GREETING[: draw.randrange(40)])
            if len(crowd) > MAXIMUM_STRANGERS:
                crowd.pop(0).close()
        for sock in crowd:
            sock.close()

    def visit() -> list[bytes]:
        try:
            return [house.insist(8.0) for _ in range(3)]
        finally:
            done.set()

    assert at_once(visit, pester)[0] == [b"house"] * 3


def test_refusals_are_logged_with_who_and_why_and_then_only_counted(caplog):
    with opened() as house:
        for _ in range(20):
            assert isinstance(house.join(secret=WRONG_SECRET), AuthenticationError)
    records = [record for record in caplog.records if record.name == "ndistribute"]
    assert all(record.levelno == logging.WARNING for record in records)
    assert 2 <= len(records) <= 5
    assert "127.0.0.1:" in records[0].getMessage()
    assert "another secret" in records[0].getMessage()
    assert "more since the last" in records[-1].getMessage()


def test_a_callback_that_raises_costs_one_connection(caplog):
    def picky(sock: socket.socket, hello: bytes) -> None:
        if hello == b"stranger":
            raise LookupError("never heard of you")
        sock.close()

    listener = listen("127.0.0.1:0")
    address = listener.getsockname()
    with Gate(listener, SECRET, picky):
        for hello in (b"stranger", b"friend"):
            sock = socket.create_connection(address, timeout=5)
            sock, _ = authenticate(sock, SECRET, hello, server=False, deadline=time.monotonic() + 5)
            with sock:
                assert hung_up(sock)
    assert "never heard of you" in caplog.text


def test_closing_drops_who_waits_and_frees_the_port(house):
    with strangers(house, 5) as silent, strangers(house, 5, GREETING) as begun:
        assert house.join() == b"house"  # So all who came before were accepted.
        house.gate.close(timeout=5)
        assert all(hung_up(sock) for sock in silent + begun)
        with pytest.raises(ConnectionError):
            house.knock()
    with listen(f"127.0.0.1:{house.address[1]}"):
        pass
    house.gate.close()


def test_closing_waits_for_a_callback_but_not_for_ever(caplog):
    entered, leave = threading.Event(), threading.Event()

    def dawdle(sock: socket.socket, hello: bytes) -> None:
        entered.set()
        leave.wait(timeout=30)
        sock.close()

    listener = listen("127.0.0.1:0")
    gate = Gate(listener, SECRET, dawdle)
    sock = socket.create_connection(listener.getsockname(), timeout=5)
    assert outcome(sock, SECRET, server=False) == b""
    assert entered.wait(timeout=5)
    began = time.monotonic()
    gate.close(timeout=0.2)
    assert time.monotonic() - began < 2.0
    assert "did not close within 0.2 s" in caplog.text
    leave.set()


def test_a_callback_may_close_the_gate():
    closed = threading.Event()
    listener = listen("127.0.0.1:0")

    def last(sock: socket.socket, hello: bytes) -> None:
        sock.close()
        gate.close(timeout=5)
        closed.set()

    gate = Gate(listener, SECRET, last)
    sock = socket.create_connection(listener.getsockname(), timeout=5)
    outcome(sock, SECRET, server=False)
    assert closed.wait(timeout=5)


def test_a_process_with_few_files_left_serves_its_peers():
    script = (
        "import resource, socket, sys\n"
        "from ndistribute.transport.gate import Gate, listen\n"
        "def welcome(sock, hello):\n"
        "    sock.close()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "listener = listen('127.0.0.1:0')\n"
        "with Gate(listener, sys.argv[1].encode(), welcome, hello=b'house'):\n"
        "    print(listener.getsockname()[1], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", script, SECRET.decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        address = ("127.0.0.1", int(process.stdout.readline()))

        def knock() -> socket.socket:
            return socket.create_connection(address, timeout=5)

        for _ in range(100):
            stack.enter_context(knock())
        for _ in range(20):
            got = outcome(knock(), SECRET, server=False)
            if got == b"house":
                break
        assert got == b"house"
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0, said


def test_a_port_in_use_is_named_with_what_to_do(house):
    port = house.address[1]
    with pytest.raises(OSError, match="choose another port, or port 0") as caught:
        listen(f"127.0.0.1:{port}")
    assert caught.value.errno == errno.EADDRINUSE
    assert f"127.0.0.1 port {port}" in str(caught.value)


def test_an_address_of_another_host_is_named_with_what_to_do():
    with pytest.raises(OSError, match=r"192\.0\.2\.1 port 0.*does not have this address"):
        listen("192.0.2.1:0")


def test_a_host_without_an_address_is_named():
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid"):
        listen("no.such.host.invalid:0")


def test_a_gate_listens_where_it_was_told_and_nowhere_else():
    with listen("127.0.0.2:0") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.skipif(
    not os.path.exists("/proc/net/if_inet6") or not socket.has_ipv6, reason="no IPv6 here"
)
def test_a_version_6_address_serves_as_well():
    try:
        listener = listen("[::1]:0")
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with Gate(listener, SECRET, lambda sock, hello: sock.close(), hello=b"six"):
        sock = socket.create_connection(listener.getsockname()[:2], timeout=5)
        assert outcome(sock, SECRET, server=False) == b"six"
