"""Fused operations of layers and losses: one entry of the tape each, with buffers reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient
from ndistribute.device import Array, array_namespace, as_array
from ndistribute.models.activations import IN_PLACE

__all__ = ["dense", "softmax_cross_entropy"]


def dense(x: Any, kernel: Any, bias: Any, activation: Callable[[Any], Any]) -> Any:
    """Return ``activation(x @ kernel + bias)``.

    Args:
        x: an array of shape ``(..., inputs)``.
        kernel: an array of shape ``(inputs, units)``.
        bias: an array of shape ``(units,)``, or None.
        activation: a function of an array; those of `IN_PLACE` need no second one.
    """
    name = activation.__name__
    if name not in IN_PLACE:
        return activation(_dense(x, kernel, bias, name=""))
    return _dense(x, kernel, bias, name=name)


@custom_gradient
def _dense(x: Any, kernel: Any, bias: Any, *, name: str) -> Any:
    x = as_array(x)
    kernel = as_array(kernel).astype(x.dtype, copy=False)  # Computes in the dtype of x.
    rows = x.reshape(-1, x.shape[-1])
    y = (rows @ kernel).astype(x.dtype, copy=False)  # NumPy returns float32 for bfloat16.
    if bias is not None:
        y += as_array(bias).astype(x.dtype, copy=False)
    if name:
        apply, slope = IN_PLACE[name]
        apply(y)
    known: list[Any] = [None, None]

    def before(g: Array) -> Array:
        """Return the gradient of the product, computed once for all arguments."""
        if known[0] is not g:
            flat = g.reshape(y.shape)
            known[:] = g, slope(flat, y) if name else np.ascontiguousarray(flat)
        return known[1]

    return y.reshape(*x.shape[:-1], y.shape[-1]), [
        lambda g: (before(g) @ kernel.T).reshape(x.shape),
        lambda g: rows.T @ before(g),
        lambda g: before(g).sum(axis=0),
    ]


@custom_gradient
def softmax_cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the cross-entropy of each example, from logits.

    Args:
        logits: an array of shape ``(..., classes)``.
        labels: integers of shape ``(...)``, or probabilities of the shape of `logits`.

    >>> softmax_cross_entropy(np.array([[0.0, 0.0]]), np.array([1])).round(4)
    array([0.6931])
    """
    logits, labels = as_array(logits), as_array(labels)
    xp = array_namespace(logits)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exponentials = xp.exp(shifted)
    total = exponentials.sum(axis=-1, keepdims=True)
    logs = xp.log(total)
    if labels.ndim < logits.ndim:
        where = labels[..., None].astype(np.int64)
        losses = (logs - xp.take_along_axis(shifted, where, axis=-1))[..., 0]
    else:
        losses = ((logs - shifted) * labels).sum(axis=-1)

    def vjp(g: Array) -> Array:
        change = exponentials / total
        if labels.ndim < logits.ndim:
            xp.put_along_axis(change, where, xp.take_along_axis(change, where, -1) - 1, -1)
        else:
            change *= labels.sum(axis=-1, keepdims=True)
            change -= labels
        change *= g[..., None]
        return change

    return losses, [vjp, None]
