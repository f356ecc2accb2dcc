"""Keras 3 models under every strategy: their variables become this package's, and `fit` trains.

Keras computes the outputs of a model, with JAX or PyTorch. Losses, optimizers, callbacks and loops
are this package's; Keras's own losses and metrics are wrapped. Keras's variables only name values:
each call gets the values of a replica, and returns the values that it would write.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute import optimizers, tree
from ndistribute.autodiff import custom_gradient, untrack
from ndistribute.autodiff.tracked import Tracked
from ndistribute.context import current_frame, current_trace, get_replica_context, get_strategy
from ndistribute.devices import as_array, to_host
from ndistribute.dtypes import kind_of
from ndistribute.errors import MissingDependencyError
from ndistribute.interop import like
from ndistribute.models import Model, losses, metrics
from ndistribute.models.batches import rows_of
from ndistribute.models.chief import schedules_steps
from ndistribute.models.masks import attach_mask
from ndistribute.variables import Variable

_UNCALLED = (
    "train_step test_step predict_step compute_loss compute_metrics get_metrics_result".split()
)
_EXCLUDED = "", "_pattern"
_tracing = threading.Lock()  # Keras's code cannot be traced by several threads at once.


def distribute(keras_model: Any) -> KerasModel:
    """Return a model of this package that trains a Keras model, under the scope's strategy.

    Its variables start with the values of the first worker's Keras model, on all workers. `fit`, at
    its end, and `write_back` write the values back into the Keras model.

    Args:
        keras_model: a built model of any kind that does not define `train_step`. Keras must compute
            with JAX or PyTorch.

    Raises:
        MissingDependencyError: Keras is not installed.
        TypeError: `keras_model` is not a Keras model.
        ValueError: the model or Keras's backend uses a feature that is not supported here.

    >>> import keras  # doctest: +SKIP
    >>> with nd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():  # doctest: +SKIP
    ...     model = distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    ...     model.compile("adam", "mse")
    """
    return KerasModel(keras_model)


class KerasModel(Model):
    """A model that computes with a Keras model; see `distribute`.

    Attributes:
        keras_model: the model of Keras.
    """

    def __init__(self, keras_model: Any) -> None:
        _check(keras_model)
        super().__init__(name=keras_model.name)
        self.keras_model = keras_model
        self._places = list(keras_model.variables)  # Keras's variables, in the order of `state`.
        parts = keras_model._flatten_layers()
        trained = {id(place) for part in parts for place in part._trainable_variables}
        self.state = [_variable(place, id(place) in trained) for place in self._places]
        # The compiled functions, by the variables that are trained.
        self._calls: dict[Any, Callable[..., Any]] = {}
        outputs = getattr(keras_model, "output", None)
        if isinstance(outputs, list | tuple) and len(outputs) > 1:
            self.output_names = list(keras_model.output_names)
        self.built = True
        self.write_back()  # Other workers may have started with other values.

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables that Keras's model trains now."""
        trained = {id(place) for place in self.keras_model.trainable_variables}
        pairs = zip(self._places, self.state, strict=True)
        return [variable for place, variable in pairs if id(place) in trained and self.trainable]

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        jit_compile: bool = False,
    ) -> None:
        """Set the optimizer, the losses and the metrics, from this package or from Keras.

        A name means an object of this package if this package has the name. Functions compute with
        Keras's operations. A Keras optimizer is replaced by this package's optimizer of the same
        name and configuration.

        Args:
            optimizer: the optimizer; see `Model.compile` for this and all other arguments.
            loss: the losses.
            metrics: the metrics.
            loss_weights: the factors of losses.
            weighted_metrics: the metrics that use sample weights.
            jit_compile: whether XLA compiles the loss and the update of variables, too.
        """
        if jit_compile and _keras().backend.backend() != "jax":
            raise ValueError("compile: jit_compile=True needs Keras with KERAS_BACKEND=jax.")
        with self.strategy.scope():
            loss, metrics = tree.map_leaves(_loss, loss), tree.map_leaves(_metric, metrics)
            weighted_metrics = tree.map_leaves(_metric, weighted_metrics)
            optimizer = optimizers.get(_optimizer(optimizer))
            parts = self.keras_model._flatten_layers()
            halves = any(part.compute_dtype == "float16" for part in parts)
            if halves and not isinstance(optimizer, optimizers.LossScale):
                optimizer = optimizers.LossScale(optimizer)
        super().compile(optimizer, loss, metrics, loss_weights, weighted_metrics, jit_compile)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the outputs of Keras's model, and keep what it writes to its variables."""
        replica = get_replica_context()
        number, resolver = 0, self.strategy.cluster_resolver
        if replica is not None:  # Each worker of parameter servers has a replica 0.
            number = replica.replica_id_in_sync_group
            number += 0 if resolver is None else 64 * (resolver.task_id or 0)
        pairs = zip(self._places, self.state, strict=True)
        values = [v if place.trainable and v.trainable else as_array(v) for place, v in pairs]
        # The generators of replicas are far apart. Keras cannot compute with an empty batch.
        mix = np.stack([number * 0x9E3779B1 % 2**30, 0]).astype(np.int32)
        rows, replicas = rows_of(inputs), 1 if replica is None else replica.num_replicas_in_sync
        batch = inputs if rows else tree.map_leaves(_one_example, inputs)
        parts = self.keras_model._flatten_layers()
        trained = (each.trainable for each in [*parts, *self._places])
        key = bool(training), not rows, *trained
        if key not in self._calls:
            self._calls[key] = _operation(functools.partial(self._compute, *key[:2]))
        outputs, masks, added, penalties, written = self._calls[key](values, mix, batch)
        if not rows:
            old = {k: as_array(values[int(k)]) for k in written}
            written |= {k: value for k, value in old.items() if kind_of(value.dtype) == "f"}
        if added:
            share = replicas * rows / losses.global_count(rows) if training else 1.0
            self.add_loss([each * share for each in added if rows])
        self.add_loss(penalties)
        self._write({int(k): untrack(value) for k, value in written.items()}, rows, replica)
        attach_mask(outputs, masks)
        return outputs

    def _write(self, written: dict[int, Any], rows: int, replica: Any) -> None:
        """Set variables to the values that replicas computed: floats to the mean over examples."""
        floats = [k for k in written if kind_of(self.state[k].dtype) == "f"]
        if floats and replica is not None and replica.num_replicas_in_sync > 1:
            counted = [*(written[k] * rows for k in floats), np.float32(rows)]
            *totals, count = replica.communicator.all_reduce("sum", counted)
            written |= {k: total / count for k, total in zip(floats, totals, strict=True)}
        for k, value in written.items():
            self.state[k].assign(value.astype(self.state[k].dtype))

    def _compute(
        self, training: bool, is_empty: bool, values: Sequence[Any], mix: Any, inputs: Any
    ) -> Any:
        """Return the outputs, their masks, the added losses, and what variables become, by place.

        Keras's operations compute these; nothing outside changes. Generators of random numbers
        start from their states mixed with the number of the replica, and keep their own states. An
        empty batch is replaced by an example: its output is dropped, and all gradients through it
        are zeros.
        """
        keras, model = _keras(), self.keras_model

        def mixed(place: Any, value: Any) -> Any:
            if place.name != "seed_generator_state":
                return value
            return keras.ops.bitwise_xor(value, keras.ops.cast(mix, value.dtype))

        options = {"training": training} if model._call_has_training_arg else {}
        mapping = [(p, mixed(p, value)) for p, value in zip(self._places, values, strict=True)]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            before = dict(scope.state_mapping)
            outputs = model(inputs, **options)
            # Not `model.losses`, which threads share.
            trained = [place for place in model.trainable_variables if place.regularizer]
            penalties = [place.regularizer(place) for place in trained]
        after = scope.state_mapping
        written = {
            str(k): mixed(place, after[id(place)])
            for k, place in enumerate(self._places)
            if after[id(place)] is not before[id(place)]
        }
        wrong = [self._places[int(k)].path for k in written if self.state[int(k)].trainable]
        if wrong or after.keys() - before.keys():
            what = ", ".join(wrong) or "a metric, or to a state that model.variables lacks"
            raise ValueError(
                f"{self._called}: its call writes to {what}, on which replicas would not agree: "
                "pass metrics to compile, and create other weights with trainable=False."
            )
        masks = [keras.src.backend.get_keras_mask(y) for y in keras.tree.flatten(outputs)]
        added = scope.losses
        if is_empty:  # Results for the example may be NaN, and zero times NaN is NaN.
            ops, pairs = keras.ops, zip(values, self.state, strict=True)
            floats = [value for value, mine in pairs if kind_of(mine.dtype) == "f"]
            zero = sum(ops.sum(ops.reshape(value, (-1,))[:0]) for value in floats)
            none = [ops.stop_gradient(y)[:0] for y in keras.tree.flatten(outputs)]
            none = [y + ops.cast(zero, y.dtype) for y in none]
            outputs = keras.tree.pack_sequence_as(outputs, none)
            masks = [None if mask is None else mask[:0] for mask in masks]
            added = [ops.stop_gradient(loss) for loss in added]
        return outputs, masks, added, penalties, written

    def _train(self, *args: Any) -> None:
        super()._train(*args)
        self.write_back()

    def write_back(self) -> None:
        """Set the variables of Keras's model to the values here; every worker must call this."""
        with self.strategy.scope():
            for place, variable in zip(self._places, self.state, strict=True):
                place.assign(variable.numpy())
        self._known = self._checksum()

    def _checksum(self) -> int:
        """Return a checksum that shows whether the variables of Keras's model were changed."""
        values = (_keras().ops.convert_to_numpy(place.value) for place in self._places)
        return functools.reduce(lambda known, each: zlib.crc32(each.tobytes(), known), values, 0)

    def _build_from(self, data: Any) -> None:
        super()._build_from(data)
        if self._checksum() != self._known:
            raise ValueError(
                f"{self._called}: the weights of Keras's model were changed, which does not change "
                "this model's: do so before distribute, or call set_weights of this model."
            )

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error, because Keras saves its models itself."""
        raise NotImplementedError(
            f"{self._called} is a model of Keras: call write_back() on every worker, and "
            "keras_model.save(path) on the chief. To save the state of training, use Checkpoint."
        )

    export = to_json = save

    def get_config(self) -> dict[str, Any]:
        """Return what distinguishes this model from others: Keras's class, and the variables."""
        kinds = [(place.shape, place.dtype, place.trainable) for place in self._places]
        return {"keras_model": type(self.keras_model).__name__, "variables": kinds}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, which compiles the model for itself."""
        return {**super().__getstate__(), "_calls": {}, "_places": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._places = list(self.keras_model.variables)


class KerasMetric(metrics.Metric):
    """A Keras metric; each replica counts its own examples.

    Args:
        metric: the Keras metric.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__(metric.name, metric.dtype)
        if not metric.variables or any(v.aggregation != "sum" for v in metric.variables):
            raise ValueError(
                f"metric {metric.name!r} of Keras: replicas add up the variables of a metric, so "
                "it must have some, with aggregation='sum'; if it makes them in its first "
                "update_state, call that before, and reset_state."
            )
        self.keras_metric, self._adds = metric, False
        self.parts = [self.add_weight(v.name, v.shape, dtype=v.dtype) for v in metric.variables]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add the examples of a batch."""
        update, _ = _counting(self.keras_metric)
        zeros = [np.zeros(part.shape, part.dtype) for part in self.parts]
        sums = update(zeros, y_true, y_pred, sample_weight)
        if not self._adds and current_trace() is None:
            self._check(sums, update([zero + 1 for zero in zeros], y_true, y_pred, sample_weight))
        for part, value in zip(self.parts, sums, strict=True):
            part.assign_add(value)

    def _check(self, sums: Sequence[Any], more: Sequence[Any]) -> None:
        """Raise a `ValueError` unless the metric added to ones in its variables as to zeros."""
        pairs = zip(map(to_host, sums), map(to_host, more), strict=True)
        if not all(np.allclose(a + 1, b, 1e-4, 1e-4, equal_nan=True) for a, b in pairs):
            raise ValueError(
                f"metric {self.name!r} of Keras: its update_state must add to its variables, which "
                "replicas add up: keep sums and counts in them."
            )
        self._adds = True

    def result(self) -> Any:
        """Return the value over all replicas."""
        _, result = _counting(self.keras_metric)
        return result([*map(as_array, self.parts)])


@functools.lru_cache(64)
def _counting(metric: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return _operation(metric.stateless_update_state), _operation(metric.stateless_result)


def _one_example(values: Any) -> Any:
    return np.zeros((1, *values.shape[1:]), values.dtype)


def _keras() -> Any:
    try:
        import keras
    except ImportError as error:
        text = "models of Keras need Keras 3: pip install 'ndistribute[keras]'."
        raise MissingDependencyError(text) from error
    return keras


def _check(model: Any) -> None:
    """Raise an error unless this is a Keras model whose features are supported here."""
    keras = _keras()
    if not isinstance(model, keras.Model):
        raise TypeError(f"distribute needs a model of Keras 3, got a {type(model).__name__}.")
    backend, strategy = keras.backend.backend(), get_strategy()
    problem = ""
    for v in model.variables if model.built else ():
        if v.constraint is not None or v.overwrite_with_gradient:
            problem = f"optimizers here do not apply the constraint of {v.path}: regularize it"
    for name in _UNCALLED:
        if getattr(type(model), name, None) is not getattr(keras.Model, name, None):
            problem = f"nothing would call its {name}: write it as that of an nd.models.Model"
    if not model.built:
        problem = "it has no variables yet: call it on an example, or begin it with keras.Input"
    if backend not in ("jax", "torch"):
        problem = f"Keras's backend is {backend}: set KERAS_BACKEND=jax or torch before the import"
    elif backend == "torch" and strategy.devices[0].kind == "tpu":
        problem = f"{type(strategy).__name__} compiles steps: set KERAS_BACKEND=jax"
    if problem:
        raise ValueError(f"distribute of Keras model {model.name!r}: {problem}.")


def _variable(place: Any, is_trained: bool) -> Variable:
    """Return a variable for one of Keras's, with its current value."""
    dtype = np.dtype(place.dtype)
    value = _keras().ops.convert_to_numpy(place.value).astype(dtype)
    if is_trained:
        return Variable(value, True, place.path, dtype, "on_write", "mean")
    # A chief's workers make steps whenever they are free, and all write to one value.
    when = "on_write" if schedules_steps(get_strategy()) else "on_read"
    return Variable(value, False, place.path, dtype, when, "only_first_replica")


def _loss(loss: Any) -> Any:
    """Return a loss of this package for a Keras loss, or for a name that only Keras has."""
    if loss is None or isinstance(loss, losses.Loss) or loss in losses.NAMED:
        return loss
    loss = _keras().losses.get(loss)
    reduction = getattr(loss, "reduction", "mean")
    reduction = "sum_over_batch_size" if reduction == "mean" else reduction  # Keras has two names.
    name = getattr(loss, "name", None) or getattr(loss, "__name__", "loss")
    return losses.FunctionLoss(functools.partial(_each, loss), name=name, reduction=reduction)


def _each(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Return the value of a Keras loss for each example."""
    return _comparing(loss)(y_true, y_pred)


@functools.lru_cache(64)
def _comparing(loss: Any) -> Callable[..., Any]:
    keras = _keras()

    def compare(*pair: Any) -> Any:
        dtype = getattr(loss, "dtype", keras.config.floatx())
        tensors = [keras.ops.convert_to_tensor(values, dtype=dtype) for values in pair]
        return getattr(loss, "call", loss)(*tensors)

    return _operation(compare)


def _metric(metric: Any) -> Any:
    """Return a metric of this package for a Keras metric."""
    if metric is None or isinstance(metric, metrics.Metric | str):
        return metric
    if isinstance(metric, _keras().metrics.Metric):
        return KerasMetric(metric)
    return metrics.MeanMetric(functools.partial(_each, metric), metric.__name__)


def _optimizer(optimizer: Any) -> Any:
    """Return the optimizer or the schedule of this package for one of Keras's."""
    keras = _keras()
    kind, name = type(optimizer), type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.schedules.LearningRateSchedule):
        known: Any = optimizers.schedules
    elif isinstance(optimizer, keras.optimizers.Optimizer):
        known = optimizers
    else:
        return optimizer
    if any(getattr(optimizer, f"_exclude_from_weight_decay{end}", None) for end in _EXCLUDED):
        raise ValueError(f"compile: {name}.exclude_from_weight_decay would have no effect here.")
    config = {key: value for key, value in optimizer.get_config().items() if value is not None}
    config.pop("name", None)
    if "learning_rate" in config and int(optimizer.iterations):
        raise ValueError(
            f"compile: Keras's {name} has made {int(optimizer.iterations)} steps, whose state "
            "would be lost: pass a new one."
        )
    if isinstance(config.get("learning_rate"), dict):
        config["learning_rate"] = _optimizer(optimizer._learning_rate)
    try:
        if not kind.__module__.startswith("keras."):
            raise AttributeError
        return getattr(known, name)(**config)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"compile: there is no {name} with {config} here: pass an optimizer of nd.optimizers."
        ) from error


def _operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays and variables, for tapes too, from Keras's operations."""
    if _keras().backend.backend() == "torch":
        return functools.partial(_by_torch, function)
    from ndistribute.interop.jax import differentiable

    def traced(*args: Any) -> Any:
        with _tracing:
            return function(*args)

    return differentiable(traced)


def _by_torch(function: Callable[..., Any], *args: Any) -> Any:
    """Return the arrays that a function of tensors returns; a tape differentiates it."""
    ops, leaves, made = _keras().ops, tree.flatten(args), list[Any]()
    kinds = (Variable, Tracked) if current_frame().recorder is not None else ()
    places = [k for k, x in enumerate(leaves) if isinstance(x, kinds) and kind_of(x.dtype) == "f"]

    def tensor(value: Any) -> Any:
        return None if value is None else ops.convert_to_tensor(np.array(to_host(as_array(value))))

    @custom_gradient
    def run(*arrays: Any) -> Any:
        back, tensors = like((*leaves, *arrays)), [*map(tensor, leaves)]
        sources = [tensor(array).requires_grad_() for array in arrays]
        for place, source in zip(places, sources, strict=True):
            tensors[place] = source
        made.append(function(*tree.unflatten(args, tensors)))
        flat = tree.flatten(made[0])

        def gradients(g: Sequence[Any]) -> list[Any]:
            pairs = [(y, dy) for y, dy in zip(flat, g, strict=True) if dy is not None]
            parts = [(y * tensor(dy)).sum() for y, dy in pairs if y.requires_grad]
            for source in sources:
                source.grad = None
            if parts:
                # A persistent tape may ask for the gradients again.
                sum(parts).backward(retain_graph=True)
            grads = [source.grad for source in sources]
            return [None if dx is None else back(ops.convert_to_numpy(dx)) for dx in grads]

        return [None if y is None else back(ops.convert_to_numpy(y)) for y in flat], gradients

    results = run(*(leaves[place] for place in places))
    return tree.unflatten(made[0], results)
