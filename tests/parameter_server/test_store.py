"""Whatever a network does: changes are made whole and once, and nobody waits in vain."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from ndistribute.optimizers.algorithms import AdamRule
from ndistribute.parameter_server import messages as m
from tests.parameter_server.calls import Calls, add, apply, assign, content, new, read, rows


@pytest.fixture
def calls():
    return Calls()


def test_a_value_is_asked_for_only_where_there_is_none(calls):
    wanted = m.Create(
        (m.NewVariable("v", (2,), "float32"), m.NewVariable("n", (), "int64", fill=3.0))
    )
    assert calls.ask("a", wanted).states == ("wanted", "made")
    assert calls.ask("a", read("v")).kind == "unknown"
    calls.create(v=np.float32([1, 2]))
    assert calls.ask("b", wanted).states == ("found", "found")
    assert calls.value("n") == 3


@pytest.mark.parametrize(
    "other",
    [
        m.NewVariable("v", (2,), "float64"),
        m.NewVariable("v", (3,), "float32", fill=0.0),
        m.NewVariable("x", (2,), "object", fill=0.0),
        m.NewVariable("x", (2,), "no such", fill=0.0),
        m.NewVariable("x", (-1,), "float32", fill=0.0),
        m.NewVariable("x", (2,), "int32", fill=np.nan),
        m.NewVariable("x", (3,), "float32", initial=np.zeros(2, np.float32)),
        m.NewVariable("x", (1 << 55,), "float64", fill=0.0),  # There is not so much memory.
    ],
)
def test_what_can_not_be_made_is_named_and_nothing_else_is_made(calls, other):
    calls.create(v=np.zeros(2, np.float32))
    reply = calls.ask("b", m.Create((new("w", 1.0), other)))
    huge = np.prod(other.shape, dtype=float) > 1e9
    assert reply.kind == ("full" if huge else "mismatch")
    assert huge or f"'{other.name}'" in reply.message
    assert calls.ask("b", read("w")).kind == "unknown"


def test_a_foreign_byte_order_becomes_this_machines(calls):
    calls.ask("a", m.Create((m.NewVariable("v", (2,), ">i4", initial=np.array([1, 2], ">i4")),)))
    assert calls.value("v").dtype.isnative
    assert calls.value("v").tolist() == [1, 2]
    assert calls.change("a", add("v", np.array([1, 1], np.int32))).versions == (2,)


def test_a_store_keeps_no_array_of_a_request(calls):
    arrays = [np.ones(2) for _ in range(3)]
    calls.create(v=arrays[0], n=np.array(0))
    held = calls.value("v")  # Makes the assignment take another array.
    gradient = m.Aggregate("t", 0, 2, apply("sgd", "v", m.Gradient(arrays[2])))
    calls.change("a", assign("v", arrays[1]), gradient)
    before = content(calls.store)
    for array in arrays:
        array[:] = 7
    assert content(calls.store) == before
    assert held.tolist() == [1, 1]


def test_a_read_moves_only_what_is_newer(calls):
    calls.create(v=np.zeros(2), w=np.ones(2))
    assert calls.change("a", assign("v", np.ones(2))).versions == (2,)
    reply = calls.ask("a", m.Read((m.Item("v", 1), m.Item("w", 1))))
    assert reply.versions == (2, 1)
    assert (reply.arrays[0].tolist(), reply.arrays[1]) == ([1, 1], None)


VECTOR = np.zeros(2, np.float32)
GRADIENT = m.Gradient(VECTOR + 1)


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
        m.Apply(("v", "v"), (GRADIENT, GRADIENT), ((), ()), "n", "sgd", 0.1),
        m.Apply(("v",), (), ((),), "n", "sgd", 0.1),
        m.Apply(("v",), (GRADIENT,), (), "n", "sgd", 0.1),
        m.Apply(("v",), (GRADIENT,), ((),), "none", "sgd", 0.1),
        m.Apply(("v",), (GRADIENT,), ((),), "counts", "sgd", 0.1),
        apply("nothing", "v", GRADIENT),
        apply("sgd", "v", GRADIENT, beta_1=0.5),
        apply("adam", "v", GRADIENT, slots=("m", "s"), beta_1=1.5),
        apply("adam", "v", GRADIENT, slots=("m",)),
        apply("adam", "v", GRADIENT, slots=("m", "m")),
        apply("adam", "v", GRADIENT, slots=("m", "v")),
        apply("adam", "v", GRADIENT, slots=("m", "none")),
        apply("adam", "v", GRADIENT, slots=("m", "wide")),
        apply("sgd", "v", m.Gradient(VECTOR[:1])),
        apply("sgd", "counts", m.Gradient(np.zeros(2))),
        apply("sgd", "v", m.Gradient(np.zeros(2, complex))),
        apply("sgd", "v", m.Gradient(VECTOR[:1], rows(9))),
        m.Aggregate("g", 0, 0, apply("sgd", "v", GRADIENT)),
        m.Aggregate("g", -1, 1, apply("sgd", "v", GRADIENT)),
        m.Aggregate("g", 0, 1, apply("sgd", "none", GRADIENT)),
        m.Aggregate("t", 0, 2, apply("sgd", "m", GRADIENT)),
    ],
)
def test_one_change_that_does_not_fit_undoes_the_whole_transaction(calls, change):
    calls.create(v=VECTOR, m=VECTOR, s=VECTOR, wide=np.zeros(2), n=np.array(0))
    calls.create(flags=np.zeros(2, bool), scalar=np.zeros(()), counts=np.zeros(2, np.int64))
    calls.change("a", m.Aggregate("t", 0, 2, apply("sgd", "v", GRADIENT)))
    before = content(calls.store)
    good = (add("v", VECTOR + 1), m.Aggregate("t2", 0, 1, apply("sgd", "v", GRADIENT)))
    for changes in ((change,), (*good, apply("sgd", "v", GRADIENT), change)):
        reply = calls.change("b", *changes)
        assert isinstance(reply, m.Failure)
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
    adam = apply("adam", "v", m.Gradient(np.ones(2)), slots=("m", "s"))
    aggregate = m.Aggregate("t", 3, 2, adam)
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
        reply = calls.ask("a", m.Read((m.Item("v", rows=rows(*indices)), m.Item("v", 1, rows(1)))))
        assert reply.versions == (1, 1)
        assert [found.tolist() for found in reply.arrays] == [values[indices].tolist(), [[2, 3]]]
    wrong = [("v", each) for each in (rows(4), rows(-1), np.zeros(1), rows(1)[None])]
    for name, indices in (*wrong, ("w", rows(0))):
        reply = calls.ask("a", m.Read((m.Item(name, rows=indices),)))
        assert (reply.kind, f"'{name}'" in reply.message) == ("mismatch", True)


def test_a_variable_that_is_made_again_does_not_pass_for_the_one_before(calls):
    calls.create(v=np.zeros(2))
    calls.change("a", add("v", np.ones(2)))
    assert [calls.ask("a", m.Delete(("v", "none"))).value for _ in range(2)] == [1, 0]
    assert calls.ask("a", read("v")).kind == "unknown"
    calls.create(v=np.zeros(2))
    assert calls.read("v", known=2).array.tolist() == [0, 0]


def test_a_repetition_changes_nothing_and_tells_what_is_there_now(calls):
    calls.create(v=0.0)
    order = m.Transaction("a", 1, 0, (add("v", np.array(1.0)),))
    first = calls.ask("a", order)
    assert (first.outcomes[0].versions, first.total, first.repeated) == ((2,), 1, False)
    calls.ask("a", m.Transaction("a", 2, 0, (add("v", np.array(1.0)),)))
    again = calls.ask("another", order)
    assert (again.outcomes[0].versions, again.total, again.repeated) == ((3,), 2, True)
    calls.ask("a", m.Delete(("v",)))
    assert calls.ask("a", order).outcomes[0].versions == (0,)


def test_what_was_refused_may_be_asked_again(calls):
    order = m.Transaction("a", 1, 1, (add("v", np.array(1.0)),))
    assert calls.ask("a", order).kind == "unknown"
    calls.create(v=0.0)
    assert not calls.ask("a", order).repeated
    assert calls.value("v") == 1
    below = m.Transaction("a", 1, 2, order.changes)
    assert calls.ask("a", below).kind == "mismatch"


def test_of_many_clients_the_one_that_was_here_least_lately_is_forgotten(calls, monkeypatch):
    monkeypatch.setattr("ndistribute.parameter_server.store.MAX_CLIENTS", 2)
    calls.create(v=0.0)
    for client, sequence in (("a", 1), ("b", 1), ("a", 2), ("c", 1)):
        calls.ask(client, m.Transaction(client, sequence, 0, (add("v", ZERO),)))
    replies = [calls.ask(c, m.Transaction(c, 1, 0, (add("v", ZERO),))).repeated for c in "acb"]
    assert replies == [True, True, False]


def test_a_client_can_not_make_the_server_remember_without_bound(calls, monkeypatch):
    monkeypatch.setattr("ndistribute.parameter_server.store.MAX_APPLIED", 3)
    calls.create(v=0.0)
    orders = [m.Transaction("a", n, 0, (add("v", ZERO),)) for n in range(1, 5)]
    replies = [calls.ask("a", order) for order in orders]
    assert [isinstance(reply, m.Changed) for reply in replies] == [True] * 3 + [False]
    assert replies[3].kind == "full"
    assert calls.ask("a", orders[1]).repeated
    more = m.Transaction("a", 2, 0, orders[1].changes, (m.Mark(number=1),))
    assert not calls.ask("a", more).repeated  # Who has begun may go on.


def test_of_the_attempts_to_run_a_function_only_the_newest_changes_anything(calls):
    """A restored server knows them, and an earlier one that is late does not come back."""
    calls.create(v=0.0)
    mark = m.Mark("0.0", number=0, digest=5)
    order = m.Transaction("a", 3, 1, (add("v", ZERO),), (mark,))
    calls.ask("a", order)
    assert calls.ask("b", m.Rerun("a", 3, 3)).marks == (mark,)
    for each in (calls, calls.restored()):
        assert each.ask("c", m.Rerun("a", 3, 2)).marks == (mark,)
        assert each.ask("a", order).kind == "superseded"
        assert each.ask("b", replace(order, attempt=3)).repeated
    over = m.Transaction("a", 4, 4, (add("v", ZERO),), (mark,))
    calls.ask("a", over)
    assert not calls.store.applied["a"].attempts


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
        self.sent.append(m.Transaction(client, number, min(self.open[client]), changes))

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
        assert self.calls.ask("a", m.Status()).total == len(self.made)


TestOnce = OnceMachine.TestCase
TestOnce.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


FOUR = np.zeros(4, np.float32)


def setting():
    """Return a store with two variables, slots for one, and a counter."""
    calls = Calls()
    calls.create(v=FOUR, m=FOUR, s=FOUR, w=np.zeros((5, 2)), n=np.array(0))
    return calls


@pytest.fixture
def synced():
    return setting()


def give(calls, client, gradient, step=0, count=2):
    """Give a set of one gradient, for plain descent; return what became of it."""
    change = apply("sgd", "v", m.Gradient(np.float32(gradient)), rate=1.0)
    outcome = calls.change(client, m.Aggregate("t", step, count, change))
    return outcome.accepted, outcome.step


def wait(calls, client, step, count=2):
    """Wait for a step, and return the call."""
    return calls.send(client, m.AwaitStep("t", step, count))


def test_a_late_set_and_a_second_one_of_a_client_are_dropped(synced):
    give(synced, "a", [1, 1, 1, 1])
    assert give(synced, "a", [9, 9, 9, 9]) == (False, 0)
    assert give(synced, "b", [1, 1, 1, 1]) == (True, 1)
    assert give(synced, "c", [9, 9, 9, 9]) == (False, 1)
    assert synced.value("v").tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_16_bits_are_summed_in_32(synced, dtype, sparse):
    values = np.array([1.0, 300.0], dtype)
    synced.create(x=np.zeros(2, dtype))
    for step in range(2):
        for client in range(400):  # Their sum is beyond float16, and steps of bfloat16 are 2 there.
            gradient = m.Gradient(values, rows(0, 1)) if sparse else m.Gradient(values)
            change = m.Aggregate("t", step, 400, apply("sgd", "x", gradient, rate=1.0))
            synced.change(f"c{client}", change)
    assert synced.value("x").astype(float).tolist() == [-2, -600]


@pytest.mark.parametrize(
    "other",
    [
        apply("sgd", "w", m.Gradient(np.zeros((5, 2)))),
        apply("sgd", "v", m.Gradient(FOUR[:1], rows(0))),
        apply("sgd", "v", m.Gradient(np.zeros(4))),
    ],
)
def test_a_set_unlike_the_steps_first_is_refused_and_the_next_step_may_differ(synced, other):
    give(synced, "a", [1, 1, 1, 1])
    assert synced.change("b", m.Aggregate("t", 0, 2, other)).kind == "mismatch"
    assert give(synced, "b", [1, 1, 1, 1]) == (True, 1)
    assert synced.change("b", m.Aggregate("t", 1, 1, other)).step == 2


def test_a_server_restored_from_before_follows_its_clients(synced):
    for step in range(2):
        for client in "ab":
            give(synced, client, [1, 1, 1, 1], step)
    old = synced.restored()
    for step in (3, 4):  # Sets for them were given to the life that was lost.
        assert old.ask("a", m.AwaitStep("t", step, 2)).value == 2
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
            adam = apply("adam", "v", m.Gradient(values), slots=("m", "s"))
            outcome = calls.change(client, m.Aggregate("t", step, needed, adam))
            assert outcome.accepted == (len(sets) < needed)
            sets.append(values)
            if draw(st.booleans()):
                calls = calls.restored()
        mean = np.sum(sets[:needed], axis=0, dtype=np.float32) / np.float32(needed)
        rule.step(expected, mean, slots, rule.rates(step + 1, 0.1))
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
    return calls.send(client, m.AwaitClock("steps", clock, slack, count))


def may(calls, client, clock, slack=0, count=2):
    """Return whether a client may begin a step at once."""
    return isinstance(calls.replies.get(begin(calls, client, clock, slack, count)), m.Number)


def test_a_member_that_left_holds_nobody_back_but_one_that_never_came_does(synced):
    begin(synced, "w:0#1", 0, count=3)
    begin(synced, "w:1#1", 0, count=3)
    synced.leave("w:1#1")
    waits = begin(synced, "w:1#2", 0, count=3)
    assert waits not in synced.replies
    assert may(synced, "w:2#1", 0, count=3)
    assert synced.replies[waits].value == 0
    ahead = begin(synced, "w:0#1", 1, count=3)
    synced.leave("w:1#2")
    assert ahead not in synced.replies
    synced.leave("w:2#1")
    assert synced.replies[ahead].value == 1


def test_a_restarted_member_takes_its_own_place_even_before_its_death_is_known(synced):
    begin(synced, "w:0#1", 0)
    begin(synced, "w:1#1", 0)
    ahead = begin(synced, "w:0#1", 1)
    assert may(synced, "w:1#2", 1)
    assert synced.replies[ahead].value == 1
    synced.leave("w:1#1")
    assert begin(synced, "w:0#1", 2) not in synced.replies  # The second one is still there.


def test_numbers_without_sense_are_refused(synced):
    assert synced.ask("a", m.AwaitStep("t", 2, 0)).kind == "mismatch"
    begin(synced, "a", 0)
    for clock, slack, count in ((-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 3)):
        assert synced.replies[begin(synced, "b", clock, slack, count)].kind == "mismatch"


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
