"""A client's calls are answered by whichever life of its server is there, or fail with a reason."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest

from ndistribute.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from ndistribute.transport.address import unix_name
from ndistribute.transport.rpc import ClientCount, RpcServer
from tests.processes import wait_until
from tests.transport.ends import (
    CREDENTIALS,
    SECONDS,
    STRANGER,
    Child,
    Echo,
    Note,
    at_once,
    client_of,
    knock,
    open_sockets,
    serving,
)

SERVE = "(server := RpcServer('127.0.0.1:{}', CREDENTIALS, 'ps:0', {{'echo': Echo()}})).port"


@pytest.fixture
def job(request, monkeypatch):
    """A service, and a client of it: over a Unix socket where a test does not ask for TCP too."""
    unix = getattr(request, "param", "1")
    monkeypatch.setenv("NDISTRIBUTE_UNIX_SOCKETS", unix)
    with (
        serving(environ={"NDISTRIBUTE_UNIX_SOCKETS": unix}) as (echo, address),
        contextlib.closing(client_of(address, audience="ps:0")) as client,
    ):
        yield echo, client


over_both = pytest.mark.parametrize("job", ["0", "1"], ids=["tcp", "unix"], indirect=True)


def total(reply: Note) -> float:
    """Return the sum of a reply's arrays."""
    return float(sum(array.sum() for array in reply.arrays))


@over_both
def test_calls_of_several_threads_get_their_own_replies(job):
    echo, client = job

    def ask(thread: int) -> None:
        for number in range(40):
            size = (thread * 31 + number * 1009) % 30_000
            array = np.full(size, thread + number, np.float64)
            assert total(client.call(Note(f"{thread}", (array,)), 20)) == array.sum()

    assert at_once(*[lambda thread=thread: ask(thread) for thread in range(6)]) == [None] * 6
    assert {*echo.here} == {client.name}


@over_both
def test_each_client_is_one_more_connection_and_thread_of_a_server(job):
    _, client = job
    client.call(Note("one"))
    before = threading.active_count(), open_sockets()
    with contextlib.closing(client_of(client.address, audience="ps:0")) as other:
        other.call(Note("another"))
        # The server and both ends of the connection are in this process.
        assert (threading.active_count(), open_sockets()) == (before[0] + 1, before[1] + 2)


def test_a_late_reply_is_not_taken_for_one_of_the_next_whatever_their_order(job):
    echo, client = job
    with pytest.raises(CollectiveTimeoutError, match=r"did not answer within 0\.[12]"):
        client.call(Note("wait", (np.ones(100_000),)), 0.15)
    echo.leave.set()
    calls = [client.start(Note(str(number)), SECONDS) for number in range(5)]
    for number in (4, 0, 3, 1, 2):  # In any order.
        assert calls[number].result().text == str(number)
    assert client.call(Note("next")).text == "next"


def test_who_waits_longer_goes_on_when_the_receiving_thread_gives_up(job):
    echo, client = job
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(client.call, Note("never"), 0.3)
        assert echo.entered.wait(SECONDS)
        patient = pool.submit(client.call, Note("patient", (np.ones(9),)), SECONDS)
        assert total(patient.result(SECONDS)) == 9
        with pytest.raises(CollectiveTimeoutError):
            short.result(SECONDS)


def test_a_server_that_raises_tells_why_and_serves_on(job, caplog):
    echo, client = job
    with pytest.raises(DistributeError, match="LookupError: never heard of it"):
        client.call(Note("fail"))
    with pytest.raises(DistributeError, match="cannot be sent"):
        client.call(Note("unsendable"))
    with pytest.raises(ValueError, match="cannot be sent"):
        client.call(Note("", (np.array([None]),)))
    assert client.call(Note("and on")).text == "and on"
    assert len(echo.here) == 1
    assert not client._in_use


def test_the_loss_of_a_client_with_several_connections_is_logged_once_each_time(caplog):
    with serving() as (echo, address):
        for losses in (1, 2):
            with Child() as process:
                process.run(f"clients = [client_of({address!r}) for _ in range(3)]")
                process.run("print([each.call(Note('here')).text for each in clients])")
            wait_until(lambda losses=losses: len(echo.gone) == 3 * losses)
            lines = [each for each in caplog.messages if "the connection of worker:0" in each]
            assert len(lines) == losses
            assert all(died for _, died, _ in echo.gone)


def test_the_loss_of_each_of_several_programs_with_one_name_is_logged(caplog):
    with serving() as (echo, address):
        with Child() as one, Child() as other:
            for process in (one, other):
                process.run(f"client = client_of({address!r}, name='client')")
                assert process.run("client.call(Note('here')).text") == "here"
        wait_until(lambda: len(echo.gone) == 2)
        records = [each for each in caplog.records if "connection of client" in each.getMessage()]
        assert [record.levelname for record in records] == ["WARNING"] * 2


def test_waits_for_a_server_that_is_not_up_yet_and_gives_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with contextlib.closing(client_of(f"127.0.0.1:{port}", audience="ps:0")) as client:
        with pytest.raises(WorkerLostError, match=r"ps:0 at 127.* was not reached within "):
            client.call(Note(), 0.25)
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(client.call, Note("early"), SECONDS)
            with serving(port=port):
                assert early.result(SECONDS).text == "early"


def test_a_client_may_bear_less_silence_than_its_process(caplog):
    """A server that is stopped is lost to it alone."""
    with Child() as child:
        address = f"127.0.0.1:{child.run(SERVE.format(0))}"
        hasty = client_of(address, repeats=False, silence=0.3)
        with contextlib.closing(hasty), contextlib.closing(client_of(address)) as patient:
            for client in (hasty, patient):
                assert client.call(Note("here"), SECONDS).text == "here"
            child.signal(signal.SIGSTOP)
            with pytest.raises(WorkerLostError, match="it sent nothing for 0"):
                hasty.call(Note(), SECONDS)
            call = patient.start(Note("late"), SECONDS)
            child.signal(signal.SIGCONT)
            assert call.result(time.monotonic() + SECONDS).text == "late"


def test_who_does_not_belong_learns_it_at_once(job):
    _, client = job
    other = client_of(client.address)
    other._hello = type(other._hello)(purpose="nothing", name="me")
    for stranger, reason in (
        (client_of(client.address, STRANGER), "another secret"),
        (client_of(client.address, audience="ps:1"), "expected ps:1, but this is ps:0"),
        (other, "this process has no service"),
    ):
        with contextlib.closing(stranger), pytest.raises(AuthenticationError, match=reason):
            stranger.call(Note(), SECONDS)


def test_a_slow_connection_holds_up_neither_other_calls_nor_close():
    """A host that swallows everything: who waits for it holds no lock that others need."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        client = client_of(f"127.0.0.1:{silent.getsockname()[1]}")
        waiting = pool.submit(client.call, Note(), 30)
        peer, _ = silent.accept()
        with pytest.raises(WorkerLostError):
            client.call(Note(), 0.2)
        assert not waiting.done()
        client.close()
        silent.close()
        peer.close()
        with pytest.raises(WorkerLostError, match="was closed"):
            waiting.result(SECONDS)


def test_closing_wakes_who_waits_and_is_no_death_for_the_server(job):
    echo, client = job
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.call, Note("never"), 30) for _ in range(2)]
        assert echo.entered.wait(SECONDS)
        client.close()
        for future in waiting:
            with pytest.raises(WorkerLostError, match="was closed"):
                future.result(SECONDS)
    client.close()
    with pytest.raises(WorkerLostError, match="was closed"):
        client.call(Note())
    wait_until(lambda: len(echo.gone) == 2)
    assert [gone[:2] for gone in echo.gone] == [(client.name, False)] * 2


def test_a_server_that_is_closed_lets_its_clients_know_and_frees_its_address(job):
    _, client = job
    assert client.call(Note("first")).text == "first"
    port = int(client.address.rpartition(":")[2])
    echo = Echo()
    own = RpcServer("127.0.0.1:0", CREDENTIALS, "ps:0", {"echo": echo})
    with contextlib.closing(client_of(f"127.0.0.1:{own.port}")) as other:
        assert other.call(Note("there")).text == "there"
        own.close()
        own.close()
        assert [gone[1] for gone in echo.gone] == [False]
        with pytest.raises(WorkerLostError):
            other.call(Note(), 0.1)
        again = RpcServer(f"127.0.0.1:{own.port}", CREDENTIALS, "ps:0", {"echo": echo})
        assert other.call(Note("again"), SECONDS).text == "again"
        again.close()
    with pytest.raises(OSError, match="choose another port"):
        RpcServer(f"127.0.0.1:{port}", CREDENTIALS, "ps:0", {})


def test_an_interrupt_ends_the_call_of_its_own_thread_alone(job):
    echo, client = job

    def call_then_interrupt() -> str:
        text = client.call(Note("of the other thread"), SECONDS).text
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return text

    with ThreadPoolExecutor(1) as pool:
        call = client.start(Note("never"), SECONDS)
        assert echo.entered.wait(SECONDS)
        other = pool.submit(call_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.result()
        assert other.result(SECONDS) == "of the other thread"
    assert client.call(Note("next")).text == "next"
    assert not client._in_use


@pytest.mark.parametrize(
    ("ends", "left"),
    [
        ("died died", [False, True]),  # The other one may still be in use.
        ("good-bye good-bye", [True, False]),
        ("good-bye died", [True, False]),
        ("died good-bye", [False, True]),
    ],
)
def test_a_client_has_left_at_its_good_bye_or_with_its_last_connection(ends, left):
    clients, peers = ClientCount(), [Mock(), Mock()]
    for peer in peers:
        peer.name = "worker:0#a"
        clients.add(peer)
    died = [end == "died" for end in ends.split()]
    assert [clients.remove(*each) for each in zip(peers, died, strict=True)] == left
    assert "worker:0#a" not in clients


def check_admission(address: str) -> None:
    """Fail if a good client does not get in and out."""
    with contextlib.closing(client_of(address)) as client:
        assert client.call(Note("here"), SECONDS).text == "here"


def test_a_process_without_descriptors_left_serves_again_when_it_has_some():
    with Child() as server, contextlib.ExitStack() as stack:
        server.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))")
        address = f"127.0.0.1:{server.run(SERVE.format(0))}"
        server.run("files = []")
        for line in ("files.append(open('/dev/null'))",) * 60:
            if server.run(line).startswith("OSError"):
                break
        for _ in range(20):
            stack.enter_context(knock(address))
        with contextlib.closing(client_of(address)) as client, pytest.raises(DistributeError):
            client.call(Note("no room"), 0.5)
        server.run("files.clear()")
        check_admission(address)


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
        check_admission(address)
        assert len(echo.here) == 1


@root_only
def test_nobody_turns_to_a_socket_that_another_user_has_put_in_its_place():
    with serving(environ={"NDISTRIBUTE_UNIX_SOCKETS": "0"}) as (_, address), nobody() as other:
        other.run("trap = socket.socket(socket.AF_UNIX)")
        other.run(f"trap.bind({unix_name(address)!r})")
        other.run("trap.listen()")
        with contextlib.closing(client_of(address)) as client:
            assert client.call(Note("here"), SECONDS).text == "here"
            assert not client._idle[0].is_unix
        assert other.run("trap.accept()[0].recv(100)") == "b''"
