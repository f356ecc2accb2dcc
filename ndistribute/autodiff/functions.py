"""`logsumexp`, `softmax` and `log_softmax`, each one entry of the tape.

SciPy's functions of these names turn their argument into a plain NumPy array, where a gradient
ends. These take plain, tracked and GPU arrays, and compute the gradient from what is there anyhow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.autodiff.custom import custom_gradient
from ndistribute.autodiff.rules.unbroadcast import kept_shape, wide
from ndistribute.device import Array, as_array

__all__ = ["log_softmax", "logsumexp", "softmax"]

Axis = int | tuple[int, ...] | None


def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Return the logarithm of the sum of exponentials, which does not overflow.

    Args:
        x: a plain or tracked array or a variable, of any shape and a real dtype.
        axis: the axes to sum over; all of them if it is None, as in SciPy.
        keepdims: whether the result keeps the summed axes, with length 1.

    Returns:
        An array of the dtype of `x` without the axes that were summed over.

    >>> float(logsumexp(np.array([1000.0, 1000.0])).round(4))
    1000.6931
    """
    return _logsumexp(x, axis=axis, keepdims=keepdims)


def softmax(x: Any, axis: Axis = None) -> Any:
    """Return exponentials divided by their sum.

    Args:
        x: a plain or tracked array or a variable, of any shape and a real dtype.
        axis: the axes over which the result sums to 1; all of them if it is None, as in SciPy.
            Probabilities of classes usually are along ``axis=-1``.

    Returns:
        An array of the shape and dtype of `x`.

    >>> softmax(np.array([[0.0, 0.0], [1000.0, 0.0]]), axis=-1)
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    return _softmax(x, axis=axis)


def log_softmax(x: Any, axis: Axis = None) -> Any:
    """Return the logarithm of `softmax`, exact where that is close to 0.

    Args:
        x: a plain or tracked array or a variable, of any shape and a real dtype.
        axis: the axes over which the exponentials of the result sum to 1; all of them if it is
            None, as in SciPy.

    Returns:
        An array of the shape and dtype of `x`.

    >>> log_softmax(np.array([1000.0, 0.0]))
    array([    0., -1000.])
    """
    return _log_softmax(x, axis=axis)


@custom_gradient
def _logsumexp(x: Any, *, axis: Axis, keepdims: bool) -> Any:
    x = as_array(x)
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0).astype(top.dtype)
    shares = np.exp(x - top)
    total = shares.sum(axis=axis, keepdims=True, dtype=wide(shares.dtype))
    with np.errstate(divide="ignore"):
        whole = (np.log(total) + top).astype(shares.dtype)
    kept = kept_shape(x.shape, axis)

    def vjp(g: Array) -> Array:
        return shares * (g.reshape(kept) / total).astype(shares.dtype)

    return whole if keepdims else whole.squeeze(axis), [vjp]


@custom_gradient
def _softmax(x: Any, *, axis: Axis) -> Any:
    x = as_array(x)
    result = np.exp(x - x.max(axis=axis, keepdims=True))
    total = result.sum(axis=axis, keepdims=True, dtype=wide(result.dtype))
    if total.dtype == result.dtype:
        result /= total
    else:  # The sum may be infinite in float16.
        result = (result / total).astype(result.dtype)

    def vjp(g: Array) -> Array:
        change = g * result
        change -= result * change.sum(axis=axis, keepdims=True)
        return change

    return result, [vjp]


@custom_gradient
def _log_softmax(x: Any, *, axis: Axis) -> Any:
    x = as_array(x)
    result = x - x.max(axis=axis, keepdims=True)
    exponentials = np.exp(result)
    total = exponentials.sum(axis=axis, keepdims=True, dtype=wide(exponentials.dtype))
    result = result - np.log(total).astype(exponentials.dtype)
    del exponentials, total

    def vjp(g: Array) -> Array:
        return g - np.exp(result) * g.sum(axis=axis, keepdims=True)

    return result, [vjp]
