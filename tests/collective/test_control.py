"""The control plane: addresses, the star, who is lost or late, and that everyone learns it."""

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from ndistribute.collective import bootstrap
from ndistribute.collective.backend import Call
from ndistribute.collective.bootstrap import (
    DataConnections,
    ProcessInfo,
    address_among,
    info_from_addresses,
    info_from_rank_0,
    outward_address,
)
from ndistribute.collective.communicator import CommunicationOptions
from ndistribute.collective.control_plane import WaitMonitor
from ndistribute.collective.shared_memory import SharedMemoryBackend
from ndistribute.collective.star import (
    CALL,
    JOIN,
    MADE,
    Exchange,
    GoodBye,
    Hub,
    Lost,
    Star,
    describe_error,
    restore_error,
)
from ndistribute.collective.step_tracker import BEFORE_ALL, END, StepTracker
from ndistribute.collective.workers import Workers
from ndistribute.devices import Device
from ndistribute.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from ndistribute.transport.address import address_of
from ndistribute.transport.codec import Decoder, encode
from ndistribute.transport.secret import Credentials
from tests.jobs.backend_calls import joined_peers
from tests.kinds import struck_inside
from tests.processes import Ranks, wait_until

FINISHED = GoodBye("has finished", False, (9, 1))
DEADLINE = 50.0


def test_a_host_is_reached_at_its_address_towards_the_others(monkeypatch):
    """Its own name may be 127.0.1.1, as on Debian, or inside of it, as the bridge of containers."""
    own = socket.gethostname()
    ways = {f"{own}:9": "172.17.0.1", "twin:9": "127.0.0.1", "other:9": "10.1.2.3"}
    monkeypatch.setattr(bootstrap, "_route_to", lambda name: (ways[name], ""))
    assert outward_address(["twin", "other", own]) == "10.1.2.3"
    assert outward_address(["twin", own]) == "172.17.0.1"


def test_loopback_serves_one_network_and_hosts_of_one_name_are_told_apart(monkeypatch):
    monkeypatch.setattr(bootstrap, "_route_to", lambda name: ("10.1.2.3", ""))
    here, beside = ("boot 1", "net 1", "box"), ("boot 1", "net 2", "box")
    away, named = ("boot 2", "net 3", "box"), ("blue", "net 1", "box")
    assert address_among([here, here], 0) == "127.0.0.1"
    for other in (beside, away, named):
        assert address_among([here, other], 0) == address_among([here, other], 1) == "10.1.2.3"


def test_hosts_that_only_the_user_tells_apart_need_no_network(monkeypatch):
    def no_way(address):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(bootstrap, "_route_to", no_way)
    red, blue = ("red", "net 1", "box"), ("blue", "net 1", "box")
    assert address_among([red, blue], 1) == "127.0.0.1"
    with pytest.raises(OSError, match="no address that other hosts can reach"):
        address_among([red, ("blue", "net 2", "box")], 0)


def test_an_unreachable_host_is_an_error_with_a_remedy(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    with pytest.raises(OSError, match="add it to /etc/hosts"):
        outward_address(["elsewhere"])


def test_a_rank_0_of_an_unknown_name_is_named(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "the secret of this test")
    with pytest.raises(OSError, match="the host name 'no-such-host"):
        info_from_rank_0("no-such-host.invalid:1", 1, 2)


@pytest.mark.parametrize("way", [("127.0.0.1", "127.0.1.1"), ("172.17.0.1", "172.17.0.1")])
def test_the_host_of_rank_0_is_named_to_all_as_it_was_given(monkeypatch, way):
    """What its name means there, no other host may reach."""
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "the secret of this test")
    monkeypatch.setattr(bootstrap, "_route_to", lambda address: way)
    own = socket.gethostname()
    for rank in (0, 1):
        info = info_from_rank_0(f"{own}:0", rank, 2)
        assert info.address == f"{own}:{info.listener.getsockname()[1]}"
        assert info.listener.getsockname()[0] in ("::", "0.0.0.0")
        for sock in (info.listener, info.entrance):
            if sock is not None:
                sock.close()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_heartbeat_that_would_never_pause_is_refused(monkeypatch, text):
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", text)
    with pytest.raises(ValueError, match="NDISTRIBUTE_HEARTBEAT_SECONDS must be a number"):
        info_from_addresses(["127.0.0.1:0", "127.0.0.1:1"], 0)


@pytest.fixture
def infos():
    """Describe the two processes of a group, both in this process."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [address_of(*listener.getsockname()) for listener in listeners]
    credentials = Credentials(b"the secret of this test", "a job", None)
    yield [
        ProcessInfo(rank, 2, addresses[0], addresses[rank], listener, credentials, group=1)
        for rank, listener in enumerate(listeners)
    ]
    for listener in listeners:
        listener.close()


def test_a_process_that_connects_again_for_data_ends_its_first_connection(infos):
    """It was closed under a thread that may poll it, by then perhaps another file."""
    group = [DataConnections(info) for info in infos]
    try:
        for data in group:
            data.open([info.address for info in infos], "this start")
        group[1].get(0, lambda: None)
        first = group[0].get(1, lambda: None)
        group[1].let_go()
        again = group[1].get(0, lambda: None)
        wait_until(lambda: group[0].get(1, lambda: None) is not first)
        assert first.fileno() >= 0
        assert first.recv(1) == b""
        again.setblocking(True)
        group[0].get(1, lambda: None).sendall(b"+")
        assert again.recv(1) == b"+"
    finally:
        for data in group:
            data.close()


def inside(step):
    """Return the tracker of a process inside a step."""
    where = StepTracker()
    where.position = step
    return where


@pytest.mark.parametrize(
    ("made", "call", "gone"),
    [((3, 2), (3, 2), set()), ((3, 2), (3, 3), {1}), ((1, 9), (3, 1), {1})],
)
def test_whoever_has_left_the_job_is_gone_for_calls_that_it_did_not_make(made, call, gone):
    where = inside(3)
    where.note_departed(1, "has finished", made)
    assert where.gone(call) == gone


@pytest.mark.parametrize(
    ("position", "made", "place", "answer"),
    [
        (3, BEFORE_ALL, (3, 2), None),
        (4, (3, 1), (3, 1), True),
        (4, (3, 1), (3, 2), False),
        (3, (3, 1), (3, END), None),
        (5, (5, 1), (3, END), False),
    ],
)
def test_a_process_tells_which_calls_it_made_or_left_out(position, made, place, answer):
    where = inside(position)
    where.made = made
    assert where.has_made(place) is answer


def test_an_answer_about_an_earlier_step_does_not_count():
    where = inside(3)
    where.note(1, (3, 1), made=False)
    assert where.gone((3, 1)) == {1}
    where.position = 4
    where.begin_step()
    assert where.gone((5, 1)) == set()
    assert not where.anyone_gone


def test_a_wait_names_those_that_nobody_has_heard_of_and_not_those_who_wait_too():
    where = inside(1)
    call = 1, 1
    where.note(1, call, made=True)
    assert where.late(call, absent=[1], others=[0, 1]) == [0]
    assert where.late(call, absent=[0, 1], others=[0, 1]) == [0]
    where.note(0, call, made=True)
    assert where.late(call, absent=[1], others=[0, 1]) == [1], "its data does not come"


def joining(rank, blob=b""):
    return Exchange(JOIN, 0, (0, 0), {rank: blob})


def hub_of(size):
    """Return a hub, and what it has delivered to whom."""
    told = []
    return Hub(size, lambda to, _, what: told.append((to, repr(what)))), told


def test_an_exchange_that_was_given_up_is_forgotten_in_the_end():
    hub, told = hub_of(3)
    for rank in range(3):
        hub.take(rank, joining(rank))
    hub.take(2, Exchange("names", 0, (1, 0), {2: b"two"}))
    for number in range(200):
        hub.take(0, Exchange(CALL, 0, (1, number), {0: MADE}))
    told.clear()
    alone = Exchange("names", 0, (1, 0), {0: b"zero"})
    hub.take(0, alone)
    assert told == [(0, repr(alone))]


def test_who_is_lost_before_all_have_joined_may_join_again():
    hub, told = hub_of(3)
    for rank in (1, 2):
        hub.take(rank, joining(rank, b"first"))
    hub.end(2, "it ended")
    hub.take(0, joining(0))
    assert not hub.joined
    told.clear()
    hub.take(2, joining(2, b"second"))
    answer = Exchange(JOIN, 0, (0, 0), {1: b"first", 0: b"", 2: b"second"})
    assert told == [(rank, repr(answer)) for rank in range(3)]
    assert hub.joined


def test_an_error_arrives_with_its_class_and_names_who_failed():
    late = restore_error(describe_error(CollectiveTimeoutError("late", rank=2, op="sum"), 1))
    assert (type(late), str(late), late.rank, late.op) == (CollectiveTimeoutError, "late", 2, "sum")
    name = os.fsdecode(b"no text \xff")
    described = describe_error(FileNotFoundError(name * 5000), 1)
    failed = restore_error(Decoder(type(described)).decode(encode(described)[0]))
    assert isinstance(failed, WorkerLostError)
    assert str(failed).startswith("worker 1 failed: FileNotFoundError: no text ?")


class Member:
    """A process's part of a star, and what it has heard."""

    def __init__(self, info):
        self.heard = queue.Queue()
        self.listens = threading.Event()
        self.listens.set()
        self.star = Star(info, self.hear, DEADLINE)

    def hear(self, sender, message):
        self.listens.wait(DEADLINE)
        self.heard.put((sender, message))

    def hears(self, wanted):
        """Wait until it hears a message."""
        while not wanted(*self.heard.get(timeout=DEADLINE)):
            pass


Start = Callable[..., Member]


@pytest.fixture
def start(infos):
    """Start members of a group of two, all in this process."""
    members = []

    def member(rank, host="here"):
        members.append(Member(dataclasses.replace(infos[rank], host=host)))
        return members[-1]

    yield member
    for one in reversed(members):
        one.listens.set()
        one.star.close(FINISHED, broken=True)


def test_a_process_that_connects_again_is_heard_on_its_new_connection_alone(start):
    first, again = start(0), start(1)
    again.star.post(joining(1, b"old"))
    again.hears(lambda _, message: isinstance(message, Exchange))
    new = start(1)
    again.hears(lambda sender, message: sender == 0 and isinstance(message, Lost))
    first.star.post(joining(0))
    new.star.post(joining(1, b"new"))
    all_of_them = {0: b"", 1: b"new"}
    for member in (first, new):
        member.hears(lambda _, message: getattr(message, "passed", None) == all_of_them)


def test_of_two_processes_with_one_index_that_come_at_once_the_second_is_refused(start):
    """Both were let in, and the first was told that it was lost."""
    first, goes_on = start(0), threading.Event()
    first.star._order(0, goes_on.wait, DEADLINE)
    with ThreadPoolExecutor() as pool:
        comes = [pool.submit(start, 1, host) for host in ("red", "blue")]
        wait_until(lambda: first.star._orders.qsize() >= 2)
        goes_on.set()
        errors = [come.exception(DEADLINE) for come in comes]
    (refused,) = [error for error in errors if error is not None]
    assert isinstance(refused, AuthenticationError)
    assert "two processes are worker 1, pid " in str(refused)
    (member,) = [come.result() for come in comes if come.exception() is None]
    for rank, one in enumerate((first, member)):
        one.star.post(joining(rank))
    while (heard := member.heard.get(timeout=DEADLINE)[1]) and len(
        getattr(heard, "passed", ())
    ) < 2:
        assert not isinstance(heard, Lost)


def joined(start):
    members = [start(0), start(1)]
    for rank, member in enumerate(members):
        member.star.post(joining(rank))
    for member in members:
        member.hears(lambda _, message: len(getattr(message, "passed", ())) == 2)
    return members


@contextlib.contextmanager
def interrupted_in(function):
    """Interrupt the main thread as soon as it waits in a function of the star."""

    def is_there(code):
        return code.co_filename.endswith("star.py") and code.co_name == function

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with struck_inside(lambda: os.kill(os.getpid(), signal.SIGINT), is_there):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("function", ["close", "_part"])
def test_an_interrupt_while_closing_leaves_no_connection_and_no_thread(start, function):
    """It left them all open."""
    first, other = joined(start)
    if function == "_part":
        other.listens.clear()  # So that it is waited for.
    with interrupted_in(function), pytest.raises(KeyboardInterrupt):
        first.star.close(FINISHED, broken=function == "_part")
    other.listens.set()
    other.hears(lambda sender, message: sender == 0 and isinstance(message, Lost))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("ndistribute-control-0")]


def test_what_rank_0_says_last_arrives_from_a_broken_group_as_well(start, monkeypatch):
    """It closed at once, and what came later made the system drop what was not sent yet."""
    monkeypatch.setenv("NDISTRIBUTE_UNIX_SOCKETS", "0")
    first, other = joined(start)
    other.listens.clear()
    count = 30
    for _ in range(count):
        first.star.post(Lost("x" * 30_000))
    closing = threading.Thread(target=first.star.close, args=(FINISHED, True))
    closing.start()
    closing.join(0.3)  # It waits for the other one to read.
    other.star.post(Lost("too late"))
    other.listens.set()
    for _ in range(count):
        other.hears(lambda _, message: isinstance(message, Lost) and len(message.why) == 30_000)
    other.hears(lambda _, message: isinstance(message, GoodBye))
    closing.join(DEADLINE)


def nothing():
    """Have nothing to reset in a recovery."""


def exchanged(rank, size):
    return joined_peers().exchange("names", f"rank {rank}".encode(), timeout=50.0)


def wait_for(missing):
    """Wait in a call for a rank that does not come."""
    patience = WaitMonitor(joined_peers(), Call(1, "all_reduce", "SUM", timeout=30.0))
    while True:
        patience.check(lambda: [missing])
        time.sleep(0.001)


def broken_before_a_step(rank, size):
    """Break a group in which one process has not begun a step yet, and say how each goes on."""
    peers = joined_peers()
    workers = Workers(peers, SharedMemoryBackend(peers), [Device("cpu:0")], CommunicationOptions())
    if rank == 0:
        workers.enter()
        cause = WorkerLostError("broken")
        peers.abort(cause, after=BEFORE_ALL)
        workers.peers.fail(cause)
        workers.peers.leave()
    else:
        wait_until(lambda: peers.cause is not None)
    told = []
    for _ in range(2):
        try:
            workers.enter()
            workers.peers.leave()
        except DistributeError as error:
            told.append(type(error).__name__)
    workers.close()
    return told


def test_who_has_begun_no_step_yet_takes_part_in_a_recovery():
    with Ranks(2) as ranks:
        raised = ranks.results(broken_before_a_step)
    assert raised == [[], ["WorkerLostError"]]


def left_behind(rank, size):
    """Wait for rank 1, which waits for nobody, in a call that rank 0 has left without."""
    peers = joined_peers()
    peers.enter(nothing, 50.0)
    if rank == 0:
        peers.close()
        return ""
    wait_until(lambda: peers.cut_off_at <= time.monotonic())
    if rank == 1:
        return ""
    patience = WaitMonitor(peers, Call(1, "all_reduce", "SUM", timeout=50.0))
    try:
        while True:
            patience.check(lambda: [1])
            time.sleep(0.001)
    except DistributeError as error:
        return f"{type(error).__name__}: {error}"


def test_without_rank_0_nobody_waits_in_a_call_that_it_did_not_make():
    with Ranks(3) as ranks:
        ranks.results(exchanged)
        outcomes = ranks.run(left_behind)
        assert "worker 0 " in outcomes[2].result()
        assert "has finished, and worker 2 waits for it" in outcomes[2].result()
        for outcome in ranks.run(exchanged, ranks=[1, 2]):
            assert outcome.error == "WorkerLostError"
            assert "has finished" in outcome.text


def held(rank, size):
    """Return how many descriptors and threads this process has more than before it joined."""
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    joined_peers()
    return len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]


def test_connections_and_threads_grow_with_the_group_at_rank_0_alone():
    found = []
    for size in (2, 6):
        with Ranks(size) as ranks:
            found.append(ranks.results(held))
    (_, few), (first, *many) = found
    assert set(many) == {few}
    assert few[1] <= 4
    assert first[0] > few[0]


def missed(rank, size):
    peers = joined_peers()
    if rank == 1:
        return ""
    try:
        peers.exchange("names", b"", timeout=0.5)
    except DistributeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_exchange_gives_everyone_all_blobs_in_rank_order_and_names_who_is_late():
    with Ranks(3) as ranks:
        blobs = ranks.results(exchanged)
        assert blobs == [[b"rank 0", b"rank 1", b"rank 2"]] * 3
        for rank, outcome in enumerate(ranks.run(missed)):
            waited = f"CollectiveTimeoutError: names: worker {rank} waited 0.5 s for worker 1."
            assert outcome.result() == ("" if rank == 1 else waited)


def aborted_twice(rank, size):
    """Cut an abort short on rank 0, as an interrupt does, and abort again."""
    peers = joined_peers()
    peers.enter(nothing, 50.0)
    if rank == 0:
        post, told = peers.star.post, []

        def interrupted(message):
            if not told:
                told.append(message)
                raise KeyboardInterrupt
            post(message)

        peers.star.post = interrupted
        with pytest.raises(KeyboardInterrupt):
            peers.abort(ValueError("first"))
        peers.abort(ValueError("second"))
    with pytest.raises(WorkerLostError) as caught:
        wait_for(1 - rank)
    peers.leave()
    peers.close()
    with pytest.raises(WorkerLostError, match="has left its group"):
        peers.enter(nothing, 50.0)
    return [str(caught.value)]


def test_an_abort_that_was_cut_short_is_made_up_for_and_who_has_left_never_waits():
    with Ranks(2) as ranks:
        for outcome in ranks.run(aborted_twice):
            assert "ValueError: second" in outcome.result()[0]


def told_of_silence_while_the_group_recovers(rank, size):
    """Let a connection be found silent just when the recovery closes it, and again after that."""
    peers, told = joined_peers(), []
    data, main = peers._data, threading.current_thread()

    def silence(sock):
        if threading.current_thread() is not main:
            return 0.0
        if not peers.generation:
            peers.recover(lambda: None, 40.0)
        return 1e9

    def look():
        with patch.object(bootstrap, "unanswered_seconds", silence):
            data.tick(time.monotonic(), False)
        wait_until(lambda: all(one.name != "ndistribute look" for one in threading.enumerate()))
        try:
            peers.check()
        except DistributeError as error:
            told.append(f"{type(error).__name__}: {error}")

    peers.data_socket(1 - rank, peers.check)
    if rank == 1:
        peers.recover(lambda: None, 40.0)
    else:
        look()
    peers.data_socket(1 - rank, peers.check)
    if rank == 0:
        assert told == []
        look()
    return told


def test_silence_of_a_closed_generation_breaks_no_later_one():
    with Ranks(2) as ranks:
        (told, _) = ranks.results(told_of_silence_while_the_group_recovers)
    assert len(told) == 1
    assert "cannot reach worker 1" in told[0]
