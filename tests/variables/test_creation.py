"""Creating variables: what they start as, what they say of themselves, what is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    closing,
    context,
    mirrored,
    one_process,
    parts,
    raised_in,
    rank,
    wait_until_in,
)


def make(strategy, *args, **kwargs):
    with strategy.scope():
        return nd.Variable(*args, **kwargs)


def test_its_properties(strategy):
    assert (make(strategy, 1).trainable, make(strategy, 1).dtype) == (True, np.int64)
    v = make(strategy, np.zeros((2, 3), np.float32), False, "weights")
    assert (v.shape, v.dtype, v.name, v.trainable) == ((2, 3), np.float32, "weights", False)
    assert (v.ndim, v.size) == (2, 6)
    assert v.synchronization is nd.VariableSynchronization.ON_WRITE
    assert v.aggregation is nd.VariableAggregation.NONE
    assert "weights" in repr(v)
    for name in ("shape", "dtype", "name", "trainable", "synchronization", "aggregation", "value"):
        with pytest.raises(AttributeError):
            setattr(v, name, None)


def test_a_variable_without_a_name_gets_the_next_one_of_its_strategy():
    with closing(mirrored(2)) as strategy, closing(mirrored(2)) as other:
        made = [make(strategy, 1.0, name=name) for name in (None, None, "w", None)]
        made.append(strategy.run(lambda: nd.Variable(1.0, synchronization="on_read")))
        assert [v.name for v in made] == ["Variable", "Variable_1", "w", "Variable_2", "Variable_3"]
        assert make(other, 1.0).name == "Variable"
        assert made[1].create_slot("m").name == "Variable_1/m"


def test_the_dtype_is_the_initial_values_unless_it_is_named():
    for initial, dtype, wanted in (
        (1.5, None, "float64"),
        ([1, 2], None, "int64"),
        (np.zeros(2, "f2"), None, "float16"),
        (True, None, "bool"),
        (1 + 2j, None, "complex128"),
        ([1, 2], np.float32, "float32"),
        (np.zeros(2), "f4", "float32"),
        (3, np.uint8, "uint8"),
    ):
        v = nd.Variable(initial, dtype=dtype)
        assert v.dtype == v.numpy().dtype == wanted
        assert np.array_equal(v.numpy(), np.asarray(initial))


def test_swapped_bytes_become_the_machines_own(strategy):
    start = np.arange(4.0)
    floats = make(strategy, start.astype(">f4"), aggregation="mean")
    others = [
        make(strategy, [1, 2], dtype=">i2"),
        make(strategy, 1j, dtype=">c8", synchronization="on_read", aggregation="sum"),
    ]
    assert [v.dtype.str for v in (floats, *others)] == ["<f4", "<i2", "<c8"]
    assert others[0].assign_add(np.array([5, 6], ">i4")).numpy().tolist() == [6, 8]
    optimizer = nd.optimizers.SGD(1.0)
    rows, ones = np.array([1, 3], ">i8"), np.ones(2, ">f4")
    gradients = [np.ones(4, ">f4"), nd.IndexedSlices(ones, rows, (4,))]

    def change():
        floats.assign((start + 1).astype(">f4"))
        floats.scatter_add(rows, ones)
        for gradient in gradients:
            optimizer.apply_gradients([(gradient, floats)], skip_gradients_aggregation=True)
        return floats.numpy()

    strategy.run(change)
    assert floats.numpy().dtype.str == "<f4"
    assert floats.numpy().tolist() == [0, 1, 2, 3]
    strategy.run(change)
    change()
    assert floats.numpy().tolist() == [0, 1, 2, 3]
    assert floats[rows].tolist() == [1, 3]


def test_a_dtype_that_would_lose_something_and_what_is_no_number_are_refused():
    for initial, dtype in ((1.5, "int32"), ([1 + 1j], "float64"), (300, "uint8"), (-1, "uint32")):
        with pytest.raises(ValueError, match="lose"):
            nd.Variable(initial, dtype=dtype)
    for wrong in ("text", None, [None], object(), np.array(["a"])):
        with pytest.raises(ValueError, match="holds numbers"):
            nd.Variable(wrong)


def test_a_callable_is_called_once(strategy):
    calls = []
    v = make(strategy, lambda: calls.append(1) or np.arange(3.0))
    assert calls == [1]
    assert np.array_equal(v, [0, 1, 2])


def test_the_initial_value_is_copied(strategy):
    initial = np.zeros(3)
    variables = [
        make(strategy, initial),
        make(strategy, lambda: initial),
        make(strategy, initial, synchronization="on_read", aggregation="mean"),
    ]
    initial[:] = 1
    for v in variables:
        assert np.array_equal(v, [0, 0, 0])
        v.assign([2.0, 2.0, 2.0])
    assert np.array_equal(initial, [1, 1, 1])


def test_a_view_or_a_transposed_array_makes_a_whole_one(strategy):
    base = np.arange(6.0).reshape(2, 3)
    v = make(strategy, base.T)
    assert np.array_equal(v, base.T)
    assert np.array_equal(make(strategy, base[:, ::2]), base[:, ::2])


def test_a_variable_starts_another(strategy):
    v = make(strategy, [1.0, 2.0])
    w = make(strategy, v)
    v.assign([3.0, 3.0])
    assert np.array_equal(w, [1, 2])


def test_a_per_replica_is_no_initial_value(several):
    with pytest.raises(ValueError, match="PerReplica"):
        make(several, parts(several, float))


def test_a_policy_by_member_or_name():
    for name in ("AUTO", "ON_WRITE", "ON_READ"):
        member = nd.VariableSynchronization[name]
        wanted = nd.VariableSynchronization.ON_WRITE if name == "AUTO" else member
        for given in (member, name, name.lower()):
            assert nd.Variable(1.0, synchronization=given).synchronization is wanted
    for name in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        member = nd.VariableAggregation[name]
        for given in (member, name.lower(), name):
            assert nd.Variable(1.0, aggregation=given).aggregation is member


MAKE = {
    "scope": lambda strategy, policy: make(strategy, 1.0, **policy),
    "run": lambda strategy, policy: strategy.run(nd.Variable, (1.0,), policy),
}


@pytest.mark.parametrize("where", MAKE)
def test_an_unknown_policy_or_no_synchronization_is_refused(strategy, where):
    for policy in (
        {"synchronization": "none"},
        {"synchronization": nd.VariableSynchronization.NONE},
        {"synchronization": "sometimes"},
        {"aggregation": "median"},
        {"synchronization": 3},
    ):
        with raised_in(strategy, None, ValueError, r"synchronization|aggregation"):
            MAKE[where](strategy, policy)


def test_a_mean_of_integers_is_refused(strategy):
    for how in ("on_write", "on_read"):
        for dtype in ("int32", "bool"):
            with pytest.raises(ValueError, match="MEAN"):
                make(strategy, np.zeros(2, dtype), synchronization=how, aggregation="mean")


def test_outside_a_scope_it_belongs_to_the_default_strategy():
    v = nd.Variable(1.0)
    assert nd.get_strategy().local_results(v) == (1.0,)
    v.assign_add(1.0)  # One replica: there is nobody to disagree with.
    assert float(v) == 2


def test_in_run_all_replicas_get_one_variable(strategy):
    calls = []

    def initial():
        calls.append(1)
        return np.zeros(2)

    made = strategy.run(lambda: nd.Variable(initial, aggregation="sum"))
    assert isinstance(made, nd.Variable)
    assert calls == [1]
    strategy.run(lambda: made.assign_add(np.ones(2)))
    assert np.array_equal(made, [strategy.num_replicas_in_sync] * 2)


def test_in_run_variables_are_matched_by_their_order(strategy):
    def step():
        first = nd.Variable(1.0, name="first")
        second = nd.Variable([2.0], name="second", synchronization="on_read")
        return {"second": second, "first": first}

    made = strategy.run(step)
    assert (made["first"].name, made["second"].name) == ("first", "second")
    again = strategy.run(step)
    assert again["first"] is not made["first"]


def test_in_run_the_first_replica_decides_the_value(strategy):
    made = strategy.run(lambda: nd.Variable(rank() + 5.0))
    assert float(made) == 5


@pytest.mark.parametrize("late", range(3))
def test_in_run_the_first_replica_draws_the_value_whoever_comes_last(late):
    def step(idents=()):
        if rank() == late:
            wait_until_in("_wait", set(idents) - {idents[late]})
        return nd.Variable(lambda: [rank(), context().rng.random()])

    with mirrored(3) as strategy:
        nd.set_seed(3)
        made = strategy.run(step, kwargs={"idents": strategy.run(threading.get_ident).values})
        nd.set_seed(3)
        assert made.numpy().tolist() == [0, strategy.run(_draw).values[0]]


def _draw():
    return context().rng.random()


@one_process("a variable is one for the replicas of a process")
def test_in_run_replicas_must_agree(several):
    for make_one in (
        lambda odd: nd.Variable(np.zeros(3 if odd else 2)),
        lambda odd: nd.Variable(np.zeros(2, "f4" if odd else "f8")),
        lambda odd: nd.Variable(np.zeros(2), dtype="f4" if odd else None),
        lambda odd: nd.Variable(0.0, aggregation="sum" if odd else "mean"),
        lambda odd: nd.Variable(0.0, synchronization="on_read" if odd else "auto"),
        lambda odd: [nd.Variable(0.0) for _ in range(2 + odd)],
        lambda odd: None if odd else nd.Variable(0.0),
    ):
        with pytest.raises(ValueError, match="replica"):
            several.run(lambda make_one=make_one: make_one(rank() == 1))
        assert float(several.run(lambda: nd.Variable(1.0))) == 1


def test_in_run_spellings_of_one_policy_agree(several):
    names = ["sum", "SUM", nd.VariableAggregation.SUM, "Sum"]
    made = several.run(lambda: nd.Variable(0.0, aggregation=names[rank()]))
    assert made.aggregation is nd.VariableAggregation.SUM


def test_in_a_merge_call_one_variable_is_made(strategy):
    made = strategy.run(lambda: context().merge_call(lambda _: nd.Variable(3.0)))
    assert isinstance(made, nd.Variable)
    with strategy.scope():
        assert float(made) == 3
