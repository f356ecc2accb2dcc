"""Control messages come back as they were, however the stream is cut, and nothing else is read."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.messages import (
    HEARTBEAT,
    Abort,
    Ask,
    Exchange,
    Failed,
    Failure,
    GoodBye,
    Left,
    Reached,
    Reader,
    Skipped,
    describe_error,
    pack,
    restore_error,
)
from ndistribute.errors import CollectiveTimeoutError, WorkerLostError
from ndistribute.transport.codec import MalformedError

MESSAGES = [
    Abort(3, (7, 2), 4, Failure("CollectiveTimeoutError", "late", 1, "all_reduce", 7)),
    Failed(3, (7, 2), Failure("WorkerLostError", "raised", 1)),
    Left(3, 7, False),
    Ask(1, (5, 2)),
    Reached(1, (5, 2)),
    Skipped(2, (0, 0)),
    Exchange("0:names:1", bytes(range(256)) * 300),
    GoodBye("has finished", False, (9, 1)),
]


@given(st.lists(st.integers(1, 5000), max_size=200))
def test_messages_come_back_however_the_stream_is_cut(cuts):
    stream = b"".join(pack(message) + HEARTBEAT for message in MESSAGES)
    reader, found = Reader(), []
    for cut in [*cuts, len(stream)]:
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert list(map(repr, found)) == list(map(repr, MESSAGES))
    assert [type(message) for message in found] == [type(message) for message in MESSAGES]


@given(st.sampled_from(MESSAGES), st.data())
def test_altered_messages_are_refused_and_nothing_worse(message, data):
    stream = bytearray(pack(message))
    stream[data.draw(st.integers(0, min(60, len(stream) - 1)))] = data.draw(st.integers(0, 255))
    try:
        list(Reader().feed(bytes(stream)))
    except MalformedError:
        return


def test_a_length_beyond_the_limit_is_refused():
    with pytest.raises(MalformedError, match="announces"):
        list(Reader().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(ValueError, match="at most"):
        pack(Exchange("key", bytes(17 << 20)))


def test_an_error_arrives_with_its_class_and_names_who_failed():
    late = restore_error(describe_error(CollectiveTimeoutError("late", rank=2, op="sum"), 1))
    assert (type(late), str(late), late.rank, late.op) == (CollectiveTimeoutError, "late", 2, "sum")
    name = os.fsdecode(b"no text \xff")
    (abort,) = Reader().feed(
        pack(Abort(0, (1, 0), 0, describe_error(FileNotFoundError(name * 5000), 1)))
    )
    failed = restore_error(abort.error)
    assert isinstance(failed, WorkerLostError)
    assert str(failed).startswith("worker 1 failed: FileNotFoundError: no text ?")
