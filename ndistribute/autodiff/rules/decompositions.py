"""Decompositions: NumPy functions written in terms of functions that have rules.

They run with tracked arrays, so they need no rule of their own. A decomposition returns
`NotImplemented` for arguments that it does not support.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.linalg import INVERSE_NORMS
from ndistribute.autodiff.rules.unbroadcast import as_axes
from ndistribute.devices import array_namespace

Value = Any  # a tracked or plain array, or a number

# Shapes and joints


def _hstack(tup: Sequence[Value], **kwargs: Any) -> Value:
    items = [np.atleast_1d(item) for item in tup]
    return np.concatenate(items, 0 if items[0].ndim == 1 else 1, **kwargs)


def _column_stack(tup: Sequence[Value]) -> Value:
    items = [np.atleast_1d(item) for item in tup]
    return np.concatenate([item[:, None] if item.ndim == 1 else item for item in items], 1)


def _atleast(ndim: int) -> Callable[..., Value]:
    def widened(array: Value) -> Value:
        # NumPy appends the new axis of a matrix, and prepends all others.
        shape = np.shape(array)
        after = 1 if ndim == 3 and 0 < len(shape) < 3 else 0
        return np.reshape(array, (1,) * (ndim - len(shape) - after) + shape + (1,) * after)

    def atleast(*arys: Value) -> Value:
        return widened(*arys) if len(arys) == 1 else tuple(map(widened, arys))

    return atleast


def _broadcast_arrays(*args: Value, subok: bool = False) -> Value:
    shape = np.broadcast_shapes(*map(np.shape, args))
    return tuple([np.broadcast_to(array, shape) for array in args])


def _tile(A: Value, reps: Any) -> Value:
    counts, shape = np.ravel(reps).tolist(), np.shape(A)
    shape = (1,) * (len(counts) - len(shape)) + shape
    counts = [1] * (len(shape) - len(counts)) + counts
    split = np.reshape(A, [side for length in shape for side in (1, length)])
    pairs = list(zip(counts, shape, strict=True))
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
    last = len(xi) - 1
    sides = [(1,) * k + (-1,) + (1,) * (last - k) for k in range(len(xi))]
    grids = np.broadcast_arrays(*map(np.reshape, xi, sides))
    swapped = indexing == "xy" and last > 0
    return tuple([np.swapaxes(grid, 0, 1) for grid in grids]) if swapped else grids


def _block(arrays: Any) -> Value:
    """Return the innermost lists joined along the last axis, the outer ones along those before."""

    def depth(part: Any) -> int:
        return 1 + max(map(depth, part)) if isinstance(part, list) else 0

    def ndim(part: Any) -> int:
        return max(map(ndim, part)) if isinstance(part, list) else np.ndim(part)

    def join(part: Any, axis: int) -> Value:
        if not isinstance(part, list):
            return np.reshape(part, (1,) * (most - np.ndim(part)) + np.shape(part))
        return np.concatenate([join(item, axis + 1) for item in part], axis)

    levels = depth(arrays)
    most = max(levels, ndim(arrays))
    return join(arrays, -levels)


def _linspace(
    start: Value, stop: Value, num: int = 50, endpoint: bool = True, *, axis: int = 0
) -> Value:
    xp = array_namespace(*(getattr(end, "value", end) for end in (start, stop)))
    shares = xp.arange(num) / max(1, num - bool(endpoint))
    shares = shares.reshape(-1, *(1,) * max(np.ndim(start), np.ndim(stop)))
    points = start + (stop - start) * shares.astype(np.result_type(start, stop, 1.0))
    return np.moveaxis(points, 0, axis)


def _full_like(a: Value, fill_value: Value, dtype: Any = None, **kwargs: Any) -> Value:
    if not hasattr(fill_value, "dtype"):
        return NotImplemented
    shape = np.shape(a) if kwargs.get("shape") is None else kwargs["shape"]
    return np.broadcast_to(fill_value, shape).astype(a.dtype if dtype is None else dtype)


# Products and norms


def _tensordot(a: Value, b: Value, axes: Any = 2) -> Value:
    """Return the product of two matrices, after moving the summed axes together."""
    shape_a, shape_b = np.shape(a), np.shape(b)
    if isinstance(axes, int):
        axes = (range(len(shape_a) - axes, len(shape_a)), range(axes))
    pairs = zip(axes, (len(shape_a), len(shape_b)), strict=True)
    first, second = ([int(axis) % ndim for axis in np.ravel(some)] for some, ndim in pairs)
    lengths = [shape_a[axis] for axis in first]
    if lengths != [shape_b[axis] for axis in second]:
        return NotImplemented
    rest_a = [axis for axis in range(len(shape_a)) if axis not in first]
    rest_b = [axis for axis in range(len(shape_b)) if axis not in second]
    out_a, out_b = [shape_a[axis] for axis in rest_a], [shape_b[axis] for axis in rest_b]
    left = np.reshape(np.transpose(a, rest_a + first), (math.prod(out_a), math.prod(lengths)))
    right = np.reshape(np.transpose(b, second + rest_b), (math.prod(lengths), math.prod(out_b)))
    return np.reshape(np.matmul(left, right), (*out_a, *out_b))


def _outer(a: Value, b: Value) -> Value:
    return np.ravel(a)[:, None] * np.ravel(b)[None, :]


def _vecdot(x1: Value, x2: Value, axis: int = -1) -> Value:
    return np.sum(np.conj(x1) * x2, axis=axis)


def _cross(
    a: Value, b: Value, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None
) -> Value:
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = np.moveaxis(a, axisa, -1), np.moveaxis(b, axisb, -1)
    if not np.shape(a)[-1] == np.shape(b)[-1] == 3:
        return NotImplemented
    # The next components, in the cyclic order x y z x.
    a1, a2, b1, b2 = (np.roll(x, -k, -1) for x in (a, b) for k in (1, 2))
    return np.moveaxis(a1 * b2 - a2 * b1, -1, axisc)


def _kron(a: Value, b: Value) -> Value:
    ndim = max(np.ndim(a), np.ndim(b))
    long_a, long_b = ((1,) * (ndim - np.ndim(x)) + np.shape(x) for x in (a, b))
    blocks = np.reshape(a, [n for pair in long_a for n in (pair, 1)])
    blocks = blocks * np.reshape(b, [n for pair in long_b for n in (1, pair)])
    return np.reshape(blocks, [m * n for m, n in zip(long_a, long_b, strict=True)])


def _norm(x: Value, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Value:
    if axis is None and ord is not None and np.ndim(x) > 2:
        return NotImplemented
    matrix = (axis is None and np.ndim(x) == 2) or (np.ndim(axis) == 1 and len(axis) == 2)
    if ord is None or (ord == 2 and not matrix) or (ord == "fro" and matrix):
        size = np.abs(x) if x.dtype.kind == "c" else x
        return np.sqrt(np.sum(np.square(size), axis=axis, keepdims=keepdims))
    return (_matrix_norm if matrix else _vector_norm)(x, ord, axis, keepdims)


def _vector_norm(x: Value, ord: Any, axis: Any, keepdims: bool) -> Value:
    size = np.abs(x)
    if abs(ord) == math.inf:
        return (np.max if ord > 0 else np.min)(size, axis=axis, keepdims=keepdims)
    if ord == 1:
        return np.sum(size, axis=axis, keepdims=keepdims)
    return NotImplemented if ord == 0 else np.sum(size**ord, axis, keepdims=keepdims) ** (1 / ord)


def _matrix_norm(x: Value, ord: Any, axis: Any, keepdims: bool) -> Value:
    if keepdims or ord not in ("nuc", 1, -1, 2, -2, math.inf, -math.inf):
        return NotImplemented
    x = x if axis is None else np.moveaxis(x, axis, (-2, -1))
    if ord == "nuc":
        return np.sum(np.linalg.svd(x, compute_uv=False), axis=-1)
    if abs(ord) == 2:
        return np.linalg.svd(x, compute_uv=False)[..., 0 if ord > 0 else -1]
    sums = np.sum(np.abs(x), axis=-2 if abs(ord) == 1 else -1)
    return (np.max if ord > 0 else np.min)(sums, axis=-1)


def _linalg_vector_norm(
    x: Value, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2
) -> Value:
    if axis is None:
        return NotImplemented if keepdims else np.linalg.norm(np.ravel(x), ord)
    return NotImplemented if isinstance(axis, tuple) else np.linalg.norm(x, ord, axis, keepdims)


def _cond(x: Value, p: Any = None) -> Value:
    if p not in (None, 2):
        return NotImplemented
    s = np.linalg.svd(x, compute_uv=False)
    return s[..., 0] / s[..., -1]


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


def _over_axes(
    last: Callable[..., Value], others: Callable[..., Value], default: Any
) -> Callable[..., Value]:
    """Return a Fourier transform over several axes; `last` transforms the last one."""

    def transform(a: Value, s: Any = None, axes: Any = default, norm: Any = None) -> Value:
        if axes is None:
            axes = range(-(np.ndim(a) if s is None else len(s)), 0)
        lengths = [None] * len(axes) if s is None else [None if n == -1 else n for n in s]
        *first, final = zip(lengths, axes, strict=True)
        if last is not np.fft.irfft:
            a, first = last(a, *final, norm), first[::-1]
        for n, axis in first:
            a = others(a, n, axis, norm)
        return last(a, *final, norm) if last is np.fft.irfft else a

    return transform


# Statistics


def _average(
    a: Value, axis: Any = None, weights: Value = None, returned: bool = False, keepdims: Any = False
) -> Value:
    if weights is None and not returned:
        return np.mean(a, axis=axis, keepdims=keepdims)
    if returned or np.shape(weights) != np.shape(a):
        return NotImplemented
    total = np.sum(a * weights, axis=axis, keepdims=keepdims)
    return total / np.sum(weights, axis=axis, keepdims=keepdims)


def _filled(function: Callable[..., Value], fill: float) -> Callable[..., Value]:
    """Return a function that replaces each NaN by a number."""
    return lambda a, *args, **kwargs: function(np.where(np.isnan(a), fill, a), *args, **kwargs)


def _nan_extreme(function: Callable[..., Value], fill: float) -> Callable[..., Value]:
    def extreme(a: Value, axis: Any = None, out: Any = None, keepdims: Any = False) -> Value:
        if np.isnan(a).all(axis).any():
            return NotImplemented
        return _filled(function, fill)(a, axis, keepdims=keepdims)

    return extreme


def _nanmean(
    a: Value, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False
) -> Value:
    present = np.sum(~np.isnan(a), axis=axis, keepdims=keepdims)
    return np.nansum(a, axis, dtype, keepdims=keepdims) / present.astype(a.dtype)


def _nanvar(
    a: Value,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: int = 0,
    keepdims: Any = False,
) -> Value:
    missing = np.isnan(a)
    count = np.sum(~missing, axis=axis, keepdims=keepdims) - ddof
    apart = np.where(missing, 0, a - np.nanmean(a, axis=axis, keepdims=True))
    count = np.where(count > 0, count, np.nan).astype(a.dtype)
    return np.sum(np.square(apart), axis, dtype, keepdims=keepdims) / count


def _cov(
    m: Value, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: Any = None
) -> Value:
    if y is not None:
        return NotImplemented
    rows = np.atleast_2d(m)
    if not rowvar and np.ndim(m) == 2:
        rows = rows.T
    rows = rows.astype(np.result_type(rows.dtype, np.float64))
    rows = rows - np.mean(rows, axis=1, keepdims=True)
    count = rows.shape[1] - (int(not bias) if ddof is None else ddof)
    return np.squeeze(np.matmul(rows, np.conj(rows.T)) / count)


# Differences, integrals and interpolation


def _diff(a: Value, n: int = 1, axis: int = -1) -> Value:
    if not -np.ndim(a) <= axis < np.ndim(a):
        return NotImplemented
    lead = (slice(None),) * (axis % np.ndim(a))
    for _ in range(n):
        a = a[(*lead, slice(1, None))] - a[(*lead, slice(None, -1))]
    return a


def _gradient(f: Value, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Value:
    axes = as_axes(axis, np.ndim(f))
    short = any(np.shape(f)[along] < 2 for along in axes)
    if edge_order != 1 or short or any(np.ndim(spacing) for spacing in varargs):
        return NotImplemented
    steps = varargs if len(varargs) == len(axes) else (varargs or (1.0,)) * len(axes)
    results = []
    for along, step in zip(axes, steps, strict=True):
        a = np.moveaxis(f, along, 0)
        slopes = [a[1:2] - a[:1], (a[2:] - a[:-2]) / 2, a[-1:] - a[-2:-1]]
        results.append(np.moveaxis(np.concatenate(slopes) / step, 0, along))
    return results[0] if len(results) == 1 else tuple(results)


def _trapezoid(y: Value, x: Value = None, dx: Any = 1.0, axis: int = -1) -> Value:
    y = np.moveaxis(y, axis, -1)
    if x is not None:
        dx = np.diff(x) if np.ndim(x) == 1 else np.diff(np.moveaxis(x, axis, -1))
    return np.sum(dx * (y[..., 1:] + y[..., :-1]) / 2, axis=-1)


def _correlate(a: Value, v: Value, mode: Any = "valid") -> Value:
    if np.size(a) < np.size(v):
        return np.conj(np.flip(_correlate(v, a, mode)))
    return np.convolve(a, np.conj(np.flip(v)), mode)


def _interp(x: Value, xp: Value, fp: Value, left: Any = None, right: Any = None) -> Value:
    if left is not None or right is not None or np.iscomplexobj(fp):
        return NotImplemented
    first = np.clip(np.searchsorted(xp, x) - 1, 0, len(xp) - 2)
    x0, x1, y0, y1 = (np.take(points, k) for points in (xp, fp) for k in (first, first + 1))
    return (y0 + (y1 - y0) * np.clip((x - x0) / (x1 - x0), 0, 1)).astype(np.float64)


COMPOSED: dict[Any, Callable[..., Value]] = {
    np.append: lambda arr, values, axis=None: np.concatenate(
        # A number is an array here, which determines the dtype of the result.
        [np.ravel(arr), np.ravel(values)] if axis is None else [arr, values],
        axis,
    ),
    np.atleast_1d: _atleast(1),
    np.atleast_2d: _atleast(2),
    np.atleast_3d: _atleast(3),
    np.average: _average,
    np.block: _block,
    np.broadcast_arrays: _broadcast_arrays,
    np.column_stack: _column_stack,
    np.compress: lambda condition, a, axis=None, out=None: np.take(
        a, np.flatnonzero(condition), axis=axis
    ),
    np.correlate: _correlate,
    np.cov: _cov,
    np.cross: _cross,
    np.delete: _delete,
    np.diff: _diff,
    np.divmod: lambda x1, x2: (np.floor_divide(x1, x2), np.remainder(x1, x2)),
    np.dsplit: lambda ary, indices_or_sections: np.split(ary, indices_or_sections, 2),
    np.dstack: lambda tup: np.concatenate([np.atleast_3d(item) for item in tup], 2),
    np.ediff1d: lambda ary, to_end=None, to_begin=None: np.concatenate(
        [np.ravel(x) for x in (to_begin, np.diff(np.ravel(ary)), to_end) if x is not None]
    ),
    np.extract: lambda condition, arr: np.take(arr, np.flatnonzero(condition)),
    np.fft.hfft: lambda a, n=None, axis=-1, norm=None: np.fft.irfft(
        np.conj(a), n, axis, INVERSE_NORMS[norm]
    ),
    np.fft.ihfft: lambda a, n=None, axis=-1, norm=None: np.conj(
        np.fft.rfft(a, n, axis, INVERSE_NORMS[norm])
    ),
    np.full_like: _full_like,
    np.gradient: _gradient,
    np.hsplit: lambda ary, indices_or_sections: np.split(
        ary, indices_or_sections, 0 if np.ndim(ary) == 1 else 1
    ),
    np.hstack: _hstack,
    np.inner: lambda a, b: (
        a * b if np.ndim(a) == 0 or np.ndim(b) == 0 else np.tensordot(a, b, (-1, -1))
    ),
    np.interp: _interp,
    np.kron: _kron,
    np.linalg.cond: _cond,
    np.linalg.cross: lambda x1, x2, /, *, axis=-1: _cross(x1, x2, axis=axis),
    np.linalg.diagonal: lambda x, /, *, offset=0: np.diagonal(x, offset, -2, -1),
    np.linalg.eigvals: lambda a: np.linalg.eig(a)[0],
    np.linalg.eigvalsh: lambda a, *args, **kwargs: np.linalg.eigh(a, *args, **kwargs)[0],
    np.linalg.matrix_norm: lambda x, /, *, keepdims=False, ord="fro": np.linalg.norm(
        x, ord, (-2, -1), keepdims
    ),
    np.linalg.matrix_power: _matrix_power,
    np.linalg.multi_dot: lambda arrays: functools.reduce(np.dot, arrays),
    np.linalg.norm: _norm,
    np.linalg.outer: _outer,
    np.linalg.svdvals: lambda x: np.linalg.svd(x, compute_uv=False),
    np.linalg.tensordot: _tensordot,
    np.linalg.trace: lambda x, /, *, offset=0, **kwargs: np.trace(x, offset, -2, -1, **kwargs),
    np.linalg.vecdot: _vecdot,
    np.linalg.vector_norm: _linalg_vector_norm,
    np.linspace: _linspace,
    np.meshgrid: _meshgrid,
    np.nancumprod: _filled(np.cumprod, 1),
    np.nancumsum: _filled(np.cumsum, 0),
    np.nanmax: _nan_extreme(np.max, -math.inf),
    np.nanmean: _nanmean,
    np.nanmin: _nan_extreme(np.min, math.inf),
    np.nanprod: _filled(np.prod, 1),
    np.nanstd: lambda *args, **kwargs: np.sqrt(np.nanvar(*args, **kwargs)),
    np.nansum: _filled(np.sum, 0),
    np.nanvar: _nanvar,
    np.outer: _outer,
    np.ptp: lambda a, axis=None, out=None, keepdims=False: (
        np.max(a, axis=axis, keepdims=keepdims) - np.min(a, axis=axis, keepdims=keepdims)
    ),
    np.select: _select,
    np.tensordot: _tensordot,
    np.tile: _tile,
    np.trace: lambda a, offset=0, axis1=0, axis2=1, dtype=None, out=None: (
        NotImplemented
        if out is not None
        else np.sum(np.diagonal(a, offset, axis1, axis2), -1, dtype)
    ),
    np.trapezoid: _trapezoid,
    np.vdot: lambda a, b: np.sum(np.ravel(np.conj(a)) * np.ravel(b)),
    np.vecdot: _vecdot,
    np.vsplit: lambda ary, indices_or_sections: np.split(ary, indices_or_sections, 0),
    np.vstack: lambda tup, **kwargs: np.concatenate(
        [np.atleast_2d(item) for item in tup], 0, **kwargs
    ),
}
COMPOSED |= {
    getattr(np.fft, f"{name}{suffix}"): _over_axes(
        getattr(np.fft, name), np.fft.ifft if name[0] == "i" else np.fft.fft, axes
    )
    for name in ("fft", "ifft", "rfft", "irfft")
    for suffix, axes in (("2", (-2, -1)), ("n", None))
}

# Functions added after NumPy 2.0, the oldest supported version.
_YOUNG: dict[str, Callable[..., Value]] = {
    "cumulative_sum": lambda x, /, *, axis=None, dtype=None, out=None, include_initial=False: (
        NotImplemented if include_initial else np.cumsum(x, axis=axis, dtype=dtype)
    ),
    "matvec": lambda x1, x2: np.matmul(x1, x2[..., None])[..., 0],
    "unstack": lambda x, *, axis=0: tuple(np.moveaxis(x, axis, 0)),
    "vecmat": lambda x1, x2: np.matmul(np.conj(x1)[..., None, :], x2)[..., 0, :],
}
COMPOSED |= {getattr(np, name): entry for name, entry in _YOUNG.items() if hasattr(np, name)}
