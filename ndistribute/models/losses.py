"""Losses: functions of labels and predictions, averaged over the batch of all replicas.

A loss computes one value for each example. Inside a replica, it divides the sum of these values by
the number of examples on all replicas. So the sum of the replicas' gradients is the gradient of the
mean, however the batch is divided.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.context import current_trace, get_replica_context
from ndistribute.devices import as_array
from ndistribute.exports import export as _export
from ndistribute.mistakes import Explaining, constructor
from ndistribute.models import operations
from ndistribute.models.loss_forms import in_form
from ndistribute.models.masks import mask_of
from ndistribute.names import deserializing, named, snake_case, table_of
from ndistribute.values import Shown

_REDUCTIONS = ("sum_over_batch_size", "sum", "none")


class Loss(Explaining, Shown):
    """The base class of losses; a subclass defines `call`.

    Args:
        reduction: ``"sum_over_batch_size"`` for the mean over the batch of all replicas, ``"sum"``
            for the sum over the examples of this replica, ``"none"`` for the value of each example.
        name: the name; None: the class name in snake case.

    Raises:
        ValueError: the reduction is unknown.
    """

    _uncalled: ClassVar = {"__call__": "define call, which returns the loss of each example"}

    def __init__(self, reduction: str | None = _REDUCTIONS[0], name: str | None = None) -> None:
        self.reduction = "none" if reduction is None else str(reduction).lower()
        if self.reduction not in _REDUCTIONS:
            known = ", ".join(_REDUCTIONS)
            raise ValueError(f"reduction must be one of {known}, got {reduction!r}.")
        self.name = name or snake_case(type(self).__name__)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each example, an array of shape ``(batch, ...)``.

        A single number counts as the mean over the examples of this replica. It allows no weights.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no call.")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the loss, reduced according to `reduction`.

        Args:
            y_true: the labels.
            y_pred: the predictions, plain or tracked.
            sample_weight: the weight of each example; None means 1.
        """
        if hasattr(y_pred, "__call_model__"):  # A tensor of a graph.
            return y_pred.__call_model__(self, (y_true, y_pred), {"sample_weight": sample_weight})
        losses = self.weighted(y_true, y_pred, sample_weight)
        if self.reduction == "none":
            return losses
        total = np.sum(losses)
        return in_form(total if self.reduction == "sum" else total / global_count(losses.size))

    def weighted(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the loss of each example, times its weight.

        Elements that the mask of the predictions leaves out are 0, and the mean is taken over the
        rest.
        """
        mask = mask_of(y_pred)
        y_true, y_pred = aligned(y_true, y_pred)

        def explained(error: Exception) -> ValueError:
            return ValueError(
                f"loss {self.name!r} of labels {y_true.dtype}{[*y_true.shape]} and predictions "
                f"{y_pred.dtype}{[*y_pred.shape]}: {error}"
            )

        trace = current_trace()
        try:
            text = y_true.flat if y_true.dtype.kind in "OSU" else ()
            if any(isinstance(y, str | bytes | None) for y in text):
                raise ValueError(
                    "labels must be numbers, got text: use np.unique(y, return_inverse=True)[1]."
                )
            with contextlib.nullcontext() if trace is None else trace.explaining(explained):
                losses = self.call(y_true, y_pred)
        except ValueError as error:
            raise explained(error) from error
        if losses.ndim == 0 and sample_weight is not None:
            raise ValueError(
                f"loss {self.name!r} returned one number, which sample_weight and class_weight "
                "cannot weigh: return one value for each example."
            )
        if losses.ndim == 0:
            losses = losses * np.ones(y_pred.shape[:1], losses.dtype)
        if mask is not None and mask.ndim <= losses.ndim:
            factor = self._factor(mask) if self.reduction == _REDUCTIONS[0] else 1
            losses = _weighted(losses, mask * factor)
        return _weighted(losses, sample_weight)

    def _factor(self, mask: Any) -> Any:
        """Return the factor from a mean over all elements to that over a mask, on all replicas."""
        counts = np.stack([mask.sum(dtype=np.float64), np.float64(mask.size)])
        replica = get_replica_context()
        if replica is not None and replica.num_replicas_in_sync > 1:
            counts = replica.communicator.all_reduce("sum", counts)
        return counts[1] / np.maximum(counts[0], 1.0)


def _weighted(losses: Any, sample_weight: Any) -> Any:
    """Return the loss of each example, times the weight of the example or of each element."""
    if sample_weight is None:
        return losses
    return losses * weight_like(losses, as_operand(sample_weight)).astype(losses.dtype)


def weight_like(values: Any, weight: Any) -> Any:
    """Return the weights of examples, or of their elements, with as many axes as the values."""
    if weight.ndim > values.ndim and weight.shape[-1] == 1:
        weight = weight[..., 0]
    if weight.shape != values.shape[: weight.ndim]:
        raise ValueError(
            f"sample_weight has shape {weight.shape}, but the values have {values.shape}: pass one "
            "weight for each example."
        )
    return weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))


def global_count(count: int) -> float:
    """Return the sum over all replicas of a number, at least 1."""
    replica = get_replica_context()
    if replica is not None and replica.num_replicas_in_sync > 1:
        # The tape must not differentiate this.
        total = replica.communicator.all_reduce("sum", np.int64(count))
        # In a compiled step the parts of all replicas have one shape.
        count = total if current_trace() is None else count * replica.num_replicas_in_sync
    return max(1.0, float(count))


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Return this replica's share of the mean loss of the batch; the shares add up to the mean.

    Args:
        per_example_loss: the loss of each example of this replica, for example from a `Loss` with
            the reduction ``"none"``. Further axes, such as time steps or pixels, are summed.
        sample_weight: the weight of each example; None means 1.
        global_batch_size: the divisor of the sum; None means the number of examples on all
            replicas, which then wait for each other.

    Raises:
        RuntimeError: called outside of replicas without a `global_batch_size`.
        ValueError: the loss is a single number instead of one for each example, or
            `global_batch_size` is negative.

    >>> float(compute_average_loss(np.array([1.0, 2.0]), global_batch_size=4))
    0.75
    """
    losses = per_example_loss if hasattr(per_example_loss, "ndim") else np.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "compute_average_loss got one number: pass the loss of each example, such as that of "
            'a loss object with reduction="none".'
        )
    if global_batch_size is None:
        if get_replica_context() is None:
            raise RuntimeError(
                "compute_average_loss was called outside of replicas, where it cannot count their "
                "examples: call it in strategy.run, or pass global_batch_size."
            )
        count = global_count(losses.shape[0])
    else:
        count = operator.index(global_batch_size)
        if count < 0:
            raise ValueError(f"global_batch_size must be 0 or more, got {count}.")
    total = np.sum(_weighted(losses, sample_weight))
    return in_form(total / count) if count else total * 0


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return a replica's share of a penalty that all replicas compute.

    >>> float(scale_regularization_loss(np.array(3.0)))
    3.0
    """
    replica = get_replica_context()
    total = np.sum(regularization_loss)
    return total if replica is None else in_form(total / replica.num_replicas_in_sync)


def aligned(y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Return labels and predictions with the same axes; one may lack a last axis of length 1."""
    y_true = y_true if hasattr(y_true, "ndim") else np.asarray(y_true)
    y_pred = y_pred if hasattr(y_pred, "ndim") else np.asarray(y_pred)
    if y_true.ndim + 1 == y_pred.ndim and y_pred.shape[-1] == 1:
        y_true = y_true[..., None]
    if y_pred.ndim + 1 == y_true.ndim and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    return y_true, y_pred


def check_shape(y_true: Any, needed: tuple[int, ...]) -> None:
    """Raise ValueError if labels have another shape, which would be broadcast."""
    if y_true.ndim and y_true.shape != needed:
        raise ValueError(f"the labels must have the shape {needed}, got {y_true.shape}.")


def mean_squared_error(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of squared differences.

    >>> mean_squared_error(np.array([[0.0, 2.0]]), np.array([[0.0, 0.0]]))
    array([2.])
    """
    return np.mean(np.square(y_pred - _like(y_true, y_pred)), axis=-1)


def mean_absolute_error(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of absolute differences."""
    return np.mean(np.abs(y_pred - _like(y_true, y_pred)), axis=-1)


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> Any:
    """Return the mean over the last axis of Huber's loss: quadratic up to `delta`, then linear.

    Source: Huber, "Robust Estimation of a Location Parameter", 1964.
    """
    size = np.abs(y_pred - _like(y_true, y_pred))
    inside = np.minimum(size, delta)
    return np.mean(inside * (size - 0.5 * inside), axis=-1)


def mean_absolute_percentage_error(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of absolute differences, in percent of the labels."""
    labels = _like(y_true, y_pred)
    return 100 * np.mean(np.abs((y_pred - labels) / np.maximum(np.abs(labels), _SMALL)), axis=-1)


def mean_squared_logarithmic_error(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of squared differences of ``log(1 + y)``."""
    logs = [np.log1p(np.maximum(y, _SMALL)) for y in (_like(y_true, y_pred), y_pred)]
    return np.mean(np.square(logs[1] - logs[0]), axis=-1)


def log_cosh(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of the logarithm of the differences' ``cosh``."""
    difference = y_pred - _like(y_true, y_pred)
    return np.mean(difference + np.logaddexp(-2 * difference, 0) - math.log(2), axis=-1)


def poisson(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of ``y_pred - y_true * log(y_pred)``."""
    return np.mean(y_pred - _like(y_true, y_pred) * np.log(y_pred + _SMALL), axis=-1)


def kl_divergence(y_true: Any, y_pred: Any) -> Any:
    """Return the sum over the last axis of ``y_true * log(y_true / y_pred)``."""
    labels, p = (np.clip(y, _SMALL, 1) for y in (_like(y_true, y_pred), y_pred))
    return np.sum(labels * np.log(labels / p), axis=-1)


def cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> Any:
    """Return minus the cosine of the angle between labels and predictions: -1 if they agree.

    >>> cosine_similarity(np.array([[0.0, 1.0]]), np.array([[0.0, 2.0]])).tolist()
    [-1.0]
    """
    labels = _like(y_true, y_pred)
    sums = (np.sum(np.square(y), axis=axis) for y in (labels, y_pred))
    lengths = [np.sqrt(np.maximum(total, _SMALL**3)) for total in sums]
    return -np.sum(labels * y_pred, axis=axis) / (lengths[0] * lengths[1])


def hinge(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of ``max(1 - y_true * y_pred, 0)``, labels -1 and 1.

    If all labels of a batch are 0 or 1, the label 0 counts as -1.
    """
    return np.mean(_margins(y_true, y_pred), axis=-1)


def squared_hinge(y_true: Any, y_pred: Any) -> Any:
    """Return the mean over the last axis of ``max(1 - y_true * y_pred, 0) ** 2``; see `hinge`."""
    return np.mean(np.square(_margins(y_true, y_pred)), axis=-1)


def categorical_hinge(y_true: Any, y_pred: Any) -> Any:
    """Return how far the score of a one-hot label is from 1 above all other scores, at least 0."""
    labels = _like(y_true, y_pred)
    best = np.max((1 - labels) * y_pred, axis=-1)
    return np.maximum(best - np.sum(labels * y_pred, axis=-1) + 1, 0)


def binary_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0
) -> Any:
    """Return the mean over the last axis of the cross-entropy of two classes.

    Args:
        y_true: labels in ``[0, 1]``.
        y_pred: probabilities, or logits.
        from_logits: whether `y_pred` are logits.
        label_smoothing: the share of the labels that is divided evenly between both classes.
    """
    labels = _like(y_true, y_pred)
    if label_smoothing:
        labels = labels * (1 - label_smoothing) + label_smoothing / 2
    if from_logits:
        losses = operations.sigmoid_cross_entropy(y_pred, labels)
    else:
        small = _EPSILON[y_pred.dtype.itemsize > 2]
        p = np.clip(y_pred, small, 1 - small)
        losses = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    return np.mean(losses, axis=-1)


def categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0
) -> Any:
    """Return the cross-entropy of labels that are probabilities of the classes.

    Args:
        y_true: probabilities of shape ``(..., classes)``, such as one-hot rows.
        y_pred: probabilities or logits of the same shape. Probabilities are divided by their sum.
        from_logits: whether `y_pred` are logits.
        label_smoothing: the share of the labels that is divided evenly among all classes.
    """
    labels = as_operand(y_true).astype(y_pred.dtype, copy=False)
    if label_smoothing:
        labels = labels * (1 - label_smoothing) + label_smoothing / y_pred.shape[-1]
    if labels.shape != y_pred.shape:
        raise ValueError(
            f"categorical_crossentropy: the labels have shape {labels.shape}, but the predictions "
            f"have {y_pred.shape}. For labels that are integers use "
            "sparse_categorical_crossentropy."
        )
    if from_logits:
        return operations.softmax_cross_entropy(y_pred, labels)
    return -np.sum(labels * _log_of(y_pred / np.sum(y_pred, axis=-1, keepdims=True)), axis=-1)


def sparse_categorical_crossentropy(y_true: Any, y_pred: Any, from_logits: bool = False) -> Any:
    """Return the cross-entropy of labels that are integers.

    Args:
        y_true: the index of the class, of shape ``(...)`` or ``(..., 1)``.
        y_pred: probabilities or logits of shape ``(..., classes)``. Probabilities are divided by
            their sum.
        from_logits: whether `y_pred` are logits.
    """
    labels = as_array(y_true)
    if labels.ndim == y_pred.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if labels.shape != y_pred.shape[:-1]:
        raise ValueError(
            f"sparse_categorical_crossentropy: the labels have shape {labels.shape}, but the "
            f"predictions have {y_pred.shape}: pass one integer for each row. For one-hot labels "
            "use categorical_crossentropy."
        )
    labels = labels.astype(np.int64)
    classes = y_pred.shape[-1]
    what = f"sparse_categorical_crossentropy: labels must be in [0, {classes})"
    operations.check_range(labels, classes, what, "The last layer needs one unit for each class.")
    logits = y_pred if from_logits else _log_of(y_pred)
    return operations.softmax_cross_entropy(logits, labels)


class FunctionLoss(Loss):
    """A loss of a function of labels and predictions.

    Args:
        function: returns the loss of each example.
        options: `reduction` and `name`, see `Loss`; all others are passed to the function.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        common = {name: options.pop(name) for name in ("reduction", "name") if name in options}
        super().__init__(**({"name": getattr(function, "__name__", "loss")} | common))
        if options:
            inspect.signature(function).bind(None, None, **options)
        self._function, self._parameters = function, options

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the function's value for each example."""
        return per_example(self._function, y_true, y_pred, self._parameters)


def per_example(function: Any, y_true: Any, y_pred: Any, parameters: dict[str, Any]) -> Any:
    """Return a function's value for each example; our functions take a single axis for examples."""
    if function in _ELEMENTWISE and y_true.ndim == y_pred.ndim == 1:
        y_true, y_pred = y_true[:, None], y_pred[:, None]
    return function(y_true, y_pred, **parameters)


class _Fixed(FunctionLoss):
    """The base class of losses of the function of the same name, whose parameters come first."""

    if TYPE_CHECKING:

        def __init__(self, *parameters: Any, **options: Any) -> None: ...

    def __init_subclass__(cls, **options: Any) -> None:
        if cls.__base__ is _Fixed:
            function = globals()[snake_case(cls.__name__)]
            parameters = [*inspect.signature(function).parameters.values()][2:]
            defaults = {each.name: each.default for each in parameters}
            init = functools.partial(FunctionLoss.__init__, function=function)
            taken = defaults | {"reduction": _REDUCTIONS[0]}
            cls.__init__ = constructor(taken, init)  # type: ignore[method-assign]
        super().__init_subclass__(**options)


class MeanSquaredError(_Fixed):
    """The mean of squared differences."""


class MeanAbsoluteError(_Fixed):
    """The mean of absolute differences."""


class MeanAbsolutePercentageError(_Fixed):
    """The mean of absolute differences, in percent of the labels."""


class MeanSquaredLogarithmicError(_Fixed):
    """The mean of squared differences of logarithms."""


class LogCosh(_Fixed):
    """The mean of the logarithm of differences' ``cosh``; see `log_cosh`."""


class Poisson(_Fixed):
    """The loss of counts from a Poisson distribution; see `poisson`."""


class KLDivergence(_Fixed):
    """The divergence of predicted from true probabilities; see `kl_divergence`."""


class CosineSimilarity(_Fixed):
    """Minus the cosine of the angle; the option `axis` is that of `cosine_similarity`."""


class Hinge(_Fixed):
    """The loss of labels -1 and 1; see `hinge`."""


class SquaredHinge(_Fixed):
    """The squared loss of labels -1 and 1; see `squared_hinge`."""


class CategoricalHinge(_Fixed):
    """The margin of one-hot labels; see `categorical_hinge`."""


class Huber(_Fixed):
    """Huber's loss, with the difference `delta` at which it becomes linear."""


class BinaryCrossentropy(_Fixed):
    """The cross-entropy of two classes; see `binary_crossentropy`."""


class CategoricalCrossentropy(_Fixed):
    """The cross-entropy of labels as probabilities; see `categorical_crossentropy`."""


class SparseCategoricalCrossentropy(_Fixed):
    """The cross-entropy of labels as integers; see `sparse_categorical_crossentropy`.

    >>> loss = SparseCategoricalCrossentropy(from_logits=True)
    >>> round(float(loss(np.array([1, 0]), np.zeros((2, 2)))), 4)
    0.6931
    """


NAMED: dict[str, type[Loss]] = table_of(
    *_Fixed.__subclasses__(),
    bce=BinaryCrossentropy,
    kld=KLDivergence,
    mae=MeanAbsoluteError,
    mape=MeanAbsolutePercentageError,
    mse=MeanSquaredError,
    msle=MeanSquaredLogarithmicError,
)

# Functions of single values, of which they return the mean over the last axis.
_ELEMENTWISE = (
    *(mean_squared_error, mean_absolute_error, huber, binary_crossentropy, poisson, log_cosh),
    *(mean_absolute_percentage_error, mean_squared_logarithmic_error, hinge, squared_hinge),
)
# The distance that predicted probabilities keep from 0 and 1, for 2 bytes and for more.
_EPSILON = (1e-3, 1e-7)
_SMALL = 1e-7  # The number that keeps the arguments of logarithms and divisors from 0.


def get(loss: str | Loss | Callable[[Any, Any], Any]) -> Loss:
    """Return a loss for a name or a function; a `Loss` is returned unchanged.

    Raises:
        ValueError: the name is unknown.
    """
    made = named(NAMED, loss, "loss")  # A `Loss` can be called, as a function.
    return made if isinstance(made, Loss) else FunctionLoss(made)


def _like(y_true: Any, y_pred: Any) -> Any:
    """Return labels in the dtype of the predictions, one for each."""
    labels = as_operand(y_true)
    check_shape(labels, y_pred.shape)
    return labels.astype(y_pred.dtype, copy=False)


def _margins(y_true: Any, y_pred: Any) -> Any:
    labels = _like(y_true, y_pred)
    signs = np.where(np.all((labels == 0) | (labels == 1)), 2 * labels - 1, labels)
    return np.maximum(1 - signs * y_pred, 0)


def _log_of(p: Any) -> Any:
    small = _EPSILON[p.dtype.itemsize > 2]
    return np.log(np.clip(p, small, 1 - small))


deserialize = deserializing(get)
_HELPERS = "aligned check_shape global_count in_form per_example weight_like"
_export(vars(), "deserialize", but=f"FunctionLoss {_HELPERS}")
