"""`Trainer`: the loops `fit`, `evaluate` and `predict` over distributed data.

A loop runs the model's step on every replica, for each batch of the distributed dataset. It reads
metrics only at the end of an epoch, so processes wait for each other only in the collectives of the
steps.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.data import INFINITE_CARDINALITY, Dataset
from ndistribute.data.agreement import check_alike
from ndistribute.data.distributed import DistributedDataset
from ndistribute.devices import to_host
from ndistribute.mistakes import count_of
from ndistribute.models import batches as _batches
from ndistribute.models.callbacks.callback import Callback, Callbacks, History, ProgbarLogger
from ndistribute.models.checkpoint import Weights, by_every_worker, check_absent
from ndistribute.models.chief import Chief, schedules_steps
from ndistribute.models.fingerprint import fingerprint
from ndistribute.models.layers.layer import Layer
from ndistribute.models.newcomers import sharing, training_loop
from ndistribute.models.position import NO_BATCHES, TrainingPosition, warn_of_end
from ndistribute.models.training_steps import TrainingSteps
from ndistribute.timeline import counter, counters_due, enabled


class Trainer(TrainingSteps):
    """A layer that can be compiled, fitted and evaluated, under the strategy of its scope."""

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
        validation_freq: int | Collection[int] = 1,
    ) -> History:
        """Train the model, and return the metrics of each epoch.

        In an elastic job, a newcomer joins in the running step. If the others have already ended
        training, it gets their history.

        Args:
            x: a nest of arrays, or a dataset of batches ``(x, y)`` or ``(x, y, sample_weight)`` of
                the global batch size.
            y: the labels, for arrays.
            batch_size: the global batch size, for arrays; None means 32.
            epochs: the number of epochs; with `initial_epoch`, the number of the epoch before which
                to stop.
            verbose: 0 shows nothing, 1 a progress bar, 2 a line an epoch; ``"auto"`` means 1. Only
                the chief shows anything.
            callbacks: `Callback` objects, the same on every worker.
            validation_split: the share of the arrays that is used for validation, taken from their
                end.
            validation_data: ``(x, y)`` or ``(x, y, sample_weight)`` of arrays, or a dataset.
            shuffle: whether to shuffle arrays again in each epoch.
            class_weight: a dict with the weight of the examples of each label; other labels have
                weight 1.
            sample_weight: the weight of each example, for arrays.
            initial_epoch: the number of the first epoch.
            steps_per_epoch: the steps of an epoch. The next epoch continues in the dataset where
                this one ended, or starts over if the dataset has ended. None means all batches.
            validation_steps: the steps of a validation; None means all batches.
            validation_batch_size: the batch size of `validation_data`; None means `batch_size`.
            validation_freq: validate every this many epochs; or the epochs after which to validate,
                counted from 1.

        Raises:
            RuntimeError: the model is not compiled, or `fit` was called inside a replica.
            ValueError: the arguments do not fit each other.
        """
        self._check_compiled("fit")
        _batches.check_counts(0, epochs=epochs, initial_epoch=initial_epoch)
        _batches.check_counts(1, steps_per_epoch=steps_per_epoch)
        every = validation_freq
        if not isinstance(every, Collection):
            _batches.check_counts(1, validation_freq=every)
            every = range(every, epochs + 1, every)
        if validation_split:
            if validation_data is not None:
                raise ValueError("pass validation_data or validation_split, not both.")
            parts = _batches.split(x, y, sample_weight, validation_split)
            (x, y, sample_weight), validation_data = parts
        sizes = validation_batch_size or batch_size, validation_steps
        scored = _batches.for_validation(validation_data, *sizes)
        with self._scope("fit"), ExitStack() as on_exit:
            data = _batches.batches_of(x, y, sample_weight, batch_size, shuffle, class_weight)
            distributed = self._distributed(data, steps_per_epoch=steps_per_epoch)
            self._build_from(data)
            steps = distributed.cardinality() if steps_per_epoch is None else steps_per_epoch
            self.history = History()
            members = [callbacks] if isinstance(callbacks, Callback) else callbacks or ()
            members = [ProgbarLogger(verbose), *members, self.history]
            called = self._callbacks(members, epochs, steps, verbose)
            more = {"steps_per_epoch": steps_per_epoch, "class_weight": class_weight}
            position = self._begin(range(initial_epoch, epochs), called.members, data, more)
            run_epoch = functools.partial(self._fit_epoch, distributed, steps_per_epoch)
            if schedules_steps(self.strategy):
                chief = on_exit.enter_context(closing(Chief(self, x, data, steps_per_epoch)))
                run_epoch = functools.partial(chief.run_epoch)
            position.validates = scored is not None
            loop = training_loop(self, distributed)
            self._train(epochs, called, run_epoch, scored or {}, every, loop)
        return self.history  # type: ignore[no-any-return]

    def _train(
        self,
        epochs: int,
        called: Callbacks,
        run_epoch: Callable[..., None],
        scored: Mapping[str, Any],
        validated: Collection[int],
        loop: AbstractContextManager[bool],
    ) -> None:
        """Make the remaining epochs, and validate some of them with `evaluate`."""
        position, logs = self.position, dict[str, Any]()
        try:
            called.call("on_train_begin", {})
            with loop as is_running:
                while is_running and position.epoch < epochs and not self.stop_training:
                    if not (position.step or position.has_joined):
                        self.reset_metrics()
                    called.call("on_epoch_begin", position.epoch, {})
                    run_epoch(called)
                    if position.exhausted:
                        break
                    epoch, logs = position.epoch, self._results()
                    if scored and epoch + 1 in validated:
                        scores = self.evaluate(**scored, callbacks=called)
                        logs |= {f"val_{name}": value for name, value in scores.items()}
                    _trace(logs)
                    position.epoch, position.step = epoch + 1, 0
                    called.call("on_epoch_end", epoch, logs)
            if is_running:
                self.optimizer.finalize_variable_values(self.trainable_variables)
                position.finished = True
        finally:
            called.call("on_train_end", logs)

    def _show(self, verbose: int | str, logs: Mapping[str, Any], prefix: str = "") -> None:
        progress = ProgbarLogger(verbose)
        progress.set_model(self)
        progress.show_line(logs, prefix)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks | Iterable[Callback] | Callback | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics over data.

        A newcomer that joins an elastic job after this evaluation gets the result of the others.

        Args:
            x: a nest of arrays, or a dataset as for `fit`.
            y: the labels, for arrays.
            batch_size: the global batch size, for arrays; None means 32.
            verbose: 0 shows nothing; otherwise the chief shows a line.
            sample_weight: the weight of each example, for arrays.
            steps: the number of batches; None means all.
            callbacks: `Callback` objects, the same on every worker.
            return_dict: whether to return a dict by the metrics' names.

        Returns:
            A list of the loss and the metrics, or the loss alone without metrics, or a dict.
        """
        self._check_compiled("evaluate")
        _batches.check_counts(1, steps=steps)
        called = self._callbacks(callbacks, 1, steps, verbose)
        with self._scope("evaluate"):
            data = _batches.batches_of(x, y, sample_weight, batch_size)
            self._make_ready(data)
            self.reset_metrics()
            made, end = list[None](), called.overriding("on_test_batch_end")
            called.call("on_test_begin", {})
            for batch in self._batches_for(made, data, steps):
                called.call("on_test_batch_begin", len(made), {})
                self._run("_test_step", batch)
                self._end_batch(end, len(made))
                made.append(None)
            if not made:
                raise ValueError(NO_BATCHES.format("evaluate"))
            if made and steps is not None and len(made) < steps:
                warn_of_end("evaluate", len(made), f"steps={steps}")
            logs = self._results()
            called.call("on_test_end", logs)
        self._show(verbose, logs)
        return _as_asked(logs, return_dict)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Make a training step with one batch of arrays; return its loss and metrics.

        Every worker passes the whole batch. The result has the form of `evaluate`.

        Args:
            x: a nest of arrays.
            y: the labels.
            sample_weight: the weight of each example.
            class_weight: the weight of the examples of each label.
            return_dict: whether to return a dict by the metrics' names.
        """
        return self._on_batch("_train_step", (x, y, sample_weight), return_dict, class_weight)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Return the loss and the metrics of one batch of arrays; see `train_on_batch`."""
        return self._on_batch("_test_step", (x, y, sample_weight), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the predictions for one batch of arrays."""
        return self.predict(x, max(1, _batches.rows_of(_batches.as_arrays(x))))

    def _on_batch(self, step: str, parts: Any, return_dict: bool, weights: Any = None) -> Any:
        method = step[1:].replace("step", "on_batch")
        self._check_compiled(method)
        with self._scope(method):
            rows = max(1, _batches.rows_of(_batches.as_arrays(parts[0])))
            x, y, weight = parts
            data = _batches.batches_of(x, y, weight, rows, class_weight=weights)
            self._make_ready(data)
            if step == "_train_step":
                self._begin(range(1), [], data, {})
            self.reset_metrics()
            for batch in self._distributed(data):
                self._run(step, batch)
            return _as_asked(self._results(), return_dict)

    def _distributed(self, data: Any, **steps: int | None) -> Any:
        """Return a dataset that is divided among the replicas; it may be divided already."""
        divided = self.strategy.elastic(data)
        if None in steps.values() and divided.cardinality() == INFINITE_CARDINALITY:
            raise ValueError(f"the dataset repeats forever: pass {next(iter(steps))}.")
        return divided

    def _batches_for(self, made: list[Any], data: Any, steps: int | None) -> Iterator[Any]:
        """Yield batches for the rest of some steps; a newcomer gets what others made before."""
        take = functools.partial(made.__setitem__, slice(None))
        with sharing(self.strategy.session, lambda: made, take):
            batches = iter(self._distributed(data, steps=steps))
            while len(made) != steps and (batch := next(batches, _END)) is not _END:
                yield batch

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = 0,
        steps: int | None = None,
        callbacks: Iterable[Callback] | Callback | None = None,
    ) -> Any:
        """Return the predictions for all examples, in their order, as arrays on the host.

        A newcomer that joins an elastic job after this prediction gets the result of the others.

        Args:
            x: a nest of arrays, or a dataset of batches ``x``, ``(x,)`` or ``(x, y)``.
            batch_size: the global batch size, for arrays; None means 32.
            verbose: 0 shows nothing; otherwise the chief shows a line.
            steps: the number of batches; None means all.
            callbacks: `Callback` objects, the same on every worker.
        """
        strategy, called = self.strategy, self._callbacks(callbacks, 1, steps, verbose)
        with self._scope("predict"):
            data = _batches.batches_of(x, batch_size=batch_size)
            self._make_ready(data)
            parts: list[Any] = []
            called.call("on_predict_begin", {})
            for batch in self._batches_for(parts, data, steps):
                number = len(parts)
                called.call("on_predict_batch_begin", number, {})
                parts.append(strategy.attempt(functools.partial(self._outputs, batch)))
                called.call("on_predict_batch_end", number, {"outputs": parts[-1]})
            called.call("on_predict_end", {})
        if not parts:
            raise ValueError(NO_BATCHES.format("predict"))
        self._show(verbose, {}, f"Predicted {count_of(len(parts), 'batch', 'batches')}.")
        return tree.map_leaves(lambda *pieces: np.concatenate(pieces), *parts)

    def _outputs(self, batch: Any) -> Any:
        """Return the predictions for a batch of all workers."""
        strategy, step = self.strategy, self._steps["_predict_step"]
        part = batch if self._defines("predict_step") else (_batches.unpacked(batch)[0],)
        some = [
            (strategy.run(step, args=(rows,)), counting)
            for rows, counting in _batches.equal_parts(strategy, part)
        ]
        gathered = strategy.gather(_batches.joined_parts(some), axis=0)
        return tree.map_leaves(to_host, gathered)

    def _begin(
        self, epochs: range, callbacks: list[Callback], data: Dataset, more: Any
    ) -> TrainingPosition:
        """Begin training, in the same way on all workers, and return its position."""
        trained = self.trainable_variables
        if not trained and self.variables and not self._defines("train_step"):
            raise ValueError(
                f"fit of model {self.name!r}: it has no variables to train. Add layers, or set "
                "layer.trainable = True."
            )
        is_saved = any(callback.restores for callback in callbacks)
        facts = fingerprint(self, more, data._node) if is_saved else {}
        workers = self.strategy.input_topology.workers
        if workers is not None:
            rate = self.optimizer.learning_rate
            options = {**more, "epochs": epochs, "rate": "a function" if callable(rate) else rate}
            remedy = "Make the same model and pass the same arguments on all workers."
            check_alike(workers, "fit", fingerprint(self, options), remedy)
        self.stop_training = False
        self.position = TrainingPosition(
            epochs.start,
            callbacks,
            trained=trained,
            penalized=self.position.penalized,
            fingerprint=facts,
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
            batch = position.next_batch(dataset, steps)
            if batch is None:
                return
            for call in begin:
                call(position.step, {})
            self._run("_train_step", batch)
            self.finish_step(end)

    def finish_step(self, end: Sequence[Callable[..., None]]) -> None:
        """Count a completed step, and call the callbacks' methods for its end."""
        position, number = self.position, self.position.step
        position.step, position.steps_made = number + 1, position.steps_made + 1
        self._end_batch(end, number)

    def _end_batch(self, end: Sequence[Callable[..., None]], number: int) -> None:
        """Call the callbacks' methods for the end of a batch; only these need its logs."""
        is_traced = counters_due()
        if end or is_traced:
            logs = self._local_logs()
            if is_traced:
                _trace(logs)
            for call in end:
                call(number, logs)

    def run_step(self, batch: Any) -> dict[str, Any]:
        """Make a step for a chief with a distributed batch, and return the logs for `take_logs`."""
        self._run("_train_step", batch)
        if self.position.logs is None:
            return {}
        metrics, local = self.metrics, self._local_logs()
        places = {id(metric): number for number, metric in enumerate(metrics)}
        return {
            name: places.get(id(each), local[name]) for name, each in self.position.logs.items()
        }

    def take_logs(self, logs: Mapping[str, Any]) -> None:
        """Keep the logs of a step of a worker: by name, a number or the place of a metric."""
        metrics = self.metrics if logs else []
        self.position.logs = {
            name: metrics[each] if isinstance(each, int) else each for name, each in logs.items()
        } or None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, without the callbacks and the iterator."""
        position = dataclasses.replace(self.position, callbacks=(), iterator=None)
        kept = {**vars(self), "position": position, "history": None}
        return {**kept, "_steps": {}, "_parts_of_steps": ()}

    def _callbacks(self, callbacks: Any, epochs: int, steps: int | None, verbose: Any) -> Callbacks:
        if isinstance(callbacks, Callbacks):
            return callbacks
        callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks or ()
        known = steps if steps is not None and steps >= 0 else None
        params = {"epochs": epochs, "steps": known, "verbose": verbose}
        return Callbacks(callbacks, self, params)

    def _make_ready(self, data: Dataset) -> None:
        """Create the variables of all layers, and the steps if the model has changed."""
        self._build_from(data)
        self._renew_steps()

    def _defines_call(self) -> bool:
        return type(self).call is not Layer.call

    def _build_from(self, data: Dataset) -> None:
        """Create the variables of all layers by a call on one example of zeros."""
        if not self._defines_call():
            return  # The model's own steps call its layers, which builds them.
        if not (self.built and all(layer.built for layer in self.walk())):
            is_divided = isinstance(data, DistributedDataset)
            if is_divided and self.strategy.session:
                data = data.divided_among(self.strategy.input_topology)
            first = next(iter(data), None)
            if first is None:
                raise ValueError(NO_BATCHES.format(f"model {self.name!r}"))
            if is_divided:
                first = self.strategy.local_results(first)[0]
            self.build_for(_batches.unpacked(first)[0])
        elif self.output_names is None and self.input_spec is not None:
            self.build_for(self.input_spec)
        if self._objective is not None:
            with self.strategy.scope():
                self._name_outputs(self.output_names or self._objective.names)
        self.position.penalized = [layer for layer in self.walk() if layer.penalties()]

    @by_every_worker
    def save_weights(self, path: str | os.PathLike[str], overwrite: bool = True) -> Path:
        """Write the variables of all layers, and return the folder; see `Checkpoint.save`.

        Args:
            path: the path.
            overwrite: whether to replace what is at the path already.

        Raises:
            FileExistsError: the path exists, and `overwrite` is False.
        """
        check_absent(self.strategy, path, overwrite)
        if not self.variables:
            raise RuntimeError(
                f"save_weights of model {self.name!r}: it has no variables yet, so call it on an "
                "input first."
            )
        return Weights(model=self).save(path)

    @by_every_worker
    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Set the variables of all layers to the saved values; see `Checkpoint.restore`.

        Args:
            path: a result of `save_weights`, `export`, or ``Checkpoint(model=model).save``, or the
                path that was passed to one of these, `save` or `ModelCheckpoint`.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"load_weights of model {self.name!r} needs a path, got a {type(path).__name__}: "
                "pass the path to which save_weights or ModelCheckpoint wrote the weights."
            )
        Weights(model=self).restore(path)

    def _check_compiled(self, what: str) -> None:
        if self._objective is None:
            raise RuntimeError(
                f"{what} of model {self.name!r}: call compile(optimizer, loss) first."
            )


_END = object()


def _trace(logs: Mapping[str, Any]) -> None:
    for name, value in logs.items() if enabled() else ():
        counter(name, np.mean(value))


def _as_asked(logs: dict[str, Any], return_dict: bool) -> Any:
    """Return logs as a dict, as a list of the values, or as the only value."""
    values = list(logs.values())
    return logs if return_dict else values if len(values) > 1 else values[0]
