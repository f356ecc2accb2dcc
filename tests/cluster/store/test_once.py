"""Whatever a network does to requests, each change is made once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.protocol.replies import Done, Failure, Step, Token
from ndistribute.cluster.protocol.requests import (
    Accumulate,
    Acknowledge,
    Add,
    Aggregate,
    Assign,
    AwaitClock,
    AwaitStep,
    Barrier,
    Create,
    Dense,
    Dequeue,
    Enqueue,
    IncrementStep,
    Join,
    Leave,
    Origin,
    Scatter,
    TakeGradient,
)
from ndistribute.cluster.protocol.spans import Span
from ndistribute.cluster.store import Limits, Store
from tests.cluster.store.calls import Calls, apply, content, one, origins, rows


def setting():
    """Return a store with variables."""
    calls = Calls()
    calls.create(v=np.zeros(3), w=np.zeros(()), m=np.zeros(()), s=np.zeros(()), n=np.array(0))
    return calls


def test_a_repeated_change_gets_the_first_ones_answer():
    calls = setting()
    add = one(Origin("a", 1), Add("w", np.array(1.0)))
    assert calls.ask("a", add) == calls.ask("a", add) == calls.ask("b", add) == Done((2,))
    assert calls.value("w") == 1


def test_a_change_that_was_refused_stays_refused():
    calls = Calls()
    add = one(Origin("a", 1), Add("v", np.array(1.0)))
    first = calls.ask("a", add)
    calls.ask("a", Create("v", np.zeros(())))
    assert calls.ask("a", add) == first
    assert calls.value("v") == 0


def test_a_change_that_comes_after_its_acknowledgement_is_not_made():
    calls = setting()
    add = one(Origin("a", 1), Add("w", np.array(1.0)))
    calls.ask("a", add)
    calls.ask("a", Acknowledge("a", 1))
    assert calls.ask("a", add).kind == "acknowledged"
    assert calls.value("w") == 1


def test_one_that_takes_long_keeps_no_others_from_being_acknowledged():
    calls = Calls(Store(Limits(replies=5)))
    for number in range(2, 100):
        request = one(Origin("a", number), IncrementStep())
        assert calls.ask("a", request) == Step(number - 1)
        calls.ask("a", Acknowledge("a", 0, (Span(2, number),)))
    copy = Calls(Store.restore(*calls.store.snapshot()))
    for held in (calls, copy):
        assert held.ask("a", request).kind == "acknowledged"
        assert held.ask("a", one(Origin("a", 1), IncrementStep())) == Step(99)
        assert held.ask("a", Acknowledge("a", 0, (Span(3, 2),))).kind == "mismatch"


def test_numbers_may_come_in_any_order():
    calls = setting()
    for number in (3, 1, 2, 3, 1):
        calls.ask("a", one(Origin("a", number), IncrementStep()))
    assert calls.ask("a", one(Origin("a", 4), IncrementStep())) == Step(4)


def test_a_number_starts_from_one():
    assert setting().ask("a", one(Origin("a", 0), IncrementStep())).kind == "mismatch"


def test_a_client_that_never_acknowledges_is_stopped_until_it_does():
    calls = Calls(Store(Limits(replies=5)))
    for number in range(1, 6):
        assert isinstance(calls.ask("a", one(Origin("a", number), IncrementStep())), Step)
    late = one(Origin("a", 6), IncrementStep())
    assert calls.ask("a", late).kind == "full"
    assert calls.ask("b", one(Origin("b", 1), IncrementStep())) == Step(6)
    calls.ask("a", Acknowledge("a", 3))
    assert calls.ask("a", late) == Step(7)


def test_there_is_an_end_to_the_series_that_a_server_knows():
    calls = Calls(Store(Limits(series=2)))
    replies = [calls.ask(name, one(Origin(name, 1), IncrementStep())) for name in "abc"]
    assert [getattr(reply, "kind", "done") for reply in replies] == ["done", "done", "full"]
    assert calls.ask("c", Acknowledge("c", 1)).kind == "full"


def test_of_those_who_left_the_first_are_forgotten_in_the_end():
    calls = Calls(Store(Limits(series=2)))
    for name in "abc":
        calls.ask("desk", Leave(name))
    replies = [calls.ask(name, Join("workers")) for name in "abc"]
    assert [getattr(reply, "kind", "done") for reply in replies] == ["done", "left", "left"]


def test_large_answers_count_as_well():
    calls = Calls(Store(Limits(reply_bytes=1000)))
    origin = origins("a")
    for step in range(2):
        calls.ask("a", one(next(origin), Accumulate("g", Dense(np.ones(100)), step)))
        calls.ask("b", TakeGradient(Origin("b", step + 1), "g", 1))
    assert calls.ask("b", TakeGradient(Origin("b", 3), "g", 1)).kind == "full"


def program(client, draw, without=()):
    """Return what a client asks."""
    number = draw(st.integers(1, 3))
    kinds = st.sampled_from(sorted(KINDS.keys() - set(without)))
    requests = []
    for kind in draw(st.lists(kinds, min_size=1, max_size=6)):
        requests.append(KINDS[kind](client, number))
        number += draw(st.integers(1, 2))
    return requests


def _increment(client, number):
    return np.full(3, float(ord(client) * 1000 + number))


def _adam(number):
    return apply("adam", "w", Dense(np.array(0.5 + number)), slots=("m", "s"))


def _several(client, number):
    return [
        Add("v", _increment(client, number)),
        Enqueue("q", (number,)),
        Accumulate("g", Dense(_increment(client, number)), 1),
    ]


KINDS = {
    "add": lambda c, n: one(Origin(c, n), Add("v", _increment(c, n))),
    "refused": lambda c, n: one(Origin(c, n), Add("none", _increment(c, n))),
    "assign": lambda c, n: one(Origin(c, n), Assign("w", np.array(float(n)))),
    "scatter": lambda c, n: one(Origin(c, n), Scatter("v", "add", rows(n % 3), np.ones(1))),
    "adam": lambda c, n: one(Origin(c, n), _adam(n)),
    "aggregate": lambda c, n: one(Origin(c, n), Aggregate("t", n % 3, 2, _adam(n))),
    "step": lambda c, n: one(Origin(c, n), IncrementStep(n)),
    "tokens": lambda c, n: one(Origin(c, n), Enqueue("q", (n, n + 1))),
    "token": lambda c, n: Dequeue(Origin(c, n), "q"),
    "gradient": lambda c, n: one(
        Origin(c, n), Accumulate("g", Dense(_increment(c, n)), n % 2, n % 3)
    ),
    "mean": lambda c, n: TakeGradient(Origin(c, n), "g", 2),
    "barrier": lambda c, n: Barrier(Origin(c, n), "b", 2),
    "step wait": lambda c, n: AwaitStep(Origin(c, n), "t", n % 4),
    "clock": lambda c, n: AwaitClock(Origin(c, n), "t", n, n % 2, 2),
    "several": lambda c, n: one(Origin(c, n), *_several(c, n)),
    "several refused": lambda c, n: one(Origin(c, n), *_several(c, n), Add("v", np.ones(7))),
}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_repeated_and_delayed_requests_end_in_the_state_of_first_arrivals_alone(data):
    draw = data.draw
    clients = "abc"[: draw(st.integers(1, 3))]
    pending = {client: program(client, draw) for client in clients}
    chaos, serial = setting(), setting()
    history = []
    while any(pending.values()):
        if history and draw(st.booleans()):
            client, request = draw(st.sampled_from(history))
            chaos.send(client, request)
            continue
        client = draw(st.sampled_from([client for client in clients if pending[client]]))
        of_client = pending[client]
        request = of_client.pop(draw(st.integers(0, len(of_client) - 1)))
        history.append((client, request))
        serial.send(client, request)
        chaos.send(client, request)
    for client, request in draw(st.permutations(history)):
        chaos.send(client, request)
    assert content(chaos.store) == content(serial.store)
    _same_answers_again(chaos, serial, history)


def _same_answers_again(chaos, serial, history):
    """Ask both for everything once more: what is remembered, or still waits, must agree."""
    for client, request in history:
        assert str(chaos.ask(client, request)) == str(serial.ask(client, request))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_value_is_the_sum_of_acknowledged_unique_increments(data):
    draw = data.draw
    calls = Calls(Store(Limits(replies=4)))
    calls.ask("chief", Create("total", np.zeros(())))
    sent = {client: [] for client in "abc"}
    done = {client: set() for client in "abc"}
    expected = 0.0
    for step in range(draw(st.integers(1, 40))):
        client = draw(st.sampled_from("abc"))
        what = draw(st.sampled_from(["new", "again", "again", "acknowledge"]))
        if what == "new" or not sent[client]:
            number = len(sent[client]) + 1
            sent[client].append(one(Origin(client, number), Add("total", np.array(2.0**step))))
            what = "again"
            request = sent[client][-1]
        elif what == "again":
            request = draw(st.sampled_from(sent[client]))
        if what == "acknowledge":
            settled = 0
            while settled + 1 in done[client]:
                settled += 1
            calls.ask(client, Acknowledge(client, settled))
            continue
        reply = calls.ask(client, request)
        if isinstance(reply, Done) and request.origin.number not in done[client]:
            done[client].add(request.origin.number)
            expected += float(request.changes[0].value)
        if isinstance(reply, Failure):
            assert reply.kind == "full" or request.origin.number in done[client]
    assert calls.value("total") == expected


@pytest.mark.parametrize("repeat", [1, 3])
def test_a_token_is_given_once_however_often_it_is_asked_for(repeat):
    calls = Calls()
    asked = [calls.send("a", Dequeue(Origin("a", 1), "q")) for _ in range(repeat)]
    calls.ask("b", one(Origin("b", 1), Enqueue("q", (10, 11))))
    assert [calls.answers[key] == Token(10) for key in asked] == [False] * (repeat - 1) + [True]
    assert calls.ask("a", Dequeue(Origin("a", 1), "q")) == Token(10)
    assert calls.ask("a", Dequeue(Origin("a", 2), "q")) == Token(11)
