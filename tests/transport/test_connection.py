"""A connection carries whole records over each transport, or says that it ended, and why."""

import contextlib
import os
import random
import signal
import socket
import struct
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from ndistribute.transport import buffers
from ndistribute.transport import connection as module
from ndistribute.transport.buffers import Ring, make_file
from ndistribute.transport.codec import MalformedError, encode
from ndistribute.transport.connection import Connection, ConnectionLostError
from ndistribute.transport.secret import TlsFiles
from tests.processes import wait_until
from tests.transport.ends import (
    Note,
    at_once,
    authority,
    forked,
    one_end,
    open_files,
    open_sockets,
    pair,
    sockets,
    soon,
)

KINDS = ["tcp", "tls", "unix"]
HEADER = struct.Struct("<HBBIQIIQ")
MAGIC, DATA, SHARED = 0x444E, 1, 2
MEGABYTES = 1 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> TlsFiles:
    return authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(params=KINDS)
def ends(request, files) -> Iterator[tuple[Connection, Connection]]:
    with pair(request.param, files) as made:
        yield made


def note(*sizes: int, text: str = "") -> Note:
    """Return a record with arrays of so many bytes, which differ."""
    numbers = [np.arange(size // 4 + 1, dtype=np.uint32).view(np.uint8) for size in sizes]
    return Note(text, tuple(array[:size] for array, size in zip(numbers, sizes, strict=True)))


def same(one: Note, other: Note) -> bool:
    texts = one.text == other.text and len(one.arrays) == len(other.arrays)
    return texts and all(map(np.array_equal, one.arrays, other.arrays))


def exchanged(sender: Connection, receiver: Connection, record: Note, call: int = 0) -> Note:
    """Return what arrives of a record; it is sent meanwhile, for it may not fit in between."""
    _, (number, found) = at_once(
        lambda: sender.send(record, call, soon()), lambda: receiver.receive(soon())
    )
    assert number == call
    return found


def lost(connection: Connection) -> ConnectionLostError:
    with pytest.raises(ConnectionLostError) as caught:
        connection.receive(soon())
    return caught.value


@contextlib.contextmanager
def half(unix: bool = False, **more) -> Iterator[tuple[Connection, socket.socket]]:
    """Yield a connection, and the socket on which the test is its other end."""
    one, other = sockets(unix)
    connection = one_end(one, "a", **more)
    with other:
        other.settimeout(40.0)
        try:
            yield connection, other
        finally:
            connection.abort("the test ended.")
            connection.close()


def frames(count: int, macs: bool, record: Note) -> list[bytes]:
    """Return the bytes of some frames for the end named ``a``."""
    one, other = sockets(unix=False)
    sender = one_end(one, "b", macs=macs)
    control, buffers = encode(record)
    length = HEADER.size + 8 * len(buffers) + len(control) + 32 * macs * (1 + bool(buffers))
    length += sum(len(buffer) + -len(buffer) % 64 for buffer in buffers)
    sent = []
    with other:
        for number in range(count):
            sender.send(record, number)
            sent.append(other.recv(length, socket.MSG_WAITALL))
        sender.abort("enough")
        sender.close()
    return sent


@pytest.mark.parametrize("macs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_records_pass_whole_both_ways(kind, macs, files):
    with pair(kind, files, macs=macs) as (one, other):
        kept = []
        for number, sizes in enumerate(
            [(), (1,), (0,), (5, 0, 64, 65), (70_000,), (0, 9 * MEGABYTES, 3), (200_000, 70_000)]
        ):
            record = note(*sizes, text="x" * 10**number)
            for sender, receiver in ((one, other), (other, one)):
                found = exchanged(sender, receiver, record, number + (1 << 40))
                assert same(found, record)
                assert all(array.ctypes.data % 16 == 0 for array in found.arrays if array.size)
                kept.append((found, record))
        assert all(same(found, record) for found, record in kept)
        assert any("memfd:ndistribute" in link for link in open_files()) == (kind == "unix")


def test_long_messages_both_ways_at_once_do_not_stop_each_other():
    with pair("unix") as (one, other):
        _, _, here, there = at_once(
            lambda: one.send(note(24 * MEGABYTES), deadline=soon()),
            lambda: other.send(note(24 * MEGABYTES), deadline=soon()),
            lambda: one.receive(soon()),
            lambda: other.receive(soon()),
        )
        assert all(same(found, note(24 * MEGABYTES)) for _, found in (here, there))


def test_a_descriptor_that_comes_while_nobody_receives_is_kept():
    with pair("unix") as (one, other):
        for size in (MEGABYTES, 4 * MEGABYTES):
            one.send(note(size))
            other.tick(time.monotonic(), False)
            assert same(other.receive(soon())[1], note(size))


def test_mutated_frames_are_malformed_or_lost_and_nothing_else():
    (frame,) = frames(1, False, note(70, 3, text="some text"))
    rng = random.Random(20240229)
    outcomes = set()
    for number in range(400):
        changed = bytearray(frame)
        for _ in range(1 + number % 3):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with half() as (connection, sock):
            sent = (rng.randbytes(number), frame[: rng.randrange(len(frame))], changed, changed)
            sock.sendall(sent[number % 4])
            sock.shutdown(socket.SHUT_WR)
            try:
                outcomes.add(type(connection.receive(soon())[1]))
            except (MalformedError, ConnectionLostError) as error:
                outcomes.add(type(error))
                assert not connection.is_open
    assert outcomes == {Note, MalformedError, ConnectionLostError}


class Never:
    """A decoder that must not be reached."""

    def decode(self, control: object, buffers: object = ()) -> Note:
        raise AssertionError("bytes were decoded that nobody vouches for")


@pytest.mark.parametrize(
    ("sizes", "distance"), [((64, 0, 120, 1), 1), ((3000,), 97)], ids=["short", "in pieces"]
)
def test_a_flipped_byte_of_a_frame_with_a_mac_is_refused_before_anything_is_decoded(
    sizes, distance, monkeypatch
):
    monkeypatch.setattr(module, "_PIECE_BYTES", 1024)
    (frame,) = frames(1, True, note(*sizes, text="some text"))
    for position in range(0, len(frame), distance):
        changed = bytearray(frame)
        changed[position] ^= 1
        with half(kinds=Never(), macs=True) as (connection, sock):
            sock.sendall(changed)
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises((MalformedError, ConnectionLostError)):
                connection.receive(soon())
            assert not connection.is_open


def test_arrays_of_two_frames_with_macs_cannot_change_places():
    sent = frames(2, True, note(128))
    body = 128 + 32  # With the MAC behind it.
    for kept in (slice(None, -body), slice(None, -32)):
        with half(kinds=Never(), macs=True) as (connection, sock):
            sock.sendall(sent[0][kept] + sent[1][kept.stop :])
            with pytest.raises(MalformedError, match="changed on the way"):
                connection.receive(soon())


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 0), ("reflected",)])
@pytest.mark.parametrize("record", [Note("some text"), note(128)])
def test_a_sealed_frame_that_is_repeated_reordered_or_sent_back_is_refused(order, record):
    sent = frames(3, True, record)
    with half(macs=True) as (connection, sock):
        for number in order:
            if number == "reflected":
                connection.send(record)
            sock.sendall(sock.recv(1000) if number == "reflected" else sent[number])
        for number in order[:-1]:
            assert connection.receive(soon())[0] == number
        with pytest.raises(MalformedError, match="changed on the way"):
            connection.receive(soon())


@pytest.mark.parametrize(
    ("count", "control", "body"),
    [
        (1, 10, (16 << 30) + 64),
        (1, (1 << 30) + 1, 64),
        ((1 << 20) + 1, 10, 0),
        (0, 0, 64),
    ],
)
def test_announced_sizes_beyond_the_limits_take_no_memory(count, control, body):
    with half() as (connection, sock):
        sock.sendall(HEADER.pack(MAGIC, DATA, 0, count, 1, control, 0, body))
        tracemalloc.start()
        try:
            with pytest.raises(MalformedError):
                connection.receive(soon())
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


def test_memory_is_refused_that_is_missing_or_of_another_size_or_may_be_made_shorter():
    control, _ = encode(Note())
    frame = HEADER.pack(MAGIC, DATA, SHARED, 1, 1, len(control), 0, MEGABYTES)
    frame += struct.pack("<Q", MEGABYTES) + control
    with tempfile.TemporaryFile() as plain, socket.socket() as unrelated:
        shrinking = os.memfd_create("shrinking", os.MFD_ALLOW_SEALING)
        os.ftruncate(shrinking, buffers._SIZE)
        plain.truncate(buffers._SIZE)
        longer = make_file()
        os.ftruncate(longer, 2 * buffers._SIZE)
        before = len(open_files())
        for sent in (
            [shrinking],
            [plain.fileno()],
            [unrelated.fileno()],
            [],
            [longer],
            [longer] * 5,
        ):
            with half(unix=True) as (connection, sock):
                socket.send_fds(sock, [frame], sent)
                with pytest.raises(MalformedError, match="memory"):
                    connection.receive(soon())
        assert len(open_files()) == before
        os.close(shrinking)
        os.close(longer)


@pytest.mark.parametrize("counts", [(0, 1), (1 << 40, 0), (1 << 63, 5), ((4 << 20) + 1, 0)])
def test_counters_of_shared_memory_that_can_not_be_are_refused_at_both_ends(counts):
    file = make_file()
    ends = Ring(file, writes=True), Ring(file, writes=False)
    os.close(file)
    ends[0]._counts[0], ends[0]._counts[8] = counts
    for end in ends:
        with pytest.raises(MalformedError, match="do not fit in shared memory"):
            end.move(np.zeros(10, np.uint8))


def test_an_end_in_the_middle_of_a_long_message_is_known_at_once():
    with pair("unix") as (one, other):
        with pytest.raises(TimeoutError):  # Nobody reads it.
            other.send(note(24 * MEGABYTES), deadline=time.monotonic() + 0.2)
        assert not lost(one).clean
    with pair("unix") as (one, other):
        record = note(24 * MEGABYTES)
        sent, _ = at_once(lambda: one.send(record), lambda: other.abort("it is killed."))
        assert isinstance(sent, ConnectionLostError)


def test_good_bye_is_told_from_the_end_of_a_process_and_arrives_although_much_was_not_read(ends):
    one, other = ends
    other.send(note(50_000))
    one.send(Note("last words"))
    closing = threading.Thread(target=one.close)
    closing.start()
    assert other.receive(soon())[1].text == "last words"
    assert lost(other).clean
    other.close()
    closing.join(40.0)
    with half() as (connection, sock):
        sock.close()
        assert not lost(connection).clean
        for use in (lambda: connection.send(Note()), connection.receive):
            with pytest.raises(ConnectionLostError, match="closed the connection"):
                use()


def test_closing_ends_although_the_other_end_never_ceases_to_send():
    with half() as (connection, sock):
        done = threading.Event()

        def flood() -> None:
            sock.settimeout(0.2)
            with contextlib.suppress(OSError):
                while not done.is_set():
                    sock.sendall(bytes(100_000))

        flooding = threading.Thread(target=flood)
        flooding.start()
        connection.close()
        done.set()
        flooding.join(40.0)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (Connection.close, "this process closed it"),
        (lambda connection: connection.abort("the test says so."), "the test says so"),
    ],
)
def test_the_end_wakes_who_receives_and_who_sends_and_says_why(ends, end, reason):
    one, _ = ends
    waiting = threading.Event()

    def send() -> None:
        while True:
            one.send(note(300_000))
            waiting.set()

    def stop() -> None:
        waiting.wait(40.0)
        end(one)

    for error in at_once(send, lambda: one.receive(soon()), stop)[:2]:
        assert isinstance(error, ConnectionLostError)
    for use in (lambda: one.send(Note()), one.receive):
        with pytest.raises(ConnectionLostError, match=reason):
            use()


def test_only_a_deadline_in_the_middle_of_a_frame_cuts_the_connection(ends):
    one, other = ends
    for seconds in (-1.0, 0.05):
        with pytest.raises(TimeoutError):
            one.receive(time.monotonic() + seconds)
    assert exchanged(other, one, Note("late")).text == "late"
    (frame,) = frames(1, False, Note("some text"))
    with half() as (connection, sock):
        sock.sendall(frame)
        assert connection.receive(1e18)[1].text == "some text"  # A deadline may be very far away.
        sock.sendall(frame[:-1])
        with pytest.raises(TimeoutError):
            connection.receive(time.monotonic() + 0.05)
        assert not connection.is_open
    with pytest.raises(TimeoutError):
        one.send(note(30 * MEGABYTES), deadline=time.monotonic() + 0.05)
    assert not one.is_open


@pytest.mark.parametrize(
    "doing", [lambda end: end.receive(soon()), lambda end: end.send(note(30 * MEGABYTES))]
)
def test_an_interrupt_leaves_no_half_frame_behind(doing):
    (frame,) = frames(1, False, note(30, text="some text"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with half() as (connection, sock):
        sock.sendall(frame[:-1])
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            with pytest.raises(KeyboardInterrupt):
                doing(connection)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert not connection.is_open
        with contextlib.suppress(ConnectionError):
            while sock.recv(MEGABYTES):
                pass  # It ends: the other end learns of it too.


def test_memory_of_long_messages_is_given_back_when_it_lies_idle(monkeypatch):
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.2)
    tracemalloc.start()
    try:
        with pair(silence=0.4) as (one, other):
            for waits in (False, True):
                found = exchanged(one, other, note(32 * MEGABYTES))
                assert found.arrays[0].nbytes == 32 * MEGABYTES
                del found
                waiting = threading.Thread(target=lambda: lost(other))
                if waits:
                    waiting.start()  # One waits for the next message, and one does nothing.
                wait_until(lambda: tracemalloc.get_traced_memory()[0] < 4 * MEGABYTES)
            one.close()
            waiting.join(40.0)
    finally:
        tracemalloc.stop()


def test_memory_of_messages_is_reused_and_not_used_up_by_lengths_that_never_come_again():
    memory, views = buffers.ReusedMemory(4 * MEGABYTES), []
    tracemalloc.start()
    try:
        for number in range(40):
            views = [*views[-2:], memory.take(500_000 + 1000 * number)]
            views[-1][:1] = bytes([number])
            assert [view[0] for view in views] == [*range(number + 1)][-3:]
        assert tracemalloc.get_traced_memory()[0] < 8 * MEGABYTES
        places = [np.frombuffer(memory.take(70_000)).ctypes.data for _ in range(2)]
        assert places[0] == places[1]
    finally:
        tracemalloc.stop()


def test_who_does_not_read_is_not_taken_for_who_does_not_hear():
    """What waits is more than the connection reads ahead, and less than the kernel buffers."""
    with pair(silence=0.4) as (one, other):
        for _ in range(5):
            one.send(note(20_000))
        with pytest.raises(TimeoutError):
            one.receive(time.monotonic() + 1.5)
        for _ in range(5):
            assert other.receive(soon())[1].arrays[0].nbytes == 20_000
        assert one.is_open


def test_heartbeats_that_find_no_room_do_not_spoil_the_frames_after_them(ends):
    """A heartbeat that was begun has to be sent to its end, and on TLS unchanged."""
    one, other = ends
    for end in ends:
        sock = getattr(end._sock, "_tls", end._sock)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4096)
    for _ in range(20_000):  # Until the way is full, since nobody reads.
        one.tick(time.monotonic(), True)
        if one._unsent:
            break
    assert one._unsent
    outcome, _ = at_once(lambda: other.receive(soon()), lambda: one.send(Note("behind them")))
    assert outcome[1].text == "behind them"


def test_a_fork_keeps_no_copy_and_does_not_disturb_its_parent(ends):
    one, other = ends
    first = exchanged(one, other, note(MEGABYTES, text="first"))

    def child() -> tuple[int, str]:
        try:
            one.send(Note("from the child"))
        except ConnectionLostError as error:
            one.close()
            return open_sockets(), str(error)
        return -1, ""

    before = open_sockets()
    one._writing.acquire()  # As another thread may hold it that the child does not have.
    kept, said = forked(child)
    one._writing.release()
    assert "fork" in said
    assert kept <= before - 2
    assert not [link for link in forked(open_files) if "memfd:ndistribute" in link][1:]
    del first
    assert exchanged(other, one, Note("the parent's goes on")).text == "the parent's goes on"
