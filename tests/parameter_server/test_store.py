"""Whatever a network does to requests: variables are made once, changed whole and once, or not."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ndistribute.parameter_server.messages import (
    Aggregate,
    Apply,
    Changed,
    Create,
    Delete,
    Failure,
    Gradient,
    Item,
    NewVariable,
    Read,
    Status,
    Transaction,
)
from tests.parameter_server.calls import Calls, add, apply, assign, content, new, read, rows


@pytest.fixture
def calls():
    return Calls()


def test_a_value_is_asked_for_only_where_there_is_none(calls):
    wanted = Create((NewVariable("v", (2,), "float32"), NewVariable("n", (), "int64", fill=3.0)))
    assert calls.ask("a", wanted).states == ("wanted", "made")
    assert calls.ask("a", read("v")).kind == "unknown"
    calls.create(v=np.float32([1, 2]))
    assert calls.ask("b", wanted).states == ("found", "found")
    assert calls.value("n") == 3


@pytest.mark.parametrize(
    "other",
    [
        NewVariable("v", (2,), "float64"),
        NewVariable("v", (3,), "float32", fill=0.0),
        NewVariable("x", (2,), "object", fill=0.0),
        NewVariable("x", (2,), "no such", fill=0.0),
        NewVariable("x", (-1,), "float32", fill=0.0),
        NewVariable("x", (2,), "int32", fill=np.nan),
        NewVariable("x", (3,), "float32", initial=np.zeros(2, np.float32)),
        NewVariable("x", (1 << 55,), "float64", fill=0.0),  # There is not so much memory.
    ],
)
def test_what_can_not_be_made_is_named_and_nothing_else_is_made(calls, other):
    calls.create(v=np.zeros(2, np.float32))
    reply = calls.ask("b", Create((new("w", 1.0), other)))
    huge = np.prod(other.shape, dtype=float) > 1e9
    assert reply.kind == ("full" if huge else "mismatch")
    assert huge or f"'{other.name}'" in reply.message
    assert calls.ask("b", read("w")).kind == "unknown"


def test_a_foreign_byte_order_becomes_this_machines(calls):
    calls.ask("a", Create((NewVariable("v", (2,), ">i4", initial=np.array([1, 2], ">i4")),)))
    assert calls.value("v").dtype.isnative
    assert calls.value("v").tolist() == [1, 2]
    assert calls.change("a", add("v", np.array([1, 1], np.int32))).versions == (2,)


def test_a_store_keeps_no_array_of_a_request(calls):
    arrays = [np.ones(2) for _ in range(3)]
    calls.create(v=arrays[0], n=np.array(0))
    held = calls.value("v")  # Makes the assignment take another array.
    gradient = Aggregate("t", 0, 2, apply("sgd", "v", Gradient(arrays[2])))
    calls.change("a", assign("v", arrays[1]), gradient)
    before = content(calls.store)
    for array in arrays:
        array[:] = 7
    assert content(calls.store) == before
    assert held.tolist() == [1, 1]


def test_a_read_moves_only_what_is_newer(calls):
    calls.create(v=np.zeros(2), w=np.ones(2))
    assert calls.change("a", assign("v", np.ones(2))).versions == (2,)
    reply = calls.ask("a", Read((Item("v", 1), Item("w", 1))))
    assert reply.versions == (2, 1)
    assert (reply.arrays[0].tolist(), reply.arrays[1]) == ([1, 1], None)


VECTOR = np.zeros(2, np.float32)
GRADIENT = Gradient(VECTOR + 1)


@pytest.mark.parametrize(
    "change",
    [
        assign("v", np.zeros(2)),
        add("v", np.zeros(3, np.float32)),
        add("none", np.zeros(2)),
        add("flags", np.zeros(2, bool)),
        add("v", np.ones(1, np.float32), rows(2)),
        add("v", np.ones(1, np.float32), rows(-1)),
        add("v", np.ones(2, np.float32), rows(0)),
        add("v", np.ones(1, np.float32), np.zeros(1)),
        add("v", np.ones(1), rows(0)),
        add("scalar", np.ones(1), rows(0)),
        Apply(("v", "v"), (GRADIENT, GRADIENT), ((), ()), "n", "sgd", 0.1),
        Apply(("v",), (), ((),), "n", "sgd", 0.1),
        Apply(("v",), (GRADIENT,), (), "n", "sgd", 0.1),
        Apply(("v",), (GRADIENT,), ((),), "none", "sgd", 0.1),
        Apply(("v",), (GRADIENT,), ((),), "counts", "sgd", 0.1),
        apply("nothing", "v", GRADIENT),
        apply("sgd", "v", GRADIENT, beta_1=0.5),
        apply("adam", "v", GRADIENT, slots=("m", "s"), beta_1=1.5),
        apply("adam", "v", GRADIENT, slots=("m",)),
        apply("adam", "v", GRADIENT, slots=("m", "m")),
        apply("adam", "v", GRADIENT, slots=("m", "v")),
        apply("adam", "v", GRADIENT, slots=("m", "none")),
        apply("adam", "v", GRADIENT, slots=("m", "wide")),
        apply("sgd", "v", Gradient(VECTOR[:1])),
        apply("sgd", "counts", Gradient(np.zeros(2))),
        apply("sgd", "v", Gradient(np.zeros(2, complex))),
        apply("sgd", "v", Gradient(VECTOR[:1], rows(9))),
        Aggregate("g", 0, 0, apply("sgd", "v", GRADIENT)),
        Aggregate("g", -1, 1, apply("sgd", "v", GRADIENT)),
        Aggregate("g", 0, 1, apply("sgd", "none", GRADIENT)),
        Aggregate("t", 0, 2, apply("sgd", "m", GRADIENT)),
    ],
)
def test_one_change_that_does_not_fit_undoes_the_whole_transaction(calls, change):
    calls.create(v=VECTOR, m=VECTOR, s=VECTOR, wide=np.zeros(2), n=np.array(0))
    calls.create(flags=np.zeros(2, bool), scalar=np.zeros(()), counts=np.zeros(2, np.int64))
    calls.change("a", Aggregate("t", 0, 2, apply("sgd", "v", GRADIENT)))
    before = content(calls.store)
    good = (add("v", VECTOR + 1), Aggregate("t2", 0, 1, apply("sgd", "v", GRADIENT)))
    for changes in ((change,), (*good, apply("sgd", "v", GRADIENT), change)):
        reply = calls.change("b", *changes)
        assert isinstance(reply, Failure)
        assert reply.kind in ("mismatch", "unknown")
        assert content(calls.store) == before


def test_a_mismatch_names_variable_shapes_and_dtypes(calls):
    calls.create(v=VECTOR)
    assert calls.change("a", add("v", np.zeros((3, 1)))).message == (
        "variable 'v' has shape (2,) and dtype float32, got (3, 1) and float64. Nothing has "
        "changed."
    )
    assert "no variable 'w' on this server" in calls.change("a", add("w", VECTOR)).message


def test_the_changes_are_made_in_order_and_each_has_its_outcome(calls):
    calls.create(v=np.zeros(2), m=np.zeros(2), s=np.zeros(2), n=np.array(-1))
    adam = apply("adam", "v", Gradient(np.ones(2)), slots=("m", "s"))
    aggregate = Aggregate("t", 3, 2, adam)
    reply = calls.change("a", assign("v", np.ones(2)), add("v", np.ones(2)), adam, adam, aggregate)
    *done, accumulated = reply.outcomes
    assert [outcome.versions for outcome in done] == [(2,), (3,), (4,), (5,)]
    assert (accumulated.accepted, accumulated.step) == (True, 3)
    assert calls.value("n") == 1
    with np.errstate(all="raise"):  # Numbers that overflow warn nobody.
        calls.change("a", assign("v", np.full(2, 1e308)), add("v", np.full(2, 1e308)))
    assert np.isinf(calls.value("v")).all()


def test_rows_that_are_there_are_read_in_the_order_asked(calls):
    values = np.arange(8.0).reshape(4, 2)
    calls.create(v=values, w=np.zeros(()))
    for indices in ([], [2], [3, 0, 3]):
        reply = calls.ask("a", Read((Item("v", rows=rows(*indices)), Item("v", 1, rows(1)))))
        assert reply.versions == (1, 1)
        assert [found.tolist() for found in reply.arrays] == [values[indices].tolist(), [[2, 3]]]
    wrong = [("v", each) for each in (rows(4), rows(-1), np.zeros(1), rows(1)[None])]
    for name, indices in (*wrong, ("w", rows(0))):
        reply = calls.ask("a", Read((Item(name, rows=indices),)))
        assert (reply.kind, f"'{name}'" in reply.message) == ("mismatch", True)


def test_a_variable_that_is_made_again_does_not_pass_for_the_one_before(calls):
    calls.create(v=np.zeros(2))
    calls.change("a", add("v", np.ones(2)))
    assert [calls.ask("a", Delete(("v", "none"))).value for _ in range(2)] == [1, 0]
    assert calls.ask("a", read("v")).kind == "unknown"
    calls.create(v=np.zeros(2))
    assert calls.read("v", known=2).array.tolist() == [0, 0]


def test_a_repetition_changes_nothing_and_tells_what_is_there_now(calls):
    calls.create(v=0.0)
    order = Transaction("a", 1, 0, (add("v", np.array(1.0)),))
    first = calls.ask("a", order)
    assert (first.outcomes[0].versions, first.total, first.repeated) == ((2,), 1, False)
    calls.ask("a", Transaction("a", 2, 0, (add("v", np.array(1.0)),)))
    again = calls.ask("another", order)
    assert (again.outcomes[0].versions, again.total, again.repeated) == ((3,), 2, True)
    calls.ask("a", Delete(("v",)))
    assert calls.ask("a", order).outcomes[0].versions == (0,)


def test_what_was_refused_may_be_asked_again(calls):
    order = Transaction("a", 1, 1, (add("v", np.array(1.0)),))
    assert calls.ask("a", order).kind == "unknown"
    calls.create(v=0.0)
    assert not calls.ask("a", order).repeated
    assert calls.value("v") == 1
    below = Transaction("a", 1, 2, order.changes)
    assert calls.ask("a", below).kind == "mismatch"


def test_of_many_clients_the_one_that_was_here_least_lately_is_forgotten(calls, monkeypatch):
    monkeypatch.setattr("ndistribute.parameter_server.store.MAX_CLIENTS", 2)
    calls.create(v=0.0)
    for client, sequence in (("a", 1), ("b", 1), ("a", 2), ("c", 1)):
        calls.ask(client, Transaction(client, sequence, 0, ()))
    replies = [calls.ask(c, Transaction(c, 1, 0, ())).repeated for c in "acb"]
    assert replies == [True, True, False]


def test_a_client_can_not_make_the_server_remember_without_bound(calls, monkeypatch):
    monkeypatch.setattr("ndistribute.parameter_server.store.MAX_APPLIED", 3)
    replies = [calls.ask("a", Transaction("a", n, 0, ())) for n in range(1, 5)]
    assert [isinstance(reply, Changed) for reply in replies] == [True] * 3 + [False]
    assert replies[3].kind == "full"
    assert calls.ask("a", Transaction("a", 2, 0, ())).repeated


ZERO = np.array(0.0)


class OnceMachine(RuleBasedStateMachine):
    """Clients send transactions and the network repeats them; at times the server is restored."""

    def __init__(self):
        super().__init__()
        self.calls = Calls()
        self.calls.create(v=0.0)
        self.open = {client: set() for client in "abc"}  # Numbers that the client may send again.
        self.next = dict.fromkeys("abc", 1)
        self.sent = []
        self.low = dict.fromkeys("abc", 0)
        self.made = set()
        self.expected = 0.0

    @rule(client=st.sampled_from("abc"), skip=st.integers(0, 2), fits=st.booleans())
    def begin(self, client, skip, fits):
        number = self.next[client] + skip
        self.next[client] = number + 1
        self.open[client].add(number)
        changes = (add("v", np.array(2.0 ** len(self.sent))), add("v" if fits else "none", ZERO))
        self.sent.append(Transaction(client, number, min(self.open[client]), changes))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver(self, data):
        request = data.draw(st.sampled_from(self.sent))
        client, key = request.client, (request.client, request.sequence)
        reply = self.calls.ask(data.draw(st.sampled_from("abc")), request)
        known = key in self.made or request.sequence < self.low[client]
        if not known and request.changes[1].name == "none":
            assert reply.kind == "unknown"
            return
        assert reply.repeated == known
        if not known:
            self.made.add(key)
            self.low[client] = max(self.low[client], request.low_water)
            self.expected += float(request.changes[0].values)
        assert reply.total == len(self.made)

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data())
    def end(self, data):
        """Let a client have its reply, or give up."""
        client = data.draw(st.sampled_from([name for name in "abc" if self.open[name]]))
        self.open[client].remove(data.draw(st.sampled_from(sorted(self.open[client]))))

    @rule()
    def restore(self):
        self.calls = self.calls.restored()

    @invariant()
    def the_value_is_the_sum_of_what_was_made(self):
        assert self.calls.value("v") == self.expected
        assert self.calls.ask("a", Status()).total == len(self.made)


TestOnce = OnceMachine.TestCase
TestOnce.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
