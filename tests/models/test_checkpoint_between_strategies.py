"""The whole state of a training moves from any strategy to any other, sharded or not.

What each saves, before the first step and in the middle of an epoch, each of the others loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, layers, losses, metrics
from tests.contract_rows import central, mirrored, served
from tests.kinds import closing, context
from tests.strategies.on_servers import holders, worker_of

BATCH, STEPS = 5, 3
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 7, (23, 4)), RNG.integers(0, 3, 23)


def sharded(servers: int, shards: int, replicas: int) -> Any:
    """Return a strategy whose variables are in shards on several servers."""
    with holders(servers) as held:
        partitioner = nd.partitioners.FixedShardsPartitioner(shards)
        return worker_of(held, replicas=replicas, variable_partitioner=partitioner)


KINDS: dict[str, Callable[[], Any]] = {
    "none": nd.get_strategy,
    "mirrored-3": lambda: mirrored(3),
    "central-2": lambda: central(2),
    "served-2": lambda: served(2),
    "sharded-3": lambda: sharded(servers=2, shards=3, replicas=1),
    "sharded-5": lambda: sharded(servers=3, shards=5, replicas=2),
}


@dataclasses.dataclass
class Training:
    """A model, its input and a metric, and the step that a user writes."""

    strategy: Any
    model: Sequential
    batches: Any
    seen: metrics.Mean

    @property
    def checkpoint(self) -> nd.Checkpoint:
        return nd.Checkpoint(model=self.model, batches=self.batches, seen=self.seen)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.strategy.run(self._step, args=(next(self.batches),))

    def _step(self, batch: Any) -> None:
        x, y = batch
        with nd.GradientTape() as tape:
            predicted = self.model(x, training=True)
            loss = self.model.loss(y, predicted)
        trained = self.model.trainable_variables
        gradients = tape.gradient(loss, trained)
        self.model.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        self.seen.update_state(self.model.loss.call(y, predicted))

    def draws(self) -> list[float]:
        """Return the next random number of each replica."""

        def draw() -> Any:
            return context().rng.random()

        own = self.strategy.run(draw)
        return [float(one) for one in self.strategy.local_results(own)]

    def state(self) -> list[Any]:
        """Return all values: weights, step count and slots, metrics, the labels of a next batch."""
        optimizer = self.model.optimizer
        slots = [one.numpy() for one in optimizer.variables]
        parts = self.strategy.local_results(next(self.batches)[1])
        return [*self.model.get_weights(), *slots, self.seen.result(), np.concatenate(parts)]


@contextlib.contextmanager
def training(kind: str, seed: int) -> Iterator[Training]:
    """Return a training at its first step."""
    nd.set_seed(seed)
    with closing(KINDS[kind]()) as strategy, strategy.scope():
        model = Sequential(
            [
                layers.Embedding(7, 6, dtype="float64"),
                layers.Flatten(dtype="float64"),
                layers.BatchNormalization(synchronized=True, dtype="float64"),
                layers.Dense(3, dtype="float64"),
            ]
        )
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(nd.optimizers.Adam(0.05), loss, metrics=["accuracy"])
        model.build_for(X[:1])
        model.optimizer.build(model.trainable_variables)
        dataset = nd.Dataset.from_tensor_slices((X, Y)).shuffle(23, seed=3).batch(BATCH)
        batches = iter(strategy.distribute_dataset(dataset.repeat()))
        yield Training(strategy, model, batches, metrics.Mean())


@functools.cache
def expected(steps: int) -> list[Any]:
    """Return the state after some steps without an interruption or a strategy."""
    with training("none", seed=1) as alone:
        alone.run(steps)
        return alone.state()


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Save under a kind of strategy; return the paths by steps, and each replica's next draw."""
    folder: Path = tmp_path_factory.mktemp("saved")
    with training(request.param, seed=1) as source:
        paths = {0: source.checkpoint.save(folder / "new")}
        source.run(STEPS)
        source.draws()
        paths[STEPS] = source.checkpoint.save(folder / "begun")
        return paths, source.draws()


@pytest.mark.parametrize("kind", KINDS)
def test_what_any_strategy_saves_all_others_continue(saved, kind):
    paths, drawn = saved
    # Before the scope below, in which no strategy would be that of the scope.
    states = {steps: expected(steps + STEPS) for steps in paths}
    with training(kind, seed=2) as target:
        for steps, path in paths.items():
            target.run(1)  # What is restored replaces all of it.
            target.checkpoint.restore(path)
            assert target.model.optimizer.iterations == steps
            if steps:
                common = min(len(drawn), target.strategy.num_replicas_in_sync)
                assert target.draws()[:common] == drawn[:common]
            target.run(STEPS)
            for found, wanted in zip(target.state(), states[steps], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
