"""A backup is continued by the training that wrote it alone, and used by one at a time."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, activations, callbacks, layers
from ndistribute.optimizers import GradientAccumulation
from tests.jobs.launched import run

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(300, 3)), np.arange(300.0)[:, None]


class Stop(callbacks.Callback):
    """Ends the training after a number of steps, once it has changed the rate."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.model.optimizer.learning_rate = 0.5
        if self.model.position.steps_made == self._steps:
            raise KeyboardInterrupt


def noting(seen: list[int]) -> Callable[[Any, Any], Any]:
    """Return a metric that notes the rows that a training sees."""

    def note(y_true: Any, y_pred: Any) -> Any:
        seen.extend(np.rint(y_true[:, 0]).astype(int).tolist())
        return np.zeros(len(y_true))

    return note


def fit(folder: Path, *more: callbacks.Callback, model: Any = None, **changed: Any) -> list[int]:
    """Train, and return the rows that the training has seen; one argument may have changed."""
    given = {"optimizer": "adam", "loss": "mse", "activation": "relu", "x": X, "units": 4}
    given |= {"batch_size": 32, "epochs": 1, "dtype": None, "regularizer": None, "seed": 0}
    given |= changed
    seen: list[int] = []
    nd.set_seed(given["seed"])
    if model is None:
        hidden = layers.Dense(
            given["units"], given["activation"], kernel_regularizer=given["regularizer"]
        )
        model = Sequential([hidden, layers.Dense(1, dtype=given["dtype"])])
        model.compile(given["optimizer"], given["loss"], metrics=[noting(seen)])
    names = ("class_weight", "shuffle", "epochs", "batch_size")
    options = {name: given[name] for name in names if name in given}
    data = given["x"] if isinstance(given["x"], tuple) else (given["x"], Y)
    if "data" in changed:
        data, options["batch_size"] = (changed["data"],), None
    backup = callbacks.BackupAndRestore(folder, save_freq=1)
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(*data, verbose=0, callbacks=[backup, *more], **options)
    return seen


def scaled(factor: float) -> Callable[[Any], Any]:
    return (lambda x: x * 2.0) if factor == 2 else (lambda x: x * 3.0)


def batches(rows: int, buffer: int, seed: int) -> nd.Dataset:
    return nd.Dataset.from_tensor_slices((X[:rows], Y[:rows])).shuffle(buffer, seed=seed).batch(32)


OTHER_ROWS = X.copy()
OTHER_ROWS[77, 1] += 1e-3
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "batch size": ({}, {"batch_size": 50}, "batch size was 32, but is now 50"),
    "one row": ({}, {"x": OTHER_ROWS}, r"array 0 was float64\[300, 3\] with the checksum"),
    "rows": ({}, {"x": (X[:290], Y[:290])}, "length of its sources was 300, but is now 290"),
    "shuffle": ({}, {"shuffle": False}, "number of shuffles was 1, but is now 0"),
    "weights": ({}, {"class_weight": {0: 2.0}}, "class_weight was None, but is now {0: 2.0}"),
    "buffer": ({"data": batches(300, 300, 1)}, {"data": batches(300, 9, 1)}, r"was .*shuffle\(300"),
    "order": ({"data": batches(300, 9, 1)}, {"data": batches(300, 9, 2)}, "is now .*seed=2"),
    "optimizer": ({}, {"optimizer": "sgd"}, r"optimizer was Adam\(.*, but is now SGD\("),
    "rate": (
        {},
        {"optimizer": nd.optimizers.Adam(0.5)},
        "first_rate=0.001.*, but is now .*first_rate=0.5",
    ),
    "momentum": (
        {"optimizer": nd.optimizers.SGD(0.1)},
        {"optimizer": nd.optimizers.SGD(0.1, momentum=0.9)},
        "momentum=0.0.*momentum=0.9",
    ),
    "accumulation": (
        {"optimizer": GradientAccumulation(nd.optimizers.SGD(0.1), 2)},
        {"optimizer": GradientAccumulation(nd.optimizers.SGD(0.1), 4)},
        "steps=2.*steps=4",
    ),
    "loss": ({}, {"loss": "mae"}, r"loss was MeanSquaredError\(.*, but is now MeanAbsoluteError\("),
    "activation": ({}, {"activation": "tanh"}, "activation='relu'.*activation='tanh'"),
    "function": (
        {"activation": activations.relu},
        {"activation": activations.tanh},
        "activation=<function relu>.*activation=<function tanh>",
    ),
    "lambda": (
        {"activation": scaled(2)},
        {"activation": scaled(3)},
        "layer 1 was .*<lambda>> of code",
    ),
    "regularizer": ({}, {"regularizer": "l2"}, "kernel_regularizer='l2'"),
    "units": ({}, {"units": 5}, "units=4.*units=5"),
    "dtype": ({}, {"dtype": "float64"}, "computing in='float32'.*computing in='float64'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_training_is_not_continued_as_another_one(change: str, tmp_path: Path) -> None:
    first, then, message = CHANGES[change]
    fit(tmp_path, Stop(3), **first)
    with pytest.raises(
        ValueError, match=rf"(?s)belongs to a different training run: .*{message}"
    ) as caught:
        fit(tmp_path, **then)
    assert f"To start from the beginning, delete {tmp_path}." in str(caught.value)


def test_no_row_is_missed_or_repeated_after_the_program_is_run_as_it_was(tmp_path: Path) -> None:
    seen = fit(tmp_path, Stop(3), activation=scaled(2))
    with pytest.raises(ValueError, match="batch size"):
        fit(tmp_path, batch_size=50, activation=scaled(2))
    # What may change: replicas, epochs, callbacks, seeds; and the rate was changed by a callback.
    history = callbacks.History()
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]):
        seen += fit(tmp_path, history, activation=scaled(2), epochs=2, seed=7)
    assert sorted(seen) == sorted([*range(300)] * 2)
    assert history.epoch == [0, 1]
    assert not list(tmp_path.iterdir())


def test_the_same_model_goes_on_with_the_rate_that_a_callback_has_set(tmp_path: Path) -> None:
    seen: list[int] = []
    model = Sequential([layers.Dense(1)])
    model.compile(nd.optimizers.LossScale(nd.optimizers.Adam(0.1)), "mse", metrics=[noting(seen)])
    fit(tmp_path, Stop(3), model=model)
    fit(tmp_path, model=model)
    assert sorted(seen) == [*range(300)]


PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
import ndistribute as nd

folder, refused = sys.argv[1], Path(sys.argv[2])


class Wait(nd.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        deadline = time.monotonic() + 60
        print("training", self.model.position.steps_made, flush=True)
        while self.model.position.steps_made == 2 and not refused.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


with nd.MirroredStrategy(["cpu:0"]).scope():
    model = nd.Sequential([nd.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((20, 2), np.float32)
backup = nd.callbacks.BackupAndRestore(folder, save_freq=1)
try:
    model.fit(x, x[:, 0], 4, verbose=0, callbacks=[backup, Wait()])
except OSError as error:
    print("refused", error, flush=True)
    refused.touch()
"""


def test_processes_of_a_job_that_train_apart_are_warned_and_refused_one_folder(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder, refused = tmp_path / "backup", tmp_path / "refused"
    job = run("run", "-n", "2", program, folder, refused)
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        warning = rf"MirroredStrategy uses only this process, which is worker {rank} of a job of 2"
        assert re.search(warning, job.stdout + job.stderr)
    assert job.stdout.count("refused Another process still used the files of 'backup") == 1
    assert job.stdout.count("training 5") == 1
    assert not list(folder.iterdir())
