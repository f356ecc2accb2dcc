"""The promise of the package: N replicas compute what one replica computes.

k steps on N replicas with a global batch of B are compared with k steps of the plain step on the
whole batch, in float64, for every strategy and optimizer, with dense and sparse gradients and a
last batch that leaves some replicas with little or nothing. `test_over_processes.py` runs the same
with the replicas spread over processes.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    ALL_MEMORIES,
    COMPILED,
    COMPILED_2,
    LARGE,
    SEVERAL_MEMORIES,
    fixture_over,
    parts,
    rank,
)
from tests.strategies.on_servers import SHARDED

strategy = fixture_over({**ALL_MEMORIES, **SHARDED, **COMPILED_2})
several = fixture_over({**SEVERAL_MEMORIES, **COMPILED_2})
compiled = fixture_over(COMPILED, "tpu-2")

EXAMPLES, BATCH, FEATURES, WORDS, WIDTH, CLASSES, EPOCHS = 37, 8, 5, 11, 4, 3, 2

OPTIMIZERS: dict[str, Callable[[], nd.optimizers.Optimizer]] = {
    "sgd": lambda: nd.optimizers.SGD(0.1),
    "momentum": lambda: nd.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: nd.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: nd.optimizers.Adagrad(0.1),
    "adam": lambda: nd.optimizers.Adam(0.01),
    "adamw": lambda: nd.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: nd.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "accumulation": lambda: nd.optimizers.GradientAccumulation(nd.optimizers.Adam(0.01), 3),
    "clipnorm": lambda: nd.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: nd.optimizers.Adagrad(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: nd.optimizers.Adam(0.01, clipvalue=0.01),
    "schedule": lambda: nd.optimizers.SGD(lambda step: 0.2 / (1 + step)),
}


def data() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(5)
    return (
        rng.normal(size=(EXAMPLES, FEATURES)),
        rng.integers(0, WORDS, size=(EXAMPLES, 3)),
        rng.integers(0, CLASSES, size=EXAMPLES),
    )


class Model:
    """An embedding, whose gradient is sparse, beside a dense layer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.table = nd.Variable(rng.normal(size=(WORDS, WIDTH)))
        self.dense = nd.Variable(rng.normal(size=(FEATURES, WIDTH)))
        self.output = nd.Variable(rng.normal(size=(WIDTH, CLASSES)))
        self.bias = nd.Variable(np.zeros(CLASSES))

    @property
    def variables(self) -> list[nd.Variable]:
        return [self.table, self.dense, self.output, self.bias]

    def loss(self, features: Any, words: Any, labels: Any) -> Any:
        hidden = np.tanh(features @ self.dense + np.sum(self.table[words], axis=1))
        logits = hidden @ self.output + self.bias
        likelihood = logits[np.arange(len(labels)), labels]
        return np.sum(np.log(np.sum(np.exp(logits), axis=1)) - likelihood) / BATCH


def train(
    strategy: nd.Strategy, optimizer: nd.optimizers.Optimizer, drop_remainder: bool = False
) -> tuple[Any, Any]:
    """Return the losses of all steps and the variables and slots after the last."""
    with strategy.scope():
        model = Model()

    def step(batch: Any) -> Any:
        with nd.GradientTape() as tape:
            loss = model.loss(*batch)
        gradients = tape.gradient(loss, model.variables)
        assert isinstance(gradients[0], nd.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        context = nd.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", loss)

    examples = nd.Dataset.from_tensor_slices(data()).shuffle(EXAMPLES, seed=3)
    batches = strategy.distribute_dataset(examples.batch(BATCH, drop_remainder=drop_remainder))
    losses = []
    for _ in range(EPOCHS):
        for batch in batches:
            seen = strategy.local_results(strategy.run(step, args=(batch,)))
            assert all(value == seen[0] for value in seen), "replicas hold different bits"
            losses.append(seen[0])
    return np.array(losses), [v.numpy() for v in [*model.variables, *optimizer.variables]]


def bits(strategy: nd.Strategy, values: list[Any]) -> list[int]:
    """Return a digest of values as each replica holds them."""
    digest = zlib.crc32(b"".join(np.asarray(value).tobytes() for value in values))
    own = parts(strategy, lambda _: np.array([digest], np.int64))
    return [int(one) for one in strategy.gather(own, axis=0)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_n_replicas_equal_steps_on_one(name: str, strategy: nd.Strategy) -> None:
    even = isinstance(strategy, nd.TPUStrategy)  # Its replicas have parts of one shape.
    expected_losses, expected = train(nd.get_strategy(), OPTIMIZERS[name](), even)
    assert len(expected_losses) == EPOCHS * (4 if even else 5)
    losses, values = train(strategy, OPTIMIZERS[name](), even)
    assert len(set(bits(strategy, [losses, *values]))) == 1, "replicas hold different bits"
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12, atol=1e-12)
    for value, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


def test_steps_on_other_numbers_of_compiled_replicas_equal_steps_on_one(
    compiled: nd.Strategy,
) -> None:
    test_steps_on_n_replicas_equal_steps_on_one("adam", compiled)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_two_runs_hold_the_same_bits(name: str, several: nd.Strategy) -> None:
    even = isinstance(several, nd.TPUStrategy)
    runs = [train(several, OPTIMIZERS[name](), even) for _ in range(2)]
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    for first, second in zip(runs[0][1], runs[1][1], strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_large_variables_are_updated_as_by_one_replica(name: str, strategy: nd.Strategy) -> None:
    def after_steps(
        where: nd.Strategy, gradient: Callable[[], Any], optimizer: nd.optimizers.Optimizer
    ) -> list[Any]:
        with where.scope():
            variables = [nd.Variable(np.ones(size)) for size in (3, LARGE, 5)]

        def step() -> None:
            gradients = [np.linspace(-1, 1, v.size) * gradient() for v in variables]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        for _ in range(3):
            where.run(step)
        return [v.numpy() for v in [*variables, *optimizer.variables]]

    replicas = strategy.num_replicas_in_sync
    whole = replicas * (replicas + 1) / 2
    expected = after_steps(nd.get_strategy(), lambda: whole, OPTIMIZERS[name]())
    values = after_steps(strategy, lambda: rank() + 1.0, OPTIMIZERS[name]())
    assert len(set(bits(strategy, values))) == 1
    for value, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


def test_training_moves_every_variable_and_lowers_the_loss() -> None:
    losses, values = train(nd.get_strategy(), OPTIMIZERS["adam"]())
    start = Model()
    assert losses[-1] < losses[0]
    for variable, value in zip(start.variables, values, strict=False):
        assert not np.array_equal(variable.numpy(), value)


def test_one_device_gives_the_bits_of_the_plain_step() -> None:
    plain = train(nd.get_strategy(), OPTIMIZERS["adam"]())
    with nd.OneDeviceStrategy("cpu:0") as strategy:
        one = train(strategy, OPTIMIZERS["adam"]())
    np.testing.assert_array_equal(plain[0], one[0])
