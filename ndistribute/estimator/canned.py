"""Ready-made estimators: linear models, dense networks, and both together.

Each part computes logits from the features and has its own optimizer. The logits of several parts
are added. The head computes the loss, the predictions and the metrics from the logits and the
labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np

from ndistribute import graph as g
from ndistribute.devices import to_host
from ndistribute.estimator import feature_column as fc
from ndistribute.estimator.estimator import Estimator
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.specs import EstimatorSpec, ModeKeys, WarmStart
from ndistribute.exports import export as _export
from ndistribute.graph.graph import apply_named
from ndistribute.graph.optimizers import OptimizerOfScopes
from ndistribute.mistakes import accepting
from ndistribute.models import layers, nn
from ndistribute.numpy_functions import register
from ndistribute.optimizers import Ftrl

Tensors = dict[str, Any]
_NAMED: dict[str, Callable[[float], Any]] = {
    "Adagrad": g.AdagradOptimizer,
    "Adam": g.AdamOptimizer,
    "Ftrl": Ftrl,
    "RMSProp": g.RMSPropOptimizer,
    "SGD": g.GradientDescentOptimizer,
}


class _CommonOptions(TypedDict, total=False):
    """The keyword arguments of every estimator here; see `Estimator`."""

    config: RunConfig | None
    warm_start_from: WarmStart


class _Regression:
    """The mixin that passes a regression head to the next class."""

    def __init__(
        self, *args: Any, label_dimension: int = 1, weight_column: str | None = None, **options: Any
    ) -> None:
        init: Any = super().__init__
        init(regression_head(label_dimension, weight_column), *args, **options)


class _Classification:
    """The mixin that passes a classification head to the next class."""

    def __init__(
        self,
        *args: Any,
        n_classes: int = 2,
        weight_column: str | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        init: Any = super().__init__
        init(multi_class_head(n_classes, weight_column, label_vocabulary), *args, **options)


class LinearEstimator(Estimator):
    """A linear model with a head, which defines its task.

    Args:
        head: what `binary_class_head`, `multi_class_head` or `regression_head` returns.
        feature_columns: the columns; a categorical one has a weight for each id.
        model_dir: the directory of checkpoints, see `Estimator`.
        optimizer: an optimizer, a function that returns one, or ``"Adagrad"``, ``"Adam"``,
            ``"Ftrl"``, ``"RMSProp"`` or ``"SGD"``; None: Adagrad.
        options: `config` and `warm_start_from`, see `Estimator`.

    >>> import ndistribute as nd
    >>> column = nd.estimator.feature_column.numeric_column("x")
    >>> model = LinearEstimator(binary_class_head(), [column])
    >>> x = np.array([-1.0, 1.0])
    >>> trained = model.train(lambda: ({"x": x}, x > 0), steps=10)
    >>> [each["class_ids"] for each in model.predict(lambda: {"x": x})]
    [array([0]), array([1])]
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Iterable[Any],
        model_dir: str | None = None,
        optimizer: Any = None,
        **options: Unpack[_CommonOptions],
    ) -> None:
        super().__init__(_model_fn(head, _linear(feature_columns, optimizer)), model_dir, **options)


class LinearRegressor(_Regression, LinearEstimator):
    """Linear regression with the mean squared error as loss.

    Predictions: ``predictions``. Metrics: ``average_loss``, ``label/mean``, ``prediction/mean``.

    Args:
        feature_columns: the columns; a categorical one has a weight for each id.
        model_dir: the directory of checkpoints, see `Estimator`.
        label_dimension: the number of labels of an example.
        weight_column: the key of the feature with the weights of the examples; None: ones.
        options: `optimizer`, `config` and `warm_start_from`, see `LinearEstimator`.

    >>> import ndistribute as nd
    >>> x = np.arange(8, dtype=np.float32)
    >>> column = nd.estimator.feature_column.numeric_column("x")
    >>> model = LinearRegressor([column], optimizer=nd.graph.AdagradOptimizer(1.0))
    >>> trained = model.train(lambda: ({"x": x}, 3 * x - 1), steps=400)
    >>> [each["predictions"].round(1) for each in model.predict(lambda: {"x": x[:2]})]
    [array([-1.], dtype=float32), array([2.], dtype=float32)]
    """


class LinearClassifier(_Classification, LinearEstimator):
    """Logistic regression, in two classes or by softmax in more.

    Predictions: ``logits``, ``probabilities``, ``class_ids``, ``classes``. Metrics: ``accuracy``,
    ``average_loss``; for two classes also ``precision`` and ``recall``.

    Args:
        n_classes: the number of classes.
        label_vocabulary: the labels by class; None: labels are the integers below `n_classes`.

    The others are those of `LinearRegressor`.
    """


class DNNEstimator(Estimator):
    """A dense network with a head, which defines its task.

    Args:
        head: what `binary_class_head`, `multi_class_head` or `regression_head` returns.
        hidden_units: the widths of the hidden layers.
        feature_columns: the columns; categorical ones in an indicator or embedding column.
        model_dir: the directory of checkpoints, see `Estimator`.
        optimizer: see `LinearEstimator`.
        activation_fn: the function of the hidden layers; None: the rectifier.
        dropout: the share of hidden values to drop in training; None: none.
        options: `config` and `warm_start_from`, see `Estimator`.
    """

    def __init__(
        self,
        head: Head,
        hidden_units: Sequence[int],
        feature_columns: Iterable[Any],
        model_dir: str | None = None,
        optimizer: Any = None,
        activation_fn: Callable[[Any], Any] | None = None,
        dropout: float | None = None,
        **options: Unpack[_CommonOptions],
    ) -> None:
        part = _dense(hidden_units, feature_columns, activation_fn, dropout, optimizer)
        super().__init__(_model_fn(head, part), model_dir, **options)


class DNNRegressor(_Regression, DNNEstimator):
    """Regression by a dense network, with the predictions and metrics of `LinearRegressor`.

    Args:
        hidden_units: the widths of the hidden layers.
        feature_columns: the columns; categorical ones in an indicator or embedding column.
        options: the other arguments of `DNNEstimator`.

    The others are those of `LinearRegressor`.
    """


class DNNClassifier(_Classification, DNNEstimator):
    """Classification by a dense network, with the predictions and metrics of `LinearClassifier`.

    The arguments are those of `DNNRegressor` and `LinearClassifier`.
    """


class DNNLinearCombinedEstimator(Estimator):
    """The sum of a linear model and a dense network, with a head, which defines the task.

    Args:
        head: what `binary_class_head`, `multi_class_head` or `regression_head` returns.
        model_dir: the directory of checkpoints, see `Estimator`.
        linear_feature_columns: the columns of the linear model; empty: no linear model.
        linear_optimizer: its optimizer, see `LinearRegressor`.
        dnn_feature_columns: the columns of the network; empty: no network.
        dnn_optimizer: its optimizer.
        dnn_hidden_units: the widths of its hidden layers.
        dnn_activation_fn: the function of the hidden layers; None: the rectifier.
        dnn_dropout: the share of hidden values to drop in training; None: none.
        options: `config` and `warm_start_from`, see `Estimator`.

    Raises:
        ValueError: there are no columns, the network has columns but no hidden layers, or one of
            two optimizers clips gradients.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | None = None,
        linear_feature_columns: Iterable[Any] = (),
        linear_optimizer: Any = None,
        dnn_feature_columns: Iterable[Any] = (),
        dnn_optimizer: Any = None,
        dnn_hidden_units: Sequence[int] = (),
        dnn_activation_fn: Callable[[Any], Any] | None = None,
        dnn_dropout: float | None = None,
        **options: Unpack[_CommonOptions],
    ) -> None:
        wide, deep = list(linear_feature_columns or ()), list(dnn_feature_columns or ())
        if not (wide or deep) or bool(deep) != bool(dnn_hidden_units):
            deeply = "dnn_feature_columns with dnn_hidden_units"
            raise ValueError(f"pass linear_feature_columns, or {deeply}, or all three.")
        parts = [_linear(wide, linear_optimizer)] if wide else []
        if deep:
            how = dnn_activation_fn, dnn_dropout, dnn_optimizer
            parts.append(_dense(dnn_hidden_units, deep, *how))
        super().__init__(_model_fn(head, *parts), model_dir, **options)


class DNNLinearCombinedRegressor(_Regression, DNNLinearCombinedEstimator):
    """Regression by a `DNNLinearCombinedEstimator`, whose keywords it also takes.

    Args:
        model_dir: the directory of checkpoints, see `Estimator`.
        label_dimension: the number of labels of an example.
        weight_column: the key of the feature with the weights of the examples; None: ones.
        parts: the other keywords.
    """


class DNNLinearCombinedClassifier(_Classification, DNNLinearCombinedEstimator):
    """Classification by a `DNNLinearCombinedEstimator`, whose keywords it also takes.

    Args:
        model_dir: the directory of checkpoints, see `Estimator`.
        n_classes: the number of classes.
        weight_column: the key of the feature with the weights of the examples; None: ones.
        label_vocabulary: the labels by class; None: labels are the integers below `n_classes`.
        parts: the other keywords.
    """


@dataclass(frozen=True)
class Network:
    """A part of a model, whose variables have their own scope and optimizer."""

    scope: str
    logits: Callable[[Any, int, str], Any]
    """Returns logits, from the features, their number and the mode, inside the scope."""
    optimizer: Any
    rate: float
    """The learning rate of an optimizer that has only a name."""

    def make_optimizer(self) -> Any:
        """Return the optimizer for a training graph."""
        if self.optimizer is None or isinstance(self.optimizer, str):
            return _NAMED[self.optimizer or "Adagrad"](self.rate)
        return self.optimizer() if callable(self.optimizer) else self.optimizer


def _dense(
    hidden_units: Sequence[int],
    columns: Iterable[Any],
    activation: Callable[[Any], Any] | None,
    dropout: float | None,
    optimizer: Any,
) -> Network:
    """Return a dense network."""
    if dropout is not None and not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}.")
    known, hidden, rate = fc.sorted_columns(columns), tuple(hidden_units), dropout or 0.0
    dtype = fc.dtype_of(known)

    def logits(features: Any, units: int, mode: str) -> Any:
        with g.variable_scope("input_from_feature_columns"):
            values = fc.input_layer(features, known)
        values.set_shape([None, sum(column.width for column in known)])
        for k, size in enumerate(hidden):
            values = layers.Dense(size, name=f"hiddenlayer_{k}", dtype=dtype)(values)
            values = activation(values) if activation else np.maximum(values, 0)
            if mode == ModeKeys.TRAIN and rate:
                kept = g.random_uniform(np.shape(values), dtype=dtype) >= rate
                values = np.where(kept, values / (1 - rate), 0)
        return layers.Dense(units, name="logits", dtype=dtype)(values)

    return Network("dnn", logits, optimizer, rate=0.05)


def _linear(columns: Iterable[Any], optimizer: Any) -> Network:
    """Return a linear model."""
    known = fc.sorted_columns(columns)

    def logits(features: Any, units: int, mode: str) -> Any:
        return fc.linear_model(features, known, units)

    return Network("linear", logits, optimizer, min(0.2, len(known) ** -0.5))


def _model_fn(head: Head, *parts: Network) -> Callable[..., EstimatorSpec]:
    """Return the model function of a head and parts, whose logits are added."""
    if not isinstance(head, Head):
        why = "use binary_class_head(), multi_class_head(n_classes) or regression_head()"
        raise TypeError(f"head must be a head of this module, got {head!r}: {why}.")
    for part in parts:
        if isinstance(part.optimizer, str) and part.optimizer not in _NAMED:
            known = ", ".join(_NAMED)
            raise ValueError(f"optimizer must be one of {known}, got {part.optimizer!r}.")

    def make_optimizer() -> Any:
        made = {part.scope: part.make_optimizer() for part in parts}
        return OptimizerOfScopes(made) if len(made) > 1 else made[parts[0].scope]

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        values: Any = None
        for part in parts:
            with g.variable_scope(part.scope):
                logits = part.logits(features, head.units, mode)
            values = logits if values is None else values + logits
        return head.spec(features, labels, mode, values, make_optimizer)

    return model_fn


@dataclass(frozen=True)
class Head:
    """The loss, predictions and metrics of a task, from logits of shape ``(batch, units)``."""

    units: int
    weight_column: str | None
    labels: Callable[[Any], Any]
    """Returns labels of shape ``(batch, n)`` as losses and metrics use them."""
    predictions: Callable[[Any], Tensors]
    """Returns tensors with an entry for each example, from the logits."""
    losses: Callable[[Any, Any], Any]
    """Returns the loss of each label, from the logits and the labels."""
    metrics: Callable[[Any, Tensors, Any], dict[str, Any]]
    """Returns metrics in addition to the average loss, from labels, predictions and weights."""

    def spec(
        self, features: Any, labels: Any, mode: str, logits: Any, optimizer: Callable[[], Any]
    ) -> EstimatorSpec:
        """Return the parts of the graph; the loss is the mean over the labels of the batch."""
        predicted = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predicted)
        if labels is None:
            raise ValueError(
                f"mode {mode!r} needs labels: input_fn must return batches (features, labels)."
            )
        labels, weights = self.labels(labels), self._weights(features)
        losses = self.losses(logits, labels)
        weighted = losses if weights is None else losses * weights.astype(np.float32)
        loss = np.mean(weighted)
        if mode == ModeKeys.EVAL:
            measured = {"average_loss": g.metrics.mean(losses, weights, name="average_loss")}
            measured |= self.metrics(labels, predicted, weights)
            return EstimatorSpec(mode, predicted, loss, eval_metric_ops=measured)
        step = g.get_or_create_global_step()
        return EstimatorSpec(mode, predicted, loss, optimizer().minimize(loss, global_step=step))

    def _weights(self, features: Any) -> Any:
        if self.weight_column is None:
            return None
        if not isinstance(features, Mapping) or self.weight_column not in features:
            raise KeyError(
                f"the features have no {self.weight_column!r}, which weight_column names."
            )
        return np.reshape(g.as_tensor(features[self.weight_column]), (-1, 1))


@accepting("name")
def regression_head(label_dimension: int = 1, weight_column: str | None = None) -> Head:
    """Return the head of a regression: logits are predictions, the loss is the squared error.

    The arguments are those of `LinearRegressor`.
    """
    units = label_dimension
    return Head(
        units,
        weight_column,
        labels=lambda labels: np.reshape(g.as_tensor(labels), (-1, units)),
        predictions=lambda logits: {"predictions": logits},
        losses=lambda logits, labels: np.square(labels - logits),
        metrics=lambda labels, predicted, weights: _means(
            weights, {"label/mean": labels, "prediction/mean": predicted["predictions"]}
        ),
    )


@accepting("name")
def binary_class_head(
    weight_column: str | None = None, label_vocabulary: Sequence[Any] | None = None
) -> Head:
    """Return the head of a classification in two classes; see `multi_class_head`."""
    return multi_class_head(2, weight_column, label_vocabulary)


@accepting("name")
def multi_class_head(
    n_classes: int,
    weight_column: str | None = None,
    label_vocabulary: Sequence[Any] | None = None,
) -> Head:
    """Return the head of a classification, by one logit for class 1, or by softmax.

    Args:
        n_classes: the number of classes.
        weight_column: see `LinearRegressor`.
        label_vocabulary: the labels by class; None or empty: labels are the classes.

    Raises:
        ValueError: there are fewer than two classes, or the number of labels differs from theirs.
    """
    count, vocabulary = n_classes, tuple(() if label_vocabulary is None else label_vocabulary)
    if count < 2 or len(vocabulary) not in (0, count):
        why = f"got {count} and {len(vocabulary)} words."
        raise ValueError(
            f"n_classes must be 2 or more, and equal to the length of label_vocabulary; {why}"
        )
    words = vocabulary or tuple(map(str, range(count)))
    known = np.array(vocabulary) if vocabulary else None

    def labels(labels: Any) -> Any:
        return apply_named("estimator.classes", (labels, count, known), {})

    def named(ids: Any) -> Tensors:
        return {"class_ids": ids, "classes": g.as_tensor(np.array(words))[ids]}

    def accuracy(labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        return {"accuracy": g.metrics.accuracy(labels, predicted["class_ids"], weights)}

    def of_softmax(logits: Any) -> Tensors:
        ids = np.reshape(np.argmax(logits, axis=1), (-1, 1))
        return {"logits": logits, "probabilities": nn.softmax(logits, -1), **named(ids)}

    def softmax_losses(logits: Any, labels: Any) -> Any:
        return nn.softmax_cross_entropy(logits, labels[:, 0])[:, None]

    def of_two(logits: Any) -> Tensors:
        positive = nn.sigmoid(logits)
        both = np.concatenate([1 - positive, positive], axis=1)
        ids = np.greater(logits, 0).astype(np.int64)
        return {"logits": logits, "logistic": positive, "probabilities": both, **named(ids)}

    def metrics_of_two(labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        ids = predicted["class_ids"]
        return {
            **accuracy(labels, predicted, weights),
            "precision": g.metrics.precision(labels, ids, weights),
            "recall": g.metrics.recall(labels, ids, weights),
            **_means(weights, {"label/mean": labels, "prediction/mean": predicted["logistic"]}),
        }

    if count == 2:
        return Head(1, weight_column, labels, of_two, nn.sigmoid_cross_entropy, metrics_of_two)
    return Head(count, weight_column, labels, of_softmax, softmax_losses, accuracy)


def _means(weights: Any, values: Tensors) -> dict[str, Any]:
    return {name: g.metrics.mean(value, weights, name=name) for name, value in values.items()}


def _classes(labels: Any, count: int, words: Any) -> Any:
    """Return the classes of labels, which are integers or words, in a column."""
    ids = to_host(labels).reshape(-1, 1)
    if words is not None:
        ids = fc.lookup(ids, words, -1, 0)
    outside = (ids < 0) | (ids >= count) | (ids != np.floor(ids))  # NaN is not a class.
    if outside.any():
        wrong = to_host(labels).reshape(-1, 1)[outside].tolist()[0]
        known = f"one of {words.tolist()}" if words is not None else f"0 to {count - 1}"
        raise ValueError(f"the label {wrong!r} is not a class: expected {known}")
    return ids.astype(np.int64)


register("estimator.classes", _classes)


_export(vars(), but="Head Network")
