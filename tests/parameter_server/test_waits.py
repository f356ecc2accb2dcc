"""Synchronous steps and clocks: the mean of enough sets counts once, and nobody waits in vain."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.optimizers.algorithms import AdamRule
from ndistribute.parameter_server.messages import Aggregate, AwaitClock, AwaitStep, Gradient, Number
from tests.parameter_server.calls import Calls, apply, rows

FOUR = np.zeros(4, np.float32)


def setting():
    """Return a store with two variables, slots for one, and a counter."""
    calls = Calls()
    calls.create(v=FOUR, m=FOUR, s=FOUR, w=np.zeros((5, 2)), n=np.array(0))
    return calls


@pytest.fixture
def calls():
    return setting()


def give(calls, client, gradient, step=0, count=2):
    """Give a set of one gradient, for plain descent; return what became of it."""
    change = apply("sgd", "v", Gradient(np.float32(gradient)), rate=1.0)
    outcome = calls.change(client, Aggregate("t", step, count, change))
    return outcome.accepted, outcome.step


def wait(calls, client, step, count=2):
    """Wait for a step, and return the call."""
    return calls.send(client, AwaitStep("t", step, count))


def test_a_late_set_and_a_second_one_of_a_client_are_dropped(calls):
    give(calls, "a", [1, 1, 1, 1])
    assert give(calls, "a", [9, 9, 9, 9]) == (False, 0)
    assert give(calls, "b", [1, 1, 1, 1]) == (True, 1)
    assert give(calls, "c", [9, 9, 9, 9]) == (False, 1)
    assert calls.value("v").tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_16_bits_are_summed_in_32(calls, dtype, sparse):
    values = np.array([1.0, 300.0], dtype)
    calls.create(x=np.zeros(2, dtype))
    for step in range(2):
        for client in range(400):  # Their sum is beyond float16, and steps of bfloat16 are 2 there.
            gradient = Gradient(values, rows(0, 1)) if sparse else Gradient(values)
            change = Aggregate("t", step, 400, apply("sgd", "x", gradient, rate=1.0))
            calls.change(f"c{client}", change)
    assert calls.value("x").astype(float).tolist() == [-2, -600]


@pytest.mark.parametrize(
    "other",
    [
        apply("sgd", "w", Gradient(np.zeros((5, 2)))),
        apply("sgd", "v", Gradient(FOUR[:1], rows(0))),
        apply("sgd", "v", Gradient(np.zeros(4))),
    ],
)
def test_a_set_unlike_the_steps_first_is_refused_and_the_next_step_may_differ(calls, other):
    give(calls, "a", [1, 1, 1, 1])
    assert calls.change("b", Aggregate("t", 0, 2, other)).kind == "mismatch"
    assert give(calls, "b", [1, 1, 1, 1]) == (True, 1)
    assert calls.change("b", Aggregate("t", 1, 1, other)).step == 2


def test_a_server_restored_from_before_follows_its_clients(calls):
    for step in range(2):
        for client in "ab":
            give(calls, client, [1, 1, 1, 1], step)
    old = calls.restored()
    for step in (3, 4):  # Sets for them were given to the life that was lost.
        assert old.ask("a", AwaitStep("t", step, 2)).value == 2
    assert give(old, "a", [5, 5, 5, 5], step=2) == (True, 2)
    # What it held for its own step is dropped: the others are further.
    assert give(old, "b", [1, 1, 1, 1], step=4) == (True, 4)
    assert give(old, "c", [9, 9, 9, 9], step=3) == (False, 4)
    assert give(old, "a", [3, 3, 3, 3], step=4) == (True, 5)
    assert old.value("v").tolist() == [-4, -4, -4, -4]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 2))
def test_steps_of_n_of_m_are_the_rule_over_the_mean_of_the_first_n(data, needed, spare):
    """Adam, so that the count of steps matters."""
    draw, calls, rule = data.draw, setting(), AdamRule()
    expected, slots = FOUR.copy(), [FOUR.copy() for _ in range(2)]
    for step in range(draw(st.integers(1, 4))):
        sets = []
        for client in draw(st.permutations("abcde"[: needed + spare])):
            values = np.float32(draw(st.lists(st.integers(-9, 9), min_size=4, max_size=4)))
            adam = apply("adam", "v", Gradient(values), slots=("m", "s"))
            outcome = calls.change(client, Aggregate("t", step, needed, adam))
            assert outcome.accepted == (len(sets) < needed)
            sets.append(values)
            if draw(st.booleans()):
                calls = calls.restored()
        mean = np.sum(sets[:needed], axis=0, dtype=np.float32) / np.float32(needed)
        rule.update(expected, mean, slots, rule.rate(step + 1, 0.1))
    assert calls.value("v").tobytes() == expected.tobytes()


class Worker:
    """A worker that gives its set, waits for the step, and gives again what a restart lost."""

    def __init__(self, name, needed):
        self.name = name
        self.needed = needed
        self.step = 0
        self.call = None

    def act(self, calls):
        if self.call is None:
            give(calls, self.name, [1, 1, 1, 1], self.step, self.needed)
            self.ask(calls)
        elif (reply := calls.replies.get(self.call)) is not None:
            self.call = None
            self.step = max(self.step, getattr(reply, "value", 0))

    def ask(self, calls):
        self.call = wait(calls, self.name, self.step + 1, self.needed)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 1))
def test_synchronous_workers_go_on_however_often_the_server_is_restored(data, needed, spare):
    draw, calls = data.draw, setting()
    workers = [Worker(name, needed) for name in "abcd"[: needed + spare]]
    saved = calls.restored()
    for _ in range(draw(st.integers(0, 40))):
        what = draw(st.sampled_from(["act", "act", "act", "act", "save", "crash"]))
        if what == "save":
            saved = calls.restored()
        elif what == "crash":
            calls = saved.restored()
            for worker in workers:
                if worker.call is not None:
                    worker.ask(calls)
        else:
            draw(st.sampled_from(workers)).act(calls)
    goal = max(worker.step for worker in workers) + 3
    for _ in range(6 * goal + 6):
        for worker in workers:
            worker.act(calls)
    assert all(worker.step >= goal for worker in workers)


def begin(calls, client, clock, slack=0, count=2):
    """Say that a client begins a step, and return the call."""
    return calls.send(client, AwaitClock("steps", clock, slack, count))


def may(calls, client, clock, slack=0, count=2):
    """Return whether a client may begin a step at once."""
    return isinstance(calls.replies.get(begin(calls, client, clock, slack, count)), Number)


def test_a_member_that_left_holds_nobody_back_but_one_that_never_came_does(calls):
    begin(calls, "w:0#1", 0, count=3)
    begin(calls, "w:1#1", 0, count=3)
    calls.leave("w:1#1")
    waits = begin(calls, "w:1#2", 0, count=3)
    assert waits not in calls.replies
    assert may(calls, "w:2#1", 0, count=3)
    assert calls.replies[waits].value == 0
    ahead = begin(calls, "w:0#1", 1, count=3)
    calls.leave("w:1#2")
    assert ahead not in calls.replies
    calls.leave("w:2#1")
    assert calls.replies[ahead].value == 1


def test_a_restarted_member_takes_its_own_place_even_before_its_death_is_known(calls):
    begin(calls, "w:0#1", 0)
    begin(calls, "w:1#1", 0)
    ahead = begin(calls, "w:0#1", 1)
    assert may(calls, "w:1#2", 1)
    assert calls.replies[ahead].value == 1
    calls.leave("w:1#1")
    assert begin(calls, "w:0#1", 2) not in calls.replies  # The second one is still there.


def test_numbers_without_sense_are_refused(calls):
    assert calls.ask("a", AwaitStep("t", 2, 0)).kind == "mismatch"
    begin(calls, "a", 0)
    for clock, slack, count in ((-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 3)):
        assert calls.replies[begin(calls, "b", clock, slack, count)].kind == "mismatch"


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 2))
def test_nobody_runs_away_and_nobody_hangs(data, count, slack):
    draw, calls = data.draw, Calls()
    lives = dict.fromkeys(range(count), 0)
    clocks = dict.fromkeys(range(count), 0)
    waits = {worker: begin(calls, f"w:{worker}#0", 0, slack, count) for worker in range(count)}
    for _ in range(draw(st.integers(0, 40))):
        going = [worker for worker in clocks if waits[worker] in calls.replies]
        assert going or not clocks, "all wait for each other"
        assert all(clocks[worker] - min(clocks.values()) <= slack for worker in going)
        worker = draw(st.sampled_from(range(count)))
        what = draw(st.sampled_from(["step", "step", "step", "again", "die"]))
        if worker not in clocks:
            lives[worker] += 1
            clocks[worker] = max(clocks.values(), default=0)  # It knows the step from a variable.
        elif what == "die":
            calls.leave(f"w:{worker}#{lives[worker]}")
            del clocks[worker], waits[worker]
            continue
        elif worker in going and what == "step":
            clocks[worker] += 1
        name = f"w:{worker}#{lives[worker]}"
        waits[worker] = begin(calls, name, clocks[worker], slack, count)
