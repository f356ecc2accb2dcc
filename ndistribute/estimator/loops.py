"""The loops of estimators on graphs: training, evaluation and prediction under a strategy.

Each replica has its own graph, made by the same model function, and a session with its own copies
of the variables, which begin equal. A step runs all sessions, each on its replica's thread. The
replicas combine their gradients in the step, so the variables stay equal. `ModelLoops` has the same
methods for a compiled model; an `Estimator` uses one of the two.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute import graph as g
from ndistribute import tree
from ndistribute.context import get_replica_context, get_strategy
from ndistribute.data import Dataset, InputContext
from ndistribute.data.dataset import as_dataset
from ndistribute.devices import to_host
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.specs import EstimatorSpec, EvalSpec, ModeKeys, TrainSpec
from ndistribute.graph.iterators import iterator_of
from ndistribute.graph.ops import op_named
from ndistribute.graph.partition import pruned
from ndistribute.graph.variables import GLOBAL_VARIABLES, METRIC_VARIABLES
from ndistribute.mistakes import count_of
from ndistribute.models.batches import unpacked
from ndistribute.models.checkpoint import by_chief, on_any_worker, read_newest
from ndistribute.strategies import TPUStrategy

_log = logging.getLogger("ndistribute")

InputFn = Callable[..., Any]
AfterStep = Callable[[], None]


class GraphLoops:
    """The loops that run the graphs of a model function.

    Args:
        model_fn: see `Estimator`.
        config: a `RunConfig`, which also has the directory of checkpoints.
        params: the parameters for the model function and input functions.
    """

    latest_checkpoint = staticmethod(g.latest_checkpoint)

    def __init__(
        self, model_fn: Callable[..., Any], config: RunConfig, params: Mapping[str, Any]
    ) -> None:
        self._model_fn, self._config, self._params = model_fn, config, params
        self.warm_start: Any = None
        """The `WarmStartSettings` of trainings; None: variables begin as the graph says."""

    def strategy(self, configured: Any) -> Any:
        """Return the strategy that a `RunConfig` has, or that of the current scope.

        Raises:
            ValueError: the strategy compiles its steps.
        """
        strategy = configured or get_strategy()
        if isinstance(strategy, TPUStrategy):
            raise ValueError(
                f"{strategy!r} cannot compile the graph of a model_fn: train an nd.Model with "
                "model_to_estimator, or use another strategy."
            )
        return strategy

    def train(
        self, spec: TrainSpec, steps: int | None = None, after_step: AfterStep = lambda: None
    ) -> None:
        """Train as `Estimator.train` does; call a function after each step, outside of replicas."""
        config, max_steps = self._config, spec.max_steps
        configured = config.train_distribute
        if config.master and getattr(configured, "cluster_resolver", None) is not None:
            configured = None  # The servers keep the variables, and each worker trains alone.
        strategy = self.strategy(configured)
        start = by_chief(strategy, self._global_step)
        if max_steps is not None and start >= max_steps:
            _log.info(
                "train has nothing to do: step %d is at or after max_steps=%d", start, max_steps
            )
            return
        stop = [] if steps is max_steps is None else [g.StopAtStepHook(steps, max_steps)]
        session = functools.partial(self._training_session, spec, stop)
        with self._opened(strategy, spec.input_fn, ModeKeys.TRAIN, session) as (batches, replicas):
            replicas.run(replicas.full(batches), after_step)

    def evaluate(self, strategy: Any, spec: EvalSpec, path: str | None) -> dict[str, Any]:
        """Return the metrics over the batches of an input function, with a checkpoint's values."""

        def session(replicas: Replicas) -> Any:
            first = replicas.first.spec
            # Other workers get the chief's values.
            restored = path if strategy.is_chief else None
            return _restored(first, restored, [*spec.hooks, *(first.evaluation_hooks or ())])

        with self._opened(strategy, spec.input_fn, ModeKeys.EVAL, session) as (batches, replicas):
            first = replicas.first.session
            some = itertools.islice(batches, spec.steps)
            replicas.run(itertools.takewhile(lambda _: not first.should_stop(), some))
            replicas.exchange(METRIC_VARIABLES, lambda values, ctx: ctx.all_reduce("sum", values))
            values = replicas.first.raw.run(replicas.first.results)
        return {name: value if np.ndim(value) else value.item() for name, value in values.items()}

    def predict(
        self, input_fn: InputFn, keys: Sequence[str] | None, hooks: Sequence[Any], path: str | None
    ) -> Iterator[Any]:
        """Yield the predictions of some names, or all, for each batch of an input function."""
        batches = self._dataset(input_fn, ModeKeys.PREDICT, InputContext())
        features = (unpacked(batch)[0] for batch in batches)
        first = next(features, None)
        if first is None:
            return
        replica = self._built(ModeKeys.PREDICT, first)
        replica.fetches = chosen(replica.spec.predictions, keys)
        with replica.graph.as_default():
            watching = [*hooks, *(replica.spec.prediction_hooks or ())]
            replica.session = _restored(replica.spec, path, watching)
        with contextlib.closing(replica.session):
            for part in itertools.chain([first], features):
                yield replica.run(part)
                if replica.session.should_stop():
                    break

    def _training_session(self, train: TrainSpec, stop: Sequence[Any], replicas: Replicas) -> Any:
        """Return the session of the first replica, which the hooks watch."""
        config, spec = self._config, replicas.first.spec
        chief = config.is_chief and replicas.strategy.is_chief
        step = g.get_or_create_global_step()
        watching = [g.NanTensorHook(spec.loss), *stop, *train.hooks, *(spec.training_hooks or ())]
        if config.log_step_count_steps:
            shown = {"loss": spec.loss, "step": step}
            watching.append(g.LoggingTensorHook(shown, every_n_iter=config.log_step_count_steps))
        scaffold = spec.scaffold or g.Scaffold()
        scaffold.max_to_keep = config.keep_checkpoint_max
        scaffold.listeners = train.saving_listeners
        # Without servers, each worker has the session of a chief; only the chief's keeps files.
        keeps_files = chief or bool(config.master)
        return g.MonitoredTrainingSession(
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
    ) -> Iterator[tuple[Iterable[Any], Replicas]]:
        """Return a context manager with the batches and the replicas, whose sessions are open."""
        config = self._config

        def source(context: InputContext) -> Any:
            if mode == ModeKeys.TRAIN and config.master:
                worker = config.resolver.worker_index or 0
                context = InputContext(config.num_worker_replicas, worker)
            return self._dataset(input_fn, mode, context)

        with contextlib.ExitStack() as stack:
            batches = iter(strategy.distribute_datasets_from_function(source))
            stack.enter_context(contextlib.closing(batches))
            batch = next(batches, None)
            if batch is None:
                raise ValueError("input_fn returned an empty dataset, without any batch.")
            ranks = [context.replica_id_in_sync_group for context in strategy.replica_contexts]
            several = strategy.num_replicas_in_sync > 1
            with strategy.scope():
                built = [
                    self._built(mode, example, rank, several)
                    for rank, example in zip(ranks, strategy.local_results(batch), strict=True)
                ]
            replicas = Replicas(strategy, built)
            stack.enter_context(replicas.first.graph.as_default())
            replicas.open(stack, session(replicas))
            yield itertools.chain([batch], batches), replicas

    def _built(self, mode: str, batch: Any, rank: int = 0, is_replicated: bool = False) -> Replica:
        """Return the graph of a replica, with placeholders for features and labels like a batch's.

        Each replica draws other random numbers.
        """
        graph, seed = g.Graph(), self._config.tf_random_seed
        graph.replicated = is_replicated
        if seed is not None:
            numbers = np.random.SeedSequence([seed, rank]).generate_state(1)
            graph.seed = int(numbers[0]) if rank else seed
        with graph.as_default(), graph.device(self._device() if mode == ModeKeys.TRAIN else None):
            g.get_or_create_global_step()
            features, labels = _split(batch)
            features = tree.map_leaves(_input, features)
            labels = None if labels is None else tree.map_leaves(_input, labels)
            spec = self._call(mode, features, labels)
            if mode == ModeKeys.TRAIN and self.warm_start is not None:
                self.warm_start.initialize()
        replica = Replica(graph, _arrays((features, labels)), spec, spec.train_op)
        if mode == ModeKeys.EVAL:
            _add_metrics(replica)
        return replica

    def _device(self) -> Any:
        """Return the function that places operations; None: all operations are in this process."""
        config = self._config
        if not config.master:
            return None
        worker = f"/job:{config.task_type}/task:{config.task_id}"
        return g.replica_device_setter(cluster=config.cluster_spec, worker_device=worker)

    def _global_step(self) -> int:
        path = g.latest_checkpoint(str(self._config.model_dir))
        return 0 if path is None else int(read_newest(Path(path))[1]["global_step"])

    def _dataset(self, input_fn: InputFn, mode: str, context: InputContext) -> Dataset:
        return dataset_from(input_fn, mode, context, self._config, self._params)

    def _call(self, mode: str, features: Any, labels: Any) -> EstimatorSpec:
        """Return the result of the model function for features and labels."""
        if labels is not None and "labels" not in arguments_of(self._model_fn):
            raise ValueError("input_fn returned labels, but model_fn has no argument labels.")
        known = {"features": features, "labels": labels, "mode": mode}
        known |= {"config": self._config, "params": self._params}
        spec = called(self._model_fn, known)
        if not isinstance(spec, EstimatorSpec):
            raise TypeError(f"the model function must return an EstimatorSpec, got {spec!r}.")
        if spec.mode != mode:
            raise ValueError(f"the EstimatorSpec is for mode {spec.mode!r}, expected {mode!r}.")
        return spec


def check_model_fn(model_fn: Any, params: Any) -> None:
    """Raise an error if a model function has unknown arguments."""
    if not callable(model_fn):
        raise TypeError(f"model_fn must be a function, got {model_fn!r}.")
    arguments = arguments_of(model_fn)
    known = {"features", "labels", "mode", "params", "config"}
    if "features" not in arguments:
        raise ValueError(f"model_fn must have an argument features; it has {list(arguments)}.")
    if params and "params" not in arguments:
        raise ValueError("the Estimator got params, but model_fn has no argument params.")
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ValueError(f"model_fn has unknown arguments {unknown}: use any of {sorted(known)}.")


def _add_metrics(replica: Replica) -> None:
    """Make a replica compute the metrics of an evaluation: their values, and updates by a batch."""
    spec = replica.spec
    pairs = {**(spec.eval_metric_ops or {})}
    for name in {"loss", "global_step"} & {*pairs}:
        raise ValueError(f"a metric cannot have the name {name!r}: estimators add it.")
    with replica.graph.as_default():
        pairs["loss"] = g.metrics.mean(spec.loss, name="loss")
        replica.results = {name: value for name, (value, _) in pairs.items()}
        replica.results["global_step"] = g.get_or_create_global_step()
    replica.fetches = {name: update for name, (_, update) in pairs.items()}


def _restored(spec: EstimatorSpec, path: str | None, hooks: Sequence[Any]) -> Any:
    """Return a session of the default graph with the values of a checkpoint, if there is one."""
    scaffold = spec.scaffold or g.Scaffold()
    if path is not None:
        scaffold.init_fn = lambda scaffold, session: scaffold.saver.restore(session, path)
    return g.MonitoredTrainingSession(scaffold=scaffold, hooks=hooks)


def chosen(predictions: Any, keys: Sequence[str] | None) -> Any:
    """Return the predictions of some names; None: all."""
    if keys is None:
        return predictions
    known = predictions if isinstance(predictions, Mapping) else {}
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(f"the predictions have no keys {unknown}: they have {list(known)}.")
    return {key: predictions[key] for key in keys}


@dataclass
class Replica:
    """The graph of a replica, and its session once it is open."""

    graph: g.Graph
    inputs: Sequence[g.Tensor]
    spec: EstimatorSpec
    fetches: Any = None  # What each step computes.
    results: Any = None  # The results of the last step: the metrics of an evaluation.
    session: Any = None

    @property
    def raw(self) -> Any:
        """The session without hooks."""
        return self.session.run_step_fn(lambda context: context.session)

    def run(self, batch: Any) -> Any:
        """Return what the session computes, on the host, for a batch."""
        values = map(to_host, _arrays(batch))
        return self.session.run(self.fetches, dict(zip(self.inputs, values, strict=True)))


@dataclass(frozen=True)
class Replicas:
    """The replicas of this process under a strategy."""

    strategy: Any
    all: Sequence[Replica]

    @property
    def first(self) -> Replica:
        """The replica whose session has the hooks and writes the checkpoints."""
        return self.all[0]

    def current(self) -> Replica:
        """Return the replica of this thread."""
        context = get_replica_context()
        return self.all[0 if context is None else context.local_replica_id]

    def open(self, stack: contextlib.ExitStack, session: Any) -> None:
        """Open the sessions, until the stack is closed, with the values of the very first.

        Args:
            stack: closes the sessions.
            session: the session of the first replica, with its hooks.
        """
        self.first.session = stack.enter_context(session)
        for replica in self.all[1:]:
            with replica.graph.as_default():
                replica.session = stack.enter_context(g.MonitoredTrainingSession())
        self.exchange(GLOBAL_VARIABLES, lambda values, ctx: ctx.communicator.broadcast(values))

    def run(self, batches: Iterable[Any], after_step: AfterStep = lambda: None) -> None:
        """Make a step with each batch."""

        def step(part: Any) -> None:
            if not is_empty(part):
                self.current().run(part)

        for batch in batches:
            self.strategy.run(step, (batch,))
            after_step()

    def full(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches until, on any worker, a hook asks to stop or a replica has no examples."""
        session, batches = self.first.session, iter(batches)
        several = self.strategy.input_topology.workers is not None
        # If a hook on one worker asks to stop, all workers take part in one more batch.
        while several or not session.should_stop():
            batch = next(batches, None)
            if batch is None:
                return
            ends = any(map(is_empty, self.strategy.local_results(batch)))
            if on_any_worker(self.strategy, ends or session.should_stop()):
                return
            yield batch

    def exchange(self, collection: str, exchange: Callable[[Any, Any], Any]) -> None:
        """Set variables to the results of a collective of the replicas over their values."""

        def step() -> None:
            replica, context = self.current(), get_replica_context()
            variables = replica.graph.get_collection(collection)
            values = exchange(replica.raw.run(variables), context)
            for variable, value in zip(variables, values, strict=True):
                variable.load(value, replica.raw)

        if self.strategy.num_replicas_in_sync > 1:
            self.strategy.run(step)


def dataset_from(
    input_fn: Callable[..., Any], mode: str, context: InputContext, config: Any, params: Any
) -> Dataset:
    """Return the result of an input function as a dataset; training repeats a single batch."""
    with g.Graph().as_default():  # The graph of a running training loop is read-only.
        known = {"mode": mode, "input_context": context, "config": config, "params": params}
        return dataset_of(called(input_fn, known), repeated=mode == ModeKeys.TRAIN)


def called(function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """Return the result of a function, called with the arguments that it accepts.

    It gets a copy of ``params``, which it may change.
    """
    names = arguments_of(function)
    values = {name: value for name, value in known.items() if name in names}
    if "params" in values:
        values["params"] = copy.deepcopy(values["params"])
    return function(**values)


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function, without those that a `partial` sets."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return [name for name in inspect.signature(function).parameters if name not in bound]


def dataset_of(data: Any, *, repeated: bool) -> Dataset:
    """Return the result of an input function as a dataset of batches.

    Args:
        data: a dataset, another re-iterable of batches, the tensors of a `DatasetIterator`, or one
            batch: an array, a dict of arrays, or a tuple of features and labels.
        repeated: whether to repeat a single batch without end.
    """
    if any(isinstance(leaf, g.Tensor) for leaf in tree.flatten(data)):
        return _dataset_behind(data, repeated)
    if not isinstance(data, tuple | dict) and not hasattr(data, "dtype"):
        return as_dataset(data)
    batch = data[0] if isinstance(data, tuple) and len(data) == 2 and data[1] is None else data
    dataset = Dataset.from_tensors(tree.map_leaves(np.asarray, batch))
    return dataset.repeat() if repeated else dataset


def _dataset_behind(nest: Any, repeated: bool) -> Dataset:
    """Return the dataset of batches like a nest of tensors: of an iterator, or of constants."""
    leaves = tree.flatten(nest)
    tensors = [leaf for leaf in leaves if isinstance(leaf, g.Tensor)]
    sources = {iterator_of(leaf) for leaf in tensors}
    iterator = sources.pop()
    if iterator is None or sources or len(tensors) < len(leaves):
        graph = tensors[0].graph
        definitions = {op.name: op.definition for op in graph.get_operations()}
        needed = pruned(definitions, [tensor.name for tensor in tensors], [], [])
        if not all(op_named(op.kind).pure for op in needed):
            raise ValueError(
                "input_fn returned tensors that are neither constant nor the results of one "
                "get_next(): compute with them in the model function, or with arrays in "
                "dataset.map()."
            )
        with graph.as_default(), contextlib.closing(g.Session()) as session:
            return dataset_of(session.run(tree.map_leaves(g.as_tensor, nest)), repeated=repeated)

    def like_nest(*batch: Any) -> Any:
        arrays = tree.flatten(batch)
        return tree.unflatten(nest, [arrays[leaf.index] for leaf in leaves])

    return as_dataset(iterator.dataset).map(like_nest)


def is_empty(batch: Any) -> bool:
    """Return True if a batch has no examples."""
    return any(np.ndim(array) and not len(array) for array in _arrays(batch))


def _split(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple):
        return batch, None
    if len(batch) != 2:
        why = "it must be features, or a tuple of features and labels."
        raise ValueError(f"a batch of input_fn is a tuple of {count_of(len(batch), 'part')}: {why}")
    return batch[0], batch[1]


def _arrays(batch: Any) -> list[Any]:
    features, labels = _split(batch)
    return [*tree.flatten(features), *([] if labels is None else tree.flatten(labels))]


def _input(example: Any) -> g.Tensor:
    """Return the placeholder for batches like an example."""
    array = example if hasattr(example, "dtype") else np.asarray(example)
    dtype = np.dtype(object) if array.dtype.kind in "US" else array.dtype
    shape = (None, *array.shape[1:]) if array.ndim else ()
    return g.placeholder(dtype, shape, name="input")
