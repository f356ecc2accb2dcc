"""Derivatives of indexing, kept sparse for as long as that is cheaper.

A part of an array gets the gradient of that part, so a rule here returns where the gradient goes
and not a whole array of zeros. The backward pass adds it to what it has, or, for a source, keeps
rows as rows: the gradient of an embedding then costs what the batch costs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import add_at, zeros
from ndistribute.autodiff.rules.windows import moved
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, array_namespace, is_gpu_array

__all__ = ["RULES", "SliceGradient", "SparseGradient", "index_rule"]


class SliceGradient:
    """Hold the gradient of the elements that an index names, in an array that is zero elsewhere.

    Args:
        shape: the shape of the whole array.
        index: what stood in the brackets.
        values: the gradient of the elements.
        distinct: whether no element is named twice.
    """

    __slots__ = ("distinct", "index", "shape", "values")

    def __init__(
        self, shape: tuple[int, ...], index: Any, values: Array, distinct: bool = False
    ) -> None:
        self.shape = shape
        self.index = index
        self.values = values
        self.distinct = distinct

    def add_to(self, total: Array) -> None:
        """Add the gradient to that of the whole array, in place."""
        if self.distinct:
            total[self.index] += self.values
        else:
            add_at(total, self.index, self.values)

    def to_dense(self) -> Array:
        """Return the gradient of the whole array."""
        whole = zeros(self.values, self.shape)
        if self.distinct:
            whole[self.index] = self.values
        else:
            self.add_to(whole)
        return whole


class SparseGradient:
    """Collect gradients of rows of one array, from one or several look-ups.

    Args:
        shape: the shape of the whole array.
        indices: which rows, of any shape, negative ones counted from the end.
        values: their gradients, of shape ``(*indices.shape, *shape[1:])``.
    """

    __slots__ = ("parts", "shape")

    def __init__(self, shape: tuple[int, ...], indices: Array, values: Array) -> None:
        self.shape = shape
        self.parts = [(indices, values)]

    def merge(self, other: SparseGradient) -> None:
        """Take over the gradients of another look-up in the same array."""
        self.parts.extend(other.parts)

    def add_to(self, total: Array) -> None:
        """Add the gradient to that of the whole array, in place."""
        for indices, values in self.parts:
            add_at(total, indices, values)

    def to_dense(self) -> Array:
        """Return the gradient of the whole array."""
        whole = zeros(self.parts[0][1], self.shape)
        self.add_to(whole)
        return whole

    def to_slices(self) -> IndexedSlices:
        """Return the rows in fresh arrays, with indices counted from 0, in order of look-up."""
        length, rest = self.shape[0], self.shape[1:]
        flat = [np.where(index < 0, index + length, index).reshape(-1) for index, _ in self.parts]
        # A reshape to -1 rows is not defined where the rows are empty.
        values = [
            value.reshape(len(index), *rest)
            for index, (_, value) in zip(flat, self.parts, strict=True)
        ]
        return IndexedSlices(np.concatenate(values), np.concatenate(flat), self.shape)


def index_rule(x: Array, index: Any) -> Callable[[Array], SliceGradient | SparseGradient]:
    """Return the rule of ``x[index]``."""
    shape = x.shape
    return lambda g: _placed(shape, index, g)


def _placed(shape: tuple[int, ...], index: Any, g: Array) -> SliceGradient | SparseGradient:
    if isinstance(index, tuple):
        index = tuple([_exact(one, g) for one in index])
    else:
        index = _exact(index, g)
    kinds = _kinds(index)
    if kinds == ["i"] and not isinstance(index, tuple) and index.ndim:
        return SparseGradient(shape, index, g)
    # A mask alone names no element twice, and neither do slices and single numbers.
    return SliceGradient(shape, index, g, distinct="i" not in kinds and kinds.count("b") <= 1)


def _exact(item: Any, g: Array) -> Any:
    """Return one part of an index, what is like an array as an array."""
    if item is None or item is Ellipsis or isinstance(item, _INDICES) or is_gpu_array(item):
        return item
    array = np.asarray(item)
    return array_namespace(g).asarray(array, dtype=None if array.size else np.intp)


_INDICES = (slice, int, np.ndarray, np.generic)


def _kinds(index: Any) -> list[str]:
    """Return the dtype kinds of the arrays in an index: i, b, or none for slices and numbers."""
    items = index if isinstance(index, tuple) else (index,)
    kinds = []
    for item in items:
        if isinstance(item, bool | np.bool_):
            kinds.append("b")
        elif item is None or item is Ellipsis or isinstance(item, slice | int | np.integer):
            continue
        else:
            kinds.append("i" if item.dtype.kind == "u" else item.dtype.kind)
    return kinds


def _take(
    result: Array, a: Array, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise"
) -> Callable[[Array], SliceGradient | SparseGradient | Array]:
    if mode != "raise":
        return moved(np.take, a, indices, axis, mode=mode)
    if not hasattr(indices, "dtype"):
        indices = array_namespace(a).asarray(indices, dtype=np.intp)
    if axis is None:
        shape, size = a.shape, a.size
        return lambda g: _placed((size,), indices, g).to_dense().reshape(shape)
    lead = operator.index(axis) % a.ndim
    return index_rule(a, indices if lead == 0 else (*(slice(None),) * lead, indices))


def _take_along_axis(
    result: Array, arr: Array, indices: Array, axis: Any = -1
) -> Callable[[Array], SliceGradient]:
    if axis is None:
        raise NotImplementedError("axis=None")
    shape = arr.shape
    xp = array_namespace(arr)
    grid = list(xp.ix_(*(xp.arange(length) for length in shape)))
    grid[axis % arr.ndim] = indices
    index = tuple(grid)
    return lambda g: SliceGradient(shape, index, g)


RULES: dict[Any, tuple[Callable[..., Any], ...]] = {
    np.take: (_take,),
    np.take_along_axis: (_take_along_axis,),
}
