"""Batch and layer normalisation.

Each keeps the normalised array and few numbers. Narrow rows are joined, because NumPy has a cost
for each row. Sources: Ioffe and Szegedy, "Batch Normalization", 2015; Ba et al., "Layer
Normalization", 2016.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.custom import fused
from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.devices import Array, array_namespace, as_array
from ndistribute.models.operations.products import column_sums, joined_rows, wide

Total = Callable[[Array], Array]


def batch_normalization(
    x: Any, gamma: Any, beta: Any, *, epsilon: float, total: Total | None = None
) -> tuple[Any, Any, Any]:
    """Return an array normalised over all axes but the last, and its mean and variance.

    With `total`, which adds up a vector over all replicas, they are those of all examples. A factor
    `gamma` or a summand `beta` of None is left out.

    >>> y, mean, variance = batch_normalization(np.array([[1.0], [3.0]]), None, None, epsilon=0.0)
    >>> y.ravel(), mean, variance
    (array([-1.,  1.]), array([2.]), array([1.]))
    """
    y, mean, variance = _batch_normalized(x, gamma, beta, epsilon=epsilon, total=total)
    return y, as_array(mean), as_array(variance)


def _plain(
    x: Any, gamma: Any, beta: Any, *, epsilon: float, total: Any = None, axes: Any = None, **of: Any
) -> Any:
    if total is not None:
        raise NotImplementedError("the statistics are those of all replicas")
    axes = tuple(range(x.ndim - 1)) if axes is None else axes
    mean = of.get("mean", np.mean(x, axes, keepdims=True))
    variance = of.get("variance", np.var(x, axes, keepdims=True))
    mean, variance = (as_operand(moment).astype(x.dtype) for moment in (mean, variance))
    y = (x - mean) / np.sqrt(variance + epsilon)
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


@fused(_plain)
def _batch_normalized(x: Any, gamma: Any, beta: Any, *, epsilon: float, total: Total | None) -> Any:
    x = as_array(x)
    rows = _rows(x)
    xp = array_namespace(rows)
    local = column_sums(rows) / max(1, len(rows))
    normalized = _affine(rows, None, -local)
    mean, variance, count = _moments(local, normalized, total)
    factor = 1 / xp.sqrt(variance + epsilon)
    (values, factors, shifts) = joined_rows(normalized, factor, (local - mean) * factor)
    values *= factors
    if total is not None:
        values += shifts
    y = _affine(normalized, gamma, beta).astype(x.dtype, copy=False).reshape(x.shape)

    def joint(gradients: Any) -> Any:
        g = _rows(gradients[0])
        product = g * normalized
        of_gamma, of_beta = column_sums(product), column_sums(g)
        sums = xp.concatenate([of_gamma, of_beta])
        if total is not None:
            sums = total(sums)
        scale = factor if gamma is None else factor * wide(gamma)
        of_normalized, of_mean = (-scale / max(1.0, count) * part for part in xp.split(sums, 2))
        # The sum of three terms, in the buffer of the product.
        change, *vectors = joined_rows(product, of_normalized, of_mean, scale)
        xp.multiply(normalized.reshape(change.shape), vectors[0], out=change)
        change += vectors[1]
        change += g.reshape(change.shape) * vectors[2]
        return [product.reshape(x.shape), of_gamma, of_beta]

    return (y, mean, variance), joint


@fused(_plain)
def normalized_by(
    x: Any, gamma: Any, beta: Any, *, mean: Any, variance: Any, epsilon: float
) -> Any:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, with constant statistics."""
    x = as_array(x)
    rows = _rows(x)
    mean, variance = (
        as_array(moment).astype(rows.dtype, copy=False) for moment in (mean, variance)
    )
    factor = 1 / np.sqrt(variance + epsilon)
    scale = factor if gamma is None else factor * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    y = _affine(rows, scale, shift).astype(x.dtype, copy=False).reshape(x.shape)
    return y, [
        lambda g: _affine(_rows(g), scale, None).reshape(x.shape),
        lambda g: column_sums(_rows(g) * _affine(rows, factor, -mean * factor)),
        lambda g: column_sums(_rows(g)),
    ]


@fused(functools.partial(_plain, axes=-1))
def layer_normalization(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Return an array normalised over its last axis, times `gamma`, plus `beta`.

    >>> layer_normalization(np.array([[1.0, 3.0]]), None, None, epsilon=0.0)
    array([[-1.,  1.]])
    """
    x = as_array(x)
    xp, rows = array_namespace(x), _rows(x)
    width = max(1, rows.shape[1])
    share = xp.full(rows.shape[1], 1 / width, rows.dtype)
    normalized = rows - (rows @ share)[:, None]
    variance = xp.einsum("ij,ij->i", normalized, normalized) / width
    factor = (1 / xp.sqrt(variance + epsilon))[:, None]
    normalized *= factor
    y = _affine(normalized, gamma, beta).astype(x.dtype, copy=False).reshape(x.shape)

    def of_x(g: Array) -> Array:
        change = _rows(g).copy() if gamma is None else _affine(_rows(g), gamma, None)
        along = xp.einsum("ij,ij->i", change, normalized) / width
        change -= (change @ share)[:, None]
        change -= normalized * along[:, None]
        change *= factor
        return change.reshape(x.shape)

    return y, [
        of_x,
        lambda g: column_sums(_rows(g) * normalized),
        lambda g: column_sums(_rows(g)),
    ]


def _moments(mean: Array, centred: Array, total: Total | None) -> tuple[Array, Array, float]:
    """Return mean and variance of each column, and the number of rows, of all replicas."""
    count, squares = float(len(centred)), column_sums(centred * centred)
    if total is None:
        return mean, squares / max(1.0, count), count
    # In float64, in which squares of a large mean do not cancel.
    xp, local = array_namespace(mean), mean.astype(np.float64)
    parts = [xp.full(1, count), count * local, squares + count * local * local]
    sums = total(xp.concatenate(parts))
    everyone = float(sums[0])
    whole, second = xp.split(sums[1:] / max(1.0, everyone), 2)
    variance = xp.maximum(second - whole * whole, 0)
    return whole.astype(mean.dtype), variance.astype(mean.dtype), everyone


def _rows(x: Array) -> Array:
    """Return a contiguous matrix of a floating dtype, with the last axis of an array."""
    x = wide(x)
    if x.dtype.kind in "iub":
        x = x.astype(np.float64)
    return array_namespace(x).ascontiguousarray(x.reshape(-1, x.shape[-1]))


def _affine(rows: Array, scale: Array | None, shift: Array | None) -> Array:
    """Return ``rows * scale + shift``, in a new array unless both are None, for 1 and 0."""
    vectors = [wide(vector) for vector in (scale, shift) if vector is not None]
    result, *vectors = joined_rows(rows, *vectors)
    if scale is not None:
        result = result * vectors[0]
    if shift is not None:
        result = np.add(result, vectors[-1], out=None if scale is None else result)
    return result.reshape(rows.shape)
