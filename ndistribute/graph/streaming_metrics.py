"""Metrics over many batches: pairs of the value so far and an operation that adds a batch.

Each metric keeps sums in local variables of the collection `METRIC_VARIABLES`, and computes its
value from them. Clients with different batches add these variables up to get the value over all
batches. All metrics also take `name`, the scope of their operations, and `metrics_collections` and
`updates_collections`, the names of collections to which they add the two tensors. A share of zero
examples is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.exports import export as _export
from ndistribute.graph.graph import Tensor, as_tensor, get_default_graph
from ndistribute.graph.operations import identity
from ndistribute.graph.variables import LOCAL_VARIABLES, METRIC_VARIABLES, GraphVariable

Metric = tuple[Tensor, Tensor]
_Curve = Callable[[Any, Any, Any, Any], Any]


def _metric(function: Callable[..., Metric]) -> Callable[..., Metric]:
    """Return a function that also takes the arguments of all metrics."""

    @functools.wraps(function)
    def call(
        *args: Any,
        name: str | None = None,
        metrics_collections: Sequence[str] | None = None,
        updates_collections: Sequence[str] | None = None,
        **options: Any,
    ) -> Metric:
        graph = get_default_graph()
        with graph.name_scope(name or function.__name__):
            value, update = function(*args, **options)
            pair = identity(value, "value"), identity(update, "update_op")
        for keys, made in zip((metrics_collections, updates_collections), pair, strict=True):
            for key in keys or ():
                graph.add_to_collection(key, made)
        return pair

    return call


def _same(value: Any) -> Any:
    return value


@_metric
def mean(values: Any, weights: Any = None) -> Metric:
    """Return the weighted mean of values over all updates, and the operation that adds a batch.

    Args:
        values: a tensor of any shape.
        weights: a tensor that broadcasts to the values; None: ones.

    Returns:
        Two tensors: the value so far, and the value after an update by this batch.

    >>> from ndistribute.graph.graph import Graph
    >>> from ndistribute.graph.operations import placeholder
    >>> from ndistribute.graph.session import Session
    >>> from ndistribute.graph.variables import local_variables, variables_initializer
    >>> with Graph().as_default(), Session() as session:
    ...     x = placeholder(np.float64, [None])
    ...     value, update = mean(x)
    ...     session.run(variables_initializer(local_variables()))
    ...     updates = [session.run(update, {x: batch}) for batch in ([1.0, 2.0], [6.0])]
    ...     float(session.run(value))
    3.0
    """
    return _mean(values, weights)


@_metric
def mean_tensor(values: Any, weights: Any = None) -> Metric:
    """Return the weighted mean of each element; the shape must be known. See `mean`."""
    values = as_tensor(values).astype(np.float64)
    spread = np.ones_like(values) if weights is None else _spread(weights, values)
    if values.shape is None or None in values.shape:
        raise ValueError(f"mean_tensor needs a tensor of a known shape, got {values!r}.")
    return _summed(_share, [values * spread, spread], tuple(values.shape))


def _named(name: str, what: str, function: Callable[..., Metric]) -> Callable[..., Metric]:
    """Return a metric of a name."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Return {what}; see `mean`."
    return _metric(function)


def _mean_of(
    name: str, what: str, of: Callable[[Any, Any], Any], then: Callable[[Any], Any] = _same
) -> Callable[..., Metric]:
    """Return a metric that is a function of the mean of another function of the examples."""

    def metric(labels: Any, predictions: Any, weights: Any = None) -> Metric:
        return _mean(of(_like(predictions, labels), predictions), weights, then)

    return _named(name, what, metric)


accuracy = _mean_of("accuracy", "the share of predictions that equal their labels", np.equal)
mean_squared_error = _mean_of(
    "mean_squared_error", "the mean of the squared differences", lambda y, p: np.square(y - p)
)
root_mean_squared_error = _mean_of(
    "root_mean_squared_error",
    "the root of `mean_squared_error`",
    lambda y, p: np.square(y - p),
    np.sqrt,
)
mean_absolute_error = _mean_of(
    "mean_absolute_error", "the mean of the absolute differences", lambda y, p: np.abs(y - p)
)


def _at_thresholds(name: str, what: str, value: _Curve) -> tuple[Callable[..., Metric], ...]:
    """Return two metrics of true and false examples: of predicted truth, and above thresholds."""

    def of_truth(labels: Any, predictions: Any, weights: Any = None) -> Metric:
        predicted = as_tensor(predictions).astype(bool).astype(np.float64)
        return _above(lambda *counts: value(*counts)[0], labels, predicted, [0.5], weights)

    def of_thresholds(
        labels: Any, predictions: Any, thresholds: Sequence[float], weights: Any = None
    ) -> Metric:
        return _above(value, labels, predictions, thresholds, weights)

    above = f"{what}, for predictions above each of `thresholds`"
    return _named(name, what, of_truth), _named(f"{name}_at_thresholds", above, of_thresholds)


true_positives, true_positives_at_thresholds = _at_thresholds(
    "true_positives", "the number of true labels predicted true", lambda tp, fp, tn, fn: tp
)
false_positives, false_positives_at_thresholds = _at_thresholds(
    "false_positives", "the number of false labels predicted true", lambda tp, fp, tn, fn: fp
)
true_negatives, true_negatives_at_thresholds = _at_thresholds(
    "true_negatives", "the number of false labels predicted false", lambda tp, fp, tn, fn: tn
)
false_negatives, false_negatives_at_thresholds = _at_thresholds(
    "false_negatives", "the number of true labels predicted false", lambda tp, fp, tn, fn: fn
)
precision, precision_at_thresholds = _at_thresholds(
    "precision", "the share of true positives", lambda tp, fp, tn, fn: _share(tp, tp + fp)
)
recall, recall_at_thresholds = _at_thresholds(
    "recall", "the share of true labels found", lambda tp, fp, tn, fn: _share(tp, tp + fn)
)


@_metric
def auc(
    labels: Any,
    predictions: Any,
    weights: Any = None,
    num_thresholds: int = 200,
    curve: str = "ROC",
    summation_method: str = "trapezoidal",
) -> Metric:
    """Return the area under the ROC or precision-recall curve.

    Args:
        labels: truth values.
        predictions: probabilities.
        weights: see `mean`.
        num_thresholds: the number of thresholds.
        curve: ``"ROC"``, the rate of true positives over the rate of false positives, or ``"PR"``,
            the precision over the recall.
        summation_method: ``"trapezoidal"``, or ``"careful_interpolation"``: for ``"PR"`` after
            Davis and Goadrich, "The Relationship Between Precision-Recall and ROC Curves", 2006.

    Raises:
        ValueError: the curve or the method is unknown.
    """
    if curve not in ("ROC", "PR") or summation_method not in _SUMMATIONS:
        known = f"curve must be 'ROC' or 'PR', and summation_method one of {_SUMMATIONS}"
        raise ValueError(f"auc: {known}, got {curve!r} and {summation_method!r}.")

    def area(tp: Any, fp: Any, tn: Any, fn: Any) -> Any:
        if curve == "PR" and summation_method == "careful_interpolation":
            return _interpolated(tp, tp + fp, tp + fn)
        x, y = _share(fp, fp + tn), _share(tp, tp + fn)
        if curve == "PR":  # Above all predictions the precision counts as 1.
            x, y = y, _share(tp + _TINY, tp + fp + _TINY)
        return np.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2)

    return _above(area, labels, predictions, _bounds(num_thresholds), weights)


@_metric
def sensitivity_at_specificity(
    labels: Any,
    predictions: Any,
    specificity: float,
    weights: Any = None,
    num_thresholds: int = 200,
) -> Metric:
    """Return the recall at the threshold whose share of true negatives is nearest to a number."""

    def nearest(tp: Any, fp: Any, tn: Any, fn: Any) -> Any:
        return _share(tp, tp + fn)[np.argmin(np.abs(_share(tn, tn + fp) - specificity))]

    return _above(nearest, labels, predictions, _bounds(num_thresholds), weights)


@_metric
def specificity_at_sensitivity(
    labels: Any,
    predictions: Any,
    sensitivity: float,
    weights: Any = None,
    num_thresholds: int = 200,
) -> Metric:
    """Return the share of true negatives at the threshold whose recall is nearest to a number."""

    def nearest(tp: Any, fp: Any, tn: Any, fn: Any) -> Any:
        distance = np.abs(_share(tp, tp + fn) - sensitivity)  # The highest threshold counts.
        return _share(tn, tn + fp)[::-1][np.argmin(distance[::-1])]

    return _above(nearest, labels, predictions, _bounds(num_thresholds), weights)


@_metric
def mean_iou(labels: Any, predictions: Any, num_classes: int, weights: Any = None) -> Metric:
    """Return the mean over classes of the intersection over union of labels and predictions."""

    def value(counts: Any) -> Any:
        both = np.diagonal(counts)
        union = np.sum(counts, axis=0) + np.sum(counts, axis=1) - both
        return _share(np.sum(_share(both, union)), np.sum(np.greater(union, 0)))

    return _confusion(value, labels, predictions, num_classes, weights)


@_metric
def mean_per_class_accuracy(
    labels: Any, predictions: Any, num_classes: int, weights: Any = None
) -> Metric:
    """Return the mean over classes of the share of examples that are predicted correctly."""
    return _confusion(
        lambda counts: np.mean(_share(np.diagonal(counts), np.sum(counts, axis=1))),
        *(labels, predictions, num_classes, weights),
    )


_TINY = 1e-7
_SUMMATIONS = ["trapezoidal", "careful_interpolation"]


def _interpolated(right: Any, predicted: Any, positive: Any) -> Any:
    """Return the area under the precision over the recall."""
    gained = right[:-1] - right[1:]
    slope = _share(gained, predicted[:-1] - predicted[1:])
    start = right[1:] - slope * predicted[1:]
    ratio = np.where(np.equal(predicted[1:], 0), 1.0, _share(predicted[:-1], predicted[1:]))
    return np.sum(_share(slope * (gained + start * np.log(ratio)), positive[1:]))


def _bounds(count: int) -> list[float]:
    """Return thresholds at equal distances, the first below 0 and the last above 1."""
    if count < 2:
        raise ValueError(f"num_thresholds must be 2 or more, got {count}.")
    return [-_TINY, *(k / (count - 1) for k in range(1, count - 1)), 1 + _TINY]


def _above(
    value: _Curve, labels: Any, predictions: Any, thresholds: Sequence[float], weights: Any
) -> Metric:
    """Return a function of true and false positives and negatives, an array of each."""
    predictions = as_tensor(predictions)
    is_real = predictions.dtype is not None and predictions.dtype.kind == "f"
    dtype = predictions.dtype if is_real else np.dtype(np.float32)
    truth = _like(predictions, labels).astype(bool).astype(np.float64)
    spread = 1.0 if weights is None else _spread(weights, predictions)
    kinds = [np.reshape(kind * spread, -1) for kind in (truth, 1.0 - truth)]
    bounds = np.asarray(thresholds, dtype)[:, None]
    above = np.greater(np.reshape(predictions.astype(dtype), (1, -1)), bounds).astype(np.float64)

    def of_counts(positive: Any, negative: Any, tp: Any, fp: Any) -> Any:
        return value(tp, fp, negative - fp, positive - tp)

    counts = [np.matmul(each, kind) for each in (np.ones_like(above), above) for kind in kinds]
    return _summed(of_counts, counts, (len(thresholds),))


def _confusion(
    value: Callable[[Any], Any], labels: Any, predictions: Any, classes: int, weights: Any
) -> Metric:
    """Return a function of how often each class, by row, is predicted as each other, by column."""
    predictions, known = as_tensor(predictions), np.arange(classes)
    spread = np.ones_like(predictions) if weights is None else _spread(weights, predictions)
    rows, columns = (
        np.equal(np.reshape(each, (-1, 1)), known).astype(np.float64)
        for each in (_like(predictions, labels), predictions)
    )
    rows = rows * np.reshape(spread, (-1, 1))
    return _summed(value, [np.matmul(np.transpose(rows), columns)], (classes, classes))


def _mean(values: Any, weights: Any, then: Callable[[Any], Any] = _same) -> Metric:
    """Return a function of the weighted mean of values."""
    values = as_tensor(values).astype(np.float64)
    spread = None if weights is None else _spread(weights, values)
    sums = [np.sum(values if spread is None else values * spread)]
    sums.append(np.size(values) if spread is None else np.sum(spread))
    return _summed(lambda total, count: then(_share(total, count)), sums)


def _spread(weights: Any, values: Any) -> Any:
    weights, values = as_tensor(weights), as_tensor(values)
    if weights.shape and values.shape is not None:  # One of them may lack a last axis.
        missing = len(values.shape) - len(weights.shape)
        if missing == 1:
            weights = weights[..., None]
        elif missing == -1:
            weights = weights[..., 0]
    return np.broadcast_to(weights, np.shape(values))


def _share(part: Any, whole: Any) -> Any:
    """Return quotients, 0 where the divisor is 0."""
    is_zero = np.equal(whole, 0)
    return np.where(is_zero, 0.0, part / np.where(is_zero, 1.0, whole))


def _summed(
    value: Callable[..., Any], sums: Sequence[Any], shape: tuple[int, ...] = ()
) -> tuple[Any, Any]:
    """Return a function of sums over all updates, before and after an update by these."""
    places = [LOCAL_VARIABLES, METRIC_VARIABLES]
    zeros = np.zeros(shape)
    kept = [GraphVariable(zeros, False, "sum", collections=places) for _ in sums]
    added = [variable.assign_add(by) for variable, by in zip(kept, sums, strict=True)]
    return value(*kept), value(*added)


def _like(predictions: Any, labels: Any) -> Any:
    """Return labels in the shape of predictions; one may lack an axis of length 1."""
    return np.reshape(as_tensor(labels), np.shape(as_tensor(predictions)))


_export(vars())
