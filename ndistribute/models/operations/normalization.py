"""Batch and layer normalisation.

Each keeps the normalised array and few numbers. Narrow rows are joined, because NumPy has a cost
for each row. Sources: Ioffe and Szegedy, "Batch Normalization", 2015; Ba et al., "Layer
Normalization", 2016.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient
from ndistribute.device import Array, array_namespace, as_array
from ndistribute.models.operations.epilogue import column_sums, joined_rows, wide

__all__ = ["batch_normalization", "layer_normalization", "normalized_by"]

Total = Callable[[Array], Array]


def batch_normalization(
    x: Any, gamma: Any, beta: Any, epsilon: float, total: Total | None = None
) -> tuple[Any, Any, Any]:
    """Return an array normalised over all axes but the last, and its mean and variance.

    Args:
        x: an array of shape ``(..., channels)``.
        gamma: the factor of each channel, or None.
        beta: the summand of each channel, or None.
        epsilon: added to the variance.
        total: a function that adds up a vector over all replicas, so that all use the statistics of
            all examples; None for those of `x` alone.

    Returns:
        The result, and the mean and the variance of each channel.

    >>> y, mean, variance = batch_normalization(np.array([[1.0], [3.0]]), None, None, 0.0)
    >>> y.ravel(), mean, variance
    (array([-1.,  1.]), array([2.]), array([1.]))
    """
    y, mean, variance = _batch_normalized(x, gamma, beta, epsilon=epsilon, total=total)
    return y, as_array(mean), as_array(variance)


def normalized_by(x: Any, gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float) -> Any:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, with constant statistics.

    Args:
        x: an array of shape ``(..., channels)``.
        gamma: the factor of each channel, or None.
        beta: the summand of each channel, or None.
        mean: the mean of each channel.
        variance: the variance of each channel.
        epsilon: added to the variance.
    """
    dtype = wide(as_array(x)).dtype
    mean, variance = (as_array(one).astype(dtype, copy=False) for one in (mean, variance))
    return _normalized_by(x, gamma, beta, mean=mean, factor=1 / np.sqrt(variance + epsilon))


def layer_normalization(x: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """Return an array normalised over its last axis.

    Args:
        x: an array of shape ``(..., features)``.
        gamma: the factor of each feature, or None.
        beta: the summand of each feature, or None.
        epsilon: added to the variance.

    >>> layer_normalization(np.array([[1.0, 3.0]]), None, None, 0.0)
    array([[-1.,  1.]])
    """
    return _layer_normalized(x, gamma, beta, epsilon=epsilon)


@custom_gradient
def _batch_normalized(x: Any, gamma: Any, beta: Any, *, epsilon: float, total: Total | None) -> Any:
    x = as_array(x)
    rows = _rows(x)
    xp = array_namespace(rows)
    own = column_sums(rows) / max(1, len(rows))
    normalized = _shifted_scaled(rows, -own, None)
    mean, variance, count = _moments(own, normalized, total)
    factor = 1 / xp.sqrt(variance + epsilon)
    (values, factors, shifts) = joined_rows(normalized, factor, (own - mean) * factor)
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


@custom_gradient
def _normalized_by(x: Any, gamma: Any, beta: Any, *, mean: Array, factor: Array) -> Any:
    x = as_array(x)
    rows = _rows(x)
    scale = factor if gamma is None else factor * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    y = _shifted_scaled(rows, shift, scale).astype(x.dtype, copy=False).reshape(x.shape)

    def of_x(g: Array) -> Array:
        upstream, scales = joined_rows(_rows(g), scale)
        return (upstream * scales).reshape(x.shape)

    def of_gamma(g: Array) -> Array:
        return column_sums(_rows(g) * _shifted_scaled(rows, -mean * factor, factor))

    return y, [of_x, of_gamma, lambda g: column_sums(_rows(g))]


@custom_gradient
def _layer_normalized(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
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
        g = _rows(g)
        change = g.copy()
        if gamma is not None:
            target, scales = joined_rows(change, wide(gamma))
            target *= scales
        along = xp.einsum("ij,ij->i", change, normalized) / width
        change -= (change @ share)[:, None]
        change -= normalized * along[:, None]
        change *= factor
        return change.reshape(x.shape)

    def of_gamma(g: Array) -> Array:
        return column_sums(_rows(g) * normalized)

    return y, [of_x, of_gamma, lambda g: column_sums(_rows(g))]


def _moments(mean: Array, centred: Array, total: Total | None) -> tuple[Array, Array, float]:
    """Return the mean and the variance of each column, and the number of rows of all replicas.

    Args:
        mean: the mean of each column of this replica.
        centred: the rows of this replica without their mean.
        total: adds up a vector over all replicas, or None.
    """
    count, squares = float(len(centred)), column_sums(centred * centred)
    if total is None:
        return mean, squares / max(1.0, count), count
    # In float64, in which squares of a large mean do not cancel.
    xp, own = array_namespace(mean), mean.astype(np.float64)
    parts = [xp.full(1, count), count * own, squares + count * own * own]
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


def _shifted_scaled(rows: Array, shift: Array, scale: Array | None) -> Array:
    """Return ``rows * scale + shift``, with one number for each column; a scale of None is 1."""
    if scale is None:
        matrix, shifts = joined_rows(rows, shift)
        return (matrix + shifts).reshape(rows.shape)
    matrix, scales, shifts = joined_rows(rows, scale, shift)
    result = matrix * scales
    result += shifts
    return result.reshape(rows.shape)


def _affine(rows: Array, gamma: Array | None, beta: Array | None) -> Array:
    """Return ``rows * gamma + beta``, in a new array unless both are None."""
    if gamma is None:
        return rows if beta is None else _shifted_scaled(rows, wide(beta), None)
    if beta is None:
        matrix, scales = joined_rows(rows, wide(gamma))
        return (matrix * scales).reshape(rows.shape)
    return _shifted_scaled(rows, wide(beta), wide(gamma))
