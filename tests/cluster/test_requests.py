"""Requests and replies come out as they went in; anything else is malformed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.protocol import replies, requests
from ndistribute.cluster.protocol.replies import decode_reply, encode_reply
from ndistribute.cluster.protocol.requests import (
    Add,
    Apply,
    Barrier,
    Batch,
    Dense,
    Origin,
    Quorum,
    Read,
    Rows,
    Scatter,
    Transaction,
    decode_request,
    encode_request,
)
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.tensors import MalformedError, pack

LIMIT = 1 << 20
NAMES = st.text(max_size=8)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
ARRAYS = st.builds(
    np.full,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 9),
    st.sampled_from(["float32", "int64", "bool"]),
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ORIGINS = st.builds(Origin, NAMES, NUMBERS)
GRADIENTS = st.builds(Dense, ARRAYS) | st.builds(Rows, ARRAYS, ARRAYS)
QUORUMS = st.none() | st.builds(Quorum, NAMES, NUMBERS)


def tuples(elements):
    """Return a strategy for short tuples."""
    return st.lists(elements, max_size=3).map(tuple)


APPLIES = st.builds(
    Apply,
    tuples(NAMES),
    tuples(GRADIENTS),
    tuples(tuples(NAMES)),
    NAMES,
    NAMES,
    FLOATS,
    st.dictionaries(NAMES, FLOATS, max_size=3),
)
CHANGES = st.one_of(
    st.builds(requests.Assign, NAMES, ARRAYS),
    st.builds(Add, NAMES, ARRAYS),
    st.builds(requests.Subtract, NAMES, ARRAYS),
    st.builds(Scatter, NAMES, st.sampled_from(["add", "max"]), ARRAYS, ARRAYS),
    APPLIES,
    st.builds(requests.Aggregate, NAMES, NUMBERS, NUMBERS, APPLIES),
    st.builds(requests.Accumulate, NAMES, GRADIENTS, NUMBERS, NUMBERS),
    st.builds(requests.Enqueue, NAMES, tuples(NUMBERS)),
    st.builds(requests.IncrementStep, NUMBERS),
)
SINGLE = st.one_of(
    st.builds(requests.Create, NAMES, ARRAYS),
    st.builds(Read, NAMES, st.none() | NUMBERS),
    st.builds(requests.ReadRows, NAMES, ARRAYS),
    st.builds(requests.ReadStep),
    st.builds(requests.ReadTotal),
    st.builds(requests.Locate, tuples(NAMES)),
    st.builds(Transaction, ORIGINS, tuples(CHANGES)),
    st.builds(requests.Acknowledge, NAMES, NUMBERS),
    st.builds(requests.Join, NAMES),
    st.builds(requests.Leave, NAMES),
)
REQUESTS = st.one_of(
    SINGLE,
    st.builds(requests.TakeGradient, ORIGINS, NAMES, NUMBERS, QUORUMS),
    st.builds(Barrier, ORIGINS, NAMES, NUMBERS, QUORUMS),
    st.builds(requests.Dequeue, ORIGINS, NAMES, QUORUMS),
    st.builds(requests.AwaitStep, ORIGINS, NAMES, NUMBERS, QUORUMS),
    st.builds(requests.AwaitClock, ORIGINS, NAMES, NUMBERS, NUMBERS, NUMBERS),
    st.builds(requests.SaveSnapshot),
    st.builds(Batch, tuples(SINGLE)),
)
OUTCOMES = st.one_of(
    st.builds(replies.Done, tuples(NUMBERS)),
    st.builds(replies.Accumulated, st.booleans(), NUMBERS),
    st.builds(replies.Step, NUMBERS),
)
PLAIN = st.one_of(
    OUTCOMES,
    st.builds(replies.Failure, st.sampled_from(["left", "full"]), NAMES),
    st.builds(replies.Created, st.booleans(), NUMBERS, tuples(NUMBERS), NAMES),
    st.builds(replies.Value, NUMBERS, st.none() | ARRAYS),
    st.builds(replies.Changed, tuples(OUTCOMES), NUMBERS),
    st.builds(replies.Total, NUMBERS),
    st.builds(replies.Located, tuples(NUMBERS), tuples(NUMBERS), tuples(NUMBERS)),
)
REPLIES = st.one_of(
    PLAIN,
    st.builds(replies.Batched, tuples(PLAIN)),
    st.builds(replies.Taken, NUMBERS, NUMBERS, GRADIENTS),
    st.builds(replies.Released, NUMBERS),
    st.builds(replies.Token, NUMBERS),
    st.builds(replies.Saved, NUMBERS),
)


def content(record):
    """Return what a record holds as something that can be compared."""
    head, tensors = records.to_message(record)
    return type(record), head, [(t.shape, t.dtype, t.tobytes()) for t in tensors]


@given(REQUESTS)
def test_a_request_comes_back_as_it_was(request_):
    back = decode_request(b"".join(encode_request(request_)), LIMIT)
    assert content(back) == content(request_)


@given(REPLIES)
def test_a_reply_comes_back_as_it_was(reply):
    back = decode_reply(b"".join(encode_reply(reply)), LIMIT)
    assert content(back) == content(reply)


@given(REQUESTS, st.data())
def test_a_request_that_is_cut_short_is_refused(request_, data):
    whole = b"".join(encode_request(request_))
    with pytest.raises(MalformedError):
        decode_request(whole[: data.draw(st.integers(0, len(whole) - 1))], LIMIT)


def test_a_request_above_the_limit_is_refused():
    whole = b"".join(encode_request(Transaction(Origin("a", 1), (Add("v", np.zeros(100)),))))
    with pytest.raises(MalformedError, match="the limit is 900"):
        decode_request(whole, 900)


READ = {"record": "Read", "name": "v", "newer_than": None}
ORIGIN = {"record": "Origin", "series": "a", "number": 1}


@pytest.mark.parametrize(
    "head",
    [
        None,
        1,
        [],
        "Read",
        {},
        {"record": "Read"},
        {"record": ["Read"]},
        {"record": "Nothing"},
        {"record": "Step", "value": 1},
        READ | {"more": 1},
        READ | {"name": 1},
        READ | {"name": None},
        READ | {"newer_than": True},
        READ | {"newer_than": 1.5},
        READ | {"newer_than": 2**63},
        READ | {"newer_than": 10**400},
        {"record": "Create", "name": "v", "initial": None},
        {"record": "Create", "name": "v", "initial": 0},
        {"record": "Batch", "requests": READ},
        {"record": "Batch", "requests": [{"record": "Batch", "requests": []}]},
        {"record": "Leave", "client": {"record": "Leave", "client": "a"}},
        {"record": "IncrementStep", "by": 1},
        {"record": "Transaction", "origin": ["a", 1], "changes": []},
        {"record": "Transaction", "origin": READ, "changes": []},
        {"record": "Transaction", "origin": ORIGIN, "changes": [READ]},
        {"record": "Batch", "requests": [{"record": "SaveSnapshot"}]},
    ],
)
def test_a_head_of_another_form_is_refused(head):
    with pytest.raises(MalformedError):
        decode_request(b"".join(pack(json.dumps(head).encode(), [])), LIMIT)


@pytest.mark.parametrize(
    "head",
    [b"", b"{", b"\xff", b"[" * 100_000, b"NaN", b'{"record": NaN}', b"1" * 5000, b"1e999", b"{}x"],
)
def test_a_head_that_is_no_json_is_refused(head):
    with pytest.raises(MalformedError):
        decode_request(b"".join(pack(head, [])), LIMIT)


def test_a_tensor_that_no_field_names_is_refused():
    with pytest.raises(MalformedError, match="tensors"):
        decode_request(b"".join(pack(json.dumps(READ).encode(), [np.zeros(2)])), LIMIT)


def test_a_number_that_json_does_not_have_is_not_sent():
    with pytest.raises(ValueError, match="JSON"):
        encode_request(Transaction(Origin("a", 1), (Apply((), (), (), "n", "sgd", float("nan")),)))


@given(st.binary(max_size=100))
def test_random_bytes_are_refused(junk):
    for decode in (decode_request, decode_reply):
        with pytest.raises(MalformedError):
            decode(junk, LIMIT)
