"""Variables outside replicas: writes reach every copy or none; whose scope may use them."""

import contextlib

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import context, cpus, each, raised_in

WRITES = {"assign": lambda old, x: x, "assign_add": np.add, "assign_sub": np.subtract}
WRONG_SHAPES = [1.0, [1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], np.zeros((0, 2))]
LOSSY = {
    "int64": [1.5, [0.5, 1.0], 1j],
    "float32": [1j, np.complex64([1, 1])],
    "bool": [1, [1, 0]],
    "uint8": [300, [-1, 1], np.array([256, 0]), 2**70, 0.5],
}


def make(strategy, *args, **kwargs):
    with strategy.scope():
        return nd.Variable(*args, **kwargs)


@pytest.mark.parametrize("method", WRITES)
def test_a_write_acts_on_every_copy_whatever_the_aggregation(strategy, method):
    old = np.array([1.0, 2.0])
    for aggregation in ("none", "sum", "mean", "only_first_replica"):
        for place in (strategy.scope(), contextlib.nullcontext()):
            v, x = make(strategy, old, aggregation=aggregation), np.array([10.0, 20.0])
            wanted = WRITES[method](old, x).copy()
            with place:
                assert getattr(v, method)(x) is v
            x[:] = 7  # The value was copied.
            for part in strategy.local_results(v):
                assert np.array_equal(part, wanted)


def test_a_value_may_be_a_list_a_number_or_a_variable(strategy):
    v, w = make(strategy, [1.0, 2.0]), make(strategy, 5.0)
    v.assign([3, 4])
    w.assign(2)
    v.assign_add(v)
    w.assign_add(w)
    assert v.numpy().tolist() == [6, 8]
    assert float(w) == 4


@pytest.mark.parametrize("how", ["on_write", "on_read"])
def test_what_does_not_fit_is_refused_and_no_copy_changes(strategy, how):
    v = make(strategy, [1.0, 2.0], synchronization=how, aggregation="mean")
    for method in WRITES:
        for kind in (nd.PerReplica, nd.Mirrored):
            with pytest.raises(ValueError, match=kind.__name__):
                getattr(v, method)(kind(each(strategy, np.ones(2))))
        for wrong in WRONG_SHAPES:
            with pytest.raises(ValueError, match="shape"):
                getattr(v, method)(wrong)
    assert all(np.array_equal(part, [1, 2]) for part in strategy.local_results(v))
    for dtype, wrong in ((dtype, wrong) for dtype, values in LOSSY.items() for wrong in values):
        initial = np.ones(np.shape(wrong), dtype)
        v = make(strategy, initial, synchronization=how, aggregation="only_first_replica")
        for method in WRITES:
            with pytest.raises(ValueError, match="lose"):
                getattr(v, method)(wrong)
        assert all(np.array_equal(part, initial) for part in strategy.local_results(v))


def test_what_loses_nothing_but_digits_is_cast():
    for dtype, value in (
        ("float32", np.float64(1.5)),
        ("float32", [1, 2]),
        ("complex64", 1.5),
        ("uint8", [1, 255]),
        ("int32", np.int64(7)),
        ("int64", True),
    ):
        v = nd.Variable(np.zeros(np.shape(value), dtype))
        v.assign(value)
        assert v.dtype == v.numpy().dtype == dtype
        assert np.array_equal(v.numpy(), np.asarray(value))


def test_a_variable_without_a_strategy_is_read_everywhere_and_written_outside_replicas(several):
    v = nd.Variable(1.0, aggregation="sum")
    with several.scope():
        assert float(v) == 1
        v.assign(2.0)
    assert several.run(lambda: v + 0).values == each(several, 2.0)
    with raised_in(several, None, RuntimeError, "scope"):
        several.run(lambda: v.assign_add(1.0))
    nd.get_replica_context().merge_call(lambda _: v.assign_add(1.0))
    nd.get_strategy().run(lambda: context().merge_call(lambda _: v.assign_add(1.0)))
    assert float(v) == 4


def test_the_parameter_device_is_chosen_or_the_first_cpu():
    with nd.CentralStorageStrategy(cpus(2), "cpu:1") as strategy:
        assert strategy.parameter_device == nd.Device("cpu:1")
        v = make(strategy, 1.0, aggregation="sum")
        strategy.run(lambda: v.assign_add(1.0))
        assert float(v) == 3
    for compute, home in ((["cpu:1"], "cpu:1"), (["cpu:1", "cpu:2"], "cpu:0")):
        with nd.CentralStorageStrategy(compute) as strategy:
            assert strategy.parameter_device == nd.Device(home)
