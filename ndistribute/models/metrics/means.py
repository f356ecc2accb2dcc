"""Metrics that are means of a function of labels and predictions, and `get` for all metrics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.devices import as_array
from ndistribute.exports import export as _export
from ndistribute.mistakes import count_of
from ndistribute.models import losses
from ndistribute.models.masks import mask_of
from ndistribute.models.metrics.counts import AUC, Precision, Recall
from ndistribute.models.metrics.metric import Mean, Metric
from ndistribute.names import deserializing, named, snake_case, table_of


class MeanMetric(Mean):
    """The weighted mean of a function of labels and predictions.

    Args:
        function: returns one value for each example.
        name: the name in logs; None: the function's name.
        parameters: passed to the function.

    If the function returns one number for a batch, it counts as the mean of the examples and allows
    no weights. The result may then depend on the sizes of batches and on the number of replicas.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, **parameters: Any
    ) -> None:
        super().__init__(name or function.__name__)
        self._function, self._parameters = function, parameters

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Add the examples of a batch, except those that the mask of the predictions leaves out."""
        mask = mask_of(y_pred)
        labels, predicted = untrack(losses.aligned(y_true, y_pred))  # No tape needs the metric.
        values = losses.per_example(self._function, labels, predicted, self._parameters)
        if not np.ndim(values) and sample_weight is None:
            values, mask = values * np.ones(predicted.shape[:1], np.float32), None
        if np.shape(values)[:1] != predicted.shape[:1]:
            raise ValueError(
                f"metric {self.name!r} returned an array of shape {np.shape(values)} for "
                f"{count_of(predicted.shape[0], 'example')}: return one value for each example, "
                "whose mean is the metric, or one number if there are no weights."
            )
        if mask is not None:
            weight = 1 if sample_weight is None else as_array(sample_weight)
            sample_weight = mask * (losses.weight_like(mask, weight) if np.ndim(weight) else weight)
        super().update_state(values, sample_weight)


def _sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Any:
    """Return for each example whether its most probable class is the label, an integer."""
    return np.equal(y_pred.argmax(axis=-1), _squeezed(y_true, y_pred))  # Of any two dtypes.


def _categorical_accuracy(y_true: Any, y_pred: Any) -> Any:
    """Return for each example whether its most probable class is that of the one-hot label."""
    losses.check_shape(y_true, y_pred.shape)
    return y_pred.argmax(axis=-1) == y_true.argmax(axis=-1)


def _binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Any:
    """Return for each prediction whether it is on the label's side of a threshold."""
    losses.check_shape(y_true, y_pred.shape)
    return (y_pred > threshold) == (y_true > 0.5)


def _is_among(y_true: Any, y_pred: Any, k: int) -> Any:
    best = np.argpartition(-y_pred, min(k, y_pred.shape[-1]) - 1, axis=-1)[..., :k]
    return np.equal(best, _squeezed(y_true, y_pred)[..., None]).any(axis=-1)


def _has_among(y_true: Any, y_pred: Any, k: int) -> Any:
    losses.check_shape(y_true, y_pred.shape)
    return _is_among(y_true.argmax(axis=-1), y_pred, k)


def _accuracy(y_true: Any, y_pred: Any) -> Any:
    losses.check_shape(y_true, y_pred.shape)
    return np.equal(y_true, y_pred).astype(np.float64)


def _squeezed(y_true: Any, y_pred: Any) -> Any:
    labels = y_true[..., 0] if y_true.shape == (*y_pred.shape[:-1], 1) else y_true
    losses.check_shape(labels, y_pred.shape[:-1])
    return labels


def _cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> Any:
    return -losses.cosine_similarity(y_true, y_pred, axis)


class _OfFunction(MeanMetric):
    """The base class of means of the function with the class's name, in snake case."""

    _of: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        name = snake_case(cls.__name__)
        if cls.__base__ is _OfFunction:
            cls._of = staticmethod(globals().get(f"_{name}") or getattr(losses, name))
        super().__init_subclass__(**options)

    def __init__(self, name: str | None = None, **options: Any) -> None:
        inspect.signature(self._of).bind(None, None, **options)
        super().__init__(self._of, name or snake_case(type(self).__name__), **options)


class MeanSquaredError(_OfFunction):
    """The mean of squared differences."""


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean of squared differences."""

    def result(self) -> float:
        """Return the root of the mean."""
        return float(np.sqrt(super().result()))


class MeanAbsoluteError(_OfFunction):
    """The mean of absolute differences."""


class MeanAbsolutePercentageError(_OfFunction):
    """The mean of absolute differences in percent of the labels."""


class CosineSimilarity(_OfFunction):
    """The mean of the cosine of the angle between labels and predictions; the option is `axis`."""


class SparseCategoricalAccuracy(_OfFunction):
    """The share of examples whose most probable class is the label, an integer.

    >>> metric = SparseCategoricalAccuracy()
    >>> metric.update_state(np.array([1, 0]), np.array([[0.2, 0.8], [0.3, 0.7]]))
    >>> metric.result()
    0.5
    """


class SparseTopKCategoricalAccuracy(MeanMetric):
    """The share of examples whose label, an integer, is among the `k` most probable classes."""

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(_is_among, name or "sparse_top_k_categorical_accuracy", k=k)


class CategoricalAccuracy(_OfFunction):
    """The share of examples whose most probable class is that of the one-hot label."""


class TopKCategoricalAccuracy(MeanMetric):
    """The share of examples whose one-hot label is among the `k` most probable classes."""

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(_has_among, name or "top_k_categorical_accuracy", k=k)


class BinaryAccuracy(_OfFunction):
    """The share of predictions on the label's side of a `threshold`, 0.5 by default."""


class Accuracy(_OfFunction):
    """The share of predictions that are equal to the labels."""


class BinaryCrossentropy(_OfFunction):
    """The mean of the loss; the options are `from_logits` and `label_smoothing`."""


class CategoricalCrossentropy(_OfFunction):
    """The mean of the loss; the options are `from_logits` and `label_smoothing`."""


class SparseCategoricalCrossentropy(_OfFunction):
    """The mean of the loss; the option is `from_logits`."""


NAMED: dict[str, type[Metric]] = table_of(
    *(*_OfFunction.__subclasses__(), RootMeanSquaredError, Precision, Recall, AUC),
    *(TopKCategoricalAccuracy, SparseTopKCategoricalAccuracy),
    mae=MeanAbsoluteError,
    mse=MeanSquaredError,
)


def get(metric: Any, loss: losses.Loss | None = None) -> Metric:
    """Return a metric for a name or a function; a `Metric` is returned unchanged.

    Args:
        metric: a metric, its name, a loss's name, or a function of labels and predictions. As in
            Keras, the shapes choose the kind of ``"accuracy"`` and ``"crossentropy"``. It is binary
            for predictions of one number, sparse for labels without the axis of the classes, and
            otherwise categorical. They take logits if the loss does; the logit 0 is the probability
            one half.
        loss: the model's loss.

    Raises:
        ValueError: the name is unknown.
    """
    parameters = {} if loss is None else getattr(loss, "_parameters", {})
    from_logits = bool(parameters.get("from_logits", False))
    if metric in ("accuracy", "acc"):
        binary = functools.partial(_binary_accuracy, threshold=0.0 if from_logits else 0.5)
        kinds: Any = (binary, _sparse_categorical_accuracy, _categorical_accuracy)
        return MeanMetric(_by_shapes, metric, kinds=kinds)
    if metric in ("crossentropy", "ce"):
        names = (f"{kind}_crossentropy" for kind in ("binary", "sparse_categorical", "categorical"))
        kinds = [functools.partial(getattr(losses, n), from_logits=from_logits) for n in names]
        return MeanMetric(_by_shapes, metric, kinds=kinds)
    made = named({"crossentropy": None, **losses.NAMED, **NAMED}, metric, "metric", name=metric)
    if isinstance(made, losses.FunctionLoss):
        return MeanMetric(made.call, metric)
    return made if isinstance(made, Metric) else MeanMetric(made)


def _by_shapes(y_true: Any, y_pred: Any, kinds: Any) -> Any:
    """Return the value of the binary, sparse or categorical function, by the arguments' shapes."""
    if y_pred.ndim < 2:
        y_true, y_pred = y_true[..., None], y_pred[..., None]
    if y_pred.shape[-1] == 1:
        return kinds[0](y_true, y_pred)
    is_sparse = y_true.ndim < y_pred.ndim or y_true.shape[-1] == 1
    return kinds[1 if is_sparse else 2](y_true, y_pred)


deserialize = deserializing(get)


_export(vars(), "deserialize")
