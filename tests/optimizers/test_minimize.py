"""`minimize` is `apply_gradients` of the tape's gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ndistribute as nd

RNG_SEED = 11
STEPS = 4


def train(strategy: Any, how: str, optimizer: Any, x: Any) -> list[Any]:
    with strategy.scope():
        rng = np.random.default_rng(RNG_SEED)
        hidden = nd.Variable(rng.normal(size=(6, 300)))
        output = nd.Variable(rng.normal(size=(300, 2)))

    def step(rows: Any) -> Any:
        with nd.GradientTape() as tape:
            loss = np.sum((np.tanh(rows @ hidden) @ output) ** 2) / 8
        if how == "minimize":
            optimizer.minimize(loss, [hidden, output], tape)
        else:
            gradients = tape.gradient(loss, [hidden, output])
            optimizer.apply_gradients(zip(gradients, [hidden, output], strict=True))
        return loss

    for _ in range(STEPS):
        strategy.run(step, args=(x,))
    return [hidden.numpy(), output.numpy()]


def batch() -> Any:
    return np.random.default_rng(3).normal(size=(8, 6))


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_equals_apply_gradients_on_one_process(replicas: int) -> None:
    results = []
    for how in ("minimize", "apply"):
        with nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
            x = nd.PerReplica(np.split(batch(), replicas))
            results.append(train(strategy, how, nd.optimizers.SGD(0.1, momentum=0.9), x))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
