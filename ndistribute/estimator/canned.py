"""Estimators that are ready made: linear models and dense networks on feature columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ndistribute import graph as g
from ndistribute.estimator.estimator import Estimator
from ndistribute.estimator.feature_column import dtype_of, input_layer, linear_model, sorted_columns
from ndistribute.estimator.heads import Head, class_head, regression_head
from ndistribute.estimator.run_config import RunConfig
from ndistribute.estimator.spec import EstimatorSpec, ModeKeys
from ndistribute.graph.scopes import glorot_uniform

_NAMED = {
    "Adagrad": g.AdagradOptimizer,
    "Adam": g.AdamOptimizer,
    "RMSProp": g.RMSPropOptimizer,
    "SGD": g.GradientDescentOptimizer,
}


class LinearRegressor(Estimator):
    """Linear regression by the mean squared error.

    Predictions: ``predictions``. Metrics: ``average_loss``, ``label/mean``, ``prediction/mean``.

    Args:
        feature_columns: the columns; a categorical one has a weight for each id.
        model_dir: the directory of checkpoints, see `Estimator`.
        label_dimension: the number of labels of an example.
        weight_column: the key of the feature with the weights of the examples; None: ones.
        optimizer: an optimizer, a function that returns one, or ``"Adagrad"``, ``"Adam"``,
            ``"RMSProp"`` or ``"SGD"``; None: Adagrad.
        config: a `RunConfig`.

    >>> import ndistribute as nd
    >>> x = np.arange(8, dtype=np.float32)
    >>> column = nd.estimator.feature_column.numeric_column("x")
    >>> model = LinearRegressor([column], optimizer=nd.graph.AdagradOptimizer(1.0))
    >>> trained = model.train(lambda: ({"x": x}, 3 * x - 1), steps=400)
    >>> [each["predictions"].round(1) for each in model.predict(lambda: {"x": x[:2]})]
    [array([-1.], dtype=float32), array([2.], dtype=float32)]
    """

    def __init__(
        self,
        feature_columns: Iterable[Any],
        model_dir: str | None = None,
        label_dimension: int = 1,
        weight_column: str | None = None,
        optimizer: Any = None,
        config: RunConfig | None = None,
    ) -> None:
        head = regression_head(label_dimension, weight_column)
        super().__init__(_linear(head, feature_columns, optimizer), model_dir, config)


class LinearClassifier(Estimator):
    """Logistic regression, in two classes or by softmax in more.

    Predictions: ``logits``, ``probabilities``, ``class_ids``, ``classes``. Metrics: ``accuracy``,
    ``average_loss``; for two classes also ``precision`` and ``recall``.

    Args:
        n_classes: the number of classes.
        label_vocabulary: the labels by class; None: labels are the integers below `n_classes`.

    The others are those of `LinearRegressor`.
    """

    def __init__(
        self,
        feature_columns: Iterable[Any],
        model_dir: str | None = None,
        n_classes: int = 2,
        weight_column: str | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = None,
        config: RunConfig | None = None,
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary)
        super().__init__(_linear(head, feature_columns, optimizer), model_dir, config)


class DNNRegressor(Estimator):
    """Regression by a dense network; predictions and metrics as of `LinearRegressor`.

    Args:
        hidden_units: the widths of the hidden layers.
        feature_columns: the columns; categorical ones in an indicator or embedding column.
        activation_fn: the function of the hidden layers; None: the rectifier.
        dropout: the share of hidden values to drop in training; None: none.

    The others are those of `LinearRegressor`.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[Any],
        model_dir: str | None = None,
        label_dimension: int = 1,
        weight_column: str | None = None,
        optimizer: Any = None,
        activation_fn: Callable[[Any], Any] | None = None,
        dropout: float | None = None,
        config: RunConfig | None = None,
    ) -> None:
        head = regression_head(label_dimension, weight_column)
        network = _dense(head, hidden_units, feature_columns, activation_fn, dropout, optimizer)
        super().__init__(network, model_dir, config)


class DNNClassifier(Estimator):
    """Classification by a dense network; predictions and metrics as of `LinearClassifier`.

    The arguments are those of `DNNRegressor` and `LinearClassifier`.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[Any],
        model_dir: str | None = None,
        n_classes: int = 2,
        weight_column: str | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = None,
        activation_fn: Callable[[Any], Any] | None = None,
        dropout: float | None = None,
        config: RunConfig | None = None,
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary)
        network = _dense(head, hidden_units, feature_columns, activation_fn, dropout, optimizer)
        super().__init__(network, model_dir, config)


def _dense(
    head: Head,
    hidden_units: Sequence[int],
    columns: Iterable[Any],
    activation: Callable[[Any], Any] | None,
    dropout: float | None,
    optimizer: Any,
) -> Callable[..., EstimatorSpec]:
    """Return the model function of a dense network."""
    if dropout is not None and not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}.")
    known, hidden, rate = sorted_columns(columns), tuple(hidden_units), dropout or 0.0
    dtype = dtype_of(known)

    def layer(values: Any, width: int, units: int) -> Any:
        kernel = g.Variable(glorot_uniform((width, units), dtype), name="kernel")
        return values @ kernel + g.Variable(np.zeros(units, dtype), name="bias")

    def logits(features: Any, units: int, mode: str) -> Any:
        graph = g.get_default_graph()
        with g.variable_scope("dnn"):
            with g.variable_scope("input_from_feature_columns"):
                values = input_layer(features, known)
            width = sum(column.width for column in known)
            for k, size in enumerate(hidden):
                with graph.name_scope(f"hiddenlayer_{k}"):
                    values = layer(values, width, size)
                    values = activation(values) if activation else np.maximum(values, 0)
                    if mode == ModeKeys.TRAIN and rate:
                        kept = g.random_uniform(np.shape(values), dtype=dtype) >= rate
                        values = np.where(kept, values / (1 - rate), 0)
                width = size
            with graph.name_scope("logits"):
                return layer(values, width, units)

    return _model_fn(head, logits, optimizer, rate=0.05)


def _linear(head: Head, columns: Iterable[Any], optimizer: Any) -> Callable[..., EstimatorSpec]:
    """Return the model function of a linear model."""
    known = sorted_columns(columns)

    def logits(features: Any, units: int, mode: str) -> Any:
        with g.variable_scope("linear"):
            return linear_model(features, known, units)

    return _model_fn(head, logits, optimizer, min(0.2, len(known) ** -0.5))


def _model_fn(
    head: Head, logits: Callable[[Any, int, str], Any], optimizer: Any, rate: float
) -> Callable[..., EstimatorSpec]:
    """Return the model function of a head and a function that makes logits."""
    if isinstance(optimizer, str) and optimizer not in _NAMED:
        raise ValueError(f"optimizer must be one of {', '.join(_NAMED)}, got {optimizer!r}.")

    def make_optimizer() -> Any:
        if optimizer is None or isinstance(optimizer, str):
            return _NAMED[optimizer or "Adagrad"](rate)
        return optimizer() if callable(optimizer) else optimizer

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        values = logits(features, head.units, mode)
        return head.spec(features, labels, mode, values, make_optimizer)

    return model_fn
