"""A chief trains on its workers by `fit`, whose callbacks see each step once, and by a loop."""

import math
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import (
    Input,
    Model,
    PreemptionCheckpointHandler,
    Sequential,
    callbacks,
    layers,
)
from ndistribute.models.checkpoint import Checkpoint, read_newest
from ndistribute.models.checkpoint_manager import CheckpointManager
from tests.jobs.digits import digits, network
from tests.kinds import DEADLINE
from tests.models.test_progress import Terminal
from tests.models.test_resumption import Interrupt
from tests.processes import Tasks

STEPS, EPOCHS = 12, 2
X, Y = np.ones((STEPS, 3)), np.ones((STEPS, 1))


def accuracy(model: Sequential, count: int = 500) -> float:
    images, labels = digits(count)
    return float(np.mean(model.predict(images, 250).argmax(axis=-1) == labels))


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


def test_a_chief_fits_on_its_workers_and_evaluates(chief: nd.ParameterServerStrategy) -> None:
    model, data = network(), digits(500)
    falling = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    options: dict[str, Any] = {"validation_data": data, "callbacks": [falling]}
    history = model.fit(*data, 64, 8, 0, **options).history
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


def small() -> Model:
    """Return a compiled functional model that is quick to train."""
    x = Input((3,), dtype="float64")
    model = Model(x, layers.Dense(1, dtype="float64")(x))
    model.compile(nd.optimizers.Adam(0.01), "mse")
    return model


def fit(model: Model, *used: callbacks.Callback, y: Any = Y) -> Any:
    """Train for two epochs of twelve steps."""
    return model.fit(X, y, 1, EPOCHS, 0, callbacks=list(used))


def saved_steps(path: Any) -> tuple[int, int]:
    """Return the optimizer's steps, and those whose loss was counted, in a checkpoint."""
    _, tensors, _ = read_newest(path)
    return int(tensors["model/optimizer/iterations"]), int(tensors["model/metrics/0/state"][1])


def test_callbacks_of_a_chief_see_every_step_and_save_its_very_state(chief, tmp_path):
    begun, ended, losses = [], [], []

    def end(batch: int, logs: Any) -> None:
        ended.append(batch)
        losses.append(logs["loss"])

    with chief.scope():
        model = small()
    keep = callbacks.LambdaCallback(
        on_batch_begin=lambda batch, logs: begun.append(batch), on_train_batch_end=end
    )
    save = callbacks.ModelCheckpoint(tmp_path / "saved", save_freq=5)
    fit(model, keep, save)
    assert begun == ended == [*range(STEPS), *range(STEPS)]
    assert min(losses) > 0
    paths = sorted(tmp_path.iterdir())
    assert [saved_steps(path) for path in paths] == [(5, 5), (10, 10), (15, 3), (20, 8)]


class Doubling(Sequential):
    """A model whose step returns a metric, and a number."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {"mean": logs["loss"], "twice": 2.0}


def test_logs_of_a_chief_are_those_that_a_step_of_the_model_returns_on_workers(chief):
    with chief.scope():
        model = Doubling([layers.Dense(1, dtype="float64", input_shape=(3,))])
        model.compile(nd.optimizers.SGD(0.0), "mse")
    expected = float(np.mean((model(X) - Y) ** 2))
    history = fit(model).history
    assert history.keys() == {"mean", "twice"}
    assert history["twice"] == [2.0] * EPOCHS
    np.testing.assert_allclose(history["mean"], [expected] * EPOCHS)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_training_of_a_chief_continues_at_the_step_where_it_ended(chief, elsewhere, tmp_path):
    backup = callbacks.BackupAndRestore(tmp_path, save_freq=4)
    with chief.scope():
        model = small()
    with nd.get_strategy().scope() if elsewhere else chief.scope():
        again = small()
    with pytest.raises(KeyboardInterrupt):
        fit(model, backup, Interrupt(16))
    ended = []
    keep = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended.append(batch))
    assert fit(again, backup, keep).epoch == [1]
    assert ended == list(range(4, STEPS))
    assert again.optimizer.iterations == STEPS * EPOCHS


def test_a_chief_that_gets_a_sigterm_saves_when_its_workers_have_ended(chief, tmp_path):
    with chief.scope():
        model = small()
    manager = CheckpointManager(Checkpoint(net=model), tmp_path)
    kill = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 3 and signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(SystemExit):
        fit(model, kill, PreemptionCheckpointHandler(manager))
    path, tensors, data = read_newest(manager.latest_checkpoint)
    assert 4 <= data["step"] == int(tensors["net/optimizer/iterations"]) <= STEPS, path


def test_a_chief_ends_the_training_when_the_loss_of_a_worker_is_no_number(chief):
    with chief.scope():
        model = small()
    history = fit(
        model, callbacks.TerminateOnNaN(), y=np.where(np.arange(STEPS) < 2, math.nan, Y.T).T
    )
    assert history.epoch == [0]


def test_the_bar_of_a_chief_counts_the_steps_of_its_workers(chief, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr", Terminal())
    with chief.scope():
        model = small()
    model.fit(X, Y, 1, 1, 1)
    assert f"Epoch 1/1 - {STEPS}/{STEPS} |##########|" in sys.stderr.getvalue()
