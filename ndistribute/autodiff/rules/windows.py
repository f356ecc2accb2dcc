"""Derivatives of padding, sliding windows, convolution, interpolation, and of counted copies.

The gradient of a copy goes back to the place that it was copied from, which is found by moving the
numbers of the places in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import add_at, as_axes, unbroadcast, zeros
from ndistribute.device import Array, array_namespace, as_array

__all__ = ["COMPOSED", "RULES", "RULES_BY_PATH", "moved"]

Value = Any  # a tracked or plain array, or a number
Vjp = Callable[[Array], Array]


def moved(function: Callable[..., Array], a: Array, *args: Any, **kwargs: Any) -> Vjp:
    """Return the rule of a function that copies elements of an array to other places.

    Args:
        function: called again with the numbers of the places, which start at 1, in place of `a`.
            A 0 in its result is no copy.
        a: the array; only its shape is kept.
        *args: the other arguments of the call.
        **kwargs: its keywords.
    """
    shape, size = a.shape, a.size

    def vjp(g: Array) -> Array:
        numbers = array_namespace(g).arange(1, size + 1).reshape(shape)
        total = zeros(g, (size + 1,))
        add_at(total, function(numbers, *args, **kwargs).reshape(-1), g.reshape(-1))
        return total[1:].reshape(shape)

    return vjp


def _moved(function: Callable[..., Array]) -> Callable[..., Vjp]:
    return lambda out, a, *args, **kwargs: moved(function, a, *args, **kwargs)


def _pad(out: Array, array: Array, pad_width: Any, mode: str = "constant", **kwargs: Any) -> Vjp:
    if mode in ("edge", "reflect", "symmetric", "wrap") and "reflect_type" not in kwargs:
        return moved(np.pad, array, pad_width, mode=mode)
    if mode != "constant" or isinstance(pad_width, dict):
        raise NotImplementedError(f"mode={mode!r}, pad_width={pad_width!r}")
    before = [int(width) for width, _ in np.broadcast_to(pad_width, (array.ndim, 2))]
    inner = tuple(slice(b, b + n) for b, n in zip(before, array.shape, strict=True))
    return lambda g: g[inner]


def _windows(out: Array, x: Array, window_shape: Any, axis: Any = None, **kwargs: Any) -> Vjp:
    """Return the rule that adds one slice for each element of a window: a few, of many windows."""
    shape, count, axes = x.shape, out.shape[: x.ndim], as_axes(axis, x.ndim)

    def vjp(g: Array) -> Array:
        whole = zeros(g, shape)
        for offset in np.ndindex(*g.shape[len(shape) :]):
            starts = [0] * len(shape)
            for one, start in zip(axes, offset, strict=True):
                starts[one] += start
            where = tuple(slice(s, s + n) for s, n in zip(starts, count, strict=True))
            whole[where] += g[(..., *offset)]
        return whole

    return vjp


def _convolve_a(out: Array, a: Any, v: Any, mode: Any = "full") -> Vjp:
    shape, dtype = np.shape(a), a.dtype
    a, v = np.atleast_1d(a), np.atleast_1d(v)
    shorter, length = min(a.size, v.size), a.size + v.size - 1
    start = {"full": 0, "same": (shorter - 1) // 2, "valid": shorter - 1}[mode]

    def vjp(g: Array) -> Array:
        whole = zeros(g, (length,))
        whole[start : start + g.size] = g
        return unbroadcast(np.correlate(whole, np.conj(v), "valid").reshape(shape), shape, dtype)

    return vjp


def _convolve_v(out: Array, a: Any, v: Any, mode: Any = "full") -> Vjp:
    return _convolve_a(out, v, a, mode)


def _bincount(out: Array, path: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Vjp | None:
    if path not in ((1,), ("weights",)):
        return None
    places = as_array(args[0]).astype(np.intp)
    dtype = (args[1] if len(args) > 1 else kwargs["weights"]).dtype
    return lambda g: g[places].astype(dtype)


def _correlate(a: Value, v: Value, mode: Any = "valid") -> Value:
    if np.size(a) < np.size(v):
        return np.conj(np.flip(_correlate(v, a, mode)))
    return np.convolve(a, np.conj(np.flip(v)), mode)


def _interp(x: Value, xp: Value, fp: Value, left: Any = None, right: Any = None) -> Value:
    if left is not None or right is not None or np.iscomplexobj(fp):
        return NotImplemented
    first = np.clip(np.searchsorted(xp, x) - 1, 0, len(xp) - 2)
    x0, x1, y0, y1 = (np.take(one, k) for one in (xp, fp) for k in (first, first + 1))
    return (y0 + (y1 - y0) * np.clip((x - x0) / (x1 - x0), 0, 1)).astype(np.float64)


def _trapezoid(y: Value, x: Value = None, dx: Any = 1.0, axis: int = -1) -> Value:
    y = np.moveaxis(y, axis, -1)
    if x is not None:
        dx = np.diff(x) if np.ndim(x) == 1 else np.diff(np.moveaxis(x, axis, -1))
    return np.sum(dx * (y[..., 1:] + y[..., :-1]) / 2, axis=-1)


def _gradient(f: Value, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Value:
    if edge_order != 1 or any(np.ndim(one) for one in varargs):
        return NotImplemented
    axes = as_axes(axis, np.ndim(f))
    if any(np.shape(f)[one] < 2 for one in axes):
        return NotImplemented
    steps = varargs if len(varargs) == len(axes) else (varargs or (1.0,)) * len(axes)
    results = []
    for one, step in zip(axes, steps, strict=True):
        a = np.moveaxis(f, one, 0)
        slopes = [a[1:2] - a[:1], (a[2:] - a[:-2]) / 2, a[-1:] - a[-2:-1]]
        results.append(np.moveaxis(np.concatenate(slopes) / step, 0, one))
    return results[0] if len(results) == 1 else tuple(results)


def _ediff1d(ary: Value, to_end: Value = None, to_begin: Value = None) -> Value:
    pieces = [to_begin, np.diff(np.ravel(ary)), to_end]
    return np.concatenate([np.ravel(piece) for piece in pieces if piece is not None])


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.convolve: (_convolve_a, _convolve_v),
    np.diagflat: (_moved(np.diagflat),),
    np.lib.stride_tricks.sliding_window_view: (_windows,),
    np.pad: (_pad,),
    np.resize: (_moved(np.resize),),
}

RULES_BY_PATH: dict[Any, Callable[..., Vjp | None]] = {np.bincount: _bincount}

COMPOSED: dict[Any, Callable[..., Value]] = {
    np.correlate: _correlate,
    np.ediff1d: _ediff1d,
    np.gradient: _gradient,
    np.interp: _interp,
    np.trapezoid: _trapezoid,
}
