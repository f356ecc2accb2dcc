"""Who waits at a server is answered exactly when what it waits for is there, or can not come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.protocol.replies import Accumulated, Failure, Released, Token
from ndistribute.cluster.protocol.requests import (
    Accumulate,
    Acknowledge,
    Barrier,
    Dense,
    Dequeue,
    Enqueue,
    Join,
    Leave,
    Origin,
    Quorum,
    Rows,
    TakeGradient,
)
from ndistribute.cluster.store import Limits, Store
from tests.cluster.store.calls import Calls, one, rows


@pytest.fixture
def calls():
    return Calls()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_a_barrier_opens_when_it_is_full_and_not_before(data, size, rounds):
    calls = Calls()
    for number in range(1, rounds + 1):
        keys = {}
        for client in data.draw(st.permutations(range(size))):
            assert not any(key in calls.answers for key in keys.values())
            request = Barrier(Origin(f"c{client}", number), "b", size)
            keys[client] = calls.send(f"c{client}", request)
            for again in data.draw(st.lists(st.sampled_from(sorted(keys)), max_size=2)):
                if len(keys) < size:
                    request = Barrier(Origin(f"c{again}", number), "b", size)
                    superseded, keys[again] = keys[again], calls.send(f"c{again}", request)
                    assert calls.answers[superseded].kind == "superseded"
        assert [calls.answers[key] for key in keys.values()] == [Released(size)] * size
        late = data.draw(st.integers(0, size - 1))
        again = calls.ask(f"c{late}", Barrier(Origin(f"c{late}", number), "b", size))
        assert again == Released(size)


def test_a_client_stands_at_a_barrier_once(calls):
    first = calls.send("a", Barrier(Origin("a", 1), "b", 2))
    second = calls.send("a", Barrier(Origin("a", 2), "b", 2))
    assert calls.answers[first].kind == "superseded"
    assert second not in calls.answers
    assert calls.ask("a", Barrier(Origin("a", 1), "b", 2)).kind == "superseded"
    assert calls.ask("b", Barrier(Origin("b", 1), "b", 2)) == Released(2)
    assert calls.answers[second] == Released(2)


def test_an_older_call_does_not_take_the_place_of_a_newer_one(calls):
    newer = calls.send("a", Barrier(Origin("a", 2), "b", 2))
    assert calls.ask("a", Barrier(Origin("a", 1), "b", 2)).kind == "superseded"
    calls.ask("b", Barrier(Origin("b", 1), "b", 2))
    assert calls.answers[newer] == Released(2)


def test_barriers_of_other_names_and_sizes_do_not_meet(calls):
    waiting = calls.send("a", Barrier(Origin("a", 1), "b", 2))
    assert calls.ask("b", Barrier(Origin("b", 1), "c", 2)) is None
    assert calls.ask("c", Barrier(Origin("c", 1), "b", 3)).kind == "mismatch"
    assert calls.ask("c", Barrier(Origin("c", 2), "b", 0)).kind == "mismatch"
    assert waiting not in calls.answers


def test_tokens_go_to_those_who_wait_in_their_order(calls):
    keys = [calls.send(name, Dequeue(Origin(name, 1), "q")) for name in "abc"]
    calls.ask("d", one(Origin("d", 1), Enqueue("q", (1, 2))))
    calls.ask("d", one(Origin("d", 2), Enqueue("q", (3, 4))))
    assert [calls.answers[key] for key in keys] == [Token(1), Token(2), Token(3)]
    assert calls.ask("a", Dequeue(Origin("a", 2), "q")) == Token(4)


def test_a_queue_that_is_full_says_so_and_takes_more_later():
    calls = Calls(Store(Limits(tokens=2)))
    more = one(Origin("a", 2), Enqueue("q", (3,)))
    calls.ask("a", one(Origin("a", 1), Enqueue("q", (1, 2))))
    assert calls.ask("a", more).kind == "full"
    calls.ask("b", Dequeue(Origin("b", 1), "q"))
    calls.ask("a", more)
    assert calls.ask("b", Dequeue(Origin("b", 2), "q")) == Token(2)
    assert calls.ask("b", Dequeue(Origin("b", 3), "q")) == Token(3)


def add(calls, client, number, gradient, step=0, staleness=0):
    """Send a gradient."""
    return calls.ask(
        client, one(Origin(client, number), Accumulate("g", gradient, step, staleness))
    )


def test_a_mean_is_taken_once_enough_gradients_are_there(calls):
    taker = calls.send("chief", TakeGradient(Origin("chief", 1), "g", 2))
    add(calls, "a", 1, Dense(np.array([1.0, 2.0])))
    assert taker not in calls.answers
    add(calls, "b", 1, Dense(np.array([3.0, 6.0])))
    taken = calls.answers[taker]
    assert (taken.step, taken.count, taken.gradient.values.tolist()) == (1, 2, [2.0, 4.0])


def test_a_mean_counts_all_that_came_before_it_was_asked_for(calls):
    for number in range(1, 4):
        add(calls, "a", number, Dense(np.array([3.0 * number])))
    taken = calls.ask("chief", TakeGradient(Origin("chief", 1), "g", 2))
    assert (taken.count, taken.gradient.values.tolist()) == (3, [6.0])


def test_a_stale_gradient_is_dropped(calls):
    gradient = Dense(np.ones(1))
    add(calls, "a", 1, gradient)
    calls.ask("chief", TakeGradient(Origin("chief", 1), "g", 1))
    assert add(calls, "b", 1, gradient, step=0) == Accumulated(False, 1)
    assert add(calls, "b", 2, gradient, step=0, staleness=1) == Accumulated(True, 1)
    assert add(calls, "b", 3, gradient, step=1) == Accumulated(True, 1)
    assert calls.ask("chief", TakeGradient(Origin("chief", 2), "g", 1)).count == 2


def test_rows_are_summed_and_divided_by_the_number_of_gradients(calls):
    for number in range(1, 41):
        add(calls, "a", number, Rows(rows(1, 5, 1), np.ones((3, 2))))
    gradient = calls.ask("chief", TakeGradient(Origin("chief", 1), "g", 40)).gradient
    assert gradient.indices.tolist() == [1, 5]
    assert gradient.values.tolist() == [[2.0, 2.0], [1.0, 1.0]]


def test_half_precision_is_summed_in_single(calls):
    for number in range(1, 102):
        add(calls, "a", number, Dense(np.float16([2048 if number == 1 else 1])))
    values = calls.ask("chief", TakeGradient(Origin("chief", 1), "g", 1)).gradient.values
    assert values.dtype == np.float16
    assert values[0] == np.float16((2048 + 100) / 101)


@pytest.mark.parametrize(
    "gradient",
    [
        Dense(np.ones(3)),
        Dense(np.ones(2, np.float32)),
        Dense(np.ones(2, np.int64)),
        Rows(rows(0), np.ones((1, 2))),
        Rows(rows(-1), np.ones((1, 2))),
    ],
)
def test_a_gradient_unlike_the_first_is_refused(calls, gradient):
    add(calls, "a", 1, Dense(np.ones(2)))
    assert add(calls, "a", 2, gradient).kind == "mismatch"
    assert calls.ask("chief", TakeGradient(Origin("chief", 1), "g", 1)).count == 1


def test_a_mean_that_is_asked_for_again_is_the_same_and_can_not_be_changed(calls):
    add(calls, "a", 1, Dense(np.ones(2)))
    take = TakeGradient(Origin("chief", 1), "g", 1)
    first = calls.ask("chief", take)
    add(calls, "a", 2, Dense(np.full(2, 5.0)), step=1)
    assert calls.ask("chief", take) is first
    assert not first.gradient.values.flags.writeable


WAITS = [
    lambda origin, quorum: Barrier(origin, "b", 2, quorum),
    lambda origin, quorum: TakeGradient(origin, "g", 2, quorum),
    lambda origin, quorum: Dequeue(origin, "q", quorum),
]


@pytest.mark.parametrize("wait", WAITS)
def test_who_waits_learns_that_a_member_left(calls, wait):
    for name in "ab":
        calls.ask(name, Join("workers"))
    quorum = Quorum("workers", 2)
    waiting = calls.send("a", wait(Origin("a", 1), quorum))
    calls.ask("chief", Leave("b"))
    reply = calls.answers[waiting]
    assert reply.kind == "left"
    assert "'b'" in reply.message
    assert calls.ask("a", wait(Origin("a", 1), quorum)) == reply
    assert calls.ask("a", wait(Origin("a", 2), quorum)).kind == "left"
    calls.ask("b-again", Join("workers"))
    assert calls.ask("a", wait(Origin("a", 3), quorum)) is None


def test_a_group_that_is_not_complete_yet_may_still_become_so(calls):
    calls.ask("a", Join("workers"))
    calls.ask("a", Leave("a"))
    calls.ask("b", Join("workers"))
    waiting = calls.send("b", Barrier(Origin("b", 1), "b", 2, Quorum("workers", 2)))
    calls.ask("c", Join("workers"))
    assert waiting not in calls.answers
    assert calls.ask("c", Barrier(Origin("c", 1), "b", 2)) == Released(2)


def test_spare_workers_may_leave_without_harm(calls):
    for name in "abc":
        calls.ask(name, Join("workers"))
    waiting = calls.send("chief", TakeGradient(Origin("chief", 1), "g", 2, Quorum("workers", 2)))
    calls.ask("c", Leave("c"))
    assert waiting not in calls.answers
    calls.ask("b", Leave("b"))
    assert calls.answers[waiting].kind == "left"


@pytest.mark.parametrize("wait", WAITS)
def test_a_client_that_left_waits_no_more_and_gets_nothing(calls, wait):
    waiting = calls.send("a", wait(Origin("a", 1), None))
    calls.ask("chief", Leave("a"))
    assert calls.answers[waiting].kind == "left"
    calls.ask("b", one(Origin("b", 1), Enqueue("q", (1,))))
    assert calls.ask("a", wait(Origin("a", 2), None)).kind == "left"
    assert calls.ask("b", Dequeue(Origin("b", 2), "q")) == Token(1)


def test_the_place_of_a_client_that_left_at_a_barrier_is_free(calls):
    calls.send("a", Barrier(Origin("a", 1), "b", 2))
    calls.ask("chief", Leave("a"))
    assert calls.ask("b", Barrier(Origin("b", 1), "b", 2)) is None
    assert calls.ask("c", Barrier(Origin("c", 1), "b", 2)) == Released(2)


def test_leaving_twice_is_leaving(calls):
    replies = [calls.ask("a", Leave("a")) for _ in range(2)]
    assert not any(isinstance(reply, Failure) for reply in replies)


@pytest.mark.parametrize("wait", WAITS)
def test_who_acknowledges_what_it_waits_for_waits_no_more(calls, wait):
    waiting = calls.send("a", wait(Origin("a", 1), None))
    calls.ask("a", Acknowledge("a", 1))
    assert calls.answers[waiting].kind == "acknowledged"


def test_waits_count_among_what_a_series_may_have_open():
    calls = Calls(Store(Limits(replies=3)))
    asked = [calls.ask("a", Dequeue(Origin("a", number), "q")) for number in range(1, 5)]
    assert asked[:3] == [None] * 3
    assert asked[3].kind == "full"
