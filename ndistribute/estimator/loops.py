"""The loops of estimators on graphs: training, evaluation and prediction under a strategy.

`ModelLoops` has the same methods for a compiled model, so an `Estimator` has either.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.context import get_strategy
from ndistribute.data import InputContext
from ndistribute.estimator.replicas import Batches, Replica, Replicas, build, dataset_of
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.spec import EstimatorSpec, EvalSpec, ModeKeys, TrainSpec
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


class GraphLoops:
    """Run the graphs that a model function builds.

    Args:
        model_fn: see `Estimator`.
        config: has the directory of checkpoints, too.
        params: for the model function and for input functions.
    """

    latest_checkpoint = staticmethod(latest_checkpoint)

    def __init__(
        self, model_fn: Callable[..., Any], config: RunConfig, params: Mapping[str, Any]
    ) -> None:
        self._model_fn, self._config, self._params = model_fn, config, params

    def strategy(self, configured: Any) -> Any:
        """Return the strategy that a `RunConfig` has, or that of the current scope."""
        return configured or get_strategy()

    def train(
        self,
        spec: TrainSpec,
        steps: int | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Train as `Estimator.train` does; call a function after each step, outside of replicas."""
        config, max_steps = self._config, spec.max_steps
        configured = config.train_distribute
        if config.master and getattr(configured, "cluster_resolver", None) is not None:
            configured = None  # The servers keep the variables, and each worker is alone.
        strategy = self.strategy(configured)
        start = by_chief(strategy, self._global_step)
        if max_steps is not None and start >= max_steps:
            _log.info("no training: step %d is at or after max_steps=%d", start, max_steps)
            return
        stop = [] if steps is max_steps is None else [StopAtStepHook(steps, max_steps)]
        session = functools.partial(
            self._training_session, [*stop, *spec.hooks], spec.saving_listeners
        )
        with self._opened(strategy, spec.input_fn, ModeKeys.TRAIN, session) as (batches, replicas):
            replicas.run(batches.full(), after_step)

    def evaluate(self, strategy: Any, spec: EvalSpec, path: str | None) -> dict[str, Any]:
        """Return the metrics over the batches of an input function, with a checkpoint's values."""

        def session(replicas: Replicas) -> Any:
            first = replicas.first.spec
            # Other workers get the chief's values.
            own = path if strategy.is_chief else None
            return _restored(first, own, [*spec.hooks, *first.evaluation_hooks])

        with self._opened(strategy, spec.input_fn, ModeKeys.EVAL, session) as (batches, replicas):
            replicas.run(itertools.islice(batches, spec.steps))
            replicas.sum_up_metrics()
            values = replicas.first.raw.run(replicas.first.results)
        return {key: one.item() if np.ndim(one) == 0 else one for key, one in values.items()}

    def predict(
        self, input_fn: InputFn, keys: Sequence[str] | None, hooks: Sequence[Any], path: str | None
    ) -> Iterator[Any]:
        """Yield the predictions of some names, or all, for each batch of an input function."""
        data = self._input(input_fn, ModeKeys.PREDICT, InputContext())
        batches = iter(dataset_of(data, repeated=False))
        batch = next(batches, None)
        if batch is None:
            return
        replica = build(
            functools.partial(self._call, ModeKeys.PREDICT),
            features_of(batch),
            seed=self._config.tf_random_seed,
        )
        replica.fetches = chosen(replica.spec.predictions, keys)
        with replica.graph.as_default():
            watching = [*hooks, *replica.spec.prediction_hooks]
            replica.session = _restored(replica.spec, path, watching)
        with contextlib.closing(replica.session):
            for part in itertools.chain([batch], batches):
                yield replica.run(features_of(part))
                if replica.session.should_stop():
                    break

    def _training_session(
        self, hooks: Sequence[Any], listeners: Sequence[Any], replicas: Replicas
    ) -> Any:
        """Return the session of the first replica, which the hooks watch."""
        config, spec = self._config, replicas.first.spec
        chief = config.is_chief and replicas.strategy.is_chief
        step = get_or_create_global_step()
        watching = [NanTensorHook(spec.loss), *hooks, *spec.training_hooks]
        if config.log_step_count_steps:
            shown = {"loss": spec.loss, "step": step}
            watching.append(LoggingTensorHook(shown, every_n_iter=config.log_step_count_steps))
        scaffold = spec.scaffold or Scaffold()
        scaffold.max_to_keep = config.keep_checkpoint_max
        scaffold.listeners = listeners
        # Without servers, another worker's session is a chief's that keeps no files.
        keeps_files = chief or bool(config.master)
        return MonitoredTrainingSession(
            master=config.master,
            is_chief=chief or not keeps_files,
            checkpoint_dir=config.model_dir if keeps_files else None,
            scaffold=scaffold,
            hooks=watching,
            chief_only_hooks=spec.training_chief_hooks if keeps_files else [],
            save_checkpoint_secs=config.save_checkpoints_secs,
            save_checkpoint_steps=config.save_checkpoints_steps,
            save_summaries_steps=config.save_summary_steps or 0,
            config=config.session_config,
            log_step_count_steps=config.log_step_count_steps,
        )

    @contextlib.contextmanager
    def _opened(
        self, strategy: Any, input_fn: InputFn, mode: str, session: Callable[[Replicas], Any]
    ) -> Iterator[tuple[Batches, Replicas]]:
        """Return a context manager with the batches and the replicas, whose sessions are open."""
        config, context = self._config, None
        training = mode == ModeKeys.TRAIN
        if training and config.master:
            context = InputContext(config.num_worker_replicas, config.resolver.worker_index or 0)

        def source(of_strategy: InputContext) -> Any:
            data = self._input(input_fn, mode, context or of_strategy)
            return dataset_of(data, repeated=training)

        with contextlib.ExitStack() as stack:
            batches = stack.enter_context(contextlib.closing(Batches(strategy, source)))
            replicas = self._replicas(strategy, batches, mode)
            stack.enter_context(replicas.first.graph.as_default())
            replicas.open(stack, session(replicas))
            yield batches, replicas

    def _replicas(self, strategy: Any, batches: Batches, mode: str) -> Replicas:
        def make(features: Any, labels: Any) -> EstimatorSpec:
            get_default_graph().replicated = strategy.num_replicas_in_sync > 1
            return self._call(mode, features, labels)

        with strategy.scope():
            replicas = [
                build(
                    make,
                    batches.example(rank),
                    seed=self._config.tf_random_seed,
                    rank=context.replica_id_in_sync_group,
                    device=self._device() if mode == ModeKeys.TRAIN else None,
                )
                for rank, context in enumerate(strategy.replica_contexts)
            ]
        for replica in replicas:
            replica.fetches = replica.spec.train_op
            if mode == ModeKeys.EVAL:
                _add_metrics(replica)
        return Replicas(strategy, replicas)

    def _device(self) -> Any:
        """Return what places operations; None: nothing, so that they are in this process."""
        config = self._config
        if config.device_fn or not config.master:
            return config.device_fn
        worker = f"/job:{config.task_type}/task:{config.task_id}"
        return replica_device_setter(cluster=config.cluster_spec, worker_device=worker)

    def _global_step(self) -> int:
        path = latest_checkpoint(str(self._config.model_dir))
        return 0 if path is None else int(read_newest(Path(path))[1]["global_step"])

    def _input(self, input_fn: InputFn, mode: str, context: InputContext) -> Any:
        return called_input(input_fn, mode, context, self._config, self._params)

    def _call(self, mode: str, features: Any, labels: Any) -> EstimatorSpec:
        """Return what the model function makes of features and labels."""
        if labels is not None and "labels" not in _arguments(self._model_fn):
            raise ValueError("input_fn gave labels, and the model function does not take any.")
        known = {"features": features, "labels": labels, "mode": mode, "config": self._config}
        spec = _called(self._model_fn, self._params, known)
        if not isinstance(spec, EstimatorSpec):
            raise TypeError(f"the model function must return an EstimatorSpec, got {spec!r}.")
        if spec.mode != mode:
            raise ValueError(f"the EstimatorSpec is for mode {spec.mode!r}, expected {mode!r}.")
        return spec


def check_model_fn(model_fn: Any, params: Any) -> None:
    """Raise an error unless a model function has the arguments that it may have."""
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


def called_input(
    input_fn: InputFn, mode: str, context: InputContext, config: RunConfig, params: Any
) -> Any:
    """Return what an input function returns, called with those of the arguments that it takes."""
    with Graph().as_default():  # The graph of a training that is under way is final.
        known = {"mode": mode, "config": config, "input_context": context}
        return _called(input_fn, params, known)


def _called(function: Callable[..., Any], params: Any, known: Mapping[str, Any]) -> Any:
    # The function may change its params.
    values = {"params": copy.deepcopy(params), **known}
    arguments = _arguments(function)
    return function(**{name: value for name, value in values.items() if name in arguments})


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function, but for those that a `partial` gives."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return [name for name in inspect.signature(function).parameters if name not in bound]


def _add_metrics(replica: Replica) -> None:
    """Let a replica compute the metrics of an evaluation: their values, and updates by a batch."""
    spec = replica.spec
    for name in ("loss", "global_step"):
        if name in spec.eval_metric_ops:
            raise ValueError(f"a metric cannot have the name {name!r}: estimators add it.")
    with replica.graph.as_default():
        pairs = {**spec.eval_metric_ops, "loss": metrics.mean(spec.loss, name="loss")}
        replica.results = {name: value for name, (value, _) in pairs.items()}
        replica.results["global_step"] = get_or_create_global_step()
    replica.fetches = {name: update for name, (_, update) in pairs.items()}


def _restored(spec: EstimatorSpec, path: str | None, hooks: Sequence[Any]) -> Any:
    """Return a session of the default graph with the values of a checkpoint, if there is one."""
    scaffold = spec.scaffold or Scaffold()
    if path is not None:
        scaffold.init_fn = lambda own, session: own.saver.restore(session, path)
    return MonitoredTrainingSession(scaffold=scaffold, hooks=hooks)


def features_of(batch: Any) -> Any:
    """Return the features of a batch, which may have labels."""
    return batch[0] if isinstance(batch, tuple) else batch


def chosen(predictions: Any, keys: Sequence[str] | None) -> Any:
    """Return the predictions of some names; None: all."""
    if keys is None:
        return predictions
    known = predictions if isinstance(predictions, Mapping) else {}
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(f"there are no predictions {unknown}: there are {list(known)}.")
    return {key: predictions[key] for key in keys}
