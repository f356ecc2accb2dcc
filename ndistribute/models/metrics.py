"""Metrics: exact means over all examples that all replicas have seen.

A metric keeps a sum and a count in one variable that is synchronized on read: each replica adds to
its own, and reading outside replicas adds them up. So an uneven last batch is counted right.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.context import current_trace
from ndistribute.devices import array_namespace, as_array, to_host
from ndistribute.exports import export as _export
from ndistribute.mistakes import Explaining
from ndistribute.models import activations, loss_forms, losses
from ndistribute.models.masks import mask_of
from ndistribute.models.names import named, snake_case, table_of
from ndistribute.values import Shown
from ndistribute.variables import Variable


class MetricValue(float):
    """The value of a metric on a replica, in a step of a model: logs contain that of all replicas.

    Attributes:
        metric: the metric.
    """

    metric: Metric


class PendingValue:
    """What stands for the value of a metric in a compiled step, which can only be returned.

    Args:
        metric: the metric.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def __repr__(self) -> str:
        return f"<the value of metric {self.metric.name!r} after the step>"


class Metric(Explaining, Shown):
    """The base class of metrics; a subclass defines `update_state` and `value_of`.

    Args:
        name: the name in logs; None: the class name in snake case.
        size: the number of sums that the metric keeps, or the shape of an array of them.
    """

    _uncalled: ClassVar = {
        "merge_state": "the sums of replicas are added up",
        "reset_states": "define reset_state",
        "result": "define value_of, which computes the value from the sums",
    }

    def __init__(self, name: str | None = None, *, size: int | tuple[int, ...] = 2) -> None:
        self.name = name or snake_case(type(self).__name__)
        kind: Any = {"trainable": False, "synchronization": "on_read", "aggregation": "sum"}
        self.state = Variable(np.zeros(size), name=f"metrics/{self.name}", **kind)

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add the examples of a batch."""
        raise NotImplementedError(f"{type(self).__name__} defines no update_state.")

    def value_of(self, sums: Any) -> Any:
        """Return the metric's value from its sums."""
        raise NotImplementedError(f"{type(self).__name__} defines no value_of.")

    def result(self) -> Any:
        """Return the value over all replicas; inside `run`, that of this replica alone."""
        if not loss_forms.in_step_of_model():
            return self.value_of(to_host(as_array(self.state)))
        if current_trace() is not None:
            pending: Any = self._pending
            return pending
        value = MetricValue(self.value_of(to_host(as_array(self.state))))
        value.metric = self
        return value

    @functools.cached_property
    def _pending(self) -> PendingValue:
        return PendingValue(self)

    def local_result(self) -> Any:
        """Return the value over the replicas of this process, without waiting for others."""
        return self.value_of(sum(map(to_host, self.state.values)))

    def reset_state(self) -> None:
        """Forget all examples."""
        self.state.assign(np.zeros(self.state.shape))

    def reset_states(self) -> None:
        """Call `reset_state`; this was its name in TensorFlow before 2.5."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch, and return the value."""
        self.update_state(*args, **kwargs)
        return self.result()


class Sum(Metric):
    """The weighted sum of values.

    >>> metric = Sum()
    >>> metric.update_state([1.0, 2.0])
    >>> metric.result()
    3.0
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name, size=1)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each times its weight."""
        total, _ = weighted_sum(values, sample_weight)
        self.state.assign_add(joined(total))

    def value_of(self, sums: Any) -> float:
        """Return the sum."""
        return float(sums[0])


class Mean(Metric):
    """The weighted mean of values; 0 before the first.

    >>> metric = Mean()
    >>> metric.update_state([1.0, 2.0, 6.0])
    >>> metric.result()
    3.0
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each with its weight."""
        self.state.assign_add(joined(*weighted_sum(values, sample_weight)))

    def value_of(self, sums: Any) -> float:
        """Return the sum over the count."""
        return float(sums[0] / sums[1]) if sums[1] else 0.0


class MeanMetric(Mean):
    """The weighted mean of a function of labels and predictions.

    Args:
        function: returns one value for each example.
        name: the name in logs; None: the function's name.
        parameters: passed to the function.

    A function that returns one number for a batch is a `ValueError`: a mean of such numbers depends
    on the sizes of batches, and on the number of replicas.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, **parameters: Any
    ) -> None:
        super().__init__(name or function.__name__)
        self._function, self._parameters = function, parameters

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Add the examples of a batch, but those that the mask of the predictions leaves out."""
        mask = mask_of(y_pred)
        labels, predicted = untrack(losses.aligned(y_true, y_pred))  # No tape needs the metric.
        values = losses.per_example(self._function, labels, predicted, self._parameters)
        if np.shape(values)[:1] != predicted.shape[:1] or not np.ndim(values):
            raise ValueError(
                f"metric {self.name!r} returned an array of shape {np.shape(values)} for "
                f"{predicted.shape[0]} examples: return one value for each example, whose mean is "
                "the metric, or write a subclass of nd.metrics.Metric."
            )
        if mask is not None:
            sample_weight = mask if sample_weight is None else _both(mask, sample_weight)
        super().update_state(values, sample_weight)


class MeanSquaredError(MeanMetric):
    """The mean of squared differences."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(losses.mean_squared_error, name)


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean of squared differences."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or "root_mean_squared_error")

    def value_of(self, sums: Any) -> float:
        """Return the root of the mean."""
        return float(np.sqrt(super().value_of(sums)))


class MeanAbsoluteError(MeanMetric):
    """The mean of absolute differences."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(losses.mean_absolute_error, name)


class MeanAbsolutePercentageError(MeanMetric):
    """The mean of absolute differences in percent of the labels."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(losses.mean_absolute_percentage_error, name)


class SparseCategoricalAccuracy(MeanMetric):
    """The share of examples whose most probable class is the label, an integer.

    >>> metric = SparseCategoricalAccuracy()
    >>> metric.update_state(np.array([1, 0]), np.array([[0.2, 0.8], [0.3, 0.7]]))
    >>> metric.result()
    0.5
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(sparse_categorical_accuracy, name)


class SparseTopKCategoricalAccuracy(MeanMetric):
    """The share of examples whose label, an integer, is among the `k` most probable classes."""

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(_is_among, name or f"sparse_top_{k}_categorical_accuracy", k=k)


class CategoricalAccuracy(MeanMetric):
    """The share of examples whose most probable class is that of the one-hot label."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(categorical_accuracy, name)


class TopKCategoricalAccuracy(MeanMetric):
    """The share of examples whose one-hot label is among the `k` most probable classes."""

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(_has_among, name or f"top_{k}_categorical_accuracy", k=k)


class BinaryAccuracy(MeanMetric):
    """The share of predictions on the label's side of a threshold."""

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(binary_accuracy, name, threshold=threshold)


class Accuracy(MeanMetric):
    """The share of predictions that are equal to the labels."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(_is_equal, name or "accuracy")


class BinaryCrossentropy(MeanMetric):
    """The mean of a loss, whose options `from_logits` and `label_smoothing` it takes."""

    _of: ClassVar[Callable[..., Any]] = staticmethod(losses.binary_crossentropy)

    def __init__(self, name: str | None = None, **options: Any) -> None:
        inspect.signature(self._of).bind(None, None, **options)
        super().__init__(type(self)._of, name, **options)


class CategoricalCrossentropy(BinaryCrossentropy):
    """The mean of the loss of this name."""

    _of = staticmethod(losses.categorical_crossentropy)


class SparseCategoricalCrossentropy(BinaryCrossentropy):
    """The mean of the loss of this name."""

    _of = staticmethod(losses.sparse_categorical_crossentropy)


class _Counted(Metric):
    """The base class of metrics of positive examples and others, counted above thresholds."""

    def __init__(self, thresholds: Any, name: str | None) -> None:
        self.thresholds = thresholds
        self._bounds = np.atleast_1d(np.asarray(thresholds, np.float64))
        super().__init__(name, size=(len(self._bounds) + 1, 2))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add the examples of a batch."""
        y_true, y_pred = untrack(losses.aligned(y_true, y_pred))
        losses.check_shape(y_true, y_pred.shape)
        xp = array_namespace(y_pred)
        if y_pred.dtype.kind in "biu":  # A bound such as 0.5 is none of these numbers.
            y_pred = y_pred.astype(np.float64)
        weights = xp.ones(y_pred.shape, np.float64)
        if sample_weight is not None:
            weight = as_array(sample_weight)
            weights = weights * weight.reshape(weight.shape + (1,) * (y_pred.ndim - weight.ndim))
        is_positive = y_true > 0.5
        kinds = xp.stack([(weights * kind).reshape(-1) for kind in (is_positive, ~is_positive)])
        bounds = xp.asarray(self._bounds.astype(y_pred.dtype))
        above = y_pred.reshape(-1, 1) > bounds
        sums = xp.concatenate([kinds @ above.astype(np.float64), kinds.sum(axis=1)[:, None]], 1).T
        self.state.assign_add(to_host(sums) if current_trace() is None else sums)

    def _shares(self, sums: Any) -> tuple[Any, Any]:
        """Return the shares among the examples above thresholds, and among the positive ones."""
        above, (positive, _) = sums[:-1], sums[-1]
        return _divided(above[:, 0], above.sum(axis=1)), _divided(above[:, 0], positive)


class Precision(_Counted):
    """The share of the examples predicted positive that are positive.

    Args:
        thresholds: the prediction above which an example is predicted positive; a list of them
            gives an array of values.
        name: the name in logs.
    """

    _index: ClassVar[int] = 0

    def __init__(self, thresholds: Any = 0.5, name: str | None = None) -> None:
        super().__init__(0.5 if thresholds is None else thresholds, name)

    def value_of(self, sums: Any) -> Any:
        """Return the share for the threshold, or an array for several."""
        shares = self._shares(sums)[self._index]
        return shares if np.ndim(self.thresholds) else float(shares[0])


class Recall(Precision):
    """The share of the positive examples that are predicted positive; see `Precision`."""

    _index = 1


class TruePositives(Precision):
    """The number of positive examples that are predicted positive; see `Precision`.

    >>> metric = FalseNegatives()
    >>> metric.update_state(np.array([0, 1, 1]), np.array([0.9, 0.8, 0.1]))
    >>> metric.result()
    1.0
    """

    _column: ClassVar[int] = 0  # Of the positive examples.

    def _shares(self, sums: Any) -> tuple[Any, Any]:
        """Return the numbers of examples above thresholds, and of the others."""
        above = sums[:-1, self._column]
        return above, sums[-1, self._column] - above


class FalseNegatives(TruePositives):
    """The number of positive examples that are predicted negative; see `Precision`."""

    _index = 1


class FalsePositives(TruePositives):
    """The number of negative examples that are predicted positive; see `Precision`."""

    _column = 1


class TrueNegatives(FalsePositives):
    """The number of negative examples that are predicted negative; see `Precision`."""

    _index = 1


class AUC(_Counted):
    """The area under a curve of shares that a threshold from 0 to 1 gives, by trapezoids.

    Args:
        num_thresholds: the number of thresholds.
        curve: ``"ROC"``, the share of true positives over that of false positives, or ``"PR"``, the
            precision over the recall.
        name: the name in logs.
        from_logits: whether predictions are logits, else probabilities.

    The area under ``"PR"`` is interpolated as by Davis and Goadrich, "The Relationship Between
    Precision-Recall and ROC Curves", 2006.

    >>> metric = AUC()
    >>> metric.update_state(np.array([0, 0, 1, 1]), np.array([0.1, 0.5, 0.3, 0.9]))
    >>> metric.result()
    0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        name: str | None = None,
        *,
        from_logits: bool = False,
    ) -> None:
        if curve not in ("ROC", "PR") or num_thresholds < 2:
            raise ValueError(
                "AUC: curve must be 'ROC' or 'PR', and num_thresholds 2 or more, got "
                f"{curve!r} and {num_thresholds}."
            )
        inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        super().__init__([-1e-7, *inner, 1 + 1e-7], name)
        self.curve, self.from_logits = curve, from_logits

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add the examples of a batch."""
        y_pred = as_array(untrack(y_pred))
        if self.from_logits:
            y_pred = activations.sigmoid(y_pred)
        super().update_state(y_true, y_pred, sample_weight)

    def value_of(self, sums: Any) -> float:
        """Return the area."""
        right, wrong = sums[:-1].T
        if self.curve == "ROC":
            x, y = _divided(wrong, sums[-1, 1]), _divided(right, sums[-1, 0])
            return float(np.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2))
        predicted = right + wrong
        slope = _divided(-np.diff(right), np.maximum(-np.diff(predicted), 0))
        start = right[1:] - slope * predicted[1:]
        both = (predicted[:-1] > 0) & (predicted[1:] > 0)
        ratio = np.where(both, _divided(predicted[:-1], np.maximum(predicted[1:], 0)), 1.0)
        rise = slope * (-np.diff(right) + start * np.log(ratio))
        return float(np.sum(_divided(rise, sums[-1, 0])))


def _divided(a: Any, b: Any) -> Any:
    """Return quotients, 0 where the divisor is."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b != 0)


NAMED: dict[str, type[Metric]] = table_of(
    *(BinaryAccuracy, CategoricalAccuracy, SparseCategoricalAccuracy, Precision, Recall, AUC),
    *(MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError, BinaryCrossentropy),
    *(CategoricalCrossentropy, SparseCategoricalCrossentropy, TopKCategoricalAccuracy),
    SparseTopKCategoricalAccuracy,
    mae=MeanAbsoluteError,
    mse=MeanSquaredError,
)


def get(metric: Any, loss: losses.Loss | None) -> Metric:
    """Return a metric for a name or a function; a `Metric` is returned unchanged.

    Args:
        metric: a metric, its name, a loss's name, or a function of labels and predictions.
            ``"accuracy"`` and ``"crossentropy"`` mean, as in Keras, those of two classes for
            predictions of one number, the sparse ones for labels without the axis of the classes,
            and otherwise the categorical ones. They take logits if the loss does, of which 0 is
            one half.
        loss: the model's loss.

    Raises:
        ValueError: the name is unknown.
    """
    parameters = {} if loss is None else getattr(loss, "_parameters", {})
    from_logits = bool(parameters.get("from_logits", False))
    if metric in ("accuracy", "acc"):
        binary = functools.partial(binary_accuracy, threshold=0.0 if from_logits else 0.5)
        kinds: Any = (binary, sparse_categorical_accuracy, categorical_accuracy)
        return MeanMetric(_by_shapes, metric, kinds=kinds)
    if metric in ("crossentropy", "ce"):
        kinds = losses.binary_crossentropy, losses.sparse_categorical_crossentropy
        kinds = [*kinds, losses.categorical_crossentropy]
        kinds = [functools.partial(kind, from_logits=from_logits) for kind in kinds]
        return MeanMetric(_by_shapes, metric, kinds=kinds)
    known = {"accuracy": None, "crossentropy": None, **losses.NAMED, **NAMED}
    made = named(known, metric, "metric", name=metric)
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


def joined(*numbers: Any) -> Any:
    """Return numbers as an array of float64, on the host or in a compiled step."""
    if current_trace() is None:
        return np.array([float(number) for number in numbers])
    return np.stack(numbers).astype(np.float64)


def weighted_sum(values: Any, sample_weight: Any = None) -> tuple[Any, Any]:
    """Return the weighted sum of values, and the sum of their weights."""
    values = as_array(untrack(values))
    if sample_weight is None:
        return values.sum(dtype=np.float64), values.size
    weight = as_array(sample_weight)
    if weight.ndim > values.ndim and weight.shape[-1] == 1:
        weight = weight[..., 0]
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    weight = array_namespace(weight).broadcast_to(weight, values.shape)
    return (values * weight).sum(dtype=np.float64), weight.sum(dtype=np.float64)


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Any:
    """Return for each example whether its most probable class is the label, an integer."""
    return y_pred.argmax(axis=-1) == _squeezed(y_true, y_pred)


def categorical_accuracy(y_true: Any, y_pred: Any) -> Any:
    """Return for each example whether its most probable class is that of the one-hot label."""
    losses.check_shape(y_true, y_pred.shape)
    return y_pred.argmax(axis=-1) == y_true.argmax(axis=-1)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Any:
    """Return for each prediction whether it is on the label's side of a threshold."""
    losses.check_shape(y_true, y_pred.shape)
    return (y_pred > threshold) == (y_true > 0.5)


def _both(mask: Any, weight: Any) -> Any:
    weight = as_array(weight)
    return mask * weight.reshape(weight.shape + (1,) * (mask.ndim - weight.ndim))


def _is_among(y_true: Any, y_pred: Any, k: int) -> Any:
    best = np.argpartition(-y_pred, min(k, y_pred.shape[-1]) - 1, axis=-1)[..., :k]
    return (best == _squeezed(y_true, y_pred)[..., None]).any(axis=-1)


def _has_among(y_true: Any, y_pred: Any, k: int) -> Any:
    losses.check_shape(y_true, y_pred.shape)
    return _is_among(y_true.argmax(axis=-1), y_pred, k)


def _is_equal(y_true: Any, y_pred: Any) -> Any:
    losses.check_shape(y_true, y_pred.shape)
    return (y_true == y_pred).astype(np.float64)


def _squeezed(y_true: Any, y_pred: Any) -> Any:
    labels = y_true[..., 0] if y_true.shape == (*y_pred.shape[:-1], 1) else y_true
    losses.check_shape(labels, y_pred.shape[:-1])
    return labels


_export(
    vars(),
    but="MetricValue PendingValue binary_accuracy categorical_accuracy joined "
    "sparse_categorical_accuracy weighted_sum",
)
