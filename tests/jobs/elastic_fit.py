"""The program of the elastic workers of `tests/models/test_elastic_fit.py`.

Its argument says what it does, and at which call of a callback which worker ends itself. Alone, and
without an end, it is what the others are compared with.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import tensor_files
from tests.processes import wait_until

ROWS = 48

_ends: list[Any] = []  # The call at which this process ends, and its number.


def end() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class Ends(nd.callbacks.Callback):
    """Ends this worker at a call of a method, and lets the chief wait there for a newcomer.

    Args:
        waits: the file that the chief makes, and the methods and numbers of calls at which it waits
            until there are three workers, or somebody waits to be the third.
    """

    def __init__(self, waits: Any) -> None:
        self._waits, self.calls = waits or [], Counter[str]()
        self.epochs: list[int] = []

    def _call(self, method: str) -> None:
        self.calls[method] += 1
        call = [method, self.calls[method]]
        if call == _ends:
            end()
        strategy = self.model.strategy
        if call in self._waits[1:] and strategy.is_chief:
            Path(self._waits[0]).touch()
            meetings = strategy.session._meetings
            wait_until(lambda: meetings.newcomers_wait or strategy.num_replicas_in_sync == 3)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._call("train")

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self._call("epoch")

    def on_test_batch_end(self, batch: int, logs: Any) -> None:
        self._call("test")

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._call("predict")


class Gan(nd.Model):
    """Two optimizers make a step; a worker may end between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nd.layers.Dense(1, dtype="float64") for _ in range(2))
        self.optimizers = [nd.optimizers.Adam(0.1), nd.optimizers.SGD(0.1)]
        self.rows = nd.metrics.Sum(name="rows")
        self._calls = 0

    def train_step(self, data: Any) -> Any:
        x, y = data
        for layer, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            with nd.GradientTape() as tape:
                errors = nd.losses.MeanSquaredError()(y, layer(x))
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(errors, variables), variables, strict=True))
            self._calls += 1
            if ["update", self._calls] == _ends:
                end()
        self.rows.update_state(np.ones(len(x)))
        return {"rows": self.rows.result(), "error": errors}


def data() -> tuple[Any, Any]:
    """Return the examples and their labels."""
    numbers = np.random.default_rng(1)
    x = numbers.normal(size=(ROWS, 4))
    return x, (x @ numbers.normal(size=(4, 1)) + 0.1)


def made(kind: str) -> Any:
    """Return the compiled model of a kind of program."""
    if kind == "gan":
        model: Any = Gan()
        model.compile()
        return model
    dtype = {"dtype": "float64"}
    layers = [nd.layers.Dense(3, activation="tanh", kernel_regularizer="l2", **dtype)]
    if kind == "fit":
        layers.append(nd.layers.BatchNormalization(synchronized=True, **dtype))
    model = nd.Sequential([*layers, nd.layers.Dense(1, **dtype)])
    optimizer: Any = nd.optimizers.Adam(0.02)
    if kind.endswith("sums"):
        optimizer = nd.optimizers.GradientAccumulation(nd.optimizers.SGD(0.1), 2)
    if kind.startswith("scale"):
        optimizer = nd.optimizers.LossScale(optimizer, growth_steps=3)
    elif kind == "rate":
        optimizer = nd.optimizers.SGD(nd.optimizers.schedules.ScaledByWorkers(0.03))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def callbacks_of(folder: str) -> list[Any]:
    """Return the callbacks that write files."""
    return [
        nd.callbacks.CSVLogger(f"{folder}/log.csv"),
        nd.callbacks.ModelCheckpoint(f"{folder}/model"),
        nd.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=3),
        nd.callbacks.TensorBoard(f"{folder}/board"),
    ]


def run(
    kind: str,
    ends: Any = None,
    waits: Any = None,
    folder: str = "",
    epochs: int = 3,
    steps: int | None = None,
) -> dict[str, Any]:
    """Train, evaluate and predict; return what is compared."""
    nd.set_seed(5)
    _ends[:] = ends or []
    strategy: Any = nd.get_strategy()
    if "TF_CONFIG" in os.environ:
        limits = nd.Elastic(batch="scaled" if kind == "rate" else "constant")
        strategy = nd.MultiWorkerMirroredStrategy(elastic=limits)
    x, y = data()
    with strategy.scope():
        model = made(kind)
        ending = Ends(waits)
        rates = nd.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        stops = nd.callbacks.EarlyStopping(
            "error" if kind == "gan" else "loss", patience=9, restore_best_weights=True
        )
        more = callbacks_of(folder) if folder else []
        if ends and ends[0] == "write":
            _end_in_write(ends[1])
        options: dict[str, Any] = {"validation_data": (x[:20], y[:20])} if kind != "gan" else {}
        examples: Any = {"x": x, "y": y, "batch_size": 8}
        if steps is not None:
            dataset = nd.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=2).batch(8)
            examples = {"x": dataset.repeat(), "steps_per_epoch": steps}
        callbacks = [ending, stops, *more] if kind == "rate" else [ending, rates, stops, *more]
        options |= {"epochs": epochs, "verbose": 2, "callbacks": callbacks}
        history = model.fit(**examples, **options)
        result = {"epochs": history.epoch, "logs": history.history}
        result |= {"begun": ending.epochs, "best": stops.best}
        if kind != "gan":
            result["scores"] = model.evaluate(x, y, batch_size=8, callbacks=ending, verbose=0)
            result["outputs"] = model.predict(x, batch_size=8, callbacks=ending).tolist()
        result["weights"] = [w.tolist() for w in model.get_weights()]
        if kind == "rate":
            result["rate"] = model.optimizer.learning_rate(0)
        result["steps"] = int(model.optimizer.iterations)
        result["chief"] = strategy.is_chief
    if strategy.session is not None:
        strategy.close()
    return result


def _end_in_write(number: int) -> None:
    """End this process at a write of files, when their folder has its name."""
    write, calls = tensor_files.write, Counter[str]()

    def ending(*args: Any) -> Any:
        path = write(*args)
        calls["write"] += 1
        if calls["write"] == number:
            end()
        return path

    tensor_files.write = ending


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    output = Path(plan.pop("output"))
    output.write_text(json.dumps(run(**plan)))
