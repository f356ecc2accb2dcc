"""Heads: the loss, the predictions and the metrics of a task, from the logits of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
class Head(ABC):
    """What a ready-made estimator does with logits of shape ``(batch, units)``."""

    units: int
    weight_column: str | None = None
    vocabulary: tuple[Any, ...] = ()  # The labels by class; empty: labels are the classes.

    @abstractmethod
    def predictions(self, logits: Any) -> Tensors:
        """Return tensors with an entry for each example."""

    @abstractmethod
    def losses(self, logits: Any, labels: Any) -> Any:
        """Return the loss of each label."""

    @abstractmethod
    def labels(self, labels: Any) -> Any:
        """Return labels of shape ``(batch, n)`` as losses and metrics use them."""

    @abstractmethod
    def metrics(self, labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        """Return metrics in addition to the average loss."""

    def spec(
        self,
        features: Any,
        labels: Any,
        mode: str,
        logits: Any,
        optimizer: Callable[[], Any],
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
            found = {"average_loss": metrics.mean(losses, weights, "average_loss")}
            found |= self.metrics(labels, predicted, weights)
            return EstimatorSpec(mode, predicted, loss, eval_metric_ops=found)
        step = get_or_create_global_step()
        return EstimatorSpec(mode, predicted, loss, optimizer().minimize(loss, global_step=step))

    def _weights(self, features: Any) -> Any:
        if self.weight_column is None:
            return None
        if not isinstance(features, Mapping) or self.weight_column not in features:
            raise KeyError(f"there is no feature {self.weight_column!r} for weight_column.")
        return np.reshape(as_tensor(features[self.weight_column]), (-1, 1))


@dataclass(frozen=True)
class RegressionHead(Head):
    """The head of a regression: the logits are the predictions, the loss is the squared error."""

    def predictions(self, logits: Any) -> Tensors:
        return {"predictions": logits}

    def losses(self, logits: Any, labels: Any) -> Any:
        return np.square(labels - logits)

    def labels(self, labels: Any) -> Any:
        return np.reshape(as_tensor(labels), (-1, self.units))

    def metrics(self, labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        values = {"label/mean": labels, "prediction/mean": predicted["predictions"]}
        return {name: metrics.mean(one, weights, name) for name, one in values.items()}


@dataclass(frozen=True)
class MultiClassHead(Head):
    """The head of a classification by softmax: one logit for each class."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.units

    def predictions(self, logits: Any) -> Tensors:
        ids = np.argmax(logits, axis=1)
        return {
            "logits": logits,
            "probabilities": np.exp(nn.log_softmax(logits, axis=1)),
            **self._named(np.reshape(ids, (-1, 1))),
        }

    def losses(self, logits: Any, labels: Any) -> Any:
        return -np.take_along_axis(nn.log_softmax(logits, axis=1), labels, axis=1)

    def labels(self, labels: Any) -> Any:
        words = np.array(self.vocabulary) if self.vocabulary else None
        return apply_named("estimator.classes", (labels, self.classes, words), {})

    def metrics(self, labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        return {"accuracy": metrics.accuracy(labels, predicted["class_ids"], weights)}

    def _named(self, ids: Any) -> Tensors:
        words = self.vocabulary or tuple(map(str, range(self.classes)))
        return {"class_ids": ids, "classes": as_tensor(np.array(words))[ids]}


@dataclass(frozen=True)
class BinaryHead(MultiClassHead):
    """The head of a classification in two classes: one logit, of class 1."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return 2

    def predictions(self, logits: Any) -> Tensors:
        positive = np.exp(-np.logaddexp(0, -logits))
        return {
            "logits": logits,
            "logistic": positive,
            "probabilities": np.concatenate([1 - positive, positive], axis=1),
            **self._named(np.greater(logits, 0).astype(np.int64)),
        }

    def losses(self, logits: Any, labels: Any) -> Any:
        return np.logaddexp(0, logits) - logits * labels

    def metrics(self, labels: Any, predicted: Tensors, weights: Any) -> dict[str, Any]:
        ids = predicted["class_ids"]
        return {
            **super().metrics(labels, predicted, weights),
            "precision": metrics.precision(labels, ids, weights),
            "recall": metrics.recall(labels, ids, weights),
            "label/mean": metrics.mean(labels, weights, "label/mean"),
            "prediction/mean": metrics.mean(predicted["logistic"], weights, "prediction/mean"),
        }


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
