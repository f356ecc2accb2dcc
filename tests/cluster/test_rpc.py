"""The wire of a server: real sockets, real processes, and strangers by the thousand."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ndistribute.cluster.wire.client import Client
from ndistribute.cluster.wire.guard import UnknownSessionError
from ndistribute.cluster.wire.rpc import GrpcTransport
from ndistribute.cluster.wire.tensors import PART_BYTES, MalformedError
from ndistribute.cluster.wire.transfers import Limits
from ndistribute.cluster.wire.transport import Envelope, UnreachableError
from ndistribute.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from tests.cluster.desks import (
    SECRET,
    EchoDesk,
    client_of,
    free_port,
    server_process,
    serving,
    stop,
)

grpc = pytest.importorskip("grpc")


@pytest.fixture(scope="module", autouse=True)
def _grpc_is_up() -> Iterator[None]:
    """Let gRPC open, before any test counts them, the files that it keeps."""
    with contextlib.closing(grpc.insecure_channel("127.0.0.1:1")):
        with serving() as server, client_of(server.port) as client:
            client.call([b"echo"])
        yield


@pytest.fixture(params=[False, True], ids=["far", "near"])
def reach(request):
    """Make clients that go by the network, or by the socket of the host."""
    return functools.partial(client_of, near=request.param)


def test_a_message_comes_back(reach):
    with serving() as server, reach(server.port) as client:
        assert bytes(client.call([b"echo", b" ", b"there"])) == b"echo there"


@pytest.mark.parametrize("size", [PART_BYTES, PART_BYTES + 1, 9 * PART_BYTES + 5])
def test_a_long_message_goes_and_comes_in_parts(size, reach):
    data = os.urandom(size)
    with serving() as server, reach(server.port) as client:
        answer = client.call([b"echo", data[:100], data[100:]])
        assert answer[4:] == data
        assert server._service.inbox.waiting_bytes == 0
        assert server._service.outbox.waiting_bytes == 0


def test_several_threads_send_long_messages_at_once(reach):
    with serving() as server, reach(server.port) as client, ThreadPoolExecutor(6) as pool:
        data = [os.urandom(3 * PART_BYTES) for _ in range(6)]
        answers = pool.map(lambda one: client.call([b"echo", one]), data)
        assert all(answer[4:] == one for answer, one in zip(answers, data, strict=True))


def test_several_parts_are_on_their_way_at_once(monkeypatch):
    with serving() as server, client_of(server.port) as client:
        client.call([b"echo"])
        together = threading.Barrier(3)
        write = server._service.inbox.write

        def slow(*args):
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(timeout=10)
            write(*args)

        monkeypatch.setattr(server._service.inbox, "write", slow)
        client.call([b"echo", bytes(3 * PART_BYTES - 4)])
        assert not together.broken


def test_messages_longer_than_the_limit_are_refused_on_either_side(reach):
    limits = Limits(message_bytes=1_000_000)
    data = bytes(1_000_000)
    with serving(limits=limits) as server:
        with (
            reach(server.port, limits=limits) as careful,
            pytest.raises(ValueError, match="limit"),
        ):
            careful.call([b"echo", data])
        with reach(server.port) as careless:
            with pytest.raises(MalformedError, match="the limit is 1000000"):
                careless.call([b"echo", data])
            with pytest.raises(MalformedError, match="the limit is 1000000"):
                careless.call([b"echo", bytes(5 * PART_BYTES)])
            assert server._service.inbox.waiting_bytes == 0


def test_a_client_with_another_secret_is_refused_at_once():
    desk = EchoDesk()
    with serving(desk) as server, client_of(server.port, secret=b"another secret!!") as client:
        start = time.monotonic()
        with pytest.raises(AuthenticationError, match="NDISTRIBUTE_SECRET"):
            client.call([b"keep"])
        assert time.monotonic() - start < 5
        assert not desk.kept


def test_a_client_of_another_server_is_refused():
    with (
        serving(audience="ps:0") as server,
        client_of(server.port, audience="ps:1") as client,
        pytest.raises(AuthenticationError, match="ps:1"),
    ):
        client.call([b"echo"])


def test_without_a_session_nothing_is_answered():
    with (
        serving() as server,
        contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{server.port}")) as channel,
    ):
        for method in ("Call", "Part", "Fetch", "Leave", "Near", "File", "Stay", "Nonsense"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/ndistribute/{method}")(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


class Recorder:
    """Carry calls, and remember them; change a byte of each where asked to."""

    def __init__(self, port: int, flip: int | None = None) -> None:
        self._inner = GrpcTransport(f"127.0.0.1:{port}")
        self.address, self.close = self._inner.address, self._inner.close
        self.part_bytes, self.stay = self._inner.part_bytes, self._inner.stay
        self.calls: list[tuple[str, bytes, bytes]] = []
        self.flip = flip

    def call(self, method, token, body, timeout):
        return self.start(method, token, body, timeout).result(timeout)

    def start(self, method, token, body, timeout):
        body = b"".join(body)
        self.calls.append((method, token, body))
        if self.flip is not None and len(body) > 64:
            changed = bytearray(body)
            changed[self.flip] ^= 1
            body = bytes(changed)
        return self._inner.start(method, token, [body], timeout)


def recording(port: int, flip: int | None = None):
    recorder = Recorder(port, flip)
    return recorder, Client(recorder, SECRET, "worker:0", timeout=10, beat_seconds=60, near=False)


def test_a_call_that_is_sent_again_by_somebody_else_is_refused():
    desk = EchoDesk()
    with serving(desk) as server:
        recorder, client = recording(server.port)
        with client, contextlib.closing(GrpcTransport(f"127.0.0.1:{server.port}")) as thief:
            client.call([b"keep", b"once"])
            for method, token, body in list(recorder.calls):
                if method == "Greet":
                    continue  # Which tells nothing to nobody.
                with pytest.raises(AuthenticationError):
                    thief.start(method, token, [body], 5).result(5)
            client.call([b"echo"])
    assert desk.kept == [b"once"]


@pytest.mark.parametrize("place", [0, 8, 24, 40, 64, -1])
def test_a_call_that_is_changed_on_its_way_is_refused(place):
    desk = EchoDesk()
    with serving(desk) as server:
        _, client = recording(server.port, flip=place)
        with client, pytest.raises((AuthenticationError, MalformedError)):
            client.call([b"keep", b"this"])
    assert not desk.kept


def resident_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@contextlib.contextmanager
def a_good_client_meanwhile(port: int) -> Iterator[list[float]]:
    """Let a client work all the time; give the seconds of each of its calls."""
    seconds: list[float] = []
    done = threading.Event()

    def work(client) -> None:
        while not done.is_set():
            start = time.monotonic()
            client.call([b"echo", bytes(1000)], timeout=10)
            seconds.append(time.monotonic() - start)

    with client_of(port, "good") as client, ThreadPoolExecutor(1) as pool:
        client.call([b"echo"])
        working = pool.submit(work, client)
        try:
            yield seconds
        finally:
            done.set()
            working.result(timeout=20)


def many(call, times: int, *bodies: bytes, at_once: int = 50) -> set[grpc.StatusCode]:
    """Make calls, several on their way at once, and return how they ended."""
    codes = set()
    for _ in range(0, times, at_once):
        futures = [call.future(bodies[k % len(bodies)], timeout=20) for k in range(at_once)]
        codes |= {future.code() for future in futures}
    return codes


def test_malformed_and_oversized_messages_by_the_thousand_neither_fill_nor_stop_a_server():
    refused = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    with server_process() as (process, port), a_good_client_meanwhile(port) as seconds:
        before = resident_megabytes(process.pid)
        # The second is longer than the server's limit, and the strangers' own is off.
        options = [("grpc.max_send_message_length", -1)]
        with contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{port}", options)) as channel:
            nonsense = [os.urandom(200), b"", bytes(64), os.urandom(5000)]
            for method in ("Call", "Part", "Fetch"):
                assert (
                    many(channel.unary_unary(f"/ndistribute/{method}"), 1000, *nonsense) <= refused
                )
            huge = channel.unary_unary("/ndistribute/Part")
            assert many(huge, 60, bytes(16 << 20), at_once=10) <= refused | {
                grpc.StatusCode.UNAVAILABLE
            }
        for _ in range(300):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=5) as sock,
                contextlib.suppress(OSError),
            ):
                sock.sendall(os.urandom(2000))
        # One that knows the secret, and sends nonsense all the same.
        with client_of(port, "confused") as confused:
            for k in range(1000):
                with pytest.raises(MalformedError):
                    confused.call([os.urandom(1 + k % 500)])
        grown = resident_megabytes(process.pid) - before
        assert grown < 100
    assert len(seconds) > 100
    assert max(seconds) < 5


def test_strangers_who_open_calls_and_send_nothing_hold_nobody_up():
    with serving() as server, client_of(server.port) as client:
        silence = threading.Event()

        def nothing() -> Iterator[bytes]:
            silence.wait(timeout=30)
            yield from ()

        with contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{server.port}")) as channel:
            calls = [
                channel.stream_unary(f"/ndistribute/{method}").future(nothing(), timeout=20)
                for method in ("Call", "Part", "Greet", "Prove")
                for _ in range(40)
            ]
            start = time.monotonic()
            for _ in range(20):
                client.call([b"echo"])
            assert time.monotonic() - start < 5
            silence.set()
            assert all(call.code() is not grpc.StatusCode.OK for call in calls)


def test_a_call_ends_at_its_deadline_and_the_client_goes_on(reach):
    with serving() as server, reach(server.port) as client:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="did not answer worker:0"):
            client.call([b"wait"], timeout=0.5)
        assert time.monotonic() - start < 2
        assert bytes(client.call([b"echo"])) == b"echo"


def test_more_callers_wait_than_there_are_places_and_all_are_answered(reach):
    desk = EchoDesk()
    waiters = 16
    with (
        serving(desk, holders=4) as server,
        reach(server.port) as client,
        ThreadPoolExecutor(waiters) as pool,
    ):
        calls = [pool.submit(client.call, [b"wait"], 20) for _ in range(waiters)]
        assert desk.waits.wait(timeout=10)
        while not all(call.done() for call in calls):
            client.call([b"wake"])
        assert {bytes(call.result()) for call in calls} == {b"woken"}


def test_a_fault_of_the_desk_is_told_once_and_ends_nothing(caplog, reach):
    with serving() as server, reach(server.port) as client:
        with pytest.raises(DistributeError, match="the desk broke"):
            client.call([b"boom"])
        client.call([b"echo"])
    assert "a call failed" in caplog.text


def test_a_server_that_is_not_there_is_named():
    port = free_port()
    with client_of(port) as client:
        start = time.monotonic()
        with pytest.raises(WorkerLostError, match=f"127.0.0.1:{port}"):
            client.call([b"echo"], timeout=0.5)
        with pytest.raises(WorkerLostError, match=f"127.0.0.1:{port}"):
            client.call([b"echo"], timeout=60, patience=0.05)
        assert time.monotonic() - start < 3


def test_a_server_that_is_killed_and_comes_back_is_only_slow(reach):
    with (
        ThreadPoolExecutor(1) as pool,
        server_process() as (first, port),
        reach(port, timeout=30) as client,
    ):
        client.call([b"echo"])
        known = client.server
        waiting = pool.submit(client.call, [b"wait"])
        long = bytes(8 * PART_BYTES)
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=10)
        with pytest.raises((WorkerLostError, CollectiveTimeoutError)):
            client.call([b"echo"], timeout=0.3)
        with server_process(port):
            assert len(client.call([b"echo", long])) == 4 + len(long)
            assert client.server != known
            while not waiting.done():
                client.call([b"wake"])
            assert bytes(waiting.result()) == b"woken"


def test_a_server_that_is_stopped_and_goes_on_is_only_slow_and_takes_nobody_for_dead():
    with (
        server_process(silence=1.0) as (process, port),
        client_of(port, beat_seconds=0.1) as client,
    ):
        client.call([b"echo"])
        session = client._connection._opened.session
        stop(process)
        try:
            with pytest.raises((CollectiveTimeoutError, WorkerLostError)):
                client.call([b"echo"], timeout=1.5)
        finally:
            process.send_signal(signal.SIGCONT)
        until = time.monotonic() + 0.7  # Long enough for the server to look around.
        while time.monotonic() < until:
            client.call([b"echo"])
        assert client._connection._opened.session is session


def test_a_client_that_closes_says_so(reach):
    desk = EchoDesk()
    with serving(desk) as server:
        with reach(server.port) as client:
            client.call([b"echo"])
        assert desk.left == ["worker:0"]
        client.close()
        with pytest.raises((WorkerLostError, UnreachableError)):
            client.call([b"echo"], timeout=1)


def test_a_client_that_closes_ends_its_own_waiting_calls(reach):
    desk = EchoDesk()
    with serving(desk) as server, ThreadPoolExecutor(1) as pool:
        with reach(server.port) as client:
            waiting = pool.submit(client.call, [b"wait"])
            assert desk.waits.wait(timeout=10)
        with pytest.raises(WorkerLostError, match="closed"):
            waiting.result(timeout=10)


def test_a_server_that_stops_sends_those_away_who_wait(reach):
    desk = EchoDesk()
    with ThreadPoolExecutor(1) as pool:
        with serving(desk) as server:
            client = reach(server.port, timeout=0.5)
            waiting = pool.submit(client.call, [b"wait"])
            assert desk.waits.wait(timeout=10)
            start = time.monotonic()
        assert time.monotonic() - start < 5
        with client, pytest.raises((WorkerLostError, CollectiveTimeoutError)):
            waiting.result(timeout=10)


def test_a_port_in_use_is_named():
    with (
        serving() as server,
        pytest.raises(OSError, match=rf"port {server.port}.*Another program"),
        serving(address=f"127.0.0.1:{server.port}"),
    ):
        pass


def test_a_program_that_speaks_otherwise_is_told_apart():
    pool = ThreadPoolExecutor(1)
    other = grpc.server(pool)
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        with client_of(port) as client, pytest.raises(AuthenticationError, match="Another program"):
            client.call([b"echo"])
    finally:
        other.stop(grace=0.1).wait(timeout=5)
        pool.shutdown()


def test_a_server_that_loses_what_it_kept_is_asked_again(monkeypatch):
    with serving() as server, client_of(server.port) as client:
        data = os.urandom(2 * PART_BYTES)
        client.call([b"keep", data])
        read, lost = server._service.outbox.read, []

        def forgetful(name, number, offset):
            if not lost:
                lost.append(number)
                server._service.outbox.forget(name)
            return read(name, number, offset)

        monkeypatch.setattr(server._service.outbox, "read", forgetful)
        assert client.call([b"kept"]) == data
        assert lost


def test_a_replayed_envelope_of_another_size_is_malformed():
    with pytest.raises(MalformedError):
        Envelope.read(Envelope(10, 10, 0, 0).packed(bytes(32)) + b"short")
    assert issubclass(UnknownSessionError, AuthenticationError)
