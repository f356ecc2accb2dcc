"""Variables on a server: made once, read as they were, changed whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.cluster.protocol.replies import Changed, Created, Done, Failure, Value
from ndistribute.cluster.protocol.requests import (
    Add,
    Aggregate,
    Apply,
    Assign,
    Batch,
    Create,
    Dense,
    IncrementStep,
    Locate,
    Read,
    ReadRows,
    ReadStep,
    Rows,
    SaveSnapshot,
    Scatter,
    Subtract,
)
from ndistribute.update_rules import hyperparameters_of
from tests.cluster.store.calls import Calls, apply, content, one, origins, rows


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def origin():
    return origins("worker")


def test_the_first_creator_wins_and_others_learn_what_is_there(calls):
    assert calls.ask("a", Create("v", np.float32([1, 2]))) == Created(True, 1, (2,), "float32")
    assert calls.ask("b", Create("v", np.float32([3, 4]))) == Created(False, 1, (2,), "float32")
    assert calls.value("v").tolist() == [1, 2]


@pytest.mark.parametrize("other", [np.zeros(2), np.zeros(3, np.float32)])
def test_a_creator_with_another_shape_or_dtype_is_told(calls, other):
    calls.ask("a", Create("v", np.zeros(2, np.float32)))
    reply = calls.ask("b", Create("v", other))
    assert reply.kind == "mismatch"
    assert "float32" in reply.message


def test_a_variable_does_not_share_the_creators_memory(calls):
    initial = np.zeros(2)
    calls.ask("a", Create("v", initial))
    initial[:] = 7
    assert calls.value("v").tolist() == [0, 0]


def test_a_read_moves_only_what_is_newer(calls, origin):
    calls.ask("a", Create("v", np.zeros(2)))
    assert calls.ask("a", Read("v", 1)).array is None
    assert calls.ask("a", Read("v", 0)).array is not None
    assert calls.ask("a", one(next(origin), Assign("v", np.ones(2)))) == Done((2,))
    newer = calls.ask("a", Read("v", 1))
    assert (newer.version, newer.array.tolist()) == (2, [1, 1])


def test_a_value_that_was_read_never_changes(calls, origin):
    calls.create(v=np.zeros(3), n=np.array(0))
    for change in (
        lambda: one(next(origin), Assign("v", np.full(3, 5.0))),
        lambda: one(next(origin), Add("v", np.ones(3))),
        lambda: one(next(origin), Scatter("v", "add", rows(1), np.ones(1))),
        lambda: one(next(origin), apply("sgd", "v", Dense(np.ones(3)))),
    ):
        held = calls.value("v")
        view = memoryview(held[1:])
        del held
        before = view.tolist()
        calls.ask("a", change())
        assert view.tolist() == before
        assert calls.value("v")[1:].tolist() != before


def test_a_value_that_nobody_reads_is_changed_in_place(calls, origin):
    calls.ask("a", Create("v", np.zeros(3)))
    address = calls.value("v").ctypes.data
    calls.ask("a", one(next(origin), Add("v", np.ones(3))))
    calls.ask("a", one(next(origin), Assign("v", np.ones(3))))
    assert calls.value("v").ctypes.data == address


def test_a_value_can_not_be_changed_by_its_reader(calls):
    calls.ask("a", Create("v", np.zeros(3)))
    with pytest.raises(ValueError, match="read-only"):
        calls.value("v")[0] = 1


def test_add_and_subtract(calls, origin):
    calls.ask("a", Create("v", np.array(1.0)))
    calls.ask("a", one(next(origin), Add("v", np.array(4.0))))
    calls.ask("a", one(next(origin), Subtract("v", np.array(0.5))))
    assert calls.value("v") == 4.5


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("update", [3, 1, 5]),
        ("add", [5, 1, 6]),
        ("sub", [-3, 1, -4]),
        ("mul", [3, 1, 5]),
        ("div", [1 / 3, 1, 1 / 5]),
        ("min", [1, 1, 1]),
        ("max", [3, 1, 5]),
    ],
)
def test_scatter_combines_rows_that_repeat(calls, origin, how, expected):
    calls.ask("a", Create("v", np.ones((3, 1))))
    values = np.array([[1.0], [5.0], [3.0]])
    calls.ask("a", one(next(origin), Scatter("v", how, rows(0, 2, 0), values)))
    assert calls.value("v").ravel() == pytest.approx(expected)


VECTOR = np.zeros(2, np.float32)
GRADIENT = Dense(VECTOR + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda o: one(o, Assign("v", np.zeros(2))),
        lambda o: one(o, Add("v", np.zeros(3, np.float32))),
        lambda o: one(o, Add("flags", np.zeros(2, bool))),
        lambda o: one(o, Scatter("v", "add", rows(2), np.ones(1, np.float32))),
        lambda o: one(o, Scatter("v", "add", rows(-1), np.ones(1, np.float32))),
        lambda o: one(o, Scatter("v", "add", rows(0), np.ones(2, np.float32))),
        lambda o: one(o, Scatter("v", "add", np.zeros(1), np.ones(1, np.float32))),
        lambda o: one(o, Scatter("v", "add", rows(0), np.ones(1))),
        lambda o: one(o, Scatter("scalar", "add", rows(0), np.ones(1))),
        lambda o: one(o, Scatter("counts", "div", rows(0), np.ones(1, np.int64))),
        lambda o: one(o, Apply(("v", "v"), (GRADIENT, GRADIENT), ((), ()), "n", "sgd", 0.1)),
        lambda o: one(o, Apply(("v",), (), ((),), "n", "sgd", 0.1)),
        lambda o: one(o, Apply(("v",), (GRADIENT,), (), "n", "sgd", 0.1)),
        lambda o: one(o, Apply(("v",), (GRADIENT,), ((),), "none", "sgd", 0.1)),
        lambda o: one(o, Apply(("v",), (GRADIENT,), ((),), "counts", "sgd", 0.1)),
        lambda o: one(o, apply("nothing", "v", GRADIENT)),
        lambda o: one(o, apply("sgd", "v", GRADIENT, beta_1=0.5)),
        lambda o: one(o, apply("adam", "v", GRADIENT, slots=("m", "s"), beta_1=1.5)),
        lambda o: one(o, apply("adam", "v", GRADIENT, slots=("m",))),
        lambda o: one(o, apply("adam", "v", GRADIENT, slots=("m", "m"))),
        lambda o: one(o, apply("adam", "v", GRADIENT, slots=("m", "v"))),
        lambda o: one(o, apply("adam", "v", GRADIENT, slots=("m", "none"))),
        lambda o: one(o, apply("adam", "v", GRADIENT, slots=("m", "wide"))),
        lambda o: one(o, apply("sgd", "v", Dense(VECTOR[:1]))),
        lambda o: one(o, apply("sgd", "counts", Dense(np.zeros(2)))),
        lambda o: one(o, apply("sgd", "v", Dense(np.zeros(2, complex)))),
        lambda o: one(o, apply("sgd", "v", Rows(rows(9), VECTOR[:1]))),
        lambda o: one(o, apply("sgd", "v", GRADIENT), apply("sgd", "none", GRADIENT)),
        lambda o: one(o, Aggregate("g", 0, 0, apply("sgd", "v", GRADIENT))),
        lambda o: one(o, Aggregate("g", -1, 1, apply("sgd", "v", GRADIENT))),
        lambda o: one(o, Aggregate("g", 0, 1, apply("sgd", "none", GRADIENT))),
        lambda o: one(o, IncrementStep(1 << 40)),
    ],
)
def test_what_does_not_fit_changes_nothing(calls, origin, change):
    calls.create(v=VECTOR, m=VECTOR, s=VECTOR, wide=np.zeros(2), n=np.array(0))
    calls.create(flags=np.zeros(2, bool), scalar=np.zeros(()), counts=np.zeros(2, np.int64))
    before = content(calls.store)[1]
    reply = calls.ask("a", change(next(origin)))
    assert isinstance(reply, Failure)
    assert reply.kind in ("mismatch", "unknown")
    assert content(calls.store)[1] == before


def test_a_variable_that_is_not_there_is_named(calls, origin):
    for request in (Read("v"), one(next(origin), Add("v", np.zeros(2)))):
        reply = calls.ask("a", request)
        assert reply.kind == "unknown"
        assert "'v'" in reply.message


def test_the_global_step_rises(calls, origin):
    assert calls.ask("a", one(next(origin), IncrementStep())).value == 1
    assert calls.ask("a", one(next(origin), IncrementStep(5))).value == 6
    assert calls.ask("b", ReadStep()).value == 6


def test_a_batch_is_answered_in_order_each_for_itself(calls, origin):
    batch = Batch(
        (
            Create("v", np.zeros(2)),
            Read("none"),
            one(next(origin), Add("v", np.ones(2))),
            Read("v"),
        )
    )
    kinds = [type(reply) for reply in calls.ask("a", batch).replies]
    assert kinds == [Created, Failure, Changed, Value]
    assert calls.value("v").tolist() == [1, 1]


OPTIMIZERS = [
    lambda: nd.optimizers.SGD(0.3),
    lambda: nd.optimizers.SGD(0.3, momentum=0.9),
    lambda: nd.optimizers.SGD(0.3, momentum=0.9, nesterov=True),
    lambda: nd.optimizers.Adagrad(0.3),
    lambda: nd.optimizers.Adam(0.3),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_on_the_server_gives_the_bits_of_one_here(calls, origin, make, sparse, dtype):
    rng = np.random.default_rng(3)
    start = rng.standard_normal((30, 1500)).astype(dtype)
    optimizer, variable = make(), nd.Variable(start)
    name, hyperparameters = hyperparameters_of(optimizer.rule)
    rule = optimizer.rule
    slots = {
        f"v/{slot}": np.full(start.shape, rule.initial_slot(slot), dtype)
        for slot in rule.slot_names
    }
    calls.create(v=start, n=np.array(0), **slots)
    for _ in range(4):
        if sparse:
            indices = rng.integers(0, 30, 12)
            values = rng.standard_normal((12, 1500)).astype(dtype)
            here, there = nd.IndexedSlices(values, indices, start.shape), Rows(indices, values)
        else:
            here = rng.standard_normal(start.shape).astype(dtype)
            there = Dense(here)
        optimizer.apply_gradients([(here, variable)])
        step = apply(name, "v", there, 0.3, tuple(slots), **hyperparameters)
        assert isinstance(calls.ask("a", one(next(origin), step)), Done)
    assert calls.value("n") == 4
    assert calls.value("v").tobytes() == variable.numpy().tobytes()


def test_two_optimizers_may_share_a_counter_and_a_variable(calls, origin):
    calls.create(v=np.zeros(2), m=np.zeros(2), n=np.array(0))
    gradient = Dense(np.ones(2))
    calls.ask("a", one(next(origin), apply("sgd", "v", gradient, 1.0)))
    step = apply("sgd", "v", gradient, 1.0, ("m",), momentum=0.5)
    assert calls.ask("a", one(next(origin), step, step)) is not None
    assert calls.value("v").tolist() == [-3.5, -3.5]
    assert calls.value("n") == 3


def test_a_counter_of_any_value_is_taken(calls, origin):
    calls.create(v=np.zeros(2), m=np.zeros(2), s=np.zeros(2), n=np.array(-1))
    step = apply("adam", "v", Dense(np.ones(2)), 0.1, ("m", "s"))
    assert calls.ask("a", one(next(origin), step)) == Done((2,))
    assert calls.value("n") == 0


@pytest.mark.parametrize("indices", [[], [2], [3, 0, 3], [1, 1]])
def test_rows_are_read_in_the_order_asked(calls, indices):
    values = np.arange(8.0).reshape(4, 2)
    calls.create(v=values)
    reply = calls.ask("a", ReadRows("v", rows(*indices)))
    assert reply.version == 1
    assert reply.array.tolist() == values[indices].tolist()


@pytest.mark.parametrize(
    ("name", "indices"),
    [("v", rows(4)), ("v", rows(-1)), ("v", np.zeros(1)), ("v", rows(1)[None]), ("w", rows(0))],
)
def test_rows_that_are_not_there_are_not_read(calls, name, indices):
    calls.create(v=np.zeros((4, 2)), w=np.zeros(()))
    reply = calls.ask("a", ReadRows(name, indices))
    assert reply.kind == "mismatch"
    assert name in reply.message


def test_a_store_alone_has_no_shared_memory_and_writes_no_snapshots(calls):
    calls.create(v=np.zeros(2))
    assert calls.ask("a", Locate(("v",))).kind == "unknown"
    assert calls.ask("a", SaveSnapshot()).kind == "unknown"


def test_numbers_that_overflow_warn_nobody(calls, origin):
    calls.ask("a", Create("v", np.full(2, 3e38, np.float32)))
    with np.errstate(all="raise"):
        calls.ask("a", one(next(origin), Add("v", np.full(2, 3e38, np.float32))))
    assert np.isinf(calls.value("v")).all()
