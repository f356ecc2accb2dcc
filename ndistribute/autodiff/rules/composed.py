"""Functions that are differentiated by what they are made of.

Each is written again in terms of functions that have rules, and runs with tracked arrays; it needs
no rule of its own. `NotImplemented` means that the arguments are beyond what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["COMPOSED_BY_NAME"]

Value = Any  # a tracked or plain array, or a number


def _vstack(tup: Sequence[Value], **kwargs: Any) -> Value:
    return np.concatenate([np.atleast_2d(item) for item in tup], 0, **kwargs)


def _hstack(tup: Sequence[Value], **kwargs: Any) -> Value:
    items = [np.atleast_1d(item) for item in tup]
    return np.concatenate(items, 0 if items[0].ndim == 1 else 1, **kwargs)


def _dstack(tup: Sequence[Value]) -> Value:
    return np.concatenate([np.atleast_3d(item) for item in tup], 2)


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


def _split_evenly(axis: int | None) -> Callable[..., Value]:
    def split(ary: Value, indices_or_sections: Any) -> Value:
        along = (0 if np.ndim(ary) == 1 else 1) if axis is None else axis
        return np.split(ary, indices_or_sections, along)

    return split


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
    if returned or (weights is not None and np.shape(weights) != np.shape(a)):
        return NotImplemented
    if weights is None:
        return np.mean(a, axis=axis, keepdims=keepdims)
    total = np.sum(a * weights, axis=axis, keepdims=keepdims)
    return total / np.sum(weights, axis=axis, keepdims=keepdims)


def _ptp(a: Value, axis: Any = None, out: Any = None, keepdims: Any = False) -> Value:
    return np.max(a, axis=axis, keepdims=keepdims) - np.min(a, axis=axis, keepdims=keepdims)


def _diff(a: Value, n: int = 1, axis: int = -1) -> Value:
    lead = (slice(None),) * (axis % np.ndim(a))
    for _ in range(n):
        a = a[(*lead, slice(1, None))] - a[(*lead, slice(None, -1))]
    return a


def _norm(x: Value, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Value:
    matrix = np.ndim(axis) == 1 or (axis is None and np.ndim(x) == 2)
    if ord is None or (ord == 2 and not matrix) or (ord == "fro" and matrix):
        return np.sqrt(np.sum(np.square(np.abs(x)), axis=axis, keepdims=keepdims))
    if ord == 1 and not matrix:
        return np.sum(np.abs(x), axis=axis, keepdims=keepdims)
    if ord == math.inf and not matrix:
        return np.max(np.abs(x), axis=axis, keepdims=keepdims)
    return NotImplemented


def _unstack(x: Value, *, axis: int = 0) -> Value:
    return tuple(np.moveaxis(x, axis, 0))


# By name, because some are younger than NumPy 1.26.
COMPOSED_BY_NAME: dict[str, Callable[..., Value]] = {
    "append": _append,
    "atleast_1d": _atleast(1),
    "atleast_2d": _atleast(2),
    "atleast_3d": _atleast(3),
    "average": _average,
    "broadcast_arrays": _broadcast_arrays,
    "column_stack": _column_stack,
    "diff": _diff,
    "dsplit": _split_evenly(2),
    "dstack": _dstack,
    "hsplit": _split_evenly(None),
    "hstack": _hstack,
    "inner": _inner,
    "linalg.matrix_norm": lambda x, *, keepdims=False, ord="fro": _norm(x, ord, (-2, -1), keepdims),
    "linalg.norm": _norm,
    "linalg.outer": _outer,
    "linalg.tensordot": _tensordot,
    "linalg.vecdot": _vecdot,
    "outer": _outer,
    "ptp": _ptp,
    "tensordot": _tensordot,
    "tile": _tile,
    "unstack": _unstack,
    "vdot": _vdot,
    "vecdot": _vecdot,
    "vsplit": _split_evenly(0),
    "vstack": _vstack,
}
