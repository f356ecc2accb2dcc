"""Gradients of weights are computed where the other workers of the host read them."""

from typing import Any

import numpy as np

import ndistribute as nd
from tests.processes import Ranks

SHAPE = (96, 256)  # Larger than what is copied because that is as fast.
STEPS = 4


def batch(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=(32, SHAPE[0])).astype(np.float32)


def loss_of(weights: Any, bias: Any, x: Any) -> Any:
    return np.sum(np.tanh(x @ weights + bias))


def train(rank: int, size: int) -> dict[str, Any]:
    """Train, and keep the gradients of all steps beside copies of them."""
    with nd.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            weights = nd.Variable(np.full(SHAPE, 0.01, np.float32))
            bias = nd.Variable(np.zeros(SHAPE[1], np.float32))
            optimizer = nd.optimizers.SGD(0.001)

        def step(x: Any) -> Any:
            with nd.GradientTape() as tape:
                loss = loss_of(weights, bias, x)
            gradients = tape.gradient(loss, [weights, bias])
            copies = [gradient.copy() for gradient in gradients]
            optimizer.apply_gradients(zip(gradients, [weights, bias], strict=True))
            return gradients, copies

        pairs = [
            strategy.local_results(strategy.run(step, (batch(rank),)))[0] for _ in range(STEPS)
        ]
        gradients = [gradients for gradients, _ in pairs]
        addresses = {one[0].ctypes.data for one in gradients}
        kept = all(
            np.array_equal(gradient, copy)
            for gradients, copies in pairs
            for gradient, copy in zip(gradients, copies, strict=True)
        )
        del pairs, gradients
        again = [strategy.local_results(strategy.run(step, (batch(rank),)))[0] for _ in range(1)]
        return {
            "kept": kept,
            "apart": len(addresses) == STEPS,
            "in shared memory": again[0][0][0].base is not None,
            "used again": again[0][0][0].ctypes.data in addresses,
            "weights": weights.numpy().tobytes(),
            "bias": bias.numpy().tobytes(),
        }


def test_gradients_in_shared_memory_are_the_users_own_and_train_alike() -> None:
    with Ranks(2) as ranks:
        first, second = [outcome.result() for outcome in ranks.run(train)]
    for seen in (first, second):
        assert seen["kept"]
        assert seen["apart"]
        assert seen["in shared memory"]
        assert seen["used again"]
    assert (first["weights"], first["bias"]) == (second["weights"], second["bias"])
