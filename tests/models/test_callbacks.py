"""Callbacks act at the epochs and steps that they promise, on every replica alike."""

import csv
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, callbacks, layers
from ndistribute.models.checkpoint import Checkpoint
from tests.models.test_resumption import Interrupt

X = np.ones((8, 2))
Y = np.zeros((8, 1))


def model_of(values: list[float] | None = None) -> Sequential:
    """Return a model; with values, its metric `score` has the next of them in each epoch."""
    model = Sequential([layers.Dense(1, dtype="float64")])
    model.compile(nd.optimizers.SGD(0.125), "mse", metrics=[_score(values)] if values else [])
    return model


def _score(values: list[float]) -> Callable[[Any, Any], Any]:
    left = iter(values)

    def score(y_true: Any, y_pred: Any) -> Any:
        return np.full(len(y_true), next(left))

    return score


def fit(model: Sequential, *used: callbacks.Callback, epochs: int = 6) -> Any:
    """Train for some epochs of one step."""
    return model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=used).history


def fit_scheduled(callback: callbacks.Callback) -> None:
    model = model_of()
    model.optimizer.learning_rate = lambda step: 0.1
    fit(model, callback)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"mode": "max"}, 3),
        ({"mode": "max", "patience": 2}, 6),
        ({"mode": "max", "patience": 2, "min_delta": 0.5}, 4),
        ({"mode": "max", "start_from_epoch": 3}, 5),
        ({"mode": "min"}, 2),
        ({"mode": "max", "baseline": 9.0}, 3),
        ({"mode": "max", "baseline": 9.0, "patience": 4}, 5),
        ({"mode": "max", "baseline": 1.5, "patience": 2}, 6),
    ],
)
def test_early_stopping_waits_for_an_improvement(options, epochs):
    model = model_of([1.0, 2.0, 1.9, 2.4, 2.3, 2.2, 2.1])
    stop = callbacks.EarlyStopping("score", **options)
    assert len(fit(model, stop)["score"]) == epochs
    assert stop.stopped_epoch == epochs - 1


@pytest.mark.parametrize("baseline", [None, 9.0])
def test_early_stopping_can_restore_the_best_weights_also_below_a_baseline(baseline):
    model, seen = model_of([1.0, 2.0, 1.0, 1.0]), []
    keep = callbacks.LambdaCallback(on_epoch_end=lambda e, logs: seen.append(model.get_weights()))
    stop = callbacks.EarlyStopping("score", 0, 2, "max", baseline, restore_best_weights=True)
    fit(model, keep, stop)
    assert baseline or len(seen) == 4
    assert all(map(np.array_equal, model.get_weights(), seen[1]))


def test_early_stopping_forgets_a_first_value_that_is_no_number():
    stop = callbacks.EarlyStopping("score", mode="max", patience=2)
    fit(model_of([math.nan, 1.0, 2.0, 3.0, 4.0, 5.0]), stop)
    assert (stop.best, stop.stopped_epoch) == (5.0, 0)


@pytest.mark.parametrize(("cooldown", "falls"), [(0, [1, 2, 3, 4]), (1, [1, 2, 3, 4]), (2, [1, 3])])
def test_the_rate_falls_again_after_the_cooldown_of_keras(cooldown, falls):
    model, rates = model_of([1.0] * 5), [0.125]
    keep = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(model.optimizer.learning_rate)
    )
    plateau = callbacks.ReduceLROnPlateau("score", 0.5, patience=1, cooldown=cooldown)
    fit(model, plateau, keep, epochs=5)
    assert [epoch for epoch in range(5) if rates[epoch + 1] < rates[epoch]] == falls


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("freq", [1, "epoch"])
def test_what_callbacks_know_is_continued_wherever_they_stand(first, freq, tmp_path):
    def run(values: list[float], *more: callbacks.Callback) -> tuple[Any, ...]:
        model = model_of(values)
        model(X)
        model.set_weights([np.ones((2, 1)), np.zeros(1)])
        stop = callbacks.EarlyStopping("loss", -1e9, 2, "max", restore_best_weights=True)
        rate = callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        used = [*more, stop, rate] if first else [stop, rate, *more]
        model.fit(X, Y, 4, 6, 0, callbacks=used)
        return model.get_weights(), stop.best, stop.stopped_epoch, model.optimizer.learning_rate

    expected = run([0.0] * 99)
    backup = callbacks.BackupAndRestore(tmp_path, save_freq=freq)
    with pytest.raises(KeyboardInterrupt):
        run([0.0] * 99, backup, Interrupt(5))
    weights, *rest = run([0.0] * 99, backup)
    assert rest == list(expected[1:])
    assert all(map(np.array_equal, weights, expected[0]))


def test_a_training_that_was_stopped_remains_so(tmp_path):
    def run(*more: callbacks.Callback) -> Any:
        stop = callbacks.EarlyStopping("loss", 1e9)
        backup = callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        return fit(model_of(), backup, stop)

    assert len(run()["loss"]) == 2
    assert not run()


def test_the_rate_falls_on_a_plateau():
    rates: list[float] = []
    model = model_of([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    keep = callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: rates.append(model.optimizer.learning_rate)
    )
    fit(model, callbacks.ReduceLROnPlateau("score", 0.5, patience=2, min_lr=0.05), keep)
    assert rates == [0.125, 0.125, 0.125, 0.0625, 0.0625, 0.05]


def test_the_model_is_saved_at_its_best_epoch_and_every_so_many_steps(tmp_path):
    model = model_of([1.0, 2.0, 1.0])
    path = f"{tmp_path}/{{epoch}}-{{score:.0f}}"
    best = callbacks.ModelCheckpoint(path, "score", save_best_only=True, mode="max")
    steps = callbacks.ModelCheckpoint(f"{tmp_path}/step", save_freq=2, save_weights_only=True)
    fit(model, best, steps, epochs=3)
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["1-1.000001", "2-2.000001", "step.000001"]
    other = model_of()
    other(X)
    Checkpoint(model=other).restore(tmp_path / "2-2")
    weights = other.get_weights()
    other.load_weights(tmp_path / "step")
    assert all(map(np.array_equal, other.get_weights(), weights))


def test_the_log_is_a_table_of_the_epochs(tmp_path):
    path = tmp_path / "log.csv"
    history = fit(model_of(), callbacks.CSVLogger(path), epochs=2)
    fit(model_of(), callbacks.CSVLogger(path, append=True), epochs=1)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["loss"]) for row in rows[:2]] == history["loss"]
    assert [row["epoch"] for row in rows] == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: callbacks.EarlyStopping("loss", mode="up"), "mode must be 'auto', 'min' or 'max'"),
        (lambda: callbacks.ReduceLROnPlateau(factor=2), "factor must be between 0 and 1"),
        (lambda: callbacks.ModelCheckpoint("x", save_freq="batch"), "save_freq must be 'epoch'"),
        (lambda: callbacks.ModelCheckpoint("x", "loss", True, save_freq=2), "save_best_only comp"),
        (lambda: callbacks.LambdaCallback(on_end=print), "unknown keyword 'on_end'"),
        (lambda: fit_scheduled(callbacks.ReduceLROnPlateau("loss")), "ReduceLROnPlateau sets the"),
        (
            lambda: fit_scheduled(callbacks.LearningRateScheduler(lambda epoch, rate: rate)),
            "LearningRateScheduler sets the learning rate, but the optimizer has a schedule",
        ),
        (
            lambda: fit(model_of(), callbacks.EarlyStopping()),
            "monitors 'val_loss', but the logs have",
        ),
    ],
)
def test_mistakes_are_explained(make, says):
    with pytest.raises((ValueError, TypeError), match=says):
        make()


class Noting(callbacks.Callback):
    """Notes the methods that are called, with the number of an epoch or a batch."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logs: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith(("on_", "set_")):
            return found

        def noting(*args: Any) -> None:
            self.calls.append(" ".join([name, *(str(one) for one in args if type(one) is int)]))
            self.logs[name] = args[-1]
            found(*args)

        return noting


def test_every_method_of_a_callback_is_called_in_the_order_of_keras():
    model, noting = model_of(), Noting()
    model.fit(X, Y, 4, 1, 0, callbacks=noting, validation_data=(X, Y))
    begin = ["set_model", "set_params"]
    tested = "on_test_begin|on_test_batch_begin 0|on_test_batch_end 0|on_test_batch_begin 1"
    tested += "|on_test_batch_end 1|on_test_end"
    assert noting.calls == [
        *begin,
        *("on_train_begin", "on_epoch_begin 0"),
        *("on_train_batch_begin 0", "on_batch_begin 0", "on_train_batch_end 0", "on_batch_end 0"),
        *("on_train_batch_begin 1", "on_batch_begin 1", "on_train_batch_end 1", "on_batch_end 1"),
        *tested.split("|"),
        *("on_epoch_end 0", "on_train_end"),
    ]
    assert noting.logs["on_test_end"]["loss"] == noting.logs["on_epoch_end"]["val_loss"]
    assert noting.params == {"epochs": 1, "steps": 2, "verbose": 0}

    noting.calls.clear()
    loss = model.evaluate(X, Y, 4, 0, callbacks=[noting])
    assert noting.calls == [*begin, *tested.split("|")]
    assert noting.logs["on_test_batch_end"] == noting.logs["on_test_end"] == {"loss": loss}

    noting.calls.clear()
    predicted = model.predict(X, 4, callbacks=[noting])
    assert noting.calls == [*begin, *tested.replace("test", "predict").split("|")]
    outputs = noting.logs["on_predict_batch_end"]["outputs"]
    np.testing.assert_array_equal(outputs, predicted[4:])


def test_the_short_names_of_the_methods_of_a_batch_are_called_if_the_long_ones_are_not_defined():
    seen = []

    class Short(callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            seen.append(f"begin {batch}")

        def on_batch_end(self, batch, logs=None):
            seen.append("not called")

        def on_train_batch_end(self, batch, logs=None):
            seen.append(f"end {batch} {sorted(logs)}")

    fit(model_of(), Short(), epochs=1)
    assert seen == ["begin 0", "end 0 ['loss']"]


def test_a_method_that_nothing_calls_is_refused():
    with pytest.raises(TypeError, match="Misspelt: nothing calls on_epoch_ends: define on_epoch_e"):

        class Misspelt(callbacks.Callback):
            def on_epoch_ends(self, epoch, logs=None):
                raise AssertionError

    misspelt = callbacks.Callback()
    misspelt.on_epoch_ends = print
    with pytest.raises(TypeError, match="Callback: nothing calls on_epoch_ends"):
        fit(model_of(), misspelt)
