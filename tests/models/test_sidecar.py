"""An evaluator beside a training scores each checkpoint, once and in order."""

import threading

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, SidecarEvaluator, layers
from ndistribute.models.checkpoint import Checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)), RNG.normal(size=(24, 1))


def build(optimizer: str = "adam", units: int = 1) -> Sequential:
    model = Sequential([layers.Dense(units, dtype="float64")])
    model.compile(optimizer, "mse")
    return model


def train(directory, epochs: int = 3) -> list[float]:
    """Save a model after each epoch, and return its losses."""
    model, losses = build(), []
    model(X[:1])
    manager = CheckpointManager(Checkpoint(model=model), directory)
    for step in range(epochs):
        model.fit(X, Y, 8, 1, 0)
        manager.save(step + 10)
        losses.append(model.evaluate(X, Y, verbose=0))
    return losses


def test_each_checkpoint_is_evaluated_with_another_optimizer(tmp_path):
    losses = train(tmp_path)
    seen = []
    scores = []
    keep = nd.callbacks.LambdaCallback(
        on_epoch_end=lambda step, logs: seen.append(step),
        on_test_end=lambda logs: scores.append(logs["loss"]),
    )
    evaluator = SidecarEvaluator(build("sgd"), (X, Y), tmp_path, None, 3, [keep])
    history = evaluator.start()
    assert scores == history.history["val_loss"]
    np.testing.assert_allclose(history.history["val_loss"], losses, atol=1e-12)
    assert seen == history.epoch == [10, 11, 12]


def test_it_waits_for_checkpoints_and_passes_over_a_damaged_one(tmp_path):
    started = threading.Event()

    def write() -> None:
        started.wait(10)
        train(tmp_path / "made")
        tmp_path.joinpath("made").rename(tmp_path / "saved")

    thread = threading.Thread(target=write)
    thread.start()
    bad = tmp_path / "saved"
    evaluator = SidecarEvaluator(
        build(), (X, Y), bad, max_evaluations=3, timeout_seconds=30, poll_seconds=0.01
    )
    started.set()
    assert evaluator.start().epoch == [10, 11, 12]
    thread.join()
    (bad / "checkpoint.000002" / "data.json").write_text("{}")
    evaluator = SidecarEvaluator(build(), (X, Y), bad, timeout_seconds=0.05, poll_seconds=0.01)
    assert evaluator.start().epoch == [10, 12]
    assert (bad / "checkpoint.000002").exists()  # It belongs to the training.


def test_weights_alone_and_the_checkpoints_of_callbacks_are_evaluated(tmp_path):
    model = build()
    save = nd.callbacks.ModelCheckpoint(tmp_path / "{epoch}")
    loss = model.fit(X, Y, 8, 2, 0, callbacks=[save], validation_data=(X, Y)).history["val_loss"]
    model.save_weights(tmp_path / "weights")
    evaluator = SidecarEvaluator(build(), (X, Y), tmp_path, max_evaluations=3)
    history = evaluator.start()
    np.testing.assert_allclose(history.history["val_loss"], [*loss, loss[-1]], atol=1e-12)
    assert history.epoch == [3, 6, 1]


def test_a_callback_can_end_it(tmp_path):
    train(tmp_path)
    stop = nd.callbacks.EarlyStopping(mode="min", min_delta=100)
    assert len(SidecarEvaluator(build(), (X, Y), tmp_path, callbacks=[stop]).start().epoch) == 2


def test_mistakes_are_explained(tmp_path):
    evaluator = SidecarEvaluator(build(), (X, Y), tmp_path / "none", timeout_seconds=0.01)
    with pytest.raises(TimeoutError, match="no intact checkpoint in"):
        evaluator.start()
    with pytest.raises(ValueError, match="max_evaluations must be an integer, 1 or more"):
        SidecarEvaluator(build(), (X, Y), tmp_path, max_evaluations=0)
    with pytest.raises(ValueError, match="must be above 0"):
        SidecarEvaluator(build(), (X, Y), tmp_path, poll_seconds=0)
    train(tmp_path)
    with pytest.raises(ValueError, match="does not fit"):
        SidecarEvaluator(build(units=2), (X, RNG.normal(size=(24, 2))), tmp_path).start()
