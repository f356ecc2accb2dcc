"""`model_to_estimator`: a compiled `nd.Model` behind the methods of an `Estimator`.

The model trains with its own `fit`, so it works with the strategy in whose scope it was created.
There is no graph; hooks are the callbacks of models.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ndistribute import tree
from ndistribute.data import Dataset, InputContext
from ndistribute.estimator.estimator import Estimator
from ndistribute.estimator.loops import AfterStep, InputFn, chosen, dataset_from
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.specs import EvalSpec, ModeKeys, TrainSpec
from ndistribute.models.batches import unpacked
from ndistribute.models.callbacks.callback import Callback, LambdaCallback
from ndistribute.models.checkpoint import Checkpoint, by_chief, latest_checkpoint, on_any_worker
from ndistribute.models.checkpoint_manager import CheckpointManager
from ndistribute.models.model import Model, Sequential
from ndistribute.timers import Timer


def model_to_estimator(
    keras_model: Model,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
) -> Estimator:
    """Return an estimator that trains a compiled model.

    Its input functions return batches of the global size, as for `Model.fit`. Its hooks are
    `nd.callbacks.Callback` objects. Predictions are dicts with the entry ``predictions``, unless
    the model itself returns a dict.

    Args:
        keras_model: the model; its strategy is that of the scope in which it was created.
        model_dir: the directory of checkpoints, see `Estimator`.
        config: a `RunConfig`.

    Raises:
        ValueError: the model is not compiled, or the strategies in `config` are not the model's.

    >>> import numpy as np, ndistribute as nd
    >>> model = nd.Sequential([nd.layers.Dense(1)])
    >>> model.compile(nd.optimizers.SGD(0.1), "mean_squared_error")
    >>> estimator = model_to_estimator(model)
    >>> x = np.array([[0.0], [1.0]], np.float32)
    >>> trained = estimator.train(lambda: (x, 2 * x + 1), steps=200)
    >>> [each["predictions"].round(1) for each in estimator.predict(lambda: x)]
    [array([1.], dtype=float32), array([3.], dtype=float32)]
    """
    if not isinstance(keras_model, Model) or keras_model.loss is None:
        raise ValueError(f"model_to_estimator needs a compiled nd.Model, got {keras_model!r}.")
    estimator = Estimator(_no_graph, model_dir, config)
    estimator.loops = ModelLoops(keras_model, estimator.config)
    return estimator


class ModelLoops:
    """The loops of a model, which keeps its variables itself between checkpoints."""

    latest_checkpoint = staticmethod(latest_checkpoint)

    def __init__(self, model: Model, config: RunConfig) -> None:
        for name in ("train_distribute", "eval_distribute"):
            configured = getattr(config, name)
            if configured not in (None, model.strategy):
                raise ValueError(
                    f"RunConfig has {name}={configured!r}, but the model was made for "
                    f"{model.strategy!r}: make the model inside `with strategy.scope():`."
                )
        self._model, self._config, self._checkpoint = model, config, Checkpoint(model=model)
        keep = config.keep_checkpoint_max or sys.maxsize
        self._manager = CheckpointManager(self._checkpoint, str(config.model_dir), keep)

    def strategy(self, configured: Any) -> Any:
        """Return the strategy of the model."""
        return self._model.strategy

    def train(
        self, spec: TrainSpec, steps: int | None = None, after_step: AfterStep = lambda: None
    ) -> None:
        """Train as `Estimator.train` does, and call a function after each step."""
        data, model = self._data(spec.input_fn, ModeKeys.TRAIN), self._model
        self._manager.restore_or_initialize()
        left = steps if spec.max_steps is None else spec.max_steps - model.optimizer.iterations
        if left is not None and left <= 0:
            return
        saving = _CheckpointSaving(self._manager, self._config, spec.saving_listeners)
        telling = LambdaCallback(on_train_batch_end=lambda batch, logs: after_step())
        data = data if left is None else data.take(left)
        model.fit(data, epochs=1, verbose=0, callbacks=[saving, telling, *spec.hooks])
        saving.save()

    def evaluate(self, strategy: Any, spec: EvalSpec, path: str | None) -> dict[str, Any]:
        """Return the metrics over the batches of an input function, with a checkpoint's values."""
        _refuse(spec.hooks)
        data, model = self._data(spec.input_fn, ModeKeys.EVAL), self._model
        kept = self._checkpoint.state()  # Training may continue after this.
        try:
            if path is not None:
                self._checkpoint.restore(path)
            metrics = model.evaluate(data, steps=spec.steps, verbose=0, return_dict=True)
            return {**metrics, "global_step": model.optimizer.iterations}
        finally:
            self._checkpoint.load("the state before the evaluation", *kept)

    def predict(
        self, input_fn: InputFn, keys: Sequence[str] | None, hooks: Sequence[Any], path: str | None
    ) -> Iterator[Any]:
        """Yield the predictions of some names, or all, for each batch of an input function."""
        _refuse(hooks)
        data = self._data(input_fn, ModeKeys.PREDICT)
        path = by_chief(self._model.strategy, lambda: path)
        if path is not None:
            self._checkpoint.restore(path)
        for features, *_ in map(unpacked, data):
            rows = len(tree.flatten(features)[0])
            outputs = self._model.predict(features, batch_size=max(rows, 1))
            named = outputs if isinstance(outputs, dict) else {"predictions": outputs}
            yield chosen(named, keys)

    def _data(self, input_fn: InputFn, mode: str) -> Dataset:
        """Return the batches, and create the variables that checkpoints contain."""
        data = dataset_from(input_fn, mode, InputContext(), self._config, {})
        if isinstance(self._model, Sequential) and _is_named(data.element_spec):
            data = data.map(_without_name)
        if not self._model.built:
            batch = next(iter(data), None)
            if batch is None:
                raise ValueError("input_fn returned an empty dataset, without any batch.")
            self._model.build_for(unpacked(batch)[0])
        with self._model.strategy.scope():
            self._model.optimizer.build(self._model.trainable_variables)
        return data


def _is_named(spec: Any) -> bool:
    """Return whether the features of batches are a dict with the only input of a model."""
    features = spec[0] if isinstance(spec, tuple) else spec
    return isinstance(features, dict) and len(features) == 1


def _without_name(features: dict[str, Any], *labels: Any) -> Any:
    """Return a batch with the features alone."""
    (values,) = features.values()
    return (values, *labels) if labels else values


def _refuse(hooks: Sequence[Any]) -> None:
    if hooks:
        raise ValueError(
            "an estimator of a model takes hooks only in train, as callbacks of the model."
        )


def _no_graph(features: Any) -> Any:
    raise NotImplementedError(
        "this estimator trains a model, which has no model_fn that makes a graph."
    )


class _CheckpointSaving(Callback):
    """A callback that saves when it is time, and calls listeners."""

    def __init__(
        self, manager: CheckpointManager, config: RunConfig, listeners: Sequence[Any]
    ) -> None:
        self._manager, self._listeners = manager, listeners
        steps, self._seconds = config.save_checkpoints_steps, config.save_checkpoints_secs
        self._timer = Timer(steps, self._seconds) if steps or self._seconds else None

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from here."""
        if self._timer is not None:
            self._timer.mark(self.model.optimizer.iterations)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        """Save if it is time on any worker."""
        if self._timer is not None:
            due = self._timer.is_due(self.model.optimizer.iterations)
            if on_any_worker(self.model.strategy, due) if self._seconds else due:
                self.save()

    def save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        step = self.model.optimizer.iterations
        if self._timer is None or self._manager.step == step:
            return
        self._manager.save(step)
        self._timer.mark(step)
        stops = [listener.after_save(None, step) for listener in self._listeners]
        if any(stops):
            self.model.stop_training = True
