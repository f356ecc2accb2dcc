"""Functions that are differentiated by what they are made of.

Each is written again in terms of functions that have rules, and runs with tracked arrays; it needs
no rule of its own. `NotImplemented` means that the arguments are beyond what is written here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["COMPOSED_BY_NAME"]

Value = Any  # a tracked or plain array, or a number


def _hstack(tup: Sequence[Value], **kwargs: Any) -> Value:
    items = [np.atleast_1d(item) for item in tup]
    return np.concatenate(items, 0 if items[0].ndim == 1 else 1, **kwargs)


def _column_stack(tup: Sequence[Value]) -> Value:
    items = [np.atleast_1d(item) for item in tup]
    return np.concatenate([item[:, None] if item.ndim == 1 else item for item in items], 1)


def _append(arr: Value, values: Value, axis: Any = None) -> Value:
    if axis is None:
        return np.concatenate([np.ravel(arr), np.ravel(values)])
    return np.concatenate([arr, values], axis)


def _atleast(ndim: int) -> Callable[..., Value]:
    def atleast(*arys: Value) -> Value:
        # NumPy puts the new axes of a matrix behind, and all others in front.
        results = []
        for array in arys:
            shape = np.shape(array)
            missing = ndim - len(shape)
            if missing > 0:
                tail = (1,) if ndim == 3 and shape else ()
                shape = (*(1,) * (missing - len(tail)), *shape, *tail)
            results.append(np.reshape(array, shape))
        return results[0] if len(results) == 1 else tuple(results)

    return atleast


def _broadcast_arrays(*args: Value, subok: bool = False) -> Value:
    shape = np.broadcast_shapes(*(np.shape(array) for array in args))
    return tuple(np.broadcast_to(array, shape) for array in args)


def _tile(A: Value, reps: Any) -> Value:
    counts = [reps] if np.ndim(reps) == 0 else list(reps)
    shape = np.shape(A)
    ndim = max(len(shape), len(counts))
    counts = [1] * (ndim - len(counts)) + [int(count) for count in counts]
    shape = (1,) * (ndim - len(shape)) + shape
    pairs = [(count, length) for count, length in zip(counts, shape, strict=True)]
    split = np.reshape(A, [side for _, length in pairs for side in (1, length)])
    spread = np.broadcast_to(split, [side for pair in pairs for side in pair])
    return np.reshape(spread, [count * length for count, length in pairs])


def _delete(arr: Value, obj: Any, axis: Any = None) -> Value:
    length = np.size(arr) if axis is None else np.shape(arr)[axis]
    return np.take(arr, np.delete(np.arange(length), obj), axis=axis)


def _select(condlist: Sequence[Any], choicelist: Sequence[Value], default: Value = 0) -> Value:
    result = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = np.where(condition, choice, result)
    return result


def _meshgrid(*xi: Value, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Value:
    if sparse or any(np.ndim(x) != 1 for x in xi):
        return NotImplemented
    order = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        order[:2] = [1, 0]
    lengths = [len(xi[k]) for k in order]
    sides = [[-1 if place == k else 1 for place in order] for k in range(len(xi))]
    return [np.broadcast_to(np.reshape(x, s), lengths) for x, s in zip(xi, sides, strict=True)]


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


def _diff(a: Value, n: int = 1, axis: int = -1) -> Value:
    lead = (slice(None),) * (axis % np.ndim(a))
    for _ in range(n):
        a = a[(*lead, slice(1, None))] - a[(*lead, slice(None, -1))]
    return a


def _vector_norm(x: Value, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Value:
    if axis is None:
        return NotImplemented if keepdims else np.linalg.norm(np.ravel(x), ord)
    return NotImplemented if isinstance(axis, tuple) else np.linalg.norm(x, ord, axis, keepdims)


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
    x: Value, /, *, axis: Any = None, dtype: Any = None, out: Any = None, include_initial: Any = 0
) -> Value:
    return NotImplemented if include_initial else np.cumsum(x, axis=axis, dtype=dtype)


COMPOSED_BY_NAME: dict[str, Callable[..., Value]] = {
    "append": _append,
    "atleast_1d": _atleast(1),
    "atleast_2d": _atleast(2),
    "atleast_3d": _atleast(3),
    "average": _average,
    "broadcast_arrays": _broadcast_arrays,
    "column_stack": _column_stack,
    "compress": lambda condition, a, axis=None, out=None: np.take(
        a, np.flatnonzero(condition), axis=axis
    ),
    "cumulative_sum": _cumulative_sum,
    "delete": _delete,
    "diff": _diff,
    "dsplit": lambda ary, indices_or_sections: np.split(ary, indices_or_sections, 2),
    "dstack": lambda tup: np.concatenate([np.atleast_3d(item) for item in tup], 2),
    "extract": lambda condition, arr: np.take(arr, np.flatnonzero(condition)),
    "hsplit": lambda ary, indices_or_sections: np.split(
        ary, indices_or_sections, 0 if np.ndim(ary) == 1 else 1
    ),
    "hstack": _hstack,
    "inner": _inner,
    "linalg.eigvalsh": lambda a, *args, **kwargs: np.linalg.eigh(a, *args, **kwargs)[0],
    "linalg.matrix_norm": lambda x, /, *, keepdims=False, ord="fro": np.linalg.norm(
        x, ord, (-2, -1), keepdims
    ),
    "linalg.matrix_power": _matrix_power,
    "linalg.multi_dot": lambda arrays: functools.reduce(np.dot, arrays),
    "linalg.outer": lambda a, b: np.ravel(a)[:, None] * np.ravel(b)[None, :],
    "linalg.svdvals": lambda x: np.linalg.svd(x, compute_uv=False),
    "linalg.tensordot": _tensordot,
    "linalg.vecdot": lambda x1, x2, *, axis=-1: np.sum(np.conj(x1) * x2, axis=axis),
    "linalg.vector_norm": _vector_norm,
    "matvec": lambda x1, x2: np.matmul(x1, x2[..., None])[..., 0],
    "meshgrid": _meshgrid,
    "nanmean": _nanmean,
    "nansum": _nansum,
    "outer": lambda a, b: np.ravel(a)[:, None] * np.ravel(b)[None, :],
    "ptp": lambda a, axis=None, out=None, keepdims=False: (
        np.max(a, axis=axis, keepdims=keepdims) - np.min(a, axis=axis, keepdims=keepdims)
    ),
    "select": _select,
    "tensordot": _tensordot,
    "tile": _tile,
    "unstack": lambda x, *, axis=0: tuple(np.moveaxis(x, axis, 0)),
    "vdot": lambda a, b: np.sum(np.ravel(np.conj(a)) * np.ravel(b)),
    "vecdot": lambda x1, x2, axis=-1: np.sum(np.conj(x1) * x2, axis=axis),
    "vecmat": lambda x1, x2: np.matmul(np.conj(x1)[..., None, :], x2)[..., 0, :],
    "vsplit": lambda ary, indices_or_sections: np.split(ary, indices_or_sections, 0),
    "vstack": lambda tup, **kwargs: np.concatenate(
        [np.atleast_2d(item) for item in tup], 0, **kwargs
    ),
}
