"""Functions that compute, differentiated by what they are made of.

Products of matrices, statistics and norms, written again like those in `composed`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["COMPOSED_BY_NAME"]

Value = Any  # a tracked or plain array, or a number


def _outer(a: Value, b: Value) -> Value:
    return np.ravel(a)[:, None] * np.ravel(b)[None, :]


def _vecdot(x1: Value, x2: Value, axis: int = -1) -> Value:
    return np.sum(x1 * x2, axis=axis)


def _vdot(a: Value, b: Value) -> Value:
    return np.sum(np.ravel(np.conj(a)) * np.ravel(b))


def _inner(a: Value, b: Value) -> Value:
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return a * b
    return np.tensordot(a, b, axes=(-1, -1))


def _tensordot(a: Value, b: Value, axes: Any = 2) -> Value:
    """Move the summed axes together and multiply two matrices."""
    ndim_a, ndim_b = np.ndim(a), np.ndim(b)
    if isinstance(axes, int):
        axes = (list(range(ndim_a - axes, ndim_a)), list(range(axes)))
    first, second = ([axis] if np.ndim(axis) == 0 else list(axis) for axis in axes)
    first = [int(axis) % ndim_a for axis in first]
    second = [int(axis) % ndim_b for axis in second]
    rest_a = [axis for axis in range(ndim_a) if axis not in first]
    rest_b = [axis for axis in range(ndim_b) if axis not in second]
    lengths_a, lengths_b = np.shape(a), np.shape(b)
    summed = math.prod(lengths_a[axis] for axis in first)
    out_a, out_b = [lengths_a[axis] for axis in rest_a], [lengths_b[axis] for axis in rest_b]
    left = np.reshape(np.transpose(a, rest_a + first), (math.prod(out_a), summed))
    right = np.reshape(np.transpose(b, second + rest_b), (summed, math.prod(out_b)))
    return np.reshape(np.matmul(left, right), (*out_a, *out_b))


def _average(
    a: Value, axis: Any = None, weights: Value = None, returned: bool = False, keepdims: Any = False
) -> Value:
    if weights is None and not returned:
        return np.mean(a, axis=axis, keepdims=keepdims)
    if returned or np.shape(weights) != np.shape(a):
        return NotImplemented
    total = np.sum(a * weights, axis=axis, keepdims=keepdims)
    return total / np.sum(weights, axis=axis, keepdims=keepdims)


def _ptp(a: Value, axis: Any = None, out: Any = None, keepdims: Any = False) -> Value:
    return np.max(a, axis=axis, keepdims=keepdims) - np.min(a, axis=axis, keepdims=keepdims)


def _diff(a: Value, n: int = 1, axis: int = -1) -> Value:
    lead = (slice(None),) * (axis % np.ndim(a))
    for _ in range(n):
        a = a[(*lead, slice(1, None))] - a[(*lead, slice(None, -1))]
    return a


def _matrix_norm(x: Value, /, *, keepdims: bool = False, ord: Any = "fro") -> Value:
    return np.linalg.norm(x, ord, (-2, -1), keepdims)


def _vector_norm(x: Value, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Value:
    if axis is None:
        return NotImplemented if keepdims else np.linalg.norm(np.ravel(x), ord)
    if isinstance(axis, tuple):
        return NotImplemented
    return np.linalg.norm(x, ord, axis, keepdims)


def _matvec(x1: Value, x2: Value) -> Value:
    return np.matmul(x1, x2[..., None])[..., 0]


def _vecmat(x1: Value, x2: Value) -> Value:
    return np.matmul(np.conj(x1)[..., None, :], x2)[..., 0, :]


def _multi_dot(arrays: Sequence[Value], *, out: Any = None) -> Value:
    return functools.reduce(np.dot, arrays)


def _matrix_power(a: Value, n: int) -> Value:
    if n == 0:
        return NotImplemented
    base = np.linalg.inv(a) if n < 0 else a
    result, power = None, abs(n)
    while power:
        if power & 1:
            result = base if result is None else np.matmul(result, base)
        power >>= 1
        base = np.matmul(base, base) if power else base
    return result


def _eigvalsh(a: Value, *args: Any, **kwargs: Any) -> Value:
    return np.linalg.eigh(a, *args, **kwargs)[0]


def _svdvals(x: Value, /) -> Value:
    return np.linalg.svd(x, compute_uv=False)


def _nansum(
    a: Value, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False
) -> Value:
    return np.sum(np.where(np.isnan(a), 0, a), axis=axis, dtype=dtype, keepdims=keepdims)


def _nanmean(
    a: Value, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False
) -> Value:
    present = np.sum(~np.isnan(a), axis=axis, keepdims=keepdims)
    return _nansum(a, axis, dtype, None, keepdims) / present.astype(a.dtype)


def _cumulative_sum(
    x: Value,
    /,
    *,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    include_initial: bool = False,
) -> Value:
    return NotImplemented if include_initial else np.cumsum(x, axis=axis, dtype=dtype)


COMPOSED_BY_NAME: dict[str, Callable[..., Value]] = {
    "average": _average,
    "cumulative_sum": _cumulative_sum,
    "diff": _diff,
    "inner": _inner,
    "linalg.eigvalsh": _eigvalsh,
    "linalg.matrix_norm": _matrix_norm,
    "linalg.matrix_power": _matrix_power,
    "linalg.multi_dot": _multi_dot,
    "linalg.outer": _outer,
    "linalg.svdvals": _svdvals,
    "linalg.tensordot": _tensordot,
    "linalg.vecdot": _vecdot,
    "linalg.vector_norm": _vector_norm,
    "matvec": _matvec,
    "nanmean": _nanmean,
    "nansum": _nansum,
    "outer": _outer,
    "ptp": _ptp,
    "tensordot": _tensordot,
    "vdot": _vdot,
    "vecdot": _vecdot,
    "vecmat": _vecmat,
}
