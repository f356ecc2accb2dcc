"""JAX's functions compute with variables, on replicas, in gradient tapes and in compiled steps."""

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import ALL_MEMORIES, COMPILED_2, fixture_over
from tests.processes import Ranks

jax = pytest.importorskip("jax")
interop = pytest.importorskip("ndistribute.interop.jax")

jnp = jax.numpy
RNG = np.random.default_rng(4)
X = RNG.normal(size=(12, 3)).astype(np.float32)
Y = X @ np.float32([1, -2, 1]) + 1
START = np.float32([0.5, -1, 2])

strategy = fixture_over({**ALL_MEMORIES, **COMPILED_2}, "mirrored-2", "central-3")


def error(weights: Any, x: Any, y: Any) -> Any:
    """Return this replica's share of the mean over the whole batch, by JAX."""
    return jnp.sum((x @ weights["w"] + weights["b"] - y) ** 2) / len(Y)


gradients_of = interop.value_and_grad(error)
taped = interop.differentiable(error)


def train(strategy: Any, in_tape: bool = False) -> Any:
    """Make some steps; return the losses and the weights."""
    with strategy.scope():
        weights = {"w": nd.Variable(START), "b": nd.Variable(np.float32(0.0))}
        optimizer = nd.optimizers.SGD(0.1, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        if in_tape:
            with nd.GradientTape() as tape:
                loss = taped(weights, x, y)
            gradients = tape.gradient(loss, weights)
        else:
            loss, gradients = gradients_of(weights, x, y)
        pairs = zip(nd.tree.flatten(gradients), nd.tree.flatten(weights), strict=True)
        optimizer.apply_gradients(pairs)
        return nd.stop_gradient(loss)

    data = nd.Dataset.from_tensor_slices((X, Y)).batch(len(Y)).repeat(5)
    batches = strategy.distribute_dataset(data)
    losses = [float(strategy.reduce("sum", strategy.run(step, args=batch))) for batch in batches]
    return losses, [weights["w"].numpy(), weights["b"].numpy()]


@pytest.mark.parametrize("in_tape", [False, True])
def test_a_function_of_jax_trains_alike_under_every_strategy(strategy, in_tape):
    expected = train(nd.get_strategy())
    assert expected[0][-1] < expected[0][0] / 2
    nd.tree.map_leaves(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, train(strategy, in_tape)
    )


def on_workers(rank, size):
    """Train together with the other workers."""
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        return [train(strategy), train(strategy, True)]


def test_workers_train_as_one_process_does():
    expected = train(nd.get_strategy())
    with Ranks(2) as workers:
        for result in [result for results in workers.results(on_workers) for result in results]:
            nd.tree.map_leaves(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, result
            )


def test_gradients_have_the_nests_of_the_arguments_asked_for():
    v = nd.Variable(START)

    def function(x: Any, weights: Any, scale: Any = 1.0) -> Any:
        return jnp.sum(weights[0]["v"] * x * weights[1]) * scale, {"x": x, "n": [jnp.int32(3)]}

    both = interop.value_and_grad(function, argnums=(0, 1), has_aux=True)
    (value, more), (of_x, of_weights) = both(X[0], ({"v": v}, 2.0), scale=3.0)
    np.testing.assert_allclose(value, 6 * np.sum(START * X[0]), rtol=1e-6)
    np.testing.assert_allclose(of_x, 6 * START, rtol=1e-6)
    np.testing.assert_allclose(of_weights[0]["v"], 6 * X[0], rtol=1e-6)
    np.testing.assert_array_equal(more["x"], X[0])
    assert more["n"] == [3]
    assert {type(x) for x in nd.tree.flatten((of_x, of_weights, more))} == {np.ndarray}


def test_a_tape_differentiates_what_is_in_nests_and_leaves_out_what_is_unused():
    v, w = nd.Variable(START), nd.Variable(START)

    def function(nest: Any, numbers: Any) -> Any:
        return {"sum": jnp.sum(nest["v"] * numbers[0]), "rest": (nest["w"] ** 2, numbers[1] + 1)}

    function = interop.differentiable(function)
    with nd.GradientTape(persistent=True) as tape:
        x = tape.watch(X[0])
        result = function({"v": v * 2, "w": w}, [x, 4])
        loss = result["sum"] * 3
    assert int(result["rest"][1]) == 5
    of_v, of_w, of_x = tape.gradient(loss, [v, w, x])
    np.testing.assert_allclose(of_v, 6 * X[0], rtol=1e-6)
    np.testing.assert_array_equal(of_w, np.zeros(3))
    np.testing.assert_allclose(of_x, 6 * START, rtol=1e-6)
    np.testing.assert_allclose(function({"v": v, "w": w}, [X[0], 4])["rest"][0], START**2)


def test_second_derivatives_are_refused_and_those_of_jax_work():
    slope = interop.differentiable(jax.grad(lambda x: x**3))
    with nd.GradientTape() as tape:
        x = tape.watch(np.float32(2.0))
        y = slope(x)
    assert tape.gradient(y, x) == 12
    with nd.GradientTape() as outer:
        x = outer.watch(np.float32(2.0))
        with nd.GradientTape() as tape:
            tape.watch(x)
            y = slope(x)
        gradient = tape.gradient(y, x)
    with pytest.raises(TypeError, match="only first derivatives"):
        outer.gradient(gradient, x)


def test_functions_of_jax_take_variables_and_read_them_at_each_call():
    v = nd.Variable(START)
    double = jax.jit(lambda nest: 2 * nest["v"])
    for _ in range(2):
        np.testing.assert_allclose(jnp.exp(v), np.exp(v), rtol=1e-6)
        np.testing.assert_allclose(jnp.stack([v, v])[1], v.numpy())
        np.testing.assert_allclose(double({"v": v}), 2 * v)
        np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(jnp.square(v) * x))(START), v**2)
        v.assign_add([1, 1, 1])
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(x * x))(v), 2 * v)


def test_what_would_lose_a_gradient_or_stay_as_it_is_raises():
    v = nd.Variable(START)
    for use in (jnp.sin, jnp.asarray, jax.jit(jnp.sin), interop.value_and_grad(jnp.sum)):
        with nd.GradientTape(), pytest.raises(TypeError, match="gradient would be lost"):
            use(v)
    with pytest.raises(TypeError, match=r"'Variable.*' is used in a function that JAX traces"):
        jax.jit(lambda x: jnp.sin(v) * x)(START)


def test_doubles_are_not_narrowed():
    v = nd.Variable(np.ones(3))
    for use in (jnp.sin, interop.value_and_grad(jnp.sum), interop.differentiable(jnp.sum)):
        with pytest.raises(TypeError, match="float64, which JAX would convert to float32"):
            use(v)
    with nd.GradientTape() as tape:
        x = tape.watch(2.0)
        with pytest.raises(TypeError, match="of float64, which JAX would convert to float32"):
            interop.differentiable(jnp.sin)(x)
    with jax.enable_x64(True):
        assert interop.value_and_grad(jnp.sum)(v)[1].dtype == np.float64
