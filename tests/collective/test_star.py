"""What the hub at rank 0 makes of messages, how an error travels, and how connections end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ndistribute.collective.bootstrap import ProcessInfo
from ndistribute.collective.star import (
    CALL,
    JOIN,
    MADE,
    Exchange,
    Failure,
    GoodBye,
    Hub,
    Lost,
    Message,
    Star,
    describe_error,
    restore_error,
)
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, WorkerLostError
from ndistribute.transport.address import address_of
from ndistribute.transport.codec import Decoder, encode
from ndistribute.transport.secret import Credentials

FINISHED = GoodBye("has finished", False, (9, 1))
DEADLINE = 50.0


def joining(rank: int, blob: bytes = b"") -> Exchange:
    return Exchange(JOIN, 0, (0, 0), {rank: blob})


def hub_of(size: int) -> tuple[Hub, list[tuple[int, str]]]:
    """Return a hub, and what it has delivered to whom."""
    told: list[tuple[int, str]] = []
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
    failed = restore_error(Decoder(Failure).decode(encode(described)[0]))
    assert isinstance(failed, WorkerLostError)
    assert str(failed).startswith("worker 1 failed: FileNotFoundError: no text ?")


class Member:
    """A process's part of a star, and what it has heard."""

    def __init__(self, info: ProcessInfo) -> None:
        self.heard: queue.Queue[tuple[int, Message]] = queue.Queue()
        self.listens = threading.Event()
        self.listens.set()
        self.star = Star(info, self.hear, DEADLINE)

    def hear(self, sender: int, message: Message) -> None:
        self.listens.wait(DEADLINE)
        self.heard.put((sender, message))

    def hears(self, wanted: Callable[[int, Message], bool]) -> None:
        """Wait until it hears a message."""
        while not wanted(*self.heard.get(timeout=DEADLINE)):
            pass


Start = Callable[..., Member]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start members of a group of two, all in this process."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [address_of(*listener.getsockname()) for listener in listeners]
    credentials = Credentials(b"the secret of this test", "a job", None)
    members: list[Member] = []

    def member(rank: int, host: str = "here") -> Member:
        who = rank, 2, addresses[0], addresses[rank], listeners[rank], credentials
        made = Member(ProcessInfo(*who, host=host, group=1))
        members.append(made)
        return made

    yield member
    for one in reversed(members):
        one.listens.set()
        one.star.close(FINISHED, broken=True)
    for listener in listeners:
        listener.close()


def test_a_process_that_connects_again_is_heard_on_its_new_connection_alone(start: Start) -> None:
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


def test_of_two_processes_with_one_index_that_come_at_once_the_second_is_refused(
    start: Start,
) -> None:
    """Both were let in, and the first was told that it was lost."""
    first, goes_on = start(0), threading.Event()
    first.star._order(0, goes_on.wait, DEADLINE)
    with ThreadPoolExecutor() as pool:
        comes = [pool.submit(start, 1, host) for host in ("red", "blue")]
        deadline = time.monotonic() + DEADLINE
        while first.star._orders.qsize() < 2 and time.monotonic() < deadline:
            goes_on.wait(0.001)
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


def joined(start: Start) -> list[Member]:
    members = [start(0), start(1)]
    for rank, member in enumerate(members):
        member.star.post(joining(rank))
    for member in members:
        member.hears(lambda _, message: len(getattr(message, "passed", ())) == 2)
    return members


@contextlib.contextmanager
def interrupted_in(function: str) -> Iterator[None]:
    """Interrupt the main thread as soon as it waits in a function of the star."""
    over = threading.Event()

    def look() -> None:
        deadline = time.monotonic() + DEADLINE
        while not over.wait(0.001) and time.monotonic() < deadline:
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            while frame is not None:
                code = frame.f_code
                if code.co_filename.endswith("star.py") and code.co_name == function:
                    os.kill(os.getpid(), signal.SIGINT)
                    return
                frame = frame.f_back

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=look, name="interrupting")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(DEADLINE)
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("function", ["close", "_part"])
def test_an_interrupt_while_closing_leaves_no_connection_and_no_thread(
    start: Start, function: str
) -> None:
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


def test_what_rank_0_says_last_arrives_from_a_broken_group_as_well(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
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
