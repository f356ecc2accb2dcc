"""Derivatives of indexing, of functions that rearrange, join or copy elements, and of reductions.

Most rules rearrange the gradient in reverse and return a view of it, at no cost; the backward pass
copies a view before it writes to it. The gradient of a part of an array is the index and the
gradient of the selected elements, not an array filled with zeros: the backward pass adds it to the
existing gradient, or keeps the rows of a source sparse. So the cost of the gradient of an embedding
depends on the batch size only.

The gradient of a reduction is repeated along the reduced axes. Calls with `where` or `initial` have
no rule, and raise when their gradient is needed.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.placing import added, is_tracked, placed
from ndistribute.autodiff.rules.unbroadcast import (
    Vjp,
    as_axes,
    kept_shape,
    refuse_complex,
    spread,
    unbroadcast,
    wide,
    zeros,
)
from ndistribute.devices import Array, array_namespace, is_device_array, to_host
from ndistribute.indexed_slices import IndexedSlices

# The position of an argument: (1,), (0, 2) inside a list, ("x",) for a keyword.
Path = tuple[Any, ...]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class SparseGradient:
    """The gradient of the elements that an index selects; it is zero elsewhere.

    `distinct` says that the index selects no element twice, and `is_rows` that it is one array of
    integers, so that gradients of several look-ups can be joined, and returned by `to_slices`.
    """

    __slots__ = ("is_rows", "parts", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        index: Any,
        values: Array,
        distinct: bool = False,
        is_rows: bool = False,
    ) -> None:
        self.shape = shape
        self.is_rows = is_rows
        self.parts = [(index, values, distinct)]

    def add_to(self, total: Array) -> Array:
        """Return the gradient of the whole array with this one added: see `added`."""
        for part in self.parts:
            total = added(total, *part)
        return total

    def to_dense(self) -> Array:
        """Return the gradient of the whole array."""
        (index, values, distinct), *others = self.parts
        whole = placed(values, self.shape, index, distinct)
        for part in others:
            whole = added(whole, *part)
        return whole

    def to_slices(self) -> IndexedSlices:
        """Return the rows in new arrays, with indices from 0, in order of look-up."""
        length, rest = self.shape[0], self.shape[1:]
        flat = [np.where(index < 0, index + length, index).reshape(-1) for index, *_ in self.parts]
        # A reshape to -1 rows is undefined if the rows are empty.
        pairs = zip(flat, self.parts, strict=True)
        values = [part[1].reshape(len(index), *rest) for index, part in pairs]
        indices: Any = np.concatenate(flat)
        if hasattr(indices, "on_device"):
            indices.is_checked = True  # When they were looked up.
        return IndexedSlices(np.concatenate(values), indices, self.shape)


def index_rule(x: Array, index: Any) -> Callable[[Array], SparseGradient]:
    """Return the rule of ``x[index]``."""
    shape = x.shape
    return lambda g: _selected(shape, index, g)


def _selected(shape: tuple[int, ...], index: Any, g: Array) -> SparseGradient:
    several = isinstance(index, tuple)
    items = [_exact(item, g) for item in (index if several else (index,))]
    # Masks, slices and numbers select no element twice.
    repeats = any(getattr(item, "ndim", 0) and item.dtype.kind in "iu" for item in items)
    place = tuple(items) if several else items[0]
    return SparseGradient(shape, place, g, distinct=not repeats, is_rows=repeats and not several)


def _exact(item: Any, g: Array) -> Any:
    """Return one part of an index, with lists and other array-likes as arrays."""
    if item is None or item is Ellipsis or isinstance(item, _INDICES) or is_device_array(item):
        return item
    array = np.asarray(item)
    return array_namespace(g).asarray(array, dtype=None if array.size else np.intp)


_INDICES = (slice, int, np.ndarray, np.generic)


def _take(
    result: Array, a: Array, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise"
) -> Callable[[Array], SparseGradient | Array]:
    if mode != "raise":
        return moved(np.take, a, indices, axis, mode=mode)
    if not hasattr(indices, "dtype"):
        indices = array_namespace(a).asarray(indices, dtype=np.intp)
    if axis is None:
        shape, size = a.shape, a.size
        return lambda g: _selected((size,), indices, g).to_dense().reshape(shape)
    lead = operator.index(axis) % a.ndim
    return index_rule(a, indices if lead == 0 else (*(slice(None),) * lead, indices))


def _take_along_axis(
    result: Array, arr: Array, indices: Array, axis: Any = -1
) -> Callable[[Array], SparseGradient]:
    if axis is None:
        raise NotImplementedError("axis=None")
    shape = arr.shape
    xp = array_namespace(arr)
    grid = list(xp.ix_(*(xp.arange(length) for length in shape)))
    grid[axis % arr.ndim] = indices
    return lambda g: SparseGradient(shape, tuple(grid), g)


def moved(function: Callable[..., Array], a: Array, *args: Any, **kwargs: Any) -> Vjp:
    """Return the rule of a function that copies elements of `a`, of which it keeps the shape only.

    The rule calls the function again with the indices of the elements, counted from 1, instead of
    `a`; a 0 in the result is not a copy. The gradient of a copy is added to that of its source.
    """
    shape, size = a.shape, a.size

    def vjp(g: Array) -> Array:
        numbers = array_namespace(g).arange(1, size + 1).reshape(shape)
        places = function(numbers, *args, **kwargs).reshape(-1)
        total = placed(g.reshape(-1), (size + 1,), places)
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
    """Return the rule: it adds one slice per element of a window, usually fewer than windows."""
    shape, count, axes = x.shape, out.shape[: x.ndim], as_axes(axis, x.ndim)

    def vjp(g: Array) -> Array:
        whole = zeros(g, shape)
        for offset in np.ndindex(*g.shape[len(shape) :]):
            starts = [0] * len(shape)
            for along, start in zip(axes, offset, strict=True):
                starts[along] += start
            where = tuple(slice(s, s + n) for s, n in zip(starts, count, strict=True))
            whole = added(whole, where, g[(..., *offset)], distinct=True)
        return whole

    return vjp


def _ravel(out: Array, a: Array, order: str = "C") -> Vjp:
    if order not in "CF":
        raise NotImplementedError(f"order={order!r}: use 'C' or 'F'")
    shape = a.shape
    return lambda g: g.reshape(shape, order=order)


def _same_elements(out: Array, a: Array, *args: Any, **kwargs: Any) -> Vjp:
    shape = a.shape
    return lambda g: g.reshape(shape)


def _transpose(out: Array, a: Array, axes: Any = None) -> Vjp:
    if axes is None:
        return np.transpose
    order = as_axes(axes, a.ndim)
    back = tuple(order.index(i) for i in range(a.ndim))
    return lambda g: np.transpose(g, back)


def _broadcast(out: Array, array: Array, *args: Any, **kwargs: Any) -> Vjp:
    shape, dtype = array.shape, array.dtype
    return lambda g: unbroadcast(g, shape, dtype)


def _roll(out: Array, a: Array, shift: Any, axis: Any = None) -> Vjp:
    back = tuple(-s for s in shift) if isinstance(shift, Sequence) else -shift
    return lambda g: np.roll(g, back, axis)


def _repeat(out: Array, a: Array, repeats: Any, axis: Any = None) -> Vjp:
    if np.ndim(repeats):
        return moved(np.repeat, a, repeats, axis)
    shape = a.shape
    flat, along = ((a.size,), 0) if axis is None else (shape, axis % a.ndim)
    unfolded = (*flat[: along + 1], int(repeats), *flat[along + 1 :])

    def vjp(g: Array) -> Array:
        total = g.reshape(unfolded).sum(axis=along + 1, dtype=wide(g.dtype))
        return total.astype(g.dtype, copy=False).reshape(shape)

    return vjp


def _triangle(function: Callable[..., Array]) -> Callable[..., Vjp]:
    def maker(out: Array, m: Array, k: int = 0) -> Vjp:
        shape, dtype = m.shape, m.dtype  # A vector is broadcast to a square.
        return lambda g: unbroadcast(function(g, k), shape, dtype)

    return maker


def _diagonal(out: Array, a: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Vjp:
    shape, (axis1, axis2) = a.shape, as_axes((axis1, axis2), a.ndim)

    def vjp(g: Array) -> Array:
        *grid, along = np.ix_(*map(range, g.shape))
        places = {axis1: along + max(0, -offset), axis2: along + max(0, offset)}
        index = tuple([places[k] if k in places else grid.pop(0) for k in range(len(shape))])
        return placed(g, shape, index, distinct=True)

    return vjp


def _diag(out: Array, v: Array, k: int = 0) -> Vjp:
    return _diagonal(out, v, k) if v.ndim == 2 else lambda g: np.diagonal(g, k)


def _joining(places_of: Callable[..., Sequence[Path]]) -> Callable[..., list[Vjp | None]]:
    """Return the rules of a function that joins arrays, given the place of each in the result."""

    def makers(out: Array, paths: Sequence[Path], args: Args, kwargs: Kwargs) -> list[Vjp | None]:
        if {*map(len, paths)} != {2}:
            return [None]
        arrays = args[0]
        places = places_of(arrays, args[1] if len(args) > 1 else kwargs.get("axis", 0), out.ndim)
        return [rule(arrays[k], places[k]) for _, k in paths]

    def rule(array: Array, place: Path) -> Vjp:
        shape, dtype = array.shape, array.dtype
        return lambda g: unbroadcast(g[place].reshape(shape), shape, dtype)

    return makers


def _concatenated(arrays: Sequence[Any], axis: Any, ndim: int) -> list[Path]:
    # All starts at once, as there may be thousands of arrays.
    lengths = [np.size(array) if axis is None else np.shape(array)[axis] for array in arrays]
    lead = (slice(None),) * (0 if axis is None else axis % ndim)
    starts = itertools.accumulate(lengths, initial=0)
    return [(*lead, slice(*pair)) for pair in itertools.pairwise(starts)]


def _stacked(arrays: Sequence[Any], axis: Any, ndim: int) -> list[Path]:
    return [(*(slice(None),) * (axis % ndim), k) for k in range(len(arrays))]


def _split(parts: Sequence[Array], ary: Array, indices_or_sections: Any, axis: int = 0) -> Any:
    """Return the rule that joins the gradients of the pieces, with zeros for None."""

    def vjp(gradients: Sequence[Array | None]) -> list[Array]:
        pairs = zip(parts, gradients, strict=True)
        return [np.concatenate([np.zeros_like(p) if g is None else g for p, g in pairs], axis)]

    return vjp


def _sum(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    shape, own_dtype = a.shape, a.dtype
    return lambda g: spread(g, shape, own_dtype, axis)


def _mean(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    shape, own_dtype = a.shape, a.dtype
    count: Any = max(1, a.size // max(1, result.size))
    if own_dtype.itemsize == 2:  # A count may overflow in it.
        count = np.float32(count)
    return lambda g: spread(g / count, shape, own_dtype, axis)


def _extreme(result: Array, a: Array, axis: Any = None, out: Any = None, keepdims: Any = 0) -> Vjp:
    """Return the rule of max and min, in which equal extremes share the gradient."""
    shape = a.shape

    def vjp(g: Array) -> Array:
        kept = g.shape if g.ndim == len(shape) else kept_shape(shape, axis)
        holds = np.equal(a, result.reshape(kept))
        are_as_many = isinstance(a, np.ndarray) and np.count_nonzero(holds) == result.size
        if are_as_many and holds.any(axis=axis).all():
            # The common case without ties. On a GPU this check costs more than it saves.
            return g.reshape(kept) * holds
        share = holds.astype(a.dtype)
        # With a NaN in the slice, no element is equal to the result.
        share /= np.maximum(share.sum(axis=axis, keepdims=True, dtype=wide(a.dtype)), 1)
        return share * g.reshape(kept)

    return vjp


def _variance(
    result: Array,
    a: Array,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: Any = 0,
    keepdims: Any = 0,
    *,
    correction: Any = None,
) -> Vjp:
    refuse_complex(a)
    count = max(1, a.size // max(1, result.size))
    with np.errstate(divide="ignore"):  # The forward pass has warned already.
        scale = np.divide(2.0, count - (ddof if correction is None else correction))

    def vjp(g: Array) -> Array:
        change = a - a.mean(axis=axis, keepdims=True, dtype=wide(a.dtype)).astype(a.dtype)
        change *= (g * scale).astype(a.dtype).reshape(kept_shape(a.shape, axis))
        return change

    return vjp


def _deviation(result: Array, a: Array, *args: Any, **kwargs: Any) -> Vjp:
    variance = _variance(result, a, *args, **kwargs)
    return lambda g: variance(g / (2 * result))


def _prod(
    result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = 0
) -> Vjp:
    def vjp(g: Array) -> Array:
        # Division fails for zeros, so 1 replaces them and they are counted. With two zeros all
        # products of the others are 0; with one, only that of this zero is not.
        zero = np.equal(a, 0)
        if is_tracked(a) and zero.any():
            raise NotImplementedError("the product has a factor of 0")
        factors = np.where(zero, np.ones_like(a), a)
        others = factors.prod(axis=axis, keepdims=True) / factors
        others *= np.equal(zero.sum(axis=axis, keepdims=True), zero)
        others *= g.reshape(kept_shape(a.shape, axis))
        return others

    return vjp


def _cumsum(result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None) -> Vjp:
    shape, own_dtype = a.shape, a.dtype

    def vjp(g: Array) -> Array:
        along = 0 if axis is None else axis
        change = np.flip(np.cumsum(np.flip(g, along), along, wide(g.dtype)), along)
        return unbroadcast(change.reshape(shape), shape, own_dtype)

    return vjp


def _cumprod(result: Array, a: Array, axis: Any = None, dtype: Any = None, out: Any = None) -> Vjp:
    """Return the rule, a loop in reverse along the axis without any division."""
    along, shape = (0, (a.size,)) if axis is None else (axis, a.shape)

    def vjp(g: Array) -> Array:
        g, products, factors = (np.moveaxis(x.reshape(shape), along, 0) for x in (g, result, a))
        total, rows = 0, []
        for k in range(len(g) - 1, -1, -1):
            total = g[k] + (total * factors[k + 1] if k + 1 < len(g) else 0)
            rows.append(total * products[k - 1] if k else total)
        change = np.stack(rows[::-1], along) if rows else zeros(g, shape)
        return unbroadcast(change.reshape(a.shape), a.shape, a.dtype)

    return vjp


def _sort(out: Array, a: Array, axis: Any = -1, *args: Any, **kwargs: Any) -> Vjp:
    """Return the rule of `sort` and `partition`: sorting both arrays matches their elements."""
    along, shape = (0, (a.size,)) if axis is None else (axis, a.shape)

    def vjp(g: Array) -> Array:
        # Stable, so that the order of the gradients of equal elements is fixed.
        source, target = (np.argsort(x.reshape(shape), axis=along, kind="stable") for x in (a, out))
        back = np.argsort(source, axis=along)
        ordered = np.take_along_axis(g, target, along)
        return np.take_along_axis(ordered, back, along).reshape(a.shape)

    return vjp


def _quantile(scale: float = 1, nan: bool = False) -> Callable[..., Vjp]:
    """Return the rule of `quantile`, or with a `scale` of 100, of `percentile`."""

    def maker(
        result: Array,
        a: Array,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        method: Any = "linear",
        keepdims: Any = False,
    ) -> Vjp:
        axes, levels = as_axes(axis, a.ndim), np.ravel(q) / scale
        order = (*(k for k in range(a.ndim) if k not in axes), *axes)
        count = math.prod(a.shape[k] for k in axes)
        if not a.size:
            raise NotImplementedError("an empty array")

        def vjp(g: Array) -> Array:
            turned = np.transpose(a, order)
            rows = turned.reshape(-1, count)
            xp = array_namespace(getattr(rows, "value", rows))
            ranks, line = xp.argsort(rows, axis=1), xp.arange(len(rows))
            counts = np.sum(~np.isnan(rows), axis=1) if nan else np.full(len(rows), count)
            change, parts = zeros(g, rows.shape, a.dtype), g.reshape(levels.size, -1)
            for places, part in zip(_places(counts, levels, method), parts, strict=True):
                below = np.floor(places).astype(np.intp)
                share = xp.asarray((places - below).astype(a.dtype))
                above = xp.asarray(np.minimum(below + 1, count - 1))
                for rank, part_of in ((xp.asarray(below), 1 - share), (above, share)):
                    where = line, ranks[line, rank]
                    change = added(change, where, part * part_of, distinct=True)
            return np.transpose(change.reshape(turned.shape), np.argsort(order).tolist())

        return vjp

    return maker


def _places(counts: Array, levels: Array, method: Any) -> Array:
    """Return the fractional index of each level in sorted rows of the given lengths."""
    distinct, which = np.unique(to_host(counts), return_inverse=True)
    # All methods interpolate between neighbours, so the quantile of 0, 1, 2 ... is the index.
    places = [np.quantile(np.arange(max(1, n)), levels, method=method) for n in distinct]
    return np.stack(places, -1)[:, which]


def _median(quantile: Callable[..., Vjp]) -> Callable[..., Vjp]:
    return lambda result, a, axis=None, *_, **__: quantile(result, a, 0.5, axis)


RULES: dict[Any, tuple[Callable[..., Any], ...]] = {
    np.reshape: (lambda out, a, shape=None, order="C", **_: _ravel(out, a, order),),
    np.ravel: (_ravel,),
    np.squeeze: (_same_elements,),
    np.expand_dims: (_same_elements,),
    np.broadcast_to: (_broadcast,),
    np.transpose: (_transpose,),
    np.matrix_transpose: (lambda out, x: lambda g: np.swapaxes(g, -1, -2),),
    np.linalg.matrix_transpose: (lambda out, x: lambda g: np.swapaxes(g, -1, -2),),
    np.swapaxes: (lambda out, a, axis1, axis2: lambda g: np.swapaxes(g, axis1, axis2),),
    np.moveaxis: (
        lambda out, a, source, destination: lambda g: np.moveaxis(g, destination, source),
    ),
    np.flip: (lambda out, m, axis=None: lambda g: np.flip(g, axis),),
    np.fliplr: (lambda out, m: np.fliplr,),
    np.flipud: (lambda out, m: np.flipud,),
    np.rot90: (lambda out, m, k=1, axes=(0, 1): lambda g: np.rot90(g, -k, axes),),
    np.roll: (_roll,),
    np.repeat: (_repeat,),
    np.resize: (_moved(np.resize),),
    np.pad: (_pad,),
    np.lib.stride_tricks.sliding_window_view: (_windows,),
    np.take: (_take,),
    np.take_along_axis: (_take_along_axis,),
    np.tril: (_triangle(np.tril),),
    np.triu: (_triangle(np.triu),),
    np.diagonal: (_diagonal,),
    np.diag: (_diag,),
    np.diagflat: (_moved(np.diagflat),),
    placed: (lambda out, a, shape, index, *_: lambda g: unbroadcast(g[index], a.shape, a.dtype),),
    np.sum: (_sum,),
    np.mean: (_mean,),
    **dict.fromkeys((np.max, np.min, np.amax, np.amin), (_extreme,)),
    np.var: (_variance,),
    np.std: (_deviation,),
    np.prod: (_prod,),
    np.cumsum: (_cumsum,),
    np.cumprod: (_cumprod,),
    np.sort: (_sort,),
    np.partition: (lambda out, a, kth, axis=-1, *_, **__: _sort(out, a, axis),),
    np.median: (_median(_quantile()),),
    np.nanmedian: (_median(_quantile(nan=True)),),
    np.quantile: (_quantile(),),
    np.nanquantile: (_quantile(nan=True),),
    np.percentile: (_quantile(100),),
    np.nanpercentile: (_quantile(100, nan=True),),
}

RULES_BY_PATH: dict[Any, Callable[[Array, Sequence[Path], Args, Kwargs], list[Vjp | None]]] = {
    np.concatenate: _joining(_concatenated),
    np.stack: _joining(_stacked),
}

JOINT_RULES: dict[Any, Callable[..., Any]] = {np.split: _split, np.array_split: _split}
