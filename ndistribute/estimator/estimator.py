"""`Estimator`, which trains, evaluates and predicts with the graph of a model function."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NoReturn, Self

import numpy as np

from ndistribute import tree
from ndistribute.estimator import specs
from ndistribute.estimator.loops import GraphLoops, InputFn, called, check_model_fn
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.specs import EstimatorSpec, EvalSpec, TrainSpec, check_input, check_steps
from ndistribute.event_files import EventFile
from ndistribute.models.checkpoint import by_chief, read_newest

_log = logging.getLogger("ndistribute")


class Estimator:
    """A model that trains, evaluates and predicts, and keeps its state in checkpoints.

    Each call builds a new graph with the model function, and starts from the newest checkpoint in
    the model's directory. With a strategy of several replicas, each replica runs its own graph on
    its own batches, and `minimize` applies the mean of the replicas' gradients. This is the
    gradient of the mean of their losses. With ``ps`` tasks in the cluster, the servers keep the
    variables, and each worker trains on its own batches without waiting for others.

    Args:
        model_fn: a function that builds the model in the default graph and returns an
            `EstimatorSpec`. It is called with ``features`` and any of ``labels``, ``mode``,
            ``params``, ``config``, by name.
        model_dir: the directory of checkpoints and summaries; None: the directory of `config`, or a
            new temporary directory.
        config: a `RunConfig`; None: the default configuration.
        params: a dict for the model function.
        warm_start_from: a checkpoint, or a directory of checkpoints, with the initial values of the
            trainable variables; or `WarmStartSettings` for some of the variables.

    Raises:
        ValueError: the model function has unknown arguments, or `model_dir` contradicts `config`.

    >>> from ndistribute import graph
    >>> from ndistribute.estimator.specs import ModeKeys
    >>> def model_fn(features, labels, mode):
    ...     w = graph.Variable(np.zeros((2, 1)), name="w")
    ...     predictions = features @ w
    ...     if mode == ModeKeys.PREDICT:
    ...         return EstimatorSpec(mode, predictions={"y": predictions})
    ...     loss = np.mean(np.square(predictions - labels))
    ...     step = graph.get_or_create_global_step()
    ...     train_op = graph.GradientDescentOptimizer(0.2).minimize(loss, global_step=step)
    ...     return EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> estimator = Estimator(model_fn)
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> estimator.train(lambda: (x, x @ [[2.0], [3.0]]), steps=200).latest_checkpoint() is not None
    True
    >>> [each["y"].round(2) for each in estimator.predict(lambda: x)]
    [array([2.]), array([3.])]
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: specs.WarmStart = None,
    ) -> None:
        if config is not None and not isinstance(config, RunConfig):
            raise TypeError(f"config must be a RunConfig, got {config!r}.")
        self.config = _with_directory(config or RunConfig(), model_dir)
        self.model_dir = str(self.config.model_dir)
        self.params = copy.deepcopy(dict(params or {}))
        self.model_fn = model_fn
        check_model_fn(model_fn, params)
        if isinstance(warm_start_from, str | os.PathLike):
            warm_start_from = specs.WarmStartSettings(str(warm_start_from))
        self.loops: Any = GraphLoops(model_fn, self.config, self.params)
        self.loops.warm_start = warm_start_from

    def train(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Self:
        """Train until the steps are made, the input ends, or a hook asks to stop.

        Args:
            input_fn: a function that returns a dataset of batches, or one batch, which each step
                gets. It is called with any of ``mode``, ``params``, ``config`` and
                ``input_context``, by name. A batch is features, or a tuple of features and labels.
                Features are an array or a dict of arrays. Each replica takes its own next batch, so
                a batch has the size for one replica.
            hooks: `SessionRunHook` objects of the first replica's session.
            steps: the number of steps to make.
            max_steps: the global step at which to stop, counted over all calls.
            saving_listeners: `CheckpointSaverListener` objects.

        Raises:
            ValueError: both `steps` and `max_steps` are passed, one of them is not above 0, or the
                input is empty.
        """
        if steps is not None and max_steps is not None:
            raise ValueError("train got both steps and max_steps: pass one of them.")
        check_steps(steps, "train: steps")
        spec = TrainSpec(input_fn, max_steps, hooks or (), saving_listeners or ())
        self.loops.train(spec, steps)
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return the metrics over the batches of an input function.

        Args:
            input_fn: see `train`.
            steps: the number of steps; None: until the input ends.
            hooks: `SessionRunHook` objects of the first replica's session.
            checkpoint_path: the checkpoint; None: the newest one, or initial values without one.
            name: the name of the evaluation; pass it if you make several.

        Returns:
            The metrics of the model function by name, ``"loss"``, the mean of the batches' losses,
            and ``"global_step"``. They cover all batches, however many replicas share these.
        """
        spec = EvalSpec(input_fn, steps, name, hooks or ())
        strategy = self.loops.strategy(self.config.eval_distribute)
        path = by_chief(strategy, lambda: self._path(checkpoint_path))
        metrics: dict[str, Any] = self.loops.evaluate(strategy, spec, path)
        if strategy.is_chief:
            self._write_summary(metrics, name)
        return metrics

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Return an iterator over the predictions for the examples of an input function, in order.

        Args:
            input_fn: see `train`; labels are ignored. All batches go to one replica.
            predict_keys: the names of the predictions to compute; None: all.
            hooks: `SessionRunHook` objects.
            checkpoint_path: the checkpoint; None: the newest one, or initial values without one.
            yield_single_examples: whether to yield the predictions of each example instead of those
                of each batch.

        Yields:
            A dict of arrays, or an array if the model function's predictions are one tensor.
        """
        check_input(input_fn, "predict")
        keys = [predict_keys] if isinstance(predict_keys, str) else predict_keys
        path = self._path(checkpoint_path)
        batches = self.loops.predict(input_fn, keys, hooks or (), path)
        return _examples(batches) if yield_single_examples else batches

    def export_saved_model(self, *args: Any, **options: Any) -> NoReturn:
        """Raise `NotImplementedError`: an estimator has no export."""
        why = (
            "train a model with tf.keras.estimator.model_to_estimator, and call export of the model"
        )
        raise NotImplementedError(
            f"an estimator has no export: {why}; or use the checkpoints of the estimator."
        )

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint, or None."""
        path = self.loops.latest_checkpoint(self.model_dir)
        return None if path is None else str(path)

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the newest checkpoint."""
        return sorted(self._tensors())

    def get_variable_value(self, name: str) -> Any:
        """Return the value of a variable in the newest checkpoint.

        Raises:
            KeyError: the checkpoint has no such variable.
            ValueError: there is no checkpoint.
        """
        tensors = self._tensors()
        if name not in tensors:
            raise KeyError(f"the checkpoint has no variable {name!r}: it has {sorted(tensors)}.")
        return tensors[name]

    def eval_dir(self, name: str | None = None) -> str:
        """Return the directory of the summaries of an evaluation."""
        return str(Path(self.model_dir, f"eval_{name}" if name else "eval"))

    def _path(self, checkpoint_path: str | os.PathLike[str] | None) -> str | None:
        path = self.latest_checkpoint() if checkpoint_path is None else str(checkpoint_path)
        if path is None:
            _log.info(
                "there is no checkpoint in %s: the variables have their initial values",
                self.model_dir,
            )
        return path

    def _tensors(self) -> Mapping[str, Any]:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(f"there is no checkpoint in {self.model_dir}: train first.")
        return read_newest(Path(path))[1]

    def _write_summary(self, metrics: Mapping[str, Any], name: str | None) -> None:
        scalars = {key: float(value) for key, value in metrics.items() if np.ndim(value) == 0}
        step = int(scalars.pop("global_step"))
        _log.info("evaluation at step %d: %s", step, scalars)
        with EventFile(self.eval_dir(name)) as file:
            file.scalars(scalars, step)


def add_metrics(estimator: Estimator, metric_fn: Callable[..., Mapping[str, Any]]) -> Estimator:
    """Return an estimator with the same directory, whose evaluations have additional metrics.

    Args:
        estimator: the estimator of a graph.
        metric_fn: called with any of ``features``, ``labels``, ``predictions`` and ``config``, by
            name; returns the pairs of `graph.metrics` by name.

    Raises:
        ValueError: the estimator was made by `model_to_estimator`: a model gets its metrics in
            `compile`.
    """
    check_graph(estimator, "add_metrics", "pass metrics to compile")

    def model_fn(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        known = {"features": features, "labels": labels, "config": config}
        spec: EstimatorSpec = called(estimator.model_fn, known | {"mode": mode, "params": params})
        if mode != specs.ModeKeys.EVAL:
            return spec
        added = called(metric_fn, known | {"predictions": spec.predictions})
        return dataclasses.replace(spec, eval_metric_ops={**(spec.eval_metric_ops or {}), **added})

    more = Estimator(model_fn, config=estimator.config, params=estimator.params)
    more.loops.warm_start = estimator.loops.warm_start
    return more


def check_graph(estimator: Estimator, what: str, instead: str) -> None:
    """Raise ValueError if an estimator was made from a model."""
    if not isinstance(estimator.loops, GraphLoops):
        raise ValueError(
            f"{what} needs an estimator with a model_fn; for an estimator of a model, {instead}."
        )


def _with_directory(config: RunConfig, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    directory = None if model_dir is None else str(model_dir)
    if directory and config.model_dir and directory != config.model_dir:
        both = f"model_dir is {directory!r}, and that of config is {config.model_dir!r}"
        raise ValueError(f"{both}: pass one of them.")
    chosen = directory or config.model_dir
    if chosen is None:
        chosen = mkdtemp(prefix="estimator-")
        _log.warning("an estimator without model_dir keeps its checkpoints in %s", chosen)
    return config.replace(model_dir=chosen)


def _examples(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the predictions for each example of batches."""
    for batch in batches:
        lengths = {len(values) if np.ndim(values) else -1 for values in tree.flatten(batch)}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(
                "predictions must have an entry for each example, but their lengths are "
                f"{sorted(lengths)}. Pass yield_single_examples=False to get whole batches."
            )
        for row in range(lengths.pop()):
            yield tree.map_leaves(lambda values, row=row: values[row], batch)
