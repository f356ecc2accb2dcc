"""Dense products, and the cross-entropy of a softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.custom import fused, log_softmax
from ndistribute.devices import Array, array_namespace, as_array
from ndistribute.models.activations import InPlace
from ndistribute.models.operations.epilogue import Epilogue, KernelRule, in_place, operands, wide


def dense(x: Any, kernel: Any, bias: Any, activation: Callable[[Any], Any]) -> Any:
    """Return ``activation(x @ kernel + bias)``; those of `IN_PLACE` need no second array."""
    rule, after = in_place(activation)
    return after(_dense(x, kernel, bias, rule=rule))


def _plain_dense(x: Any, kernel: Any, bias: Any, *, rule: InPlace | None) -> Any:
    dtype = kernel.dtype if x.dtype.kind in "iub" else x.dtype
    return Epilogue.plain(x.astype(dtype) @ kernel.astype(dtype), bias, rule)


@fused(_plain_dense)
def _dense(x: Any, kernel: Any, bias: Any, *, rule: InPlace | None) -> Any:
    x = as_array(x)
    dtype, values, matrix = operands(x, as_array(kernel))
    rows = values.reshape(-1, x.shape[-1])
    y = rows @ matrix
    after = Epilogue(y, bias, rule)
    after.finish(y)

    def of_kernel(g: Array, out: Array | None) -> Array:
        return array_namespace(g).matmul(rows.T, after.before(g), out=out)

    def of_x(g: Array) -> Array:
        g = after.before(g)
        if len(g) * 4 <= len(matrix):  # OpenBLAS took 2/3 of the time for 64 rows and 512 or 4096.
            return (matrix @ g.T).T.reshape(x.shape)
        return (g @ matrix.T).reshape(x.shape)

    y = y.astype(dtype, copy=False).reshape(*x.shape[:-1], y.shape[-1])
    return y, [
        of_x,
        KernelRule(of_kernel, kernel, matrix),
        after.of_bias,
    ]


def _plain_cross_entropy(logits: Any, labels: Any) -> Any:
    logs = log_softmax(logits, axis=-1)
    if np.ndim(labels) < np.ndim(logits):
        return -np.take_along_axis(logs, labels[..., None].astype(np.int64), -1)[..., 0]
    return -np.sum(logs * labels, axis=-1)


@fused(_plain_cross_entropy)
def softmax_cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the cross-entropy of each example, from logits of shape ``(..., classes)``.

    The labels are integers of shape ``(...)``, or probabilities of the shape of `logits`.

    >>> softmax_cross_entropy(np.array([[0.0, 0.0]]), np.array([1])).round(4)
    array([0.6931])
    """
    logits, labels = as_array(logits), as_array(labels)
    xp, dtype = array_namespace(logits), logits.dtype
    shifted = wide(logits)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    exponentials = xp.exp(shifted)
    total = exponentials.sum(axis=-1, keepdims=True)
    logs = xp.log(total)
    is_index, classes = labels.ndim < logits.ndim, logits.shape[-1]
    if is_index:
        where = xp.arange(labels.size), labels.reshape(-1).astype(np.int64)
        losses = logs[..., 0] - shifted.reshape(-1, classes)[where].reshape(labels.shape)
    else:
        losses = ((logs - shifted) * labels).sum(axis=-1)

    def vjp(g: Array) -> Array:
        change = xp.ascontiguousarray(exponentials / total)
        if is_index:
            change.reshape(-1, classes)[where] -= 1
        else:
            change *= labels.sum(axis=-1, keepdims=True)
            change -= labels
        change *= g[..., None]
        return change

    def vjp_of_labels(g: Array) -> Array:
        return (logs - shifted) * g[..., None]

    return losses.astype(dtype, copy=False), [vjp, None if is_index else vjp_of_labels]


def sigmoid_cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the cross-entropy of two classes for each element, from logits."""
    # Without the maximum of 0, of which the derivative at 0 would be wrong.
    size = np.abs(logits)
    return logits * (0.5 - labels) + 0.5 * size + np.log1p(np.exp(-size))
