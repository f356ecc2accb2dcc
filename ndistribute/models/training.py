"""`Trainer`: the loops `fit`, `evaluate` and `predict` over distributed data.

A loop runs the model's step on every replica, for each batch of the distributed dataset. Metrics
are read at the end of an epoch, so between steps no process waits for another, except in the
collectives of the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from ndistribute.context import get_replica_context, get_strategy
from ndistribute.data import Dataset
from ndistribute.data.agreement import check_alike
from ndistribute.devices import to_host
from ndistribute.jit.function import Function
from ndistribute.jit.identity import settings_of
from ndistribute.models import batches as _batches
from ndistribute.models import losses as _losses
from ndistribute.models import metrics as _metrics
from ndistribute.models.callbacks.callback import Callback, Callbacks, History, ProgressBar
from ndistribute.models.checkpoint import Weights, by_every_worker, on_any_worker
from ndistribute.models.chief import Chief, schedules_steps
from ndistribute.models.fingerprint import fingerprint, without_data
from ndistribute.models.layers.layer import Layer, build_for
from ndistribute.models.masks import attach_mask, mask_of
from ndistribute.models.memory import keep_freed_memory
from ndistribute.models.position import NO_BATCHES, TrainingPosition

_ONE_OUTPUT = (
    "{}: fit and evaluate compare one output of a model with one array of labels. For several, "
    "write a step of your own with a GradientTape and a loss for each output; predict returns any "
    "nest."
)

_OF_KERAS = """
    compute_loss compute_metrics get_metrics_result make_predict_function make_test_function
    make_train_function predict_step reset_metrics test_step train_step
""".split()


class Trainer(Layer):
    """A layer that can be compiled, fitted and evaluated, under the strategy of its scope."""

    _uncalled = Layer._uncalled | dict.fromkeys(_OF_KERAS, "write a loop of your own")
    del _uncalled["trainable_variables"]  # That of a model has an effect.

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
        self.position = TrainingPosition(0)
        self._jit_compile = False
        self._steps: dict[str, Any] = {}  # By the name of the method.
        self._parts_of_steps: tuple[Any, ...] = ()

    def compile(
        self,
        optimizer: str | _optimizers.Optimizer = "rmsprop",
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        weighted_metrics: Sequence[Any] | None = None,
        jit_compile: bool = False,
    ) -> None:
        """Set the optimizer, the loss and the metrics.

        If layers compute in float16, the optimizer is wrapped in a `LossScale`.

        Args:
            optimizer: an optimizer, or its name.
            loss: a `Loss`, its name, or a function of labels and predictions.
            metrics: metrics, their names, or functions of labels and predictions.
            weighted_metrics: the same; these use the sample weights.
            jit_compile: whether XLA compiles the steps of `fit`, `evaluate` and `predict`; with
                several replicas, those of `fit` without the update. `TPUStrategy` always does.

        Raises:
            TypeError: a class is passed, or metrics are no list.
            ValueError: a name is unknown, there are several losses, or steps whose variables are on
                parameter servers are to be compiled.
            RuntimeError: called in the scope of another strategy than that of the model.
        """
        if isinstance(loss, list | tuple | Mapping):
            raise ValueError(_ONE_OUTPUT.format(f"compile: loss is a {type(loss).__name__}"))
        for listed in (metrics, weighted_metrics):
            if listed is not None and not isinstance(listed, list | tuple):
                raise TypeError(f"compile: metrics must be a list, got {listed!r}.")
        for part in (optimizer, loss, *(metrics or ()), *(weighted_metrics or ())):
            if isinstance(part, type):
                name = part.__name__
                raise TypeError(f"compile got the class {name}: pass an object, {name}(...).")
        if jit_compile and hasattr(type(self.strategy), "servers"):
            raise ValueError(
                "compile: jit_compile=True, but a compiled step has no variables on parameter "
                "servers: leave it out, or use another strategy."
            )
        self._jit_compile, self._parts_of_steps = bool(jit_compile), ()
        with self.strategy.scope():
            self.optimizer = _optimizers.get(optimizer)
            halves = any(layer.compute_dtype == np.float16 for layer in self.walk())
            if halves and not isinstance(self.optimizer, _optimizers.LossScale):
                self.optimizer = _optimizers.LossScale(self.optimizer)
            self.loss = None if loss is None else _losses.get(loss)
            if self.loss is not None and self.loss.reduction != "sum_over_batch_size":
                raise ValueError(
                    f"compile: the loss has reduction={self.loss.reduction!r}, but fit divides the "
                    "sum by the number of examples: leave it out, or write a loop of your own."
                )
            self._loss_mean = _metrics.Mean("loss")
            self._metrics = [
                (_metrics.get(metric, self.loss), weighted)
                for weighted, some in ((False, metrics), (True, weighted_metrics))
                for metric in some or ()
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
        callbacks: Iterable[Callback] | Callback | None = None,
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
        _batches.check_counts(0, epochs=epochs, initial_epoch=initial_epoch)
        _batches.check_counts(1, steps_per_epoch=steps_per_epoch, validation_freq=validation_freq)
        if validation_split:
            if validation_data is not None:
                raise ValueError("pass validation_data or validation_split, not both.")
            parts = _batches.split(x, y, sample_weight, validation_split)
            (x, y, sample_weight), validation_data = parts
        scored = None if validation_data is None else _batches.validation_parts(validation_data)
        if scored is not None and scored[1] is not None:  # A dataset has its batches.
            validation_batch_size = validation_batch_size or batch_size
        data = _batches.batches_of(x, y, sample_weight, batch_size, shuffle, class_weight)
        with self.strategy.scope(), contextlib.ExitStack() as on_exit:
            self._build_from(data)
            distributed = self.strategy.distribute_dataset(data)
            steps = distributed.cardinality() if steps_per_epoch is None else steps_per_epoch
            history = History()
            progress = ProgressBar(verbose if self.strategy.is_chief else 0)
            called = self._callbacks(callbacks, epochs, steps, verbose, [progress], [history])
            more = {"steps_per_epoch": steps_per_epoch, "class_weight": class_weight}
            position = self._begin(range(initial_epoch, epochs), called.members, data, more)
            run_epoch = functools.partial(self._fit_epoch, distributed, steps_per_epoch)
            if schedules_steps(self.strategy):
                chief = Chief(self, data, steps_per_epoch)
                on_exit.callback(chief.close)
                run_epoch = functools.partial(chief.run_epoch)
            on_exit.callback(called.call, "on_train_end", {})
            called.call("on_train_begin", {})
            while position.epoch < epochs and not self.stop_training:
                if not position.step:
                    self._reset_metrics()
                called.call("on_epoch_begin", position.epoch, {})
                run_epoch(called)
                epoch, logs = position.epoch, self._results()
                if scored is not None and not (epoch + 1) % validation_freq:
                    values = self._validate(scored, validation_batch_size, validation_steps, called)
                    logs |= {f"val_{name}": value for name, value in values.items()}
                position.epoch, position.step = epoch + 1, 0
                called.call("on_epoch_end", epoch, logs)
            self._finish(position)
        return history

    def _finish(self, position: TrainingPosition) -> None:
        self.optimizer.finalize_variable_values(self.trainable_variables)
        position.finished = True

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        return_dict: bool = False,
        callbacks: Iterable[Callback] | Callback | None = None,
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
            callbacks: `Callback` objects, the same on every worker.

        Returns:
            A list of the loss and the metrics, or the loss alone without metrics, or a dict.
        """
        self._check_compiled("evaluate")
        with self.strategy.scope():
            called = self._callbacks(callbacks, 1, steps, verbose)
            logs = self._validate((x, y, sample_weight), batch_size, steps, called)
        ProgressBar(verbose if self.strategy.is_chief else 0).show_line(logs)
        if return_dict:
            return logs
        values = list(logs.values())
        return values if len(values) > 1 else values[0]

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = 0,
        steps: int | None = None,
        callbacks: Iterable[Callback] | Callback | None = None,
    ) -> Any:
        """Return the predictions for all examples, in their order, as arrays on the host.

        Args:
            x: a nest of arrays, or a dataset of batches ``x``, ``(x,)`` or ``(x, y)``.
            batch_size: the global batch size, for arrays; None means 32.
            verbose: 0 shows nothing; otherwise the chief shows a line.
            steps: the number of batches; None means all.
            callbacks: `Callback` objects, the same on every worker.
        """
        strategy, called = self.strategy, self._callbacks(callbacks, 1, steps, verbose)
        progress = ProgressBar(verbose if strategy.is_chief else 0)
        with strategy.scope():
            data = _batches.batches_of(x, batch_size=batch_size)
            self._build_from(data)
            self._renew_steps()
            parts: list[Any] = []
            called.call("on_predict_begin", {})
            for batch in itertools.islice(strategy.distribute_dataset(data), steps):
                number = len(parts)
                called.call("on_predict_batch_begin", number, {})
                inputs, _, _ = _batches.unpacked(batch)
                outputs = strategy.run(self._steps["_predict_step"], args=(inputs,))
                parts.append(tree.map_leaves(to_host, strategy.gather(outputs, axis=0)))
                called.call("on_predict_batch_end", number, {"outputs": parts[-1]})
            called.call("on_predict_end", {})
        if not parts:
            raise ValueError(NO_BATCHES.format("predict"))
        progress.show_line({}, f"Predicted {len(parts)} batches.")
        return tree.map_leaves(lambda *pieces: np.concatenate(pieces), *parts)

    def _train_step(self, data: Any, rows: int | None) -> None:
        """Make a step on this replica.

        Args:
            data: this replica's part of the batch.
            rows: the number of examples on all replicas; None: not known in this process.
        """
        count = _losses.global_count(_batches.rows_of(data)) if rows is None else rows
        gradients = self._steps.get("_gradients", self._gradients)(data, count)
        pairs = zip(gradients, self.position.trained, strict=True)
        self.optimizer.apply_gradients(pairs)

    def _gradients(self, data: Any, rows: float) -> list[Any]:
        """Return the gradients of this replica, and count its part of the batch."""
        with GradientTape() as tape:
            y, predicted, weight = self._compared(data, training=True)
            each = self.loss.weighted(y, predicted, weight)
            loss = np.sum(each) / max(1.0, rows * math.prod(each.shape[1:]))
            penalties = [each for layer in self.position.penalized for each in layer.penalties()]
            if penalties:  # Each replica computes them, and the gradients are added up.
                replica = get_replica_context()
                loss = loss + sum(penalties) / (replica.num_replicas_in_sync if replica else 1)
            loss = self.optimizer.scale_loss(loss)
        gradients: list[Any] = tape.gradient(loss, self.position.trained)
        self._count(each, penalties, y, predicted, weight)
        return gradients

    def _test_step(self, data: Any) -> None:
        """Add this replica's part of a batch to the metrics."""
        y, predicted, weight = self._compared(data, training=False)
        self._count(self.loss.weighted(y, predicted, weight), self.losses, y, predicted, weight)

    def _predict_step(self, inputs: Any) -> Any:
        """Return the predictions for this replica's part of a batch."""
        return self(inputs, training=False)

    def _renew_steps(self) -> None:
        """Make new steps if the model has other parts: its compiled steps would keep the old."""
        parts = frozenset([*self.walk(), *self.trainable_variables]), settings_of(self)
        if parts == self._parts_of_steps:
            return
        alone = self.strategy.num_replicas_in_sync == 1
        compiled = Function if self._jit_compile else functools.partial
        self._steps = {
            "_train_step": (compiled if alone else functools.partial)(self._train_step),
            "_gradients": compiled(self._gradients),
            "_test_step": compiled(self._test_step),
            "_predict_step": compiled(self._predict_step),
        }
        self._parts_of_steps = parts

    def _compared(self, data: Any, *, training: bool) -> tuple[Any, Any, Any]:
        """Return the labels, predictions and weights of this replica's part of a batch."""
        x, y, weight = _batches.unpacked(data)
        predicted = self(x, training=training)
        if y is None:
            raise ValueError(
                f"model {self.name!r} got no labels: pass y, or a dataset of batches (x, y)."
            )
        for what, array in (("returned", predicted), ("got labels as", y)):
            if not hasattr(array, "dtype"):
                problem = f"model {self.name!r} {what} a {type(array).__name__}"
                raise ValueError(_ONE_OUTPUT.format(problem))
        # Losses of 16-bit predictions are computed in float32.
        wide = predicted.astype(np.float32) if predicted.dtype.itemsize == 2 else predicted
        attach_mask(wide, mask_of(predicted))
        return y, wide, weight

    def _count(self, each: Any, penalties: Any, y: Any, predicted: Any, weight: Any) -> None:
        each, predicted = untrack((each, predicted))
        total = each.sum(dtype=np.float64)
        total += sum(untrack(penalty) for penalty in penalties) * each.size
        self._loss_mean.state.assign_add(_metrics.joined(total, each.size))
        for metric, weighted in self._metrics:
            metric.update_state(y, predicted, weight if weighted else None)

    def _begin(
        self, epochs: range, callbacks: list[Callback], data: Dataset, more: Any
    ) -> TrainingPosition:
        """Begin a training, alike on all workers, and return its position."""
        trained = self.trainable_variables
        if not trained:
            raise ValueError(
                f"fit of model {self.name!r}: it has no variables to train. Add layers, or set "
                "layer.trainable = True."
            )
        penalized = [layer for layer in self.walk() if layer.penalties()]
        is_saved = any(callback.restores for callback in callbacks)
        facts = fingerprint(self, data._node, more) if is_saved else {}
        workers = self.strategy.input_topology.workers
        if workers is not None:
            rate = self.optimizer.learning_rate
            options = {**more, "epochs": epochs, "rate": "a function" if callable(rate) else rate}
            remedy = "Make the same model and pass the same arguments on all workers."
            check_alike(workers, "fit", without_data(self, options), remedy)
        self.stop_training = False
        self.position = TrainingPosition(
            epochs.start, callbacks, trained=trained, penalized=penalized, fingerprint=facts
        )
        return self.position

    def _fit_epoch(self, dataset: Any, steps: int | None, called: Callbacks) -> None:
        """Make the remaining steps of an epoch."""
        begin = called.overriding("on_train_batch_begin")
        end = called.overriding("on_train_batch_end")
        self._renew_steps()  # A callback may have changed a layer.
        self.position.begin_epoch(dataset, steps)
        position = self.position
        while position.step != steps and not self.stop_training:
            batch = next(position.iterator, None)
            if batch is None:
                position.check_used(steps)
                return
            for call in begin:
                call(position.step, {})
            self.run_step(batch)
            self.finish_step(end)

    def finish_step(self, end: Sequence[Callable[..., None]]) -> None:
        """Count a step that was made, and call the methods of callbacks for its end."""
        position, number = self.position, self.position.step
        position.step, position.steps_made = number + 1, position.steps_made + 1
        self._end_batch(end, number)

    def _end_batch(self, end: Sequence[Callable[..., None]], number: int) -> None:
        """Call the methods of callbacks for the end of a batch, which alone need its logs."""
        if end:
            logs = {metric.name: metric.local_result() for metric in self.metrics}
            for call in end:
                call(number, logs)

    def run_step(self, batch: Any) -> None:
        """Make a step on all replicas with a distributed batch; see `fit`."""
        step = self._steps.get("_train_step", self._train_step)  # A worker has none.
        self.strategy.run(step, args=(batch, self._rows_of_step(batch)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, without the callbacks and the iterator."""
        position = dataclasses.replace(self.position, callbacks=(), iterator=None)
        return {**vars(self), "position": position, "_steps": {}, "_parts_of_steps": ()}

    def _callbacks(
        self,
        callbacks: Any,
        epochs: int,
        steps: int | None,
        verbose: Any,
        before: Sequence[Callback] = (),
        after: Sequence[Callback] = (),
    ) -> Callbacks:
        if isinstance(callbacks, Callbacks):
            return callbacks
        callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks or ()
        known = steps if steps is not None and steps >= 0 else None
        params = {"epochs": epochs, "steps": known, "verbose": verbose}
        return Callbacks([*before, *callbacks, *after], self, params)

    def _validate(
        self,
        data: tuple[Any, Any, Any],
        batch_size: int | None,
        steps: int | None,
        called: Callbacks,
    ) -> dict[str, float]:
        """Return the metrics over inputs, labels and weights; or a dataset, None and None."""
        _batches.check_counts(1, steps=steps)
        batches = _batches.batches_of(*data, batch_size)
        self._build_from(batches)
        self._renew_steps()
        self._reset_metrics()
        made, end = 0, called.overriding("on_test_batch_end")
        called.call("on_test_begin", {})
        for batch in itertools.islice(self.strategy.distribute_dataset(batches), steps):
            called.call("on_test_batch_begin", made, {})
            self.strategy.run(self._steps["_test_step"], args=(batch,))
            self._end_batch(end, made)
            made += 1
        if not made:
            raise ValueError(NO_BATCHES.format("evaluate"))
        logs = self._results()
        called.call("on_test_end", logs)
        return logs

    def _reset_metrics(self) -> None:
        for metric in self.metrics:
            metric.reset_state()

    def _results(self) -> dict[str, float]:
        return {metric.name: metric.result() for metric in self.metrics}

    def _rows_of_step(self, batch: Any) -> int | None:
        """Return the number of examples of all replicas, if all are in this process."""
        strategy = self.strategy
        if strategy.num_replicas_in_sync > len(strategy.devices):
            return None
        first = tree.flatten(batch)[0]
        return sum(map(_batches.rows_of, strategy.local_results(first)))

    def _build_from(self, data: Dataset) -> None:
        """Create the variables of all layers, by a call on one example of zeros."""
        if self.built and all(layer.built for layer in self.walk()):
            return
        first = next(iter(data), None)
        if first is None:
            raise ValueError(NO_BATCHES.format(f"model {self.name!r}"))
        self.build_for(_batches.unpacked(first)[0])

    def build_for(self, batch: Any) -> None:
        """Create the variables of all layers for inputs of the shapes and dtypes of a batch."""
        build_for(self, batch, self.strategy)

    _build_with = build_for

    def on_any_worker(self, flag: bool) -> bool:
        """Return True if a flag is set on any worker; all must call this after the same step."""
        return on_any_worker(self.strategy, flag)

    @by_every_worker
    def save_weights(self, path: str | os.PathLike[str]) -> Path:
        """Write the variables of all layers, and return the folder; see `Checkpoint.save`."""
        if not self.variables:
            raise RuntimeError(
                f"save_weights of model {self.name!r}: it has no variables yet, so call it on an "
                "input first."
            )
        return Weights(model=self).save(path)

    @by_every_worker
    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Set the variables of all layers to what was saved; see `Checkpoint.restore`.

        Args:
            path: a result of `save_weights`, `export`, or ``Checkpoint(model=model).save``.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"load_weights of model {self.name!r} needs a path, got a {type(path).__name__}: "
                "pass that of the saved weights, as it was given to ModelCheckpoint."
            )
        Weights(model=self).restore(path)

    def _check_compiled(self, what: str) -> None:
        if self.loss is None:
            raise RuntimeError(
                f"{what} of model {self.name!r}: call compile(optimizer, loss) with a loss first."
            )
