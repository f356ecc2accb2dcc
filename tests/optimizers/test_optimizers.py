"""Optimizers follow their formulas, sum and clip gradients, and refuse bad input."""

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.optimizers import SGD
from tests.kinds import host_memory
from tests.optimizers.formulas import FORMULAS, GRADIENTS, MAKERS, RNG, START, followed


@pytest.mark.parametrize("name", FORMULAS)
def test_steps_follow_the_formula_and_rows_update_like_the_dense_gradient(name: str) -> None:
    make, formula, slots = FORMULAS[name]
    optimizer, variable = make(), nd.Variable(START)
    for gradient in GRADIENTS:
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable.numpy(), followed(formula, *slots), rtol=1e-12)
    assert optimizer.iterations == len(GRADIENTS)
    results = []
    for sparse in (True, False):
        optimizer, variable = make(), nd.Variable(START)
        for indices in ([5, 0, 5, 2], [1, 1, 3, 4], [0, 1, 2, 3]):  # Velocities move other rows.
            rows = nd.IndexedSlices(GRADIENTS[0][:4].copy(), np.array(indices), START.shape)
            optimizer.apply_gradients([(rows if sparse else rows.to_dense(), variable)])
        results.append(variable.numpy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-12)


@pytest.mark.parametrize("name", ["nesterov", "adam"])
def test_float32_stays_float32_and_gradients_as_they_are(name: str) -> None:
    optimizer, variable = MAKERS[name](), nd.Variable(START.astype(np.float32))
    gradient = GRADIENTS[0].astype(np.float32)
    before = gradient.copy()
    optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(gradient, before)
    assert variable.dtype == np.float32
    assert all(slot.dtype == np.float32 for slot in optimizer.variables[1:])


def test_a_replica_sums_gradients_unless_told_that_they_are_summed() -> None:
    with nd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        with strategy.scope():
            variables = [nd.Variable(np.zeros(50_000)) for _ in range(2)]
        optimizers = [SGD(1.0), SGD(1.0)]

        def step() -> None:
            for skip, (variable, optimizer) in enumerate(zip(variables, optimizers, strict=True)):
                optimizer.apply_gradients(
                    [(np.ones(50_000), variable)], skip_gradients_aggregation=bool(skip)
                )

        strategy.run(step)
    assert set(variables[0].numpy()) == {-3.0}
    assert set(variables[1].numpy()) == {-1.0}


def test_clipping_bounds_each_gradient_all_together_or_each_element() -> None:
    rows = nd.IndexedSlices(np.array([2.0, 2.0]), np.array([0, 0]), (1,))
    for bound, wanted in (
        ({"clipnorm": 1.0}, [-1.0, -1.0]),
        ({"clipnorm": 3.5}, [-3.0, -3.5]),
        ({"global_clipnorm": 1.0}, [-0.6, -0.8]),
        ({"clipvalue": 3.5}, [-3.0, -3.5]),
    ):
        variables = [nd.Variable(np.zeros(1)) for _ in range(2)]
        pairs = zip([np.array([3.0]), rows], variables, strict=True)
        SGD(1.0, **bound).apply_gradients(pairs)
        np.testing.assert_allclose([v.numpy()[0] for v in variables], wanted)


@pytest.mark.parametrize("summed", [False, True])
def test_clipping_follows_the_sum_over_replicas(summed: bool) -> None:
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        variable, gradient = nd.Variable(np.zeros(2)), np.array([3.0, 4.0])
        optimizer = SGD(1.0, clipnorm=1.0)
        strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)], summed))
        np.testing.assert_allclose(variable.numpy(), [-0.6, -0.8])


def test_variables_without_gradient_are_reported_once(caplog: Any) -> None:
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        used, one, two = (nd.Variable(START, name=name) for name in ("used", "one", "two"))
        optimizer = SGD(0.1)
        for missing in ([one], [one, two], [two]):
            pairs = [(GRADIENTS[0], used), *((None, v) for v in missing)]
            for _ in range(2):
                strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    np.testing.assert_array_equal(two.numpy(), START)
    assert [record.getMessage() for record in caplog.records] == [
        "no gradient for one: a variable without a gradient does not change",
        "no gradient for two: a variable without a gradient does not change",
    ]


def test_a_clipping_bound_is_above_zero() -> None:
    with pytest.raises(ValueError, match="a clipping bound must be a number above 0, got 0"):
        SGD(0.1, clipnorm=0.0)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [([5], "got 1 boundary and 3 values"), ([5, 5], r"above the one before it, got \[5, 5\]")],
)
def test_boundaries_increase_and_values_are_one_more(boundaries: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nd.optimizers.schedules.PiecewiseConstantDecay(boundaries, [1.0, 0.5, 0.1])


@host_memory("it computes with arrays of the host")
def test_minimize_is_apply_gradients_of_the_tapes_gradients(strategy: nd.Strategy) -> None:
    rows = RNG.normal(size=(8, 6))
    with strategy.scope():
        pair, optimizers = [nd.Variable(START), nd.Variable(START)], [SGD(0.1), SGD(0.1)]

    def step() -> None:
        for optimizer, variable in zip(optimizers, pair, strict=True):
            with nd.GradientTape() as tape:
                loss = np.sum(np.tanh(rows @ variable) ** 2) / 8
            if variable is pair[0]:
                optimizer.minimize(loss, [variable], tape)
            else:
                optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    strategy.run(step)
    np.testing.assert_array_equal(pair[0].numpy(), pair[1].numpy())
    assert not np.array_equal(pair[0].numpy(), START)
