"""Heads: the loss, the predictions and the metrics of a task, from the logits of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.devices import to_host
from ndistribute.estimator import feature_column
from ndistribute.estimator.spec import EstimatorSpec, ModeKeys
from ndistribute.graph import metrics
from ndistribute.graph.graph import apply_named, as_tensor
from ndistribute.graph.variables import get_or_create_global_step
from ndistribute.models import nn
from ndistribute.numpy_functions import register

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What a ready-made estimator does with logits of shape ``(batch, units)``."""

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
            raise ValueError(f"mode {mode!r} needs labels: input_fn must give (features, labels).")
        labels, weights = self.labels(labels), self._weights(features)
        losses = self.losses(logits, labels)
        weighted = losses if weights is None else losses * weights.astype(np.float32)
        loss = np.mean(weighted)
        if mode == ModeKeys.EVAL:
            measured = {"average_loss": metrics.mean(losses, weights, "average_loss")}
            measured |= self.metrics(labels, predicted, weights)
            return EstimatorSpec(mode, predicted, loss, eval_metric_ops=measured)
        step = get_or_create_global_step()
        return EstimatorSpec(mode, predicted, loss, optimizer().minimize(loss, global_step=step))

    def _weights(self, features: Any) -> Any:
        if self.weight_column is None:
            return None
        if not isinstance(features, Mapping) or self.weight_column not in features:
            raise KeyError(f"there is no feature {self.weight_column!r} for weight_column.")
        return np.reshape(as_tensor(features[self.weight_column]), (-1, 1))


def regression_head(units: int, weight_column: str | None) -> Head:
    """Return the head of a regression: the logits are predictions, the loss the squared error."""
    return Head(
        units,
        weight_column,
        labels=lambda labels: np.reshape(as_tensor(labels), (-1, units)),
        predictions=lambda logits: {"predictions": logits},
        losses=lambda logits, labels: np.square(labels - logits),
        metrics=lambda labels, predicted, weights: _means(
            weights, {"label/mean": labels, "prediction/mean": predicted["predictions"]}
        ),
    )


def class_head(count: int, weight_column: str | None, vocabulary: Sequence[Any] | None) -> Head:
    """Return the head of a classification: by one logit, of class 1, or by softmax.

    Args:
        count: the number of classes.
        weight_column: see `LinearRegressor`.
        vocabulary: the labels by class; None or empty: labels are the classes.

    Raises:
        ValueError: there are fewer than two classes, or not as many labels.
    """
    vocabulary = tuple(vocabulary or ())
    if count < 2 or len(vocabulary) not in (0, count):
        why = f"got {count} and {len(vocabulary)} words."
        raise ValueError(f"n_classes must be 2 or more, and the length of label_vocabulary; {why}")
    words = vocabulary or tuple(map(str, range(count)))
    known = np.array(vocabulary) if vocabulary else None

    def labels(labels: Any) -> Any:
        return apply_named("estimator.classes", (labels, count, known), {})

    def named(ids: Any) -> Tensors:
        return {"class_ids": ids, "classes": as_tensor(np.array(words))[ids]}

    def accuracy(labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        return {"accuracy": metrics.accuracy(labels, predicted["class_ids"], weights)}

    def of_softmax(logits: Any) -> Tensors:
        probabilities = np.exp(nn.log_softmax(logits, axis=1))
        ids = np.reshape(np.argmax(logits, axis=1), (-1, 1))
        return {"logits": logits, "probabilities": probabilities, **named(ids)}

    def of_two(logits: Any) -> Tensors:
        positive = np.exp(-np.logaddexp(0, -logits))
        both = np.concatenate([1 - positive, positive], axis=1)
        ids = np.greater(logits, 0).astype(np.int64)
        return {"logits": logits, "logistic": positive, "probabilities": both, **named(ids)}

    def metrics_of_two(labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        ids = predicted["class_ids"]
        return {
            **accuracy(labels, predicted, weights),
            "precision": metrics.precision(labels, ids, weights),
            "recall": metrics.recall(labels, ids, weights),
            **_means(weights, {"label/mean": labels, "prediction/mean": predicted["logistic"]}),
        }

    if count == 2:
        return Head(1, weight_column, labels, of_two, _binary_cross_entropy, metrics_of_two)
    return Head(count, weight_column, labels, of_softmax, _cross_entropy, accuracy)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return -np.take_along_axis(nn.log_softmax(logits, axis=1), labels, axis=1)


def _binary_cross_entropy(logits: Any, labels: Any) -> Any:
    return np.logaddexp(0, logits) - logits * labels


def _means(weights: Any, values: Tensors) -> dict[str, Any]:
    return {name: metrics.mean(value, weights, name) for name, value in values.items()}


def _classes(labels: Any, count: int, words: Any) -> Any:
    """Return the classes of labels, which are integers or words, in a column."""
    ids = to_host(labels).reshape(-1, 1)
    if words is not None:
        ids = feature_column.lookup(ids, words, -1, 0)
    outside = (ids < 0) | (ids >= count) | (ids != np.floor(ids))  # NaN is none of them.
    if outside.any():
        wrong = to_host(labels).reshape(-1, 1)[outside].tolist()[0]
        known = f"one of {words.tolist()}" if words is not None else f"0 to {count - 1}"
        raise ValueError(f"the label {wrong!r} is no class: expected {known}")
    return ids.astype(np.int64)


register("estimator.classes", _classes)
