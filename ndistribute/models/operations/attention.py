"""Scaled dot-product attention of several heads.

The products read the heads where they are in the input, so nothing is transposed or copied. The
probabilities are the only large array that is kept. Source: Vaswani et al., "Attention Is All You
Need", 2017.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient, untrack
from ndistribute.autodiff.rules.placing import as_operand, is_tracked
from ndistribute.devices import Array, array_namespace
from ndistribute.models.operations.products import wide


@custom_gradient
def attention(
    query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False, kept: Any = None
) -> Any:
    """Return for each query the mean of the values, weighted by ``softmax(query . key / sqrt(d))``.

    Args:
        query: an array of shape ``(batch, queries, heads, d)``.
        key: an array of shape ``(batch, keys, heads, d)``.
        value: an array of shape ``(batch, keys, heads, width)``.
        mask: booleans that broadcast to ``(batch, heads, queries, keys)``, True where a query
            attends to a key; None for everywhere. A query without keys has zeros.
        is_causal: whether a query attends to no later key.
        kept: factors of the probabilities for dropout, or None.

    >>> attention(np.zeros((1, 1, 1, 2)), np.zeros((1, 2, 1, 2)), np.eye(2).reshape(1, 2, 1, 2))
    array([[[[0.5, 0.5]]]])
    """
    dtype = query.dtype
    q, k, v = (wide(as_operand(array)).swapaxes(1, 2) for array in (query, key, value))
    xp, scale = array_namespace(q), 1 / math.sqrt(max(1, q.shape[-1]))
    weights = q @ k.swapaxes(-1, -2)
    weights *= scale
    for allowed in (mask, _causal(untrack(weights)) if is_causal else None):
        if allowed is not None:
            weights += xp.where(allowed, 0, -np.inf).astype(weights.dtype)
    limits = np.finfo(weights.dtype)
    if weights.shape[-1]:
        weights -= xp.maximum(weights.max(axis=-1, keepdims=True), limits.min)
    weights = xp.exp(weights, out=None if is_tracked(weights) else weights)
    weights /= xp.maximum(weights.sum(axis=-1, keepdims=True), limits.tiny)
    used = weights if kept is None else weights * kept
    y = _heads_last(xp, used, v)

    def joint(g: Array) -> Any:
        upstream = wide(g).swapaxes(1, 2)
        of_value = _heads_last(xp, used.swapaxes(-1, -2), upstream)
        change = upstream @ v.swapaxes(-1, -2)
        if kept is not None:
            change *= kept
        # The sum over keys of gradient times probability, which is shorter over the width.
        along = xp.einsum("bqhd,bqhd->bhq", wide(g), y)
        change -= along[..., None]
        change *= weights
        change *= scale
        of_query = _heads_last(xp, change, k)
        of_key = _heads_last(xp, change.swapaxes(-1, -2), q)
        return [of_query, of_key, of_value]

    return y.astype(dtype, copy=False), joint


def _causal(weights: Array) -> Array:
    """Return for each query whether it may attend to each key."""
    xp, shape = array_namespace(weights), weights.shape
    return xp.arange(shape[-1]) <= xp.arange(shape[-2])[:, None]


def _heads_last(xp: Any, matrices: Array, others: Array) -> Array:
    """Return products of shape ``(batch, heads, n, m)``, stored as ``(batch, n, heads, m)``."""
    if is_tracked(matrices) or is_tracked(others):
        return np.swapaxes(matrices @ others, 1, 2)
    batch, heads, length, _ = matrices.shape
    result = xp.empty((batch, length, heads, others.shape[-1]), matrices.dtype)
    xp.matmul(matrices, others, out=result.swapaxes(1, 2))
    return result
