"""Creating variables: what they start as, what they say of themselves, what is refused."""

import threading

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    closing,
    context,
    host_memory,
    mirrored,
    one_process,
    parts,
    plain_step,
    raised_in,
    rank,
    wait_until_in,
)


def make(strategy, *args, **kwargs):
    with strategy.scope():
        return nd.Variable(*args, **kwargs)


def test_a_variable_has_the_properties_that_it_was_created_with(strategy):
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
        ([1, 2], None, "int64"),
        (np.zeros(2, "f2"), None, "float16"),
        (True, None, "bool"),
        (1 + 2j, None, "complex128"),
        ([1, 2], np.float32, "float32"),
        (3, np.uint8, "uint8"),
    ):
        v = nd.Variable(initial, dtype=dtype)
        assert v.dtype == v.numpy().dtype == wanted
        assert np.array_equal(v.numpy(), np.asarray(initial))


@host_memory("it computes with what lies on another GPU than the current one")
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

    for _ in range(2):
        strategy.run(change)
        assert floats.numpy().dtype.str == "<f4"
        assert floats.numpy().tolist() == [0, 1, 2, 3]
    change()
    assert floats.numpy().tolist() == [0, 1, 2, 3]
    assert floats[rows].tolist() == [1, 3]


def test_what_would_lose_something_and_what_is_no_number_are_refused(several):
    for initial, dtype in ((1.5, "int32"), ([1 + 1j], "float64"), (300, "uint8"), (-1, "uint32")):
        with pytest.raises(ValueError, match="lose"):
            nd.Variable(initial, dtype=dtype)
    for wrong in ("text", None, object(), np.array(["a"])):
        with pytest.raises(ValueError, match="holds numbers"):
            nd.Variable(wrong)
    with pytest.raises(ValueError, match="PerReplica"):
        make(several, parts(several, float))


@host_memory("it compares components with arrays")
def test_a_callable_is_called_once_and_the_initial_value_is_copied(strategy):
    initial, calls = np.arange(6.0).reshape(2, 3).T, []
    variables = [
        make(strategy, initial),
        make(strategy, lambda: calls.append(1) or initial),
        make(strategy, initial, synchronization="on_read", aggregation="mean"),
        make(strategy, nd.Variable(initial)),
    ]
    assert calls == [1]
    initial += 1
    for v in variables:
        assert np.array_equal(v, initial - 1)
        v.assign(np.zeros((3, 2)))
    w = make(strategy, variables[0])
    variables[0].assign(initial)
    assert not np.any(w)
    assert np.array_equal(initial.T, np.arange(6.0).reshape(2, 3) + 1)


def test_a_policy_by_member_or_name():
    for kind, argument in (
        (nd.VariableSynchronization, "synchronization"),
        (nd.VariableAggregation, "aggregation"),
    ):
        for member in kind:
            if (argument, member.name) != ("synchronization", "NONE"):
                wanted = kind["ON_WRITE"] if member.name == "AUTO" else member
                for given in (member, member.name, member.name.lower()):
                    assert getattr(nd.Variable(1.0, **{argument: given}), argument) is wanted


def test_an_unknown_policy_no_synchronization_or_a_mean_of_integers_is_refused(strategy):
    for policy, says in (
        ({"synchronization": "none"}, "synchronization"),
        ({"synchronization": nd.VariableSynchronization.NONE}, "synchronization"),
        ({"synchronization": 3}, "synchronization"),
        ({"aggregation": "median"}, "aggregation"),
        ({"aggregation": "mean", "dtype": "int32"}, "MEAN"),
        ({"aggregation": "mean", "dtype": "bool", "synchronization": "on_read"}, "MEAN"),
    ):
        with pytest.raises(ValueError, match=says):
            make(strategy, True, **policy)
        with raised_in(strategy, None, ValueError, says):
            strategy.run(nd.Variable, (True,), policy)


@plain_step("a program makes its variables while it is traced, by values that are known then")
def test_in_run_all_replicas_get_one_variable_matched_by_order(strategy):
    calls = []

    def initial():
        calls.append(1)
        return np.zeros(2)

    def step():
        first = nd.Variable(initial, name="first", aggregation="sum")
        second = nd.Variable(rank() + 5.0, name="second", synchronization="on_read")
        third = context().merge_call(lambda _: nd.Variable(3.0))
        return {"second": second, "first": first, "third": third}

    made = strategy.run(step)
    assert calls == [1]
    assert (made["first"].name, made["second"].name) == ("first", "second")
    strategy.run(lambda: made["first"].assign_add(np.ones(2)))
    assert made["first"].numpy().tolist() == [strategy.num_replicas_in_sync] * 2
    assert {float(part) for part in strategy.local_results(made["second"])} == {5.0}
    assert float(made["third"]) == 3
    assert strategy.run(step)["first"] is not made["first"]


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
        drawn = strategy.run(lambda: [context().rng.random()])[0].values
        assert made.numpy().tolist() == [0, drawn[0]]


@one_process("a variable is one for the replicas of a process")
@plain_step("one trace stands for all replicas")
def test_in_run_replicas_must_agree(several):
    for make_one in (
        lambda odd: nd.Variable(np.zeros(3 if odd else 2)),
        lambda odd: nd.Variable(np.zeros(2), dtype="f4" if odd else None),
        lambda odd: nd.Variable(0.0, aggregation="sum" if odd else "mean"),
        lambda odd: nd.Variable(0.0, synchronization="on_read" if odd else "auto"),
        lambda odd: [nd.Variable(0.0) for _ in range(2 + odd)],
    ):
        with pytest.raises(ValueError, match="replica"):
            several.run(lambda make_one=make_one: make_one(rank() == 1))
        assert float(several.run(lambda: nd.Variable(1.0))) == 1
