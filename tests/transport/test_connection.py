"""A connection carries whole records over each transport, or says that it ended, and why."""

from __future__ import annotations

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

from ndistribute.transport import connection as module
from ndistribute.transport import shared_memory
from ndistribute.transport.codec import MalformedError, encode
from ndistribute.transport.connection import Connection, ConnectionLostError
from ndistribute.transport.secret import TlsFiles
from ndistribute.transport.shared_memory import make_file
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
    wait_until,
)

KINDS = ["tcp", "tls", "unix"]
HEADER = struct.Struct("<HBBIQIIQ")
MAGIC, DATA, HEARTBEAT, SHARED = 0x444E, 1, 2, 2
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
    """Return how a connection ended."""
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


def frames(count: int, sealed: bool, record: Note) -> list[bytes]:
    """Return the bytes of some frames for the end named ``a``."""
    one, other = sockets(unix=False)
    sender = one_end(one, "b", sealed=sealed)
    sent = []
    with other:
        for number in range(count):
            sender.send(record, number)
            control, buffers = encode(record)
            length = HEADER.size + 8 * len(buffers) + len(control) + 32 * sealed
            length += sum(len(buffer) + -len(buffer) % 64 for buffer in buffers)
            sent.append(other.recv(length, socket.MSG_WAITALL))
        sender.abort("enough")
        sender.close()
    return sent


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_records_pass_whole_both_ways(kind, sealed, files):
    with pair(kind, files, sealed=sealed) as (one, other):
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


@pytest.mark.parametrize("nbytes", [70_000, 20 * MEGABYTES])
def test_long_buffers_of_a_host_go_through_memory_that_both_ends_map(nbytes):
    with pair("unix") as (one, other):
        for _ in range(2):
            record = note(nbytes, 5, 3 * MEGABYTES)
            assert same(exchanged(one, other, record), record)
        assert sum("memfd:ndistribute" in link for link in open_files()) >= 1


def test_a_descriptor_that_comes_while_nobody_receives_is_kept():
    with pair("unix") as (one, other):
        for size in (MEGABYTES, 4 * MEGABYTES):
            one.send(note(size))
            other.tick(time.monotonic(), False)
            assert same(other.receive(soon())[1], note(size))
            other.send(Note())
            one.tick(time.monotonic(), False)
            one.receive(soon())


@pytest.mark.parametrize("sealed", [False, True])
def test_a_frame_cut_anywhere_is_a_lost_connection(sealed):
    (frame,) = frames(1, sealed, note(70, 3, text="some text"))
    for end in [*range(len(frame) - 70), len(frame) - 1]:
        with half(sealed=sealed) as (connection, sock):
            sock.sendall(frame[:end])
            sock.close()
            assert not lost(connection).clean


def test_mutated_frames_are_malformed_or_lost_and_nothing_else():
    (frame,) = frames(1, False, note(70, 3, text="some text"))
    rng = random.Random(20240229)
    outcomes = set()
    for number in range(400):
        changed = bytearray(frame)
        for _ in range(1 + number % 3):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with half() as (connection, sock):
            sock.sendall(changed if number % 5 else rng.randbytes(number))
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


def test_a_flipped_byte_of_a_sealed_frame_is_refused_before_anything_is_decoded():
    record = note(64, text="some text")
    (frame,) = frames(1, True, record)
    for position in range(len(frame) - 64):  # But for the raw data, which TLS protects.
        changed = bytearray(frame)
        changed[position] ^= 1
        with half(kinds=Never(), sealed=True) as (connection, sock):
            sock.sendall(changed)
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises((MalformedError, ConnectionLostError)):
                connection.receive(soon())
            assert not connection.is_open


def test_a_sealed_frame_that_comes_again_or_out_of_turn_is_refused():
    sent = frames(3, True, Note("some text"))
    for order in ((0, 0), (1,), (0, 2), (0, 1, 0)):
        with half(sealed=True) as (connection, sock):
            for number in order:
                sock.sendall(sent[number])
            for number in order[:-1]:
                assert connection.receive(soon())[0] == number
            with pytest.raises(MalformedError, match="changed on its way"):
                connection.receive(soon())


def test_a_sealed_frame_of_ones_own_is_refused_when_it_is_sent_back():
    with half(sealed=True) as (connection, sock):
        connection.send(Note("mine"))
        sock.sendall(sock.recv(1000))
        with pytest.raises(MalformedError, match="changed on its way"):
            connection.receive(soon())


def test_announced_sizes_beyond_the_limits_take_no_memory():
    for count, control, body in (
        (1, 10, (16 << 30) + 64),
        (1, (1 << 30) + 1, 64),
        ((1 << 20) + 1, 10, 0),
        (0, 0, 64),
    ):
        with half() as (connection, sock):
            sock.sendall(HEADER.pack(MAGIC, DATA, 0, count, 1, control, 0, body))
            tracemalloc.start()
            try:
                with pytest.raises(MalformedError):
                    connection.receive(soon())
                assert tracemalloc.get_traced_memory()[1] < 1_000_000
            finally:
                tracemalloc.stop()


def shared(memory: int, nbytes: int) -> bytes:
    control, _ = encode(Note())
    head = HEADER.pack(MAGIC, DATA, SHARED, 1, 1, len(control), 0, nbytes)
    return head + struct.pack("<Q", nbytes) + control


def test_memory_that_its_owner_could_make_shorter_is_refused():
    with tempfile.TemporaryFile() as plain, socket.socket() as unrelated:
        shrinking = os.memfd_create("shrinking", os.MFD_ALLOW_SEALING)
        os.ftruncate(shrinking, MEGABYTES)
        plain.truncate(MEGABYTES)
        before = len(open_files())
        for file in (shrinking, plain.fileno(), unrelated.fileno()):
            with half(unix=True) as (connection, sock):
                socket.send_fds(sock, [shared(file, MEGABYTES)], [file])
                with pytest.raises(MalformedError, match="memory"):
                    connection.receive(soon())
        os.close(shrinking)
        assert len(open_files()) == before - 1


def test_memory_that_is_missing_or_of_another_size_is_refused_and_no_descriptor_stays():
    file, before = make_file(), len(open_files())
    os.ftruncate(file, 2 * os.fstat(file).st_size)
    for fds in ([], [file], [file] * 5):
        with half(unix=True) as (connection, sock):
            socket.send_fds(sock, [shared(0, MEGABYTES)], fds)
            with pytest.raises(MalformedError, match="memory"):
                connection.receive(soon())
    assert len(open_files()) == before
    os.close(file)


def test_good_bye_is_told_from_the_end_of_a_process(ends):
    one, other = ends
    outcome, _ = at_once(lambda: lost(other), one.close)
    assert outcome.clean
    with half() as (connection, sock):
        sock.close()
        error = lost(connection)
        assert not error.clean
        assert "closed the connection" in str(error)
        with pytest.raises(ConnectionLostError, match="closed the connection"):
            connection.send(Note())


def test_good_bye_arrives_although_much_was_not_read(ends):
    one, other = ends
    other.send(note(50_000))
    one.send(Note("last words"))
    closing = threading.Thread(target=one.close)
    closing.start()
    assert other.receive(soon())[1].text == "last words"
    assert lost(other).clean
    other.close()
    closing.join(40.0)


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
        began = time.monotonic()
        connection.close()
        assert time.monotonic() - began < 30.0
        done.set()
        flooding.join(40.0)


def test_closing_wakes_who_receives_and_who_sends(ends):
    one, _ = ends
    waiting = threading.Event()

    def send() -> None:
        while True:
            one.send(note(300_000))
            waiting.set()

    def close() -> None:
        waiting.wait(40.0)
        one.close()

    sent, received, _ = at_once(send, lambda: one.receive(soon()), close)
    assert isinstance(sent, ConnectionLostError)
    assert isinstance(received, ConnectionLostError)
    for use in (lambda: one.send(Note()), one.receive):
        with pytest.raises(ConnectionLostError, match="this process closed it"):
            use()
    one.close()


def test_cutting_wakes_who_receives_and_who_sends_and_tells_why(ends):
    one, other = ends
    began = threading.Barrier(3)

    def send() -> None:
        began.wait(40.0)
        while True:
            one.send(note(3 * MEGABYTES))

    def receive() -> None:
        began.wait(40.0)
        one.receive(soon())

    def cut() -> None:
        began.wait(40.0)
        one.abort("the test says so.")

    for error in at_once(send, receive, cut)[:2]:
        assert isinstance(error, ConnectionLostError)
        assert "the test says so" in str(error)
    at_once(lambda: lost(other) and None)


def test_a_deadline_without_a_message_leaves_the_connection_whole(ends):
    one, other = ends
    for deadline in (0.0, time.monotonic() + 0.05):
        with pytest.raises(TimeoutError):
            one.receive(deadline)
    assert exchanged(other, one, Note("late")).text == "late"
    with pytest.raises(TimeoutError):
        one.receive(time.monotonic() + 0.01)
    assert exchanged(other, one, Note("far"), 1).text == "far"


def test_a_deadline_in_the_middle_of_a_frame_cuts_the_connection():
    (frame,) = frames(1, False, Note("some text"))
    with half() as (connection, sock):
        sock.sendall(frame[:-1])
        with pytest.raises(TimeoutError):
            connection.receive(time.monotonic() + 0.05)
        assert not connection.is_open
    with half() as (connection, _):
        with pytest.raises(TimeoutError):
            connection.send(note(30 * MEGABYTES), deadline=time.monotonic() + 0.05)
        assert not connection.is_open
    with half() as (connection, sock):
        sock.sendall(frame)
        assert connection.receive(1e18)[1].text == "some text"  # A deadline may be very far away.


LONG = Note("", (np.zeros(30 * MEGABYTES, np.uint8),))


@pytest.mark.parametrize("doing", [lambda end: end.receive(soon()), lambda end: end.send(LONG)])
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


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_memory_of_long_messages_is_given_back_when_it_lies_idle(kind, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.2)
    tracemalloc.start()
    try:
        with pair(kind, silence=0.4) as (one, other):
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


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_lengths_that_never_come_again_do_not_use_up_memory(kind, monkeypatch):
    monkeypatch.setattr(shared_memory, "_KEPT_BYTES", 4 * MEGABYTES)
    tracemalloc.start()
    try:
        with pair(kind) as (one, other):
            kept = []
            for number in range(40):
                record = note(500_000 + 1000 * number)
                found = exchanged(one, other, record)
                assert same(found, record)
                kept = [*kept[-2:], (found, record)]
                other.send(Note())
                one.receive(soon())
            assert all(same(found, record) for found, record in kept)
            assert tracemalloc.get_traced_memory()[0] < 12 * MEGABYTES
    finally:
        tracemalloc.stop()


def test_who_does_not_read_is_not_taken_for_who_does_not_hear():
    """Heartbeats wait behind messages that were not read yet: their sender lives all the same.

    What waits is more than the connection takes in by itself, and less than the system does: that
    cuts a connection whose window stays closed.
    """
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
