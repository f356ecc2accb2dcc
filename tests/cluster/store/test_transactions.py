"""The changes of a transaction are made together and once, whoever asks for it how often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.protocol.replies import (
    Accumulated,
    Changed,
    Done,
    Failure,
    Step,
    Token,
    Total,
)
from ndistribute.cluster.protocol.requests import (
    Accumulate,
    Add,
    Aggregate,
    Assign,
    Batch,
    Dense,
    Dequeue,
    Enqueue,
    IncrementStep,
    Leave,
    Origin,
    Read,
    ReadTotal,
    Transaction,
)
from ndistribute.cluster.store import Limits, Store
from tests.cluster.store.calls import Calls, apply, content, one

GRADIENT = Dense(np.ones(2))


def setting(limits=None):
    """Return a store with a variable, slots for it and a counter."""
    calls = Calls(Store(limits))
    calls.create(v=np.zeros(2), m=np.zeros(2), s=np.zeros(2), n=np.array(0))
    return calls


def test_the_changes_are_made_in_order_and_each_has_its_outcome():
    calls = setting()
    adam = apply("adam", "v", GRADIENT, slots=("m", "s"))
    waits = calls.send("b", Dequeue(Origin("b", 1), "q"))
    changes = [
        Assign("v", np.ones(2)),
        Add("v", np.ones(2)),
        adam,
        adam,
        Accumulate("g", GRADIENT, 0),
        Aggregate("t", 3, 2, adam),
        Enqueue("q", (4,)),
        IncrementStep(),
    ]
    reply = calls.ask("a", Transaction(Origin("a", 1), tuple(changes)))
    done = tuple(Done((version,)) for version in (2, 3, 4, 5))
    assert reply.outcomes == (*done, Accumulated(True, 0), Accumulated(True, 3), Done(), Step(1))
    assert calls.answers[waits] == Token(4)
    assert calls.value("n") == 2


BAD = [
    Add("v", np.zeros(3)),
    Add("none", np.zeros(2)),
    apply("none", "v", GRADIENT),
    apply("sgd", "v", GRADIENT, momentum=0.5),
    Accumulate("g", Dense(np.ones(3)), 0),
    Aggregate("t", 0, 2, apply("sgd", "m", GRADIENT)),
    Enqueue("q", (1, 2)),
]


@pytest.mark.parametrize("bad", BAD)
def test_one_change_that_can_not_be_made_undoes_all(bad):
    calls = setting(Limits(tokens=2))
    calls.ask("a", one(Origin("a", 1), Aggregate("t", 0, 2, apply("sgd", "v", GRADIENT))))
    before = content(calls.store)[1]
    good = [Add("v", np.ones(2)), Accumulate("g", GRADIENT, 0), Enqueue("q", (1,))]
    request = one(Origin("a", 2), *good, apply("sgd", "v", GRADIENT), bad)
    reply = calls.ask("a", request)
    assert isinstance(reply, Failure)
    assert calls.ask("a", request) == reply
    state, tensors = content(calls.store)
    assert tensors == before
    assert '"accumulators": []' in state
    assert '"queues": []' in state
    assert calls.ask("a", ReadTotal()) == Total(1)


def test_what_is_not_made_does_not_change_what_a_reader_holds_nor_its_place():
    calls = setting()
    calls.ask("a", one(Origin("a", 1), Add("v", np.ones(2)), Add("none", np.ones(2))))
    assert calls.ask("a", Read("v")).version == 1


def test_the_total_counts_what_was_made_and_nothing_else():
    calls = setting()
    requests = [one(Origin("a", number), IncrementStep()) for number in (1, 2)]
    for request in (requests[0], requests[0], one(Origin("a", 3), Add("none", np.ones(2)))):
        calls.ask("a", request)
    key = calls.send("a", requests[1])
    assert calls.answers[key] == Changed((Step(2),), 2)
    assert calls.ask("b", ReadTotal()) == Total(2)
    copy = Calls(Store.restore(*calls.store.snapshot()))
    assert copy.store.total == 2
    key = copy.send("b", one(Origin("b", 1), IncrementStep()))
    assert copy.answers[key].total == 3


def test_a_transaction_and_reads_may_go_in_one_batch():
    calls = setting()
    batch = Batch((one(Origin("a", 1), Add("v", np.ones(2))), Read("v"), ReadTotal()))
    for _ in range(2):
        changed, value, total = calls.ask("a", batch).replies
        assert (changed, total) == (Changed((Done((2,)),), 1), Total(1))
        assert value.array.tolist() == [1, 1]


def test_a_store_keeps_no_array_of_a_request():
    calls = Calls()
    arrays = [np.ones(2) for _ in range(6)]
    calls.create(v=arrays[0], n=np.array(0))
    held = calls.ask("a", Read("v"))  # Makes the assignment take another array.
    changes = [
        Assign("v", arrays[1]),
        Accumulate("g", Dense(arrays[2]), 0),
        Aggregate("t", 0, 2, apply("sgd", "v", Dense(arrays[3]))),
    ]
    calls.ask("a", one(Origin("a", 1), *changes))
    before = content(calls.store)[1]
    for array in arrays:
        array[:] = 7
    assert content(calls.store)[1] == before
    assert held.array.tolist() == [1, 1]


class Servers:
    """Two servers, a coordinator that runs closures again, and workers that die anywhere."""

    def __init__(self, draw):
        self.draw = draw
        self.servers = [setting(), setting()]
        self.under_way = []
        self.workers = 0

    def run(self, number):
        """Run a closure until it is done on both servers."""
        for attempt in range(4):
            worker = f"worker-{self.workers}"
            if self.attempt(worker, number, may_die=attempt < 3):
                return
            self.workers += 1
            for calls in self.servers:
                calls.ask("chief", Leave(worker))

    def attempt(self, worker, number, may_die):
        """Run a closure; False if the worker died at some point of it."""
        add = Add("v", np.full(2, 2.0**number))
        first, second = (Origin("closures", (number << 16) + k) for k in (0, 1))
        steps = [(0, one(first, add, add)), (1, one(first, add)), (0, one(second, add))]
        dies_at = self.draw(st.integers(0, len(steps) * 2)) if may_die else len(steps) * 2
        for at, (server, request) in enumerate(steps):
            # What a dying process sent may still arrive, much later.
            self.under_way.append((worker, server, request))
            if at == dies_at:
                return False
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
    assert servers.servers[0].value("v").tolist() == [3 * total, 3 * total]
    assert servers.servers[1].value("v").tolist() == [total, total]
