"""The changes of a closure are made together and once, whoever runs it how often."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.replies import Accumulated, Batched, Done, Failure, Staged, Step, Token
from ndistribute.cluster.requests import (
    Abandon,
    Accumulate,
    Acknowledge,
    Add,
    Apply,
    Commit,
    Create,
    Dense,
    Dequeue,
    Enqueue,
    IncrementStep,
    Leave,
    Origin,
)
from ndistribute.cluster.store import Limits, Store
from tests.cluster.store.calls import Calls, content


def setting(limits=None):
    """Return a store with a variable."""
    calls = Calls(Store(limits))
    calls.ask("chief", Create("v", np.zeros(2)))
    return calls


def part(number, at, by=1.0, attempt=0):
    """Return a change that is part of a closure."""
    return Add(Origin("chief", number, at, attempt), "v", np.full(2, by))


def commit(number, parts, attempt=0):
    """Return the commit of a closure."""
    return Commit(Origin("chief", number, None, attempt), parts)


def test_nothing_is_made_before_the_commit_and_all_of_it_then():
    calls = setting()
    assert calls.ask("a", part(1, 1)) == calls.ask("a", part(1, 0)) == Staged(False)
    assert calls.value("v").tolist() == [0, 0]
    assert calls.ask("a", commit(1, 2)).replies == (Done((2,)), Done((3,)))
    assert calls.value("v").tolist() == [2, 2]


def test_all_kinds_of_changes_can_be_parts():
    calls = setting()
    gradient = Dense(np.ones(2))
    kinds = [
        lambda origin: Apply(origin, "o", "adam", 0.5, ("v",), (gradient,)),
        lambda origin: Apply(origin, "o", "adam", 0.5, ("v",), (gradient,)),
        lambda origin: Accumulate(origin, "g", gradient, 0),
        lambda origin: Enqueue(origin, "q", (4,)),
        IncrementStep,
    ]
    for at, make in enumerate(kinds):
        calls.ask("a", make(Origin("chief", 1, at)))
    waits = calls.send("b", Dequeue(Origin("b", 1), "q"))
    assert waits not in calls.answers
    reply = calls.ask("a", commit(1, len(kinds)))
    assert reply.replies == (Done((2,)), Done((3,)), Accumulated(True, 0), Done(), Step(1))
    assert calls.answers[waits] == Token(4)


def test_one_part_that_does_not_fit_undoes_all():
    for bad in (
        Add(Origin("chief", 1, 1), "v", np.zeros(3)),
        Add(Origin("chief", 1, 1), "none", np.zeros(3)),
        Apply(Origin("chief", 1, 1), "o", "none", 0.1, ("v",), (Dense(np.zeros(2)),)),
    ):
        calls = setting()
        before = content(calls.store)[1]
        calls.ask("a", part(1, 0))
        calls.ask("a", bad)
        reply = calls.ask("a", commit(1, 2))
        assert isinstance(reply, Failure)
        assert calls.ask("a", commit(1, 2)) == reply
        assert content(calls.store)[1] == before
        assert calls.ask("a", part(1, 0)) == Staged(True)


def test_parts_that_fit_what_there_is_but_not_each_other_undo_all():
    gradient = Dense(np.ones(2))
    pairs = [
        [
            Accumulate(Origin("chief", 1, 0), "g", gradient, 0),
            Accumulate(Origin("chief", 1, 1), "g", Dense(np.ones(3)), 0),
        ],
        [
            Apply(Origin("chief", 1, 0), "o", "sgd", 0.1, ("v",), (gradient,)),
            Apply(Origin("chief", 1, 1), "o", "adam", 0.1, ("v",), (gradient,)),
        ],
        [
            Apply(Origin("chief", 1, 0), "o", "sgd", 0.1, ("v",), (gradient,)),
            Apply(Origin("chief", 1, 1), "o", "sgd", 0.1, ("v",), (gradient,), {"momentum": 0.5}),
        ],
    ]
    for pair in pairs:
        calls = setting()
        for change in pair:
            calls.ask("a", change)
        assert calls.ask("a", commit(1, 2)).kind == "mismatch"
        state, tensors = content(calls.store)
        assert len(tensors) == 1
        assert '"optimizers": []' in state
        assert '"accumulators": []' in state


def test_a_commit_without_all_parts_makes_nothing_and_may_be_tried_as_a_new_attempt():
    calls = setting()
    calls.ask("a", part(1, 0))
    assert calls.ask("a", commit(1, 2)).kind == "incomplete"
    assert calls.value("v").tolist() == [0, 0]
    calls.ask("b", part(1, 0, attempt=1))
    calls.ask("b", part(1, 1, attempt=1))
    assert isinstance(calls.ask("b", commit(1, 2, attempt=1)), Batched)
    assert calls.value("v").tolist() == [2, 2]


def test_an_attempt_that_was_thought_dead_changes_nothing_once_another_committed():
    calls = setting()
    calls.ask("zombie", part(1, 0, by=100.0))
    calls.ask("b", part(1, 0, attempt=1))
    committed = calls.ask("b", commit(1, 1, attempt=1))
    assert calls.ask("zombie", part(1, 1, by=100.0)) == Staged(True)
    assert calls.ask("zombie", commit(1, 2)) == committed
    assert calls.value("v").tolist() == [1, 1]


def test_an_abandoned_attempt_leaves_nothing_also_when_a_part_of_it_comes_late():
    calls = setting()
    calls.ask("a", part(1, 0))
    assert calls.ask("a", Abandon(Origin("chief", 1))) == Done()
    assert calls.ask("a", part(1, 0)).kind == "incomplete"
    assert calls.ask("a", commit(1, 1)).kind == "incomplete"
    assert calls.value("v").tolist() == [0, 0]


def test_two_clients_can_not_mix_their_parts_in_an_attempt():
    calls = setting()
    calls.ask("a", part(1, 0))
    assert calls.ask("b", part(1, 1)).kind == "mismatch"


def test_what_a_client_that_left_kept_is_dropped():
    calls = setting()
    calls.ask("a", part(1, 0))
    calls.ask("chief", Leave("a"))
    assert calls.ask("a", part(1, 1)).kind == "left"
    assert calls.ask("chief", commit(1, 1)).kind == "incomplete"
    assert '"stages": []' in content(calls.store)[0]


def test_the_coordinator_may_commit_what_a_worker_ran():
    calls = setting()
    calls.ask("a", part(1, 0))
    assert isinstance(calls.ask("chief", commit(1, 1)), Batched)


def test_what_is_kept_is_bounded_and_room_comes_back():
    for free in (
        lambda calls: calls.ask("a", commit(1, 1)),
        lambda calls: calls.ask("a", Abandon(Origin("chief", 1))),
        lambda calls: calls.ask("a", Leave("a")),
        lambda calls: calls.ask("a", Acknowledge("chief", 1)),
    ):
        calls = setting(Limits(staged_bytes=10_000))
        big = Add(Origin("chief", 1, 0), "v", np.zeros(500))
        other = Add(Origin("chief", 2, 0), "v", np.zeros(800))
        assert calls.ask("a", big) == Staged(False)
        assert calls.ask("b", other).kind == "full"
        free(calls)
        assert calls.ask("b", other) == Staged(False)


def test_many_small_parts_are_bounded_as_well():
    calls = setting(Limits(staged_bytes=10_000))
    replies = [calls.ask("a", IncrementStep(Origin("chief", n, 0))) for n in range(1, 100)]
    assert replies[-1].kind == "full"


class Servers:
    """Two servers, a coordinator that runs closures again, and workers that die anywhere."""

    def __init__(self, draw):
        self.draw = draw
        self.servers = [setting(), setting()]
        self.under_way = []
        self.workers = 0

    def run(self, number):
        """Run a closure until it is committed on both servers."""
        for attempt in range(4):
            worker = f"worker-{self.workers}"
            if self.attempt(worker, number, attempt, may_die=attempt < 3):
                return
            self.workers += 1
            for calls in self.servers:
                calls.ask("chief", Leave(worker))

    def attempt(self, worker, number, attempt, may_die):
        """Run a closure; False if the worker died at some point of it."""
        by = 2.0**number
        steps = [
            (0, part(number, 0, by, attempt)),
            (0, part(number, 1, by, attempt)),
            (1, part(number, 0, by, attempt)),
            (0, commit(number, 2, attempt)),
            (1, commit(number, 1, attempt)),
        ]
        dies_at = self.draw(st.integers(0, len(steps) * 2)) if may_die else len(steps) * 2
        for at, (server, request) in enumerate(steps):
            if at == dies_at:
                # What a dying process sent may still arrive, much later.
                self.under_way.append((worker, server, request))
                return False
            self.under_way.append((worker, server, request))
            self.servers[server].ask(worker, request)
            self.deliver_something_old()
        return True

    def deliver_something_old(self):
        """Let a message that was under way for long, or twice, arrive."""
        if self.draw(st.booleans()):
            worker, server, request = self.draw(st.sampled_from(self.under_way))
            self.servers[server].ask(worker, request)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_each_closure_counts_once_on_each_server_whoever_dies_when(data):
    servers = Servers(data.draw)
    count = data.draw(st.integers(1, 5))
    for number in range(1, count + 1):
        servers.run(number)
    for worker, server, request in servers.under_way:
        servers.servers[server].ask(worker, request)
    total = sum(2.0**number for number in range(1, count + 1))
    assert servers.servers[0].value("v").tolist() == [2 * total, 2 * total]
    assert servers.servers[1].value("v").tolist() == [total, total]
