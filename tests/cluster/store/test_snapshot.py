"""A store that is restored goes on as the one that was saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.protocol.replies import Accumulated, Released, Total
from ndistribute.cluster.protocol.requests import (
    Accumulate,
    Add,
    Aggregate,
    AwaitClock,
    Create,
    Dense,
    Dequeue,
    Enqueue,
    Join,
    Leave,
    Origin,
    Quorum,
    Read,
    ReadTotal,
    Rows,
    TakeGradient,
)
from ndistribute.cluster.store import Store
from ndistribute.cluster.wire.tensors import MalformedError, pack, unpack
from tests.cluster.store.calls import Calls, apply, content, one, rows
from tests.cluster.store.test_once import program, setting


def saved_and_restored(store):
    """Return a store made from the bytes of another."""
    head, tensors = store.snapshot()
    whole = b"".join(pack(json.dumps(head).encode(), tensors))
    head, tensors = unpack(whole, 1 << 20)
    return Store.restore(json.loads(head), tensors)


def everything(draw):
    """Return the programs of three clients, mixed."""
    # Who waits for a step is answered at once by a store that was restored.
    requests = [(c, request) for c in "abc" for request in program(c, draw, {"step wait"})]
    return draw(st.permutations(requests)) + [(c, r) for c, r in requests]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_restored_store_answers_as_the_saved_one_does(data):
    requests = everything(data.draw)
    cut = data.draw(st.integers(0, len(requests)))
    original = setting()
    keys = [(c, r, original.send(c, r)) for c, r in requests[:cut]]
    copy = Calls(saved_and_restored(original.store))
    assert content(copy.store) == content(original.store)
    # Who waited asks again, in the order in which it came.
    waiting, seen = [], set()
    for client, request, key in keys:
        answer = original.answers.get(key)
        unanswered = answer is None or getattr(answer, "kind", "") == "superseded"
        if unanswered and id(request) not in seen:
            seen.add(id(request))
            waiting.append((client, request))
    for client, request in waiting:
        assert str(copy.ask(client, request)) == str(original.ask(client, request))
    for client, request in requests[cut:]:
        assert str(copy.ask(client, request)) == str(original.ask(client, request))
    assert content(copy.store) == content(original.store)


STEP = apply("sgd", "v", Dense(np.ones(3)), rate=1.0)


def filled():
    """Return a store with something of everything in it."""
    calls = setting()
    calls.ask("a", Join("workers"))
    calls.ask("b", Join("workers"))
    calls.ask("b", Leave("b"))
    calls.ask("a", one(Origin("a", 1), STEP))
    calls.ask("a", one(Origin("a", 2), Accumulate("dense", Dense(np.ones(3)), 0)))
    calls.ask("a", one(Origin("a", 3), Accumulate("rows", Rows(rows(1), np.ones((1, 2))), 0)))
    calls.ask("a", one(Origin("a", 4), Enqueue("q", (5, 6))))
    calls.ask("a", one(Origin("a", 5), Aggregate("t", 4, 2, STEP)))
    calls.send("a", AwaitClock(Origin("a", 6), "c", 3, 1, 2))
    return calls


def test_everything_is_in_a_snapshot():
    copy = Calls(saved_and_restored(filled().store))
    take = [TakeGradient(Origin("a", n), name, 1) for n, name in ((7, "dense"), (8, "rows"))]
    assert copy.ask("a", take[0]).gradient.values.tolist() == [1, 1, 1]
    assert copy.ask("a", take[1]).gradient.indices.tolist() == [1]
    assert copy.ask("a", Dequeue(Origin("a", 6), "q", Quorum("workers", 2))).value == 5
    assert copy.ask("a", one(Origin("c", 1), Aggregate("t", 4, 2, STEP))) == Accumulated(True, 5)
    assert copy.value("v").tolist() == [-2, -2, -2]
    assert copy.ask("c", AwaitClock(Origin("c", 2), "c", 5, 1, 2)) is None
    assert copy.ask("a", AwaitClock(Origin("a", 9), "c", 4, 1, 2)) == Released(2)
    assert copy.ask("c", ReadTotal()) == Total(6, 5)
    assert copy.ask("b", one(Origin("b", 1), STEP)).kind == "left"


def test_a_snapshot_does_not_change_when_the_store_does():
    calls = filled()
    _head, tensors = calls.store.snapshot()
    before = [tensor.tobytes() for tensor in tensors]
    calls.ask("a", one(Origin("b2", 1), Aggregate("t", 4, 3, STEP)))
    calls.ask("a", one(Origin("a", 7), STEP))
    calls.ask("a", one(Origin("a", 8), Accumulate("dense", Dense(np.ones(3)), 0)))
    assert [tensor.tobytes() for tensor in tensors] == before


def test_a_restored_store_has_its_own_memory():
    _, tensors = content(filled().store)
    original = filled()
    copy = Calls(Store.restore(*original.store.snapshot()))
    copy.ask("a", one(Origin("a", 6), Add("v", np.full(3, 9.0))))
    assert content(original.store)[1] == tensors


def test_versions_of_a_later_epoch_are_above_all_of_earlier_ones():
    calls = setting()
    saved = calls.store.snapshot()
    for number in range(1, 100):
        calls.ask("a", one(Origin("a", number), Add("v", np.ones(3))))
    lost = calls.ask("a", Read("v")).version
    copy = Calls(Store.restore(*saved, epoch=1))
    assert copy.ask("a", Read("v", lost)).array.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda head: [],
        lambda head: head | {"step": "one"},
        lambda head: {key: value for key, value in head.items() if key != "gone"},
        lambda head: head | {"variables": []},
        lambda head: head | {"gone": [1]},
    ],
)
def test_what_is_no_snapshot_is_refused(damage):
    head, tensors = filled().store.snapshot()
    with pytest.raises(MalformedError):
        Store.restore(damage(head), tensors)


def test_stores_that_hold_the_same_give_the_same_snapshot_however_they_came_to_it():
    one, other = Calls(), Calls()
    for name in "abc":
        one.ask("x", Create(name, np.zeros(2)))
    for name in "cab":
        other.ask("x", Create(name, np.zeros(2)))
    assert content(one.store) == content(other.store)
