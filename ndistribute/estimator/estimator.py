"""`Estimator`: it trains, evaluates and predicts with the graph that a model function builds."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

import numpy as np

from ndistribute import tree
from ndistribute.context import get_strategy
from ndistribute.data import InputContext
from ndistribute.estimator.replicas import Batches, Replica, Replicas, build, dataset_of, is_empty
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.spec import (
    EstimatorSpec,
    EvalSpec,
    ModeKeys,
    TrainSpec,
    check_input,
    check_steps,
)
from ndistribute.event_files import EventFile
from ndistribute.graph import metrics
from ndistribute.graph.devices import replica_device_setter
from ndistribute.graph.graph import Graph, get_default_graph
from ndistribute.graph.hooks import LoggingTensorHook, NanTensorHook, StopAtStepHook
from ndistribute.graph.monitored import MonitoredTrainingSession, Scaffold
from ndistribute.graph.saver import latest_checkpoint
from ndistribute.graph.variables import get_or_create_global_step
from ndistribute.models.checkpoint import by_chief, read_newest

_log = logging.getLogger("ndistribute")

InputFn = Callable[..., Any]


class Estimator:
    """A model that is trained, evaluated and used through its checkpoints.

    Each call builds a new graph by the model function, and starts from the newest checkpoint in the
    model's directory. With a strategy of several replicas, each replica runs a graph of its own on
    batches of its own, and `minimize` follows the mean of the replicas' gradients: that of the mean
    of their losses. With ``ps`` tasks in the cluster, variables are on the servers, and each worker
    trains on its own batches without waiting for others.

    Args:
        model_fn: called with ``features`` and any of ``labels``, ``mode``, ``params``, ``config``,
            by name, when a graph is the default one; returns an `EstimatorSpec`.
        model_dir: the directory of checkpoints and summaries; None: that of `config`, else a new
            temporary one.
        config: a `RunConfig`; None: the default one.
        params: a dict for the model function.

    Raises:
        ValueError: the model function has other arguments, or model_dir contradicts `config`.

    >>> from ndistribute import graph
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
    >>> [one["y"].round(2) for one in estimator.predict(lambda: x)]
    [array([2.]), array([3.])]
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        if config is not None and not isinstance(config, RunConfig):
            raise TypeError(f"config must be a RunConfig, got {config!r}.")
        self.config = _with_directory(config or RunConfig(), model_dir)
        self.model_dir = str(self.config.model_dir)
        self.params = copy.deepcopy(dict(params or {}))
        self.model_fn = model_fn
        _check_model_fn(model_fn, params)

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
            input_fn: called with any of ``mode``, ``params``, ``config`` and ``input_context``, by
                name; returns a dataset of batches, or one batch, which each step gets. A batch is
                features, an array or a dict of arrays, or a tuple of these and labels. Each replica
                takes its own next batch, so batches have the size of one replica's.
            hooks: `SessionRunHook` objects of the first replica's session.
            steps: the number of steps to make.
            max_steps: the global step to stop at, counted over all calls.
            saving_listeners: `CheckpointSaverListener` objects.

        Raises:
            ValueError: both `steps` and `max_steps` are given, one is not above 0, or the input is
                empty.
        """
        if steps is not None and max_steps is not None:
            raise ValueError("train got both steps and max_steps: pass one of them.")
        check_steps(steps, "train: steps")
        check_steps(max_steps, "train: max_steps")
        check_input(input_fn, "train")
        self.train_model(TrainSpec(input_fn, max_steps, hooks or (), saving_listeners or ()), steps)
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
            name: the name of the evaluation, if there are several.

        Returns:
            The metrics of the model function by name, ``"loss"``, the mean of the batches' losses,
            and ``"global_step"``. They are those of all batches, however many replicas shared them.
        """
        check_steps(steps, "evaluate: steps")
        check_input(input_fn, "evaluate")
        strategy = self._strategy(self.config.eval_distribute)
        path = by_chief(strategy, lambda: self._path(checkpoint_path))
        spec = EvalSpec(input_fn, steps, name, hooks or ())
        found = self._metrics(strategy, spec, path)
        if strategy.is_chief:
            self._write_summary(found, name)
        return found

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
            yield_single_examples: whether to yield the predictions of each example; else those of
                each batch.

        Yields:
            A dict of arrays, or an array if the model function's predictions are one tensor.
        """
        check_input(input_fn, "predict")
        keys = [predict_keys] if isinstance(predict_keys, str) else predict_keys
        path = self._path(checkpoint_path)
        batches = self._predictions(input_fn, keys, hooks or (), path)
        return _examples(batches) if yield_single_examples else batches

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint, or None."""
        return latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the newest checkpoint."""
        return sorted(self._tensors())

    def get_variable_value(self, name: str) -> Any:
        """Return the value of a variable in the newest checkpoint.

        Raises:
            KeyError: it has no such variable.
            ValueError: there is no checkpoint.
        """
        tensors = self._tensors()
        if name not in tensors:
            raise KeyError(f"the checkpoint has no variable {name!r}: it has {sorted(tensors)}.")
        return tensors[name]

    def eval_dir(self, name: str | None = None) -> str:
        """Return the directory of the summaries of an evaluation."""
        return str(Path(self.model_dir, f"eval_{name}" if name else "eval"))

    def train_model(
        self,
        spec: TrainSpec,
        steps: int | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Train as `train` does, and call a function after each step, outside of replicas."""
        max_steps = spec.max_steps
        strategy = self._training_strategy()
        start = by_chief(strategy, self._global_step)
        if max_steps is not None and start >= max_steps:
            _log.info("no training: step %d is at or after max_steps=%d", start, max_steps)
            return
        with contextlib.ExitStack() as stack:
            batches = self._batches(strategy, spec.input_fn, ModeKeys.TRAIN)
            stack.callback(batches.close)
            replicas = self._replicas(strategy, batches, ModeKeys.TRAIN)
            first = replicas.first
            stop = [] if steps is max_steps is None else [StopAtStepHook(steps, max_steps)]
            stack.enter_context(first.graph.as_default())
            session = self._training_session(replicas, [*stop, *spec.hooks], spec.saving_listeners)
            replicas.open(stack, session)

            def step(part: Any) -> None:
                replica = replicas.current()
                replica.run(replica.spec.train_op, part)

            if first.session.should_stop():  # A hook has asked for it with the new session.
                return
            for batch in batches.full():
                strategy.run(step, (batch,))
                after_step()
                if first.session.should_stop():
                    break

    def _training_session(
        self, replicas: Replicas, hooks: Sequence[Any], listeners: Sequence[Any]
    ) -> Any:
        """Return the session of the first replica, which the hooks watch."""
        config, spec = self.config, replicas.first.spec
        chief = self.config.is_chief and replicas.strategy.is_chief
        step = get_or_create_global_step()
        watching = [NanTensorHook(spec.loss), *hooks, *spec.training_hooks]
        if config.log_step_count_steps:
            shown = {"loss": spec.loss, "step": step}
            watching.append(LoggingTensorHook(shown, every_n_iter=config.log_step_count_steps))
        scaffold = spec.scaffold or Scaffold()
        scaffold.max_to_keep = config.keep_checkpoint_max
        scaffold.listeners = listeners
        # Without servers, another worker's session is a chief's that keeps no files.
        own = not chief and not config.master
        return MonitoredTrainingSession(
            master=config.master,
            is_chief=chief or own,
            checkpoint_dir=None if own else self.model_dir,
            scaffold=scaffold,
            hooks=watching,
            chief_only_hooks=[] if own else spec.training_chief_hooks,
            save_checkpoint_secs=config.save_checkpoints_secs,
            save_checkpoint_steps=config.save_checkpoints_steps,
            save_summaries_steps=config.save_summary_steps or 0,
            config=config.session_config,
            log_step_count_steps=config.log_step_count_steps,
        )

    def _metrics(self, strategy: Any, spec: EvalSpec, path: str | None) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            batches = self._batches(strategy, spec.input_fn, ModeKeys.EVAL)
            stack.callback(batches.close)
            replicas = self._replicas(strategy, batches, ModeKeys.EVAL)
            results = [_with_metrics(replica) for replica in replicas.all]
            first = replicas.first
            stack.enter_context(first.graph.as_default())
            watching = [*spec.hooks, *first.spec.evaluation_hooks]
            path = path if strategy.is_chief else None  # The others get its values.
            replicas.open(stack, _restored(first.spec, path, watching))

            def step(part: Any) -> None:
                replica = replicas.current()
                if not is_empty(part):
                    replica.run(results[replicas.all.index(replica)][1], part)

            for batch in itertools.islice(batches, spec.steps):
                strategy.run(step, (batch,))
                if first.session.should_stop():
                    break
            replicas.sum_up_metrics()
            found = first.raw.run(results[0][0])
        return {key: one.item() if np.ndim(one) == 0 else one for key, one in found.items()}

    def _predictions(
        self, input_fn: InputFn, keys: Sequence[str] | None, hooks: Sequence[Any], path: str | None
    ) -> Iterator[Any]:
        """Yield the predictions for each batch."""
        given = self._input(input_fn, ModeKeys.PREDICT, InputContext())
        batches = iter(dataset_of(given, repeated=False))
        batch = next(batches, None)
        if batch is None:
            return
        replica = build(
            lambda features, _: self._call(features, None, ModeKeys.PREDICT),
            batch[0] if isinstance(batch, tuple) else batch,
            seed=self.config.tf_random_seed,
        )
        fetches = chosen(replica.spec.predictions, keys)
        with replica.graph.as_default():
            watching = [*hooks, *replica.spec.prediction_hooks]
            replica.session = _restored(replica.spec, path, watching)
        try:
            for one in itertools.chain([batch], batches):
                yield replica.run(fetches, one[0] if isinstance(one, tuple) else one)
                if replica.session.should_stop():
                    break
        finally:
            replica.session.close()

    def _training_strategy(self) -> Any:
        """Return the strategy that runs the replicas of this process."""
        given = self.config.train_distribute
        if self.config.master and given is not None and given.cluster_resolver is not None:
            given = None  # The servers of the cluster keep the variables, and each worker is alone.
        return self._strategy(given)

    def _strategy(self, given: Any) -> Any:
        return given or get_strategy()

    def _batches(self, strategy: Any, input_fn: InputFn, mode: str) -> Batches:
        config, context = self.config, None
        training = mode == ModeKeys.TRAIN
        if training and config.master:
            context = InputContext(config.num_worker_replicas, config.resolver.worker_index or 0)
        return Batches(
            strategy,
            lambda own: dataset_of(self._input(input_fn, mode, context or own), repeated=training),
        )

    def _input(self, input_fn: InputFn, mode: str, context: InputContext) -> Any:
        with Graph().as_default():  # The graph of a training that is under way is final.
            return self._called(input_fn, mode, input_context=context)

    def _replicas(self, strategy: Any, batches: Batches, mode: str) -> Replicas:
        def make(features: Any, labels: Any) -> EstimatorSpec:
            get_default_graph().replicated = strategy.num_replicas_in_sync > 1
            return self._call(features, labels, mode)

        with strategy.scope():
            replicas = [
                build(
                    make,
                    batches.example(rank),
                    seed=self.config.tf_random_seed,
                    rank=one.replica_id_in_sync_group,
                    device=self._device(mode),
                )
                for rank, one in enumerate(strategy.replica_contexts)
            ]
        return Replicas(strategy, replicas)

    def _device(self, mode: str) -> Any:
        """Return what places operations; None: nothing, so that they are in this process."""
        config = self.config
        if mode != ModeKeys.TRAIN or not (config.device_fn or config.master):
            return None
        return config.device_fn or replica_device_setter(
            cluster=config.cluster_spec,
            worker_device=f"/job:{config.task_type}/task:{config.task_id}",
        )

    def _call(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Return what the model function makes of features and labels."""
        if labels is not None and "labels" not in _arguments(self.model_fn):
            raise ValueError("input_fn gave labels, and the model function does not take any.")
        spec = self._called(self.model_fn, mode, features=features, labels=labels)
        if not isinstance(spec, EstimatorSpec):
            raise TypeError(f"the model function must return an EstimatorSpec, got {spec!r}.")
        if spec.mode != mode:
            raise ValueError(f"the EstimatorSpec is for mode {spec.mode!r}, expected {mode!r}.")
        return spec

    def _called(self, function: Callable[..., Any], mode: str, **more: Any) -> Any:
        """Return the result of a function, called with those of the arguments that it takes."""
        params = copy.deepcopy(self.params)  # Which the function may change.
        known = {"mode": mode, "params": params, "config": self.config, **more}
        arguments = _arguments(function)
        return function(**{name: value for name, value in known.items() if name in arguments})

    def _path(self, given: str | os.PathLike[str] | None) -> str | None:
        path = self.latest_checkpoint() if given is None else str(given)
        if path is None:
            _log.info("there is no checkpoint in %s: variables are initialized", self.model_dir)
        return path

    def _global_step(self) -> int:
        return int(self.get_variable_value("global_step")) if self.latest_checkpoint() else 0

    def _tensors(self) -> Mapping[str, Any]:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(f"there is no checkpoint in {self.model_dir}: train first.")
        return read_newest(Path(path))[1]

    def _write_summary(self, found: Mapping[str, Any], name: str | None) -> None:
        scalars = {key: float(one) for key, one in found.items() if np.ndim(one) == 0}
        step = int(scalars.pop("global_step"))
        _log.info("evaluation at step %d: %s", step, scalars)
        with EventFile(self.eval_dir(name)) as file:
            file.scalars(scalars, step)


def _with_directory(config: RunConfig, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    given = None if model_dir is None else str(model_dir)
    if given and config.model_dir and given != config.model_dir:
        raise ValueError(
            f"model_dir is {given!r}, and that of config is {config.model_dir!r}: pass one of them."
        )
    chosen = given or config.model_dir
    if chosen is None:
        chosen = mkdtemp(prefix="estimator-")
        _log.warning("an estimator without model_dir keeps its checkpoints in %s", chosen)
    return config.replace(model_dir=chosen)


def _check_model_fn(model_fn: Any, params: Any) -> None:
    if not callable(model_fn):
        raise TypeError(f"model_fn must be a function, got {model_fn!r}.")
    arguments = _arguments(model_fn)
    known = {"features", "labels", "mode", "params", "config"}
    if "features" not in arguments:
        raise ValueError(f"model_fn must have an argument features; it has {list(arguments)}.")
    if params and "params" not in arguments:
        raise ValueError("params were given, and model_fn has no argument params.")
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ValueError(f"model_fn has unknown arguments {unknown}: use any of {sorted(known)}.")


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function, but for those that a `partial` gives."""
    given = function.keywords if isinstance(function, functools.partial) else {}
    return [name for name in inspect.signature(function).parameters if name not in given]


def _with_metrics(replica: Replica) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the metrics of an evaluation, and what updates them by a batch."""
    spec = replica.spec
    for name in ("loss", "global_step"):
        if name in spec.eval_metric_ops:
            raise ValueError(f"a metric cannot have the name {name!r}: estimators add it.")
    with replica.graph.as_default():
        pairs = {**spec.eval_metric_ops, "loss": metrics.mean(spec.loss, name="loss")}
        values: dict[str, Any] = {name: value for name, (value, _) in pairs.items()}
        values["global_step"] = get_or_create_global_step()
    return values, {name: update for name, (_, update) in pairs.items()}


def _restored(spec: EstimatorSpec, path: str | None, hooks: Sequence[Any]) -> Any:
    """Return a session of the default graph with the values of a checkpoint, if there is one."""
    scaffold = spec.scaffold or Scaffold()
    if path is not None:
        scaffold.init_fn = lambda own, session: own.saver.restore(session, path)
    return MonitoredTrainingSession(scaffold=scaffold, hooks=hooks)


def chosen(predictions: Any, keys: Sequence[str] | None) -> Any:
    """Return the predictions of some names; None: all."""
    if keys is None:
        return predictions
    there = predictions if isinstance(predictions, Mapping) else {}
    unknown = [key for key in keys if key not in there]
    if unknown:
        raise ValueError(f"there are no predictions {unknown}: there are {list(there)}.")
    return {key: predictions[key] for key in keys}


def _examples(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the predictions for each example of batches."""
    for batch in batches:
        lengths = {len(one) if np.ndim(one) else -1 for one in tree.flatten(batch)}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(
                "predictions must have an entry for each example; their lengths are "
                f"{sorted(lengths)}. Pass yield_single_examples=False for others."
            )
        for row in range(lengths.pop()):
            yield tree.map_leaves(lambda one, row=row: one[row], batch)
