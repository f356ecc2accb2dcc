"""Functions that are differentiated by what they are made of.

Each is written again in terms of functions that have rules, and runs with tracked arrays; it needs
no rule of its own. `NotImplemented` means that the arguments are beyond what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.device import array_namespace

__all__ = ["COMPOSED", "COMPOSED_BY_NAME"]

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
    pairs = zip(xi, sides, strict=True)
    return tuple([np.broadcast_to(np.reshape(x, side), lengths) for x, side in pairs])


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
    if [lengths_a[axis] for axis in first] != [lengths_b[axis] for axis in second]:
        return NotImplemented
    summed = math.prod(lengths_a[axis] for axis in first)
    out_a, out_b = [lengths_a[axis] for axis in rest_a], [lengths_b[axis] for axis in rest_b]
    left = np.reshape(np.transpose(a, rest_a + first), (math.prod(out_a), summed))
    right = np.reshape(np.transpose(b, second + rest_b), (summed, math.prod(out_b)))
    return np.reshape(np.matmul(left, right), (*out_a, *out_b))


def _block(arrays: Any) -> Value:
    """Join the innermost lists along the last axis, those around them along the one before."""

    def depth(part: Any) -> int:
        return 1 + max(map(depth, part)) if isinstance(part, list) else 0

    def leaves(part: Any) -> list[Value]:
        return [x for one in part for x in leaves(one)] if isinstance(part, list) else [part]

    def join(part: Any, axis: int) -> Value:
        if not isinstance(part, list):
            return np.reshape(part, (1,) * (ndim - np.ndim(part)) + np.shape(part))
        return np.concatenate([join(one, axis + 1) for one in part], axis)

    levels = depth(arrays)
    ndim = max(levels, *map(np.ndim, leaves(arrays)))
    return join(arrays, -levels)


def _linspace(
    start: Value, stop: Value, num: int = 50, endpoint: bool = True, *, axis: int = 0
) -> Value:
    xp = array_namespace(*(getattr(end, "value", end) for end in (start, stop)))
    shares = xp.arange(num) / max(1, num - bool(endpoint))
    shares = shares.reshape(-1, *(1,) * max(np.ndim(start), np.ndim(stop)))
    return np.moveaxis(
        start + (stop - start) * shares.astype(np.result_type(start, stop, 1.0)), 0, axis
    )


def _full_like(a: Value, fill_value: Value, dtype: Any = None, **kwargs: Any) -> Value:
    if not hasattr(fill_value, "dtype"):
        return NotImplemented
    shape = np.shape(a) if kwargs.get("shape") is None else kwargs["shape"]
    return np.broadcast_to(fill_value, shape).astype(a.dtype if dtype is None else dtype)


def _cross(
    a: Value, b: Value, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None
) -> Value:
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = np.moveaxis(a, axisa, -1), np.moveaxis(b, axisb, -1)
    if not np.shape(a)[-1] == np.shape(b)[-1] == 3:
        return NotImplemented
    # The components that follow, in the circle x y z x.
    a1, a2, b1, b2 = (np.roll(x, -k, -1) for x in (a, b) for k in (1, 2))
    return np.moveaxis(a1 * b2 - a2 * b1, -1, axisc)


def _kron(a: Value, b: Value) -> Value:
    ndim = max(np.ndim(a), np.ndim(b))
    long_a, long_b = ((1,) * (ndim - np.ndim(x)) + np.shape(x) for x in (a, b))
    blocks = np.reshape(a, [n for pair in long_a for n in (pair, 1)])
    blocks = blocks * np.reshape(b, [n for pair in long_b for n in (1, pair)])
    return np.reshape(blocks, [m * n for m, n in zip(long_a, long_b, strict=True)])


COMPOSED: dict[Any, Callable[..., Value]] = {
    np.append: _append,
    np.atleast_1d: _atleast(1),
    np.atleast_2d: _atleast(2),
    np.atleast_3d: _atleast(3),
    np.block: _block,
    np.broadcast_arrays: _broadcast_arrays,
    np.column_stack: _column_stack,
    np.compress: lambda condition, a, axis=None, out=None: np.take(
        a, np.flatnonzero(condition), axis=axis
    ),
    np.cross: _cross,
    np.delete: _delete,
    np.divmod: lambda x1, x2: (np.floor_divide(x1, x2), np.remainder(x1, x2)),
    np.dsplit: lambda ary, indices_or_sections: np.split(ary, indices_or_sections, 2),
    np.dstack: lambda tup: np.concatenate([np.atleast_3d(item) for item in tup], 2),
    np.extract: lambda condition, arr: np.take(arr, np.flatnonzero(condition)),
    np.full_like: _full_like,
    np.hsplit: lambda ary, indices_or_sections: np.split(
        ary, indices_or_sections, 0 if np.ndim(ary) == 1 else 1
    ),
    np.hstack: _hstack,
    np.inner: _inner,
    np.kron: _kron,
    np.linalg.cross: lambda x1, x2, /, *, axis=-1: _cross(x1, x2, axis=axis),
    np.linalg.outer: lambda a, b: np.ravel(a)[:, None] * np.ravel(b)[None, :],
    np.linalg.tensordot: _tensordot,
    np.linalg.vecdot: lambda x1, x2, *, axis=-1: np.sum(np.conj(x1) * x2, axis=axis),
    np.linspace: _linspace,
    np.meshgrid: _meshgrid,
    np.outer: lambda a, b: np.ravel(a)[:, None] * np.ravel(b)[None, :],
    np.select: _select,
    np.tensordot: _tensordot,
    np.tile: _tile,
    np.vdot: lambda a, b: np.sum(np.ravel(np.conj(a)) * np.ravel(b)),
    np.vecdot: lambda x1, x2, axis=-1: np.sum(np.conj(x1) * x2, axis=axis),
    np.vsplit: lambda ary, indices_or_sections: np.split(ary, indices_or_sections, 0),
    np.vstack: lambda tup, **kwargs: np.concatenate(
        [np.atleast_2d(item) for item in tup], 0, **kwargs
    ),
}

# Younger than NumPy 2.0, the oldest version that is supported.
COMPOSED_BY_NAME: dict[str, Callable[..., Value]] = {
    "matvec": lambda x1, x2: np.matmul(x1, x2[..., None])[..., 0],
    "unstack": lambda x, *, axis=0: tuple(np.moveaxis(x, axis, 0)),
    "vecmat": lambda x1, x2: np.matmul(np.conj(x1)[..., None, :], x2)[..., 0, :],
}
