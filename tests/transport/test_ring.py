"""Long messages of one host: a ring that nothing but its two ends, and their deaths, can stop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ndistribute.transport.codec import MalformedError
from ndistribute.transport.connection import Connection, ConnectionLostError
from ndistribute.transport.shared_memory import Ring, make_file
from tests.transport.ends import Child, Note, at_once, one_end, pair, soon, wait_until

LONG = Note("long", (np.arange(3_000_000.0),))


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[Ring, Ring]]:
    file = make_file()
    ends = Ring(file, writes=True), Ring(file, writes=False)
    os.close(file)
    yield ends


def test_a_stream_comes_out_as_it_went_in_though_neither_end_keeps_pace():
    draw = np.random.default_rng(1)
    data = draw.integers(0, 256, 30 << 20, np.uint8)
    got, written, read = np.zeros_like(data), 0, 0
    with two_ends() as (here, there):
        while read < len(data):
            written += here.move(data[written : written + draw.integers(1, 3 << 20)])
            read += there.move(got[read : read + draw.integers(1, 3 << 20)])
            assert written - read <= 4 << 20
    np.testing.assert_array_equal(got, data)


@pytest.mark.parametrize("counts", [(0, 1), (1 << 40, 0), (1 << 63, 5), ((4 << 20) + 1, 0)])
def test_counters_that_can_not_be_are_refused_at_both_ends(counts):
    with two_ends() as (here, there):
        here._counts[0], here._counts[8] = counts
        for end in (here, there):
            with pytest.raises(MalformedError, match="cannot lie in memory"):
                end.move(np.zeros(10, np.uint8))


def test_long_messages_both_ways_at_once_do_not_stop_each_other():
    with pair("unix") as (one, other):
        _, _, here, there = at_once(
            lambda: one.send(LONG, deadline=soon()),
            lambda: other.send(LONG, deadline=soon()),
            lambda: one.receive(soon()),
            lambda: other.receive(soon()),
        )
        for _, found in (here, there):
            np.testing.assert_array_equal(found.arrays[0], LONG.arrays[0])


@contextlib.contextmanager
def met() -> Iterator[tuple[Connection, Child]]:
    """Yield a connection, and the process that has its other end, named ``end``."""
    name = f"\0ring-{os.getpid()}-{time.monotonic_ns()}".encode()
    with socket.socket(socket.AF_UNIX) as listener, Child() as child:
        listener.bind(name)
        listener.listen()
        child.run(f"end = one_end(knock_near({name!r}), 'b')")
        connection = one_end(listener.accept()[0], "a")
        try:
            yield connection, child
        finally:
            connection.abort("the test ended.")
            connection.close()


def test_a_process_that_is_killed_in_the_middle_of_a_message_is_known_at_once():
    with met() as (connection, child):
        child.start("end.send(Note('long', (np.zeros(100_000_000, np.uint8),)))")
        wait_until(lambda: connection._end or select.select([connection._sock], [], [], 0)[0])
        child.signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ConnectionLostError):
            connection.receive(soon(60))
        assert time.monotonic() - began < 30.0
    with met() as (connection, child):
        sent, _ = at_once(lambda: connection.send(LONG), lambda: child.signal(signal.SIGKILL))
        assert isinstance(sent, ConnectionLostError)


def test_a_process_that_is_stopped_holds_nobody_beyond_the_deadline():
    with met() as (connection, child):
        child.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            connection.send(LONG, deadline=time.monotonic() + 0.3)
        assert not connection.is_open
