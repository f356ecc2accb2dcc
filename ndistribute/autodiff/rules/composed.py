"""Functions that arrange elements, differentiated by what they are made of.

Each is written again in terms of functions that have rules, and runs with tracked arrays; it needs
no rule of its own. `NotImplemented` means that the arguments are beyond what is written here.
"""

from __future__ import annotations

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


def _unstack(x: Value, *, axis: int = 0) -> Value:
    return tuple(np.moveaxis(x, axis, 0))


def _compress(condition: Any, a: Value, axis: Any = None, out: Any = None) -> Value:
    return np.take(a, np.flatnonzero(condition), axis=axis)


def _extract(condition: Any, arr: Value) -> Value:
    return np.take(arr, np.flatnonzero(condition))


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


COMPOSED_BY_NAME: dict[str, Callable[..., Value]] = {
    "append": _append,
    "atleast_1d": _atleast(1),
    "atleast_2d": _atleast(2),
    "atleast_3d": _atleast(3),
    "broadcast_arrays": _broadcast_arrays,
    "column_stack": _column_stack,
    "compress": _compress,
    "delete": _delete,
    "dsplit": _split_evenly(2),
    "dstack": _dstack,
    "extract": _extract,
    "hsplit": _split_evenly(None),
    "hstack": _hstack,
    "meshgrid": _meshgrid,
    "select": _select,
    "tile": _tile,
    "unstack": _unstack,
    "vsplit": _split_evenly(0),
    "vstack": _vstack,
}
