"""Every strategy trains a model on digits as one process does, by `fit` and by a loop of one's own.

Where the steps do not wait for each other, what is compared is the accuracy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, callbacks
from tests.digits_training import (
    BATCH,
    WAYS,
    digits,
    network,
    on_own_loop,
    on_worker,
    serve,
    train_by_schedule,
    weights,
)
from tests.kinds import ALL, DEADLINE, fixture_over, inside_worker
from tests.processes import Ranks, Tasks

pytest.importorskip("sklearn")

ONE = {} if inside_worker() else {"one-device": lambda: nd.OneDeviceStrategy("cpu:0")}
strategy = fixture_over({**ALL, **ONE})


@functools.cache
def expected() -> list[Any]:
    return weights(nd.get_strategy(), "fit")


def check(found: list[Any]) -> None:
    for ours, alone in zip(found, expected(), strict=True):
        np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_every_strategy_gives_the_weights_of_one_process(strategy: nd.Strategy, way: str) -> None:
    check(weights(strategy, way))


def test_the_training_that_is_compared_moves_every_weight() -> None:
    for trained, initial in zip(expected(), network().get_weights(), strict=True):
        assert np.max(np.abs(trained - initial)) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_workers_in_processes_give_the_weights_of_one_process(way: str) -> None:
    with Ranks(2) as ranks:
        for found in ranks.results(on_worker, way):
            check(found)


def accuracy(model: Sequential, count: int = 500) -> float:
    images, labels = digits(count)
    return float(np.mean(model.predict(images, 250).argmax(axis=-1) == labels))


@pytest.mark.parametrize("way", WAYS)
def test_workers_of_servers_that_do_not_wait_reach_the_accuracy(way: str) -> None:
    with Ranks(3, jobs=["ps", "worker", "worker"]) as ranks:
        ranks.run(serve, ranks=[0])[0].result()
        found = [outcome.result() for outcome in ranks.run(on_own_loop, way, ranks=[1, 2])]
    assert max(found) > 0.9  # The other one may have ended before.


@pytest.fixture
def chief(monkeypatch: pytest.MonkeyPatch) -> Iterator[nd.ParameterServerStrategy]:
    pytest.importorskip("cloudpickle")
    with Tasks(workers=2, servers=1) as tasks:
        for name, value in tasks.environ.items():
            monkeypatch.setenv(name, value)
        tasks.start_all()
        resolver = tasks.resolver("chief")
        with nd.ParameterServerStrategy(
            resolver, devices=["cpu:0"], timeout_seconds=DEADLINE
        ) as strategy:
            yield strategy


def test_a_loop_of_a_chief_reaches_the_accuracy(chief: nd.ParameterServerStrategy) -> None:
    model = network()
    train_by_schedule(chief, model, 500, 8)
    assert model.optimizer.iterations == 64
    assert accuracy(model) > 0.9


def test_a_chief_fits_on_its_workers_and_evaluates(chief: nd.ParameterServerStrategy) -> None:
    model, data = network(), digits(500)
    falling = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    options: dict[str, Any] = {"validation_data": data, "callbacks": [falling]}
    history = model.fit(*data, BATCH, 8, 0, **options).history
    assert model.optimizer.iterations == 64
    assert len(model.optimizer.slots) == 6  # So a checkpoint of the chief has them.
    assert history["val_accuracy"][-1] > 0.9
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert accuracy(model) == history["val_accuracy"][-1]
    moving = model.layers[1].moving_mean.numpy()
    normalized = model.layers[0](data[0])
    np.testing.assert_allclose(moving, normalized.mean(axis=(0, 1, 2)), atol=0.2)
    model.compile(nd.optimizers.GradientAccumulation(nd.optimizers.SGD(), 2), model.loss)
    with pytest.raises(ValueError, match="would mix their sums"):
        model.fit(*data, verbose=0)
