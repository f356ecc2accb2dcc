"""Metrics of many batches, as pairs of tensors: the value so far, and the update by a batch.

Each keeps sums in local variables of the collection `METRIC_VARIABLES`. So clients with batches of
their own add these variables up, and the value is that of all batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.exports import export as _export
from ndistribute.graph.graph import Tensor, as_tensor, get_default_graph
from ndistribute.graph.operations import identity
from ndistribute.graph.variables import LOCAL_VARIABLES, GraphVariable

METRIC_VARIABLES = "metric_variables"

Metric = tuple[Tensor, Tensor]


def mean(values: Any, weights: Any = None, name: str = "mean") -> Metric:
    """Return the weighted mean of values over all updates, and the operation that adds a batch.

    Args:
        values: a tensor of any shape.
        weights: a tensor that broadcasts to the values; None: ones.
        name: the name scope of the operations.

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
    with get_default_graph().name_scope(name):
        values = as_tensor(values).astype(np.float64)
        if weights is None:
            return _ratio(np.sum(values), np.size(values))
        spread = _spread(weights, values)
        return _ratio(np.sum(values * spread), np.sum(spread))


def accuracy(labels: Any, predictions: Any, weights: Any = None, name: str = "accuracy") -> Metric:
    """Return the share of predictions that equal their labels; see `mean`."""
    return mean(np.equal(_like(predictions, labels), predictions), weights, name)


def mean_squared_error(
    labels: Any, predictions: Any, weights: Any = None, name: str = "mean_squared_error"
) -> Metric:
    """Return the mean of the squared differences; see `mean`."""
    return mean(np.square(_like(predictions, labels) - predictions), weights, name)


def root_mean_squared_error(
    labels: Any, predictions: Any, weights: Any = None, name: str = "root_mean_squared_error"
) -> Metric:
    """Return the root of the mean of the squared differences; see `mean`."""
    pair = mean_squared_error(labels, predictions, weights, name)
    return tuple(np.sqrt(squared) for squared in pair)  # type: ignore[return-value]


def mean_absolute_error(
    labels: Any, predictions: Any, weights: Any = None, name: str = "mean_absolute_error"
) -> Metric:
    """Return the mean of the absolute differences; see `mean`."""
    return mean(np.abs(_like(predictions, labels) - predictions), weights, name)


def precision(
    labels: Any, predictions: Any, weights: Any = None, name: str = "precision"
) -> Metric:
    """Return the share of true labels where predictions are true; see `mean`."""
    return _share_where(predictions, labels, weights, name)


def recall(labels: Any, predictions: Any, weights: Any = None, name: str = "recall") -> Metric:
    """Return the share of true predictions where labels are true; see `mean`."""
    return _share_where(labels, predictions, weights, name)


def _share_where(there: Any, counted: Any, weights: Any, name: str) -> Metric:
    with get_default_graph().name_scope(name):
        true = as_tensor(there).astype(bool)
        chosen = true if weights is None else true * _spread(weights, true)
        both = chosen * _like(true, counted).astype(bool)
        return _ratio(np.sum(both), np.sum(chosen))


def _spread(weights: Any, values: Any) -> Any:
    weights, values = as_tensor(weights), as_tensor(values)
    if weights.shape and values.shape is not None:  # One of them may lack a last axis.
        missing = len(values.shape) - len(weights.shape)
        if missing == 1:
            weights = weights[..., None]
        elif missing == -1:
            weights = weights[..., 0]
    return np.broadcast_to(weights, np.shape(values))


def _ratio(total: Any, count: Any) -> Metric:
    """Return the quotient of two sums over all updates, 0 before the first one."""
    sums = [_local("total"), _local("count")]
    added = [kept.assign_add(by) for kept, by in zip(sums, (total, count), strict=True)]
    value, update = (
        np.where(np.equal(divisor, 0), 0.0, dividend / np.where(np.equal(divisor, 0), 1.0, divisor))
        for dividend, divisor in (sums, added)
    )
    return identity(value, "value"), identity(update, "update_op")


def _local(name: str) -> GraphVariable:
    collections = [LOCAL_VARIABLES, METRIC_VARIABLES]
    return GraphVariable(np.float64(0), False, name, collections=collections)


def _like(predictions: Any, labels: Any) -> Any:
    """Return labels in the shape of predictions: an axis of length 1 may be missing or too many."""
    return np.reshape(as_tensor(labels), np.shape(as_tensor(predictions)))


_export(vars(), "METRIC_VARIABLES")
