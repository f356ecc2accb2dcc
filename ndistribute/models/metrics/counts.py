"""Metrics of positive and negative examples, counted above thresholds of the predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.context import current_trace
from ndistribute.devices import array_namespace, as_array, to_host
from ndistribute.exports import export as _export
from ndistribute.models import activations, losses
from ndistribute.models.metrics.metric import Sums


class _Counted(Sums):
    """The base class of metrics that count positive and negative examples above thresholds."""

    def __init__(self, thresholds: Any, name: str | None) -> None:
        self.thresholds = thresholds
        self._bounds = np.atleast_1d(np.asarray(thresholds, np.float64))
        super().__init__(name, (len(self._bounds) + 1, 2))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add the examples of a batch."""
        y_true, y_pred = untrack(losses.aligned(y_true, y_pred))
        losses.check_shape(y_true, y_pred.shape)
        xp = array_namespace(y_pred)
        if y_pred.dtype.kind in "biu":  # These dtypes cannot hold a bound such as 0.5.
            y_pred = y_pred.astype(np.float64)
        weights = xp.ones(y_pred.shape, np.float64)
        if sample_weight is not None:
            weights = weights * losses.weight_like(y_pred, as_array(sample_weight))
        is_positive = y_true > 0.5
        kinds = xp.stack([(weights * kind).reshape(-1) for kind in (is_positive, ~is_positive)])
        bounds = xp.asarray(self._bounds.astype(y_pred.dtype))
        above = y_pred.reshape(-1, 1) > bounds
        sums = xp.concatenate([kinds @ above.astype(np.float64), kinds.sum(axis=1)[:, None]], 1).T
        self.state.assign_add(to_host(sums) if current_trace() is None else sums)


class _AtThresholds(_Counted):
    """The base class of metrics that are computed from the counts above thresholds.

    Args:
        thresholds: an example with a prediction above the threshold is predicted positive. For a
            list of thresholds, the result is an array.
        name: the name in logs.
    """

    of_counts: ClassVar[Callable[..., Any]]
    """A function of the true and false positives at each threshold, and of all that are either."""

    def __init__(self, thresholds: Any = 0.5, name: str | None = None) -> None:
        super().__init__(0.5 if thresholds is None else thresholds, name)

    def result(self) -> Any:
        """Return the value for the threshold, or an array for several."""
        sums = self.sums()
        (true_positives, false_positives), totals = sums[:-1].T, sums[-1]
        values = self.of_counts(true_positives, false_positives, *totals)
        return values if np.ndim(self.thresholds) else float(values[0])


class Precision(_AtThresholds):
    """The share of the examples predicted positive that are positive."""

    of_counts = staticmethod(lambda tp, fp, positive, negative: _divided(tp, tp + fp))


class Recall(_AtThresholds):
    """The share of the positive examples that are predicted positive."""

    of_counts = staticmethod(lambda tp, fp, positive, negative: _divided(tp, positive))


class TruePositives(_AtThresholds):
    """The number, or weight, of positive examples that are predicted positive."""

    of_counts = staticmethod(lambda tp, fp, positive, negative: tp)


class FalsePositives(_AtThresholds):
    """The number, or weight, of negative examples that are predicted positive."""

    of_counts = staticmethod(lambda tp, fp, positive, negative: fp)


class FalseNegatives(_AtThresholds):
    """The number, or weight, of positive examples that are not predicted positive."""

    of_counts = staticmethod(lambda tp, fp, positive, negative: positive - tp)


class TrueNegatives(_AtThresholds):
    """The number, or weight, of negative examples that are not predicted positive."""

    of_counts = staticmethod(lambda tp, fp, positive, negative: negative - fp)


class AUC(_Counted):
    """The area under the ROC or precision-recall curve, computed from trapezoids.

    Args:
        num_thresholds: the number of thresholds between 0 and 1.
        curve: ``"ROC"``, the share of true positives over that of false positives, or ``"PR"``, the
            precision over the recall.
        name: the name in logs.
        from_logits: whether predictions are logits instead of probabilities.

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

    def result(self) -> float:
        """Return the area."""
        sums = self.sums()
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
    """Return quotients, 0 where the divisor is 0."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b != 0)


_export(vars())
