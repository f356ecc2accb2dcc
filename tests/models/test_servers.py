"""`fit` with a chief that schedules steps, on workers and servers that are processes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, callbacks, layers, losses
from tests.kinds import DEADLINE
from tests.processes import Tasks

pytest.importorskip("cloudpickle")

RNG = np.random.default_rng(0)
CENTERS = 3 * RNG.normal(size=(3, 6))
Y = RNG.integers(0, 3, 120)
X = CENTERS[Y] + RNG.normal(size=(120, 6))


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    with Tasks(workers=2, servers=1) as tasks:
        for name, value in tasks.environ.items():
            monkeypatch.setenv(name, value)
        tasks.start_all()
        yield tasks


def test_a_chief_fits_on_its_workers_and_evaluates(tasks):
    with nd.ParameterServerStrategy(
        tasks.resolver("chief"), devices=["cpu:0"], timeout_seconds=DEADLINE
    ):
        nd.set_seed(1)
        normalization = layers.BatchNormalization(momentum=0.9)
        model = Sequential([normalization, layers.Dense(8, activation="relu"), layers.Dense(3)])
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(nd.optimizers.Adam(0.05), loss, metrics=["accuracy"])
        falling = callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        history = model.fit(X, Y, 12, 5, 0, validation_data=(X, Y), callbacks=[falling]).history
        assert model.optimizer.iterations == 50
        assert len(model.optimizer.slots) == 6  # So a checkpoint of the chief has them.
        assert history["val_accuracy"][-1] > 0.95
        assert history["loss"][-1] < 0.5 * history["loss"][0]
        assert np.mean(model.predict(X).argmax(axis=-1) == Y) == history["val_accuracy"][-1]
        moving = normalization.moving_mean.numpy()
        np.testing.assert_allclose(moving, X.mean(axis=0), atol=1.0)
        model.compile(nd.optimizers.GradientAccumulation(nd.optimizers.SGD(), 2), loss)
        with pytest.raises(ValueError, match="would mix their sums"):
            model.fit(X, Y, verbose=0)
