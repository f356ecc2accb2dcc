"""`Trainer`: the loops `fit`, `evaluate` and `predict` over distributed data.

A loop runs the model's step on every replica, for each batch of the distributed dataset. Metrics
are read at the end of an epoch, so between steps no process waits for another, except in the
collectives of the step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute import optimizers as _optimizers
from ndistribute import tree
from ndistribute.autodiff import GradientTape, untrack
from ndistribute.collective.objects import all_gather_object
from ndistribute.context import get_replica_context, get_strategy
from ndistribute.data import Dataset, as_dataset
from ndistribute.device import copy_to, to_host
from ndistribute.models import losses as _losses
from ndistribute.models import metrics as _metrics
from ndistribute.models.callbacks.callback import Callback, Callbacks, History
from ndistribute.models.checkpoint import Checkpoint
from ndistribute.models.chief import Chief, schedules_steps
from ndistribute.models.layers.layer import Layer
from ndistribute.models.memory import keep_freed_memory
from ndistribute.models.progress import Progress
from ndistribute.variables import Variable

__all__ = ["Trainer"]

_BATCH = 32
RunEpoch = Callable[[Callbacks], None]
_EMPTY: Mapping[str, float] = {}


class Position:
    """Where a training is; a part of the state from which it can be continued.

    Args:
        epoch: the epoch, from 0.
        callbacks: the callbacks of the training.

    Attributes:
        step: the number of steps made in the epoch.
        steps_made: the number of steps made in all epochs.
        iterator: the iterator over the distributed dataset.
        finished: whether the training ended as planned.
        trained: the variables to train.
        penalized: the layers whose regularizers add to the loss.
    """

    def __init__(self, epoch: int, callbacks: Sequence[Callback]) -> None:
        self.epoch = epoch
        self.callbacks = callbacks
        self.step = self.steps_made = 0
        self.iterator: Any = None
        self.finished = False
        self.trained: list[Variable] = []
        self.penalized: list[Layer] = []
        self._restored: Any = None

    def begin_epoch(self, dataset: Any, steps: int | None) -> None:
        """Set the iterator for an epoch, to the restored position if there is one.

        Args:
            dataset: the distributed dataset.
            steps: the steps of an epoch, if epochs go on in the dataset; otherwise None.
        """
        restored, self._restored = self._restored, None
        if restored is not None:
            self.iterator = iter(dataset)
            self.iterator.load_state_dict(restored)  # Later iterations continue after it.
        if self.iterator is None or (steps is None and not self.step):
            self.iterator = iter(dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "steps_made": self.steps_made,
            "input": None if self.iterator is None else self.iterator.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position of `state_dict`."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.steps_made, self._restored = state["steps_made"], state["input"]

    def check_used(self, steps: int | None) -> None:
        """Raise a `ValueError` if the dataset ended before the steps of an epoch."""
        if steps is not None:
            raise ValueError(
                f"epoch {self.epoch + 1}: the dataset ended after {self.step} of steps_per_epoch="
                f"{steps} steps: append .repeat() to the dataset, or pass fewer steps."
            )


class Trainer(Layer):
    """A layer that can be compiled, fitted and evaluated, under the strategy of its scope."""

    def __init__(self, *, name: str | None = None, **options: Any) -> None:
        super().__init__(name=name, **options)
        keep_freed_memory()
        self.strategy: Any = get_strategy()
        self.stop_training = False
        self.optimizer: Any = None
        self.loss: Any = None
        self._loss_mean: Any = None
        # Each metric, and whether it counts sample weights.
        self._metrics: list[tuple[_metrics.Metric, bool]] = []
        self.position = Position(0, ())

    def compile(
        self,
        optimizer: str | _optimizers.Optimizer = "rmsprop",
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        weighted_metrics: Sequence[Any] | None = None,
    ) -> None:
        """Set the optimizer, the loss and the metrics.

        If layers compute in float16, the optimizer is wrapped in a `LossScale`.

        Args:
            optimizer: an optimizer, or its name.
            loss: a `Loss`, its name, or a function of labels and predictions.
            metrics: metrics, their names, or functions of labels and predictions.
            weighted_metrics: the same; these use the sample weights.

        Raises:
            ValueError: a name is unknown.
            RuntimeError: called in the scope of another strategy than that of the model.
        """
        with self.strategy.scope():
            self.optimizer = _optimizers.get(optimizer)
            halves = any(layer.compute_dtype == np.float16 for layer in self.walk())
            if halves and not isinstance(self.optimizer, _optimizers.LossScale):
                self.optimizer = _optimizers.LossScale(self.optimizer)
            self.loss = None if loss is None else _losses.get(loss)
            self._loss_mean = _metrics.Mean("loss")
            self._metrics = [
                (_metrics.get(one, self.loss), weighted)
                for weighted, some in ((False, metrics), (True, weighted_metrics))
                for one in some or ()
            ]

    @property
    def metrics(self) -> list[_metrics.Metric]:
        """The mean of the loss, and the metrics given to `compile`; none before."""
        if self._loss_mean is None:
            return []
        return [self._loss_mean, *(metric for metric, _ in self._metrics)]

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Iterable[Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> History:
        """Train the model, and return the metrics of each epoch.

        Args:
            x: a nest of arrays, or a dataset of batches ``(x, y)`` or ``(x, y, sample_weight)`` of
                the global batch size.
            y: the labels, for arrays.
            batch_size: the global batch size, for arrays; None means 32.
            epochs: the number of the epoch to stop before.
            verbose: 0 shows nothing, 1 a progress bar, 2 a line an epoch; ``"auto"`` means 1. Only
                the chief shows anything.
            callbacks: `Callback` objects, the same on every worker.
            validation_split: the share of the arrays, at their end, that is kept for validation.
            validation_data: ``(x, y)`` or ``(x, y, sample_weight)`` of arrays, or a dataset.
            shuffle: whether arrays are shuffled anew in each epoch.
            class_weight: the weight of the examples of each label; others have weight 1.
            sample_weight: the weight of each example, for arrays.
            initial_epoch: the number of the first epoch.
            steps_per_epoch: the steps of an epoch; the next one continues there in the dataset.
                None means all batches.
            validation_steps: the steps of a validation; None means all batches.
            validation_batch_size: the batch size of `validation_data`; None means `batch_size`.
            validation_freq: after how many epochs to validate.

        Raises:
            RuntimeError: the model is not compiled, or `fit` was called inside a replica.
            ValueError: the arguments do not fit each other.
        """
        self._check_compiled("fit")
        if validation_split:
            (x, y, sample_weight), validation_data = _split(x, y, sample_weight, validation_split)
        data = _batches(x, y, sample_weight, batch_size, shuffle, class_weight)
        with self.strategy.scope():
            self._build_from(data)
            distributed = self.strategy.distribute_dataset(data)
            steps = distributed.cardinality() if steps_per_epoch is None else steps_per_epoch
            history = History()
            progress = Progress(verbose if self.strategy.is_chief else 0)
            params = {"epochs": epochs, "steps": steps if steps >= 0 else None, "verbose": verbose}
            called = Callbacks([progress, *(callbacks or ()), history], self, params)
            self.stop_training = False
            self.position = position = Position(initial_epoch, called.members)
            position.trained = self.trainable_variables
            position.penalized = [layer for layer in self.walk() if layer.penalties()]

            def validate(epoch: int) -> dict[str, float]:
                if validation_data is None or (epoch + 1) % validation_freq:
                    return {}
                size = validation_batch_size or batch_size
                found = self._validate(validation_data, size, validation_steps)
                return {f"val_{name}": value for name, value in found.items()}

            with contextlib.ExitStack() as on_exit:
                run_epoch: RunEpoch = functools.partial(
                    self._fit_epoch, distributed, steps_per_epoch
                )
                if schedules_steps(self.strategy):
                    chief = Chief(self, data, steps_per_epoch)
                    on_exit.callback(chief.close)
                    run_epoch = chief.run_epoch
                on_exit.callback(called.on_train_end)
                called.on_train_begin()
                while position.epoch < epochs and not self.stop_training:
                    self._fit_and_validate(run_epoch, validate, called)
                position.finished = True
        return history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics over data.

        Args:
            x: a nest of arrays, or a dataset as for `fit`.
            y: the labels, for arrays.
            batch_size: the global batch size, for arrays; None means 32.
            verbose: 0 shows nothing; otherwise the chief shows a line.
            sample_weight: the weight of each example, for arrays.
            steps: the number of batches; None means all.
            return_dict: whether to return a dict by the metrics' names.

        Returns:
            A list of the loss and the metrics, or the loss alone without metrics, or a dict.
        """
        self._check_compiled("evaluate")
        with self.strategy.scope():
            found = self._validate((x, y, sample_weight), batch_size, steps)
        Progress(verbose if self.strategy.is_chief else 0).show_line(found)
        if return_dict:
            return found
        values = list(found.values())
        return values if len(values) > 1 else values[0]

    def predict(self, x: Any, batch_size: int | None = None, steps: int | None = None) -> Any:
        """Return the predictions for all examples, in their order, as arrays on the host.

        Args:
            x: a nest of arrays, or a dataset of batches ``x``, ``(x,)`` or ``(x, y)``.
            batch_size: the global batch size, for arrays; None means 32.
            steps: the number of batches; None means all.
        """
        strategy = self.strategy
        with strategy.scope():
            data = _batches(x, None, None, batch_size, False, None)
            self._build_from(data)
            parts = []
            for batch in itertools.islice(strategy.distribute_dataset(data), steps):
                inputs, _, _ = _unpacked(batch)
                found = strategy.run(self._predict_step, args=(inputs,))
                parts.append(tree.map_leaves(to_host, strategy.gather(found, axis=0)))
        if not parts:
            raise ValueError("predict got no batches.")
        return tree.map_leaves(lambda *pieces: np.concatenate(pieces), *parts)

    def _predict_step(self, x: Any) -> Any:
        return self(x, training=False)

    def _train_step(self, data: Any, rows: int | None) -> None:
        """Make a step on this replica.

        Args:
            data: this replica's part of the batch.
            rows: the number of examples on all replicas; None: not known in this process.
        """
        x, y, weight = _unpacked(data)
        with GradientTape() as tape:
            predicted = _widened(self(x, training=True))
            each = self.loss.weighted(y, predicted, weight)
            count = _losses.global_count(_rows_of(x)) if rows is None else rows
            loss = np.sum(each) / max(1.0, count * math.prod(each.shape[1:]))
            penalties = [each for layer in self.position.penalized for each in layer.penalties()]
            if penalties:  # Each replica computes them, and the gradients are added up.
                replica = get_replica_context()
                loss = loss + sum(penalties) / (replica.num_replicas_in_sync if replica else 1)
            loss = self.optimizer.scale_loss(loss)
        trained = self.position.trained
        gradients = tape.gradient(loss, trained)
        self.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        self._count(each, penalties, y, predicted, weight)

    def _test_step(self, data: Any) -> None:
        """Add this replica's part of a batch to the metrics."""
        x, y, weight = _unpacked(data)
        predicted = _widened(self(x, training=False))
        self._count(self.loss.weighted(y, predicted, weight), self.losses, y, predicted, weight)

    def _count(self, each: Any, penalties: Any, y: Any, predicted: Any, weight: Any) -> None:
        each, predicted = untrack((each, predicted))
        total = float(each.sum(dtype=np.float64))
        total += sum(float(untrack(penalty)) for penalty in penalties) * each.size
        self._loss_mean.state.assign_add(np.array([total, each.size]))
        for metric, weighted in self._metrics:
            metric.update_state(y, predicted, weight if weighted else None)

    def _fit_and_validate(
        self,
        run_epoch: RunEpoch,
        validate: Callable[[int], dict[str, float]],
        called: Callbacks,
    ) -> None:
        """Make the steps of an epoch from the position on, and validate the model."""
        position = self.position
        if not position.step:
            for metric in self.metrics:
                metric.reset_state()
        called.on_epoch_begin(position.epoch)
        run_epoch(called)
        epoch, logs = position.epoch, self._results()
        logs |= validate(epoch)
        position.epoch, position.step = epoch + 1, 0
        called.on_epoch_end(epoch, logs)

    def _fit_epoch(self, dataset: Any, steps: int | None, called: Callbacks) -> None:
        """Make the remaining steps of an epoch."""
        begin = called.overriding("on_train_batch_begin")
        end = called.overriding("on_train_batch_end")
        self.position.begin_epoch(dataset, steps)
        position = self.position
        while position.step != steps and not self.stop_training:
            batch = next(position.iterator, None)
            if batch is None:
                position.check_used(steps)
                return
            number = position.step
            for call in begin:
                call(number, {})
            self.run_step(batch)
            position.step, position.steps_made = number + 1, position.steps_made + 1
            if end:
                logs = {metric.name: metric.local_result() for metric in self.metrics}
                for call in end:
                    call(number, logs)

    def run_step(self, batch: Any) -> None:
        """Make a step on all replicas with a distributed batch; see `fit`."""
        self.strategy.run(self._train_step, args=(batch, self._rows_of_step(batch)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, without the callbacks and the iterator."""
        position = Position(self.position.epoch, ())
        position.trained = self.position.trained
        position.penalized = self.position.penalized
        return {**vars(self), "position": position}

    def _validate(self, data: Any, batch_size: int | None, steps: int | None) -> dict[str, float]:
        """Return the metrics over validation data."""
        x, y, weight = _unpacked(data)
        batches = _batches(x, y, weight, batch_size, False, None)
        self._build_from(batches)
        for metric in self.metrics:
            metric.reset_state()
        for batch in itertools.islice(self.strategy.distribute_dataset(batches), steps):
            self.strategy.run(self._test_step, args=(batch,))
        return self._results()

    def _results(self) -> dict[str, float]:
        return {metric.name: metric.result() for metric in self.metrics}

    def _rows_of_step(self, batch: Any) -> int | None:
        """Return the number of examples of all replicas, if all are in this process."""
        strategy = self.strategy
        if strategy.num_replicas_in_sync > len(strategy.devices):
            return None
        first = tree.flatten(batch)[0]
        return sum(map(_rows_of, strategy.local_results(first)))

    def _build_from(self, data: Dataset) -> None:
        """Create the variables of all layers, by a call on one example of zeros."""
        if self.built and all(layer.built for layer in self.walk()):
            return
        x, _, _ = _unpacked(next(iter(data)))
        self.build_for(x)

    def build_for(self, batch: Any) -> None:
        """Create the variables of all layers for inputs of the shapes and dtypes of a batch."""
        example = tree.map_leaves(lambda one: np.zeros((1, *one.shape[1:]), one.dtype), batch)

        def call() -> None:
            replica = get_replica_context()
            device = self.strategy.devices[0] if replica is None else replica.device
            self(tree.map_leaves(lambda one: copy_to(one, device), example), training=False)

        self.strategy.run(call)

    def on_any_worker(self, flag: bool) -> bool:
        """Return True if a flag is set on any worker; all must call this after the same step."""
        group = self.strategy.input_topology.workers
        return flag if group is None else any(all_gather_object(group, bool(flag)))

    def save_weights(self, path: str | os.PathLike[str]) -> Path:
        """Write the variables of all layers, and return the folder; see `Checkpoint.save`."""
        return self._weights("save_weights").save(path)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Set the variables of all layers to what was saved; see `Checkpoint.restore`."""
        self._weights("load_weights").restore(path)

    def _weights(self, what: str) -> Checkpoint:
        variables = self.named_variables()
        if not variables:
            raise RuntimeError(
                f"{what} of model {self.name!r}: it has no variables yet, so call it on an input "
                "first."
            )
        return Checkpoint(**variables)

    def _check_compiled(self, what: str) -> None:
        if self.loss is None:
            raise RuntimeError(
                f"{what} of model {self.name!r}: call compile(optimizer, loss) with a loss first."
            )


def _batches(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    shuffle: bool,
    class_weight: Mapping[int, float] | None,
) -> Dataset:
    """Return a dataset of batches, from arrays or from a dataset."""
    arrays = all(hasattr(leaf, "shape") for leaf in tree.flatten(x)) and not _iterates_batches(x)
    if not arrays:
        if y is not None or sample_weight is not None or batch_size is not None:
            what = "x is a dataset"
            if not isinstance(x, Dataset):
                what = f"x is a {type(x).__name__}, not arrays, so it is taken for a dataset"
            raise ValueError(
                f"{what}: its batches contain y and sample_weight, and determine the batch size. "
                "Do not pass y, sample_weight or batch_size; or make x an array."
            )
        data = as_dataset(x)
    else:
        given = tuple(one for one in (x, y, sample_weight) if one is not None)
        data = Dataset.from_tensor_slices(given)
        rows = len(data)
        if shuffle and rows > 1:
            data = data.shuffle(rows)
        data = data.batch(_BATCH if batch_size is None else batch_size)
    if class_weight is None:
        return data
    return data.map(lambda *batch: _with_class_weight(batch, class_weight))


def _iterates_batches(x: Any) -> bool:
    return isinstance(x, Dataset)


def _with_class_weight(batch: Any, weights: Mapping[int, float]) -> Any:
    x, y, weight = _unpacked(batch)
    labels = y[..., 0] if y.ndim > 1 and y.shape[-1] == 1 else y
    own = np.ones(labels.shape, np.float32)
    for label, one in weights.items():
        own[labels == label] = one
    return x, y, own if weight is None else own * weight


def _split(x: Any, y: Any, weight: Any, share: float) -> tuple[Any, Any]:
    """Return the arrays in two parts: for training, and the last ones for validation."""
    if not 0 < share < 1:
        raise ValueError(f"validation_split must be between 0 and 1, got {share}.")
    rows = len(tree.flatten(x)[0])
    at = int(rows * (1 - share))
    if not 0 < at < rows:
        raise ValueError(f"validation_split={share} of {rows} examples leaves one part empty.")

    def cut(part: slice) -> Any:
        def take(array: Any) -> Any:
            return None if array is None else array[part]

        return tree.map_leaves(take, (x, y, weight))

    return cut(slice(at)), cut(slice(at, None))


def _unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Return the input, labels and weights of a batch, None for what it lacks."""
    if not isinstance(data, tuple):
        return data, None, None
    if not 1 <= len(data) <= 3:
        raise ValueError(
            f"a batch has {len(data)} parts: it must be x, (x, y) or (x, y, sample_weight)."
        )
    x, y, weight = (*data, None, None)[:3]
    return x, y, weight


def _widened(predicted: Any) -> Any:
    """Return predictions of 16 bits in float32, in which losses are computed."""
    return predicted.astype(np.float32) if predicted.dtype.itemsize == 2 else predicted


def _rows_of(value: Any) -> int:
    return int(np.shape(tree.flatten(value)[0])[0])
