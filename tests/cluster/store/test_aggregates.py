"""Synchronous steps: the mean of enough sets is applied once, late ones do no harm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.protocol.replies import Accumulated, Step
from ndistribute.cluster.protocol.requests import (
    Acknowledge,
    Aggregate,
    Apply,
    AwaitStep,
    Dense,
    Join,
    Leave,
    Origin,
    Quorum,
    Rows,
)
from ndistribute.cluster.store import Store
from ndistribute.update_rules import Adam
from tests.cluster.store.calls import Calls, apply, one, rows


@pytest.fixture
def calls():
    return setting()


def setting():
    """Return a store with two variables, slots for one, and a counter."""
    calls = Calls()
    zeros = np.zeros(4, np.float32)
    calls.create(v=zeros, m=zeros, s=zeros, w=np.zeros((5, 2)), n=np.array(0))
    return calls


def give(calls, series, number, gradient, step=0, count=2):
    """Give a set of one gradient, for plain descent."""
    origin = Origin(series, number)
    change = Aggregate("t", step, count, apply("sgd", "v", Dense(np.float32(gradient)), rate=1.0))
    return calls.ask(series, one(origin, change))


def wait(calls, series, number, step, quorum=None):
    """Wait for a step, and return under which key the answer will be."""
    return calls.send(series, AwaitStep(Origin(series, number), "t", step, quorum))


def test_the_step_rises_with_the_set_that_completes_it(calls):
    assert give(calls, "a", 1, [4, 0, 0, 0]) == Accumulated(True, 0)
    waits = wait(calls, "a", 2, 1)
    assert waits not in calls.answers
    assert calls.value("v").tolist() == [0, 0, 0, 0]
    assert give(calls, "b", 1, [0, 2, 0, 0]) == Accumulated(True, 1)
    assert calls.answers[waits] == Step(1)
    assert calls.ask("b", AwaitStep(Origin("b", 2), "t", 1)) == Step(1)
    assert calls.value("v").tolist() == [-2, -1, 0, 0]
    assert calls.value("n") == 1


def test_a_set_for_a_step_that_is_over_is_dropped(calls):
    for series in "abc":
        give(calls, series, 1, [1, 1, 1, 1])
    assert give(calls, "d", 1, [9, 9, 9, 9]) == Accumulated(False, 1)
    assert calls.value("v").tolist() == [-1, -1, -1, -1]


def test_a_series_gives_one_set_for_a_step(calls):
    give(calls, "a", 1, [1, 1, 1, 1])
    assert give(calls, "a", 2, [9, 9, 9, 9]) == Accumulated(False, 0)
    assert give(calls, "b", 1, [1, 1, 1, 1]) == Accumulated(True, 1)
    assert calls.value("v").tolist() == [-1, -1, -1, -1]


def test_a_repeated_set_counts_once(calls):
    for _ in range(3):
        assert give(calls, "a", 1, [1, 1, 1, 1], count=3) == Accumulated(True, 0)
    give(calls, "b", 1, [1, 1, 1, 1], count=3)
    assert calls.value("n") == 0


def test_rows_and_several_variables_are_in_one_set(calls):
    values = np.full((2, 2), 3.0)
    change = Apply(
        ("w", "v"),
        (Rows(rows(1, 1), values), Dense(np.ones(4, np.float32))),
        ((), ()),
        "n",
        "sgd",
        1.0,
    )
    for series in "ab":
        calls.ask(series, one(Origin(series, 1), Aggregate("t", 0, 2, change)))
    assert calls.value("w").tolist() == [[0, 0], [-6, -6], [0, 0], [0, 0], [0, 0]]
    assert calls.value("v").tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize(
    "other",
    [
        apply("sgd", "w", Dense(np.zeros((5, 2)))),
        apply("sgd", "v", Rows(rows(0), np.zeros(1, np.float32))),
        apply("sgd", "v", Dense(np.zeros(4))),
    ],
)
def test_a_set_unlike_the_steps_first_is_refused(calls, other):
    give(calls, "a", 1, [1, 1, 1, 1])
    assert calls.ask("b", one(Origin("b", 1), Aggregate("t", 0, 2, other))).kind == "mismatch"
    assert give(calls, "b", 2, [1, 1, 1, 1]) == Accumulated(True, 1)


def test_the_next_step_may_be_of_other_variables(calls):
    give(calls, "a", 1, [1, 1, 1, 1], count=1)
    change = Aggregate("t", 1, 1, apply("sgd", "w", Dense(np.ones((5, 2)))))
    assert calls.ask("a", one(Origin("a", 2), change)) == Accumulated(True, 2)


def test_who_waits_where_nobody_gave_is_told(calls):
    assert calls.ask("a", AwaitStep(Origin("a", 1), "t", 1)).kind == "unknown"


def test_who_waits_for_a_step_learns_that_a_member_left(calls):
    for name in "ab":
        calls.ask(name, Join("workers"))
    give(calls, "a", 1, [1, 1, 1, 1])
    waits = wait(calls, "a", 2, 1, Quorum("workers", 2))
    calls.ask("chief", Leave("b"))
    assert calls.answers[waits].kind == "left"
    # Its successor goes on with what is there.
    calls.ask("b2", Join("workers"))
    waits = wait(calls, "a", 3, 1, Quorum("workers", 2))
    give(calls, "b2", 1, [1, 1, 1, 1])
    assert calls.answers[waits] == Step(1)


def test_a_set_of_a_client_that_left_still_counts(calls):
    give(calls, "a", 1, [1, 1, 1, 1])
    calls.ask("chief", Leave("a"))
    assert give(calls, "b", 1, [3, 3, 3, 3]) == Accumulated(True, 1)
    assert calls.value("v").tolist() == [-2, -2, -2, -2]


def restored(calls):
    """Return a store as an earlier one was."""
    return Calls(Store.restore(*calls.store.snapshot()))


def advanced(calls, steps):
    """Let two clients make steps, the first numbers of each are even, waits odd."""
    for step in range(steps):
        for series in "ab":
            give(calls, series, 2 * step + 2, [1, 1, 1, 1], step)
    return calls


def test_a_server_restored_from_before_follows_its_clients(calls):
    old = restored(advanced(calls, 2))
    assert give(old, "a", 20, [5, 5, 5, 5], step=2) == Accumulated(True, 2)
    # What it held for its own step is dropped: the others are further.
    assert give(old, "b", 20, [1, 1, 1, 1], step=4) == Accumulated(True, 4)
    assert give(old, "c", 1, [9, 9, 9, 9], step=3) == Accumulated(False, 4)
    assert give(old, "a", 22, [3, 3, 3, 3], step=4) == Accumulated(True, 5)
    assert old.value("v").tolist() == [-4, -4, -4, -4]


def test_nobody_waits_for_sets_that_a_restart_lost(calls):
    old = restored(advanced(calls, 2))
    # Both gave a set for step 2, or 3, to the life that was lost.
    for step in (3, 4):
        key = wait(old, "a", 30 + step, step)
        assert old.answers[key] == Step(2)


def test_who_gave_its_set_after_a_restart_waits(calls):
    old = restored(advanced(calls, 2))
    give(old, "a", 20, [1, 1, 1, 1], step=2)
    waits = wait(old, "a", 21, 3)
    assert waits not in old.answers
    give(old, "b", 20, [1, 1, 1, 1], step=2)
    assert old.answers[waits] == Step(3)


def test_a_set_that_the_snapshot_holds_is_waited_for(calls):
    give(calls, "a", 1, [1, 1, 1, 1])
    old = restored(calls)
    waits = wait(old, "a", 2, 1)
    assert waits not in old.answers
    give(old, "b", 1, [3, 3, 3, 3])
    assert old.answers[waits] == Step(1)
    assert old.value("v").tolist() == [-2, -2, -2, -2]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 2))
def test_steps_of_n_of_m_are_the_rule_over_the_mean_of_the_first_n(data, needed, spare):
    """Adam, so that the count of steps matters."""
    draw, calls, rule = data.draw, setting(), Adam()
    expected, slots = np.zeros(4, np.float32), [np.zeros(4, np.float32) for _ in range(2)]
    numbers = dict.fromkeys("abcde"[: needed + spare], 0)
    for step in range(draw(st.integers(1, 4))):
        sets = []
        for series in draw(st.permutations(sorted(numbers))):
            numbers[series] += 1
            values = np.float32(draw(st.lists(st.integers(-9, 9), min_size=4, max_size=4)))
            adam = apply("adam", "v", Dense(values), slots=("m", "s"))
            request = one(Origin(series, numbers[series]), Aggregate("t", step, needed, adam))
            for _ in range(draw(st.integers(1, 2))):
                reply = calls.ask(series, request)
            assert reply == Accumulated(len(sets) < needed, step + (len(sets) + 1 >= needed))
            sets.append(values)
            if draw(st.booleans()):
                calls.ask(series, Acknowledge(series, numbers[series]))
        mean = np.sum(sets[:needed], axis=0, dtype=np.float32) / np.float32(needed)
        rule.update(expected, mean, slots, rule.rate(step + 1, 0.1))
    assert calls.value("v").tobytes() == expected.tobytes()


class Worker:
    """A worker that gives its set, waits for the step, and gives again what a restart lost."""

    def __init__(self, name, needed):
        self.name = name
        self.needed = needed
        self.step = 0
        self.key = None
        self._number = 0
        self._wait = None

    def origin(self):
        self._number += 1
        return Origin(self.name, self._number)

    def act(self, calls):
        """Give, or look whether the wait is over."""
        if self.key is None:
            change = Aggregate("t", self.step, self.needed, apply("sgd", "v", GRADIENT))
            calls.ask(self.name, one(self.origin(), change))
            self._wait = AwaitStep(self.origin(), "t", self.step + 1)
            self.ask(calls)
        elif (reply := calls.answers.get(self.key)) is not None:
            self.key = None
            self.step = max(self.step, reply.value)
            calls.ask(self.name, Acknowledge(self.name, self._number))

    def ask(self, calls):
        """Wait, of a server that was started again as well."""
        self.key = calls.send(self.name, self._wait)


GRADIENT = Dense(np.ones(4, np.float32))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 1))
def test_synchronous_workers_go_on_however_often_the_server_is_restored(data, needed, spare):
    draw, calls = data.draw, setting()
    workers = [Worker(name, needed) for name in "abcd"[: needed + spare]]
    saved = calls.store.snapshot()
    for _ in range(draw(st.integers(0, 40))):
        what = draw(st.sampled_from(["act", "act", "act", "act", "save", "crash"]))
        if what == "save":
            saved = calls.store.snapshot()
        elif what == "crash":
            calls = Calls(Store.restore(*saved))
            for worker in workers:
                if worker.key is not None:
                    worker.ask(calls)
        else:
            draw(st.sampled_from(workers)).act(calls)
    goal = max(worker.step for worker in workers) + 3
    for _ in range(6 * goal + 6):
        for worker in workers:
            worker.act(calls)
    assert all(worker.step >= goal for worker in workers)
