"""`minimize` is `apply_gradients` of the tape's gradients, also where they travel early."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.processes import Ranks

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


def over_a_ring(rank: int, size: int, how: str, clipped: bool) -> tuple[list[Any], bool]:
    """Train with small buckets, so that several travel, and say whether any travelled early."""
    options = nd.CommunicationOptions(
        bytes_per_pack=2048, timeout_seconds=30, implementation="ring"
    )
    optimizer = nd.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5 if clipped else None)
    with nd.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        x = nd.PerReplica([np.split(batch(), size)[rank]])
        values = train(strategy, how, optimizer, x)
        # The courier's thread starts with the first bucket that it is given.
        early = any(t.name.startswith("ndistribute-courier") for t in threading.enumerate())
    return values, early


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_travel_early_give_the_same_result(clipped: bool) -> None:
    with Ranks(2) as ranks:
        plain = [outcome.result() for outcome in ranks.run(over_a_ring, "apply", clipped)]
        early = [outcome.result() for outcome in ranks.run(over_a_ring, "minimize", clipped)]
    assert [travelled for _, travelled in early] == [not clipped] * 2
    for (wanted, _), (got, _) in zip(plain, early, strict=True):
        for one, other in zip(wanted, got, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(early[0][0], early[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
