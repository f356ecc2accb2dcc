"""Metrics: exact means over all examples that all replicas have seen.

A metric keeps a sum and a count in one variable that is synchronized on read: each replica adds to
its own, and reading outside replicas adds them up. So an uneven last batch is counted right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.context import current_trace
from ndistribute.devices import array_namespace, as_array, to_host
from ndistribute.exports import export as _export
from ndistribute.mistakes import Explaining
from ndistribute.models import losses
from ndistribute.models.masks import mask_of
from ndistribute.models.names import named, snake_case, table_of
from ndistribute.values import Shown
from ndistribute.variables import Variable


class Metric(Explaining, Shown):
    """The base class of metrics; a subclass defines `update_state` and `value_of`.

    Args:
        name: the name in logs; None: the class name in snake case.
        size: the number of sums that the metric keeps.
    """

    _uncalled: ClassVar = {
        "merge_state": "the sums of replicas are added up",
        "reset_states": "define reset_state",
        "result": "define value_of, which computes the value from the sums",
    }

    def __init__(self, name: str | None = None, *, size: int = 2) -> None:
        self.name = name or snake_case(type(self).__name__)
        kind: Any = {"trainable": False, "synchronization": "on_read", "aggregation": "sum"}
        self.state = Variable(np.zeros(size), name=f"metrics/{self.name}", **kind)

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add the examples of a batch."""
        raise NotImplementedError(f"{type(self).__name__} defines no update_state.")

    def value_of(self, sums: Any) -> float:
        """Return the metric's value from its sums."""
        raise NotImplementedError(f"{type(self).__name__} defines no value_of.")

    def result(self) -> float:
        """Return the value over all replicas; inside `run`, that of this replica alone."""
        return self.value_of(to_host(as_array(self.state)))

    def local_result(self) -> float:
        """Return the value over the replicas of this process, without waiting for others."""
        return self.value_of(sum(map(to_host, self.state.values)))

    def reset_state(self) -> None:
        """Forget all examples."""
        self.state.assign(np.zeros(self.state.shape))

    def reset_states(self) -> None:
        """Call `reset_state`; this was its name in TensorFlow before 2.5."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> float:
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


class BinaryAccuracy(MeanMetric):
    """The share of predictions on the label's side of a threshold."""

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(binary_accuracy, name, threshold=threshold)


class _Ratio(Mean):
    """The base class of the share of positive examples predicted positive, among some."""

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(name)
        self.threshold = threshold

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Add the examples of a batch."""
        y_true, y_pred = untrack(losses.aligned(y_true, y_pred))
        losses.check_shape(y_true, y_pred.shape)
        both = y_true > 0.5, y_pred > self.threshold
        counted = both[0] & both[1], both[self._among]
        sums = [weighted_sum(examples, sample_weight)[0] for examples in counted]
        self.state.assign_add(joined(*sums))

    _among: ClassVar[int]


class Precision(_Ratio):
    """The share of the examples predicted positive that are positive."""

    _among = 1


class Recall(_Ratio):
    """The share of the positive examples that are predicted positive."""

    _among = 0


NAMED: dict[str, type[Metric]] = table_of(
    *(BinaryAccuracy, CategoricalAccuracy, SparseCategoricalAccuracy, Precision, Recall),
    *(MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError),
    mae=MeanAbsoluteError,
    mse=MeanSquaredError,
)
_ACCURACIES: dict[type[losses.Loss], type[Metric]] = {
    losses.BinaryCrossentropy: BinaryAccuracy,
    losses.CategoricalCrossentropy: CategoricalAccuracy,
    losses.SparseCategoricalCrossentropy: SparseCategoricalAccuracy,
}


def get(metric: Any, loss: losses.Loss) -> Metric:
    """Return a metric for a name or a function; a `Metric` is returned unchanged.

    Args:
        metric: a metric, its name, or a function of labels and predictions. ``"accuracy"`` means
            the accuracy that belongs to the loss; for a binary cross-entropy of logits, with the
            threshold 0, the logit of 0.5.
        loss: the model's loss.

    Raises:
        ValueError: the name is unknown, or the loss has no accuracy.
    """
    if metric in ("accuracy", "acc"):
        for kind, accuracy in _ACCURACIES.items():
            if isinstance(loss, kind):
                if kind is losses.BinaryCrossentropy and loss.from_logits:  # type: ignore[attr-defined]
                    return BinaryAccuracy(0.0, name=metric)
                return accuracy(name=metric)
        raise ValueError(
            f"{metric!r} is undefined for the loss {loss.name!r}: pass a metric, such as "
            "metrics.MeanAbsoluteError()."
        )
    made = named({"accuracy": None, **NAMED}, metric, "metric", name=metric)
    return made if isinstance(made, Metric) else MeanMetric(made)


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


def _squeezed(y_true: Any, y_pred: Any) -> Any:
    labels = y_true[..., 0] if y_true.shape == (*y_pred.shape[:-1], 1) else y_true
    losses.check_shape(labels, y_pred.shape[:-1])
    return labels


_export(
    vars(),
    but="binary_accuracy categorical_accuracy joined sparse_categorical_accuracy weighted_sum",
)
