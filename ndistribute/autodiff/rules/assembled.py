"""Functions that assemble arrays from parts, written again like those in `composed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.device import array_namespace

__all__ = ["COMPOSED"]

Value = Any  # a tracked or plain array, or a number


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


def _choose(a: Any, choices: Sequence[Value], out: Any = None, mode: str = "raise") -> Value:
    if mode != "raise":
        return NotImplemented
    *parts, places = np.broadcast_arrays(*choices, a)
    return np.take_along_axis(np.stack(parts), places[None], 0)[0]


def _piecewise(x: Value, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> Value:
    conditions = np.broadcast_to(condlist, (len(condlist), *np.shape(x)))
    # The last condition that holds decides; where none does, the last function or else 0.
    which = np.full(np.shape(x), len(conditions))
    for k, condition in enumerate(conditions):
        which[condition] = k
    flat, places, parts = np.ravel(x), [], []
    for k, function in enumerate([*funclist, 0.0][: len(conditions) + 1]):
        here = np.flatnonzero(which == k)
        part = function(flat[here], *args, **kw) if callable(function) else function
        places.append(here)
        parts.append(np.broadcast_to(part, here.shape))
    ordered = np.concatenate(parts)[np.argsort(np.concatenate(places))]
    return np.reshape(ordered, np.shape(x)).astype(x.dtype)


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
    return np.broadcast_to(fill_value, np.shape(a)).astype(a.dtype if dtype is None else dtype)


COMPOSED: dict[Any, Callable[..., Value]] = {
    np.block: _block,
    np.choose: _choose,
    np.divmod: lambda x1, x2: (np.floor_divide(x1, x2), np.remainder(x1, x2)),
    np.full_like: _full_like,
    np.linspace: _linspace,
    np.modf: lambda x: (x - np.trunc(x), np.trunc(x)),
    np.piecewise: _piecewise,
    np.rollaxis: lambda a, axis, start=0: np.moveaxis(a, axis, start - (start > axis % np.ndim(a))),
}
