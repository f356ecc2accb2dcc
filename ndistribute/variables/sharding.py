"""The arithmetic of shards: the rows of each shard, and the rows that an index needs.

Shards are consecutive rows. If the rows do not divide evenly, the first shards have one row more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, Device, to_host

__all__ = ["Shards", "select_rows"]


@dataclass(frozen=True, slots=True)
class Shards:
    """The division of a variable's rows into shards; a variable without axes has one shard.

    >>> Shards((7, 2), 3).starts
    (0, 3, 5, 7)
    """

    shape: tuple[int, ...]
    count: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each shard, and the end of the last shard."""
        each, longer = divmod(self.shape[0], self.count)
        return tuple(k * each + min(k, longer) for k in range(self.count + 1))

    def shape_of(self, shard: int) -> tuple[int, ...]:
        """Return the shape of a shard."""
        if self.count == 1:
            return self.shape
        start, stop = self.starts[shard : shard + 2]
        return (stop - start, *self.shape[1:])

    def cut(self, value: Any) -> list[Any]:
        """Return the part of each shard: views of a whole array, or its rows of `IndexedSlices`.

        The rows of `IndexedSlices` keep their order; a shard's part may be empty.
        """
        if self.count == 1:
            return [value]
        if not isinstance(value, IndexedSlices):
            return [value[start:stop] for start, stop in pairwise(self.starts)]
        rows = value.on(Device("cpu:0"))
        return [
            IndexedSlices(rows.values[positions], indices, self.shape_of(shard))
            for shard, (positions, indices) in enumerate(self.locate(rows.indices))
        ]

    def locate(self, rows: Array) -> list[tuple[Array, Array]]:
        """Return, for each shard, the positions in `rows` of its rows, and their indices in it.

        The rows may be in any order and may repeat.

        >>> for positions, indices in Shards((7, 2), 3).locate(np.array([6, 0, 6, 2])):
        ...     print(positions, indices)
        [1 3] [0 2]
        [] []
        [0 2] [1 1]
        """
        starts = np.array(self.starts)
        rows = rows.astype(np.int64, copy=False)  # uint64 minus int64 is float64.
        owners: Array = np.searchsorted(starts[1:], rows, side="right")
        parts = [np.flatnonzero(owners == shard) for shard in range(self.count)]
        return [(part, rows[part] - start) for part, start in zip(parts, starts, strict=False)]

    def join(self, parts: Sequence[Array]) -> Array:
        """Return the whole array, given its shards in order."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def select_rows(index: Any, shape: tuple[int, ...]) -> tuple[Array | None, Any]:
    """Return ``(rows, rest)``, so that ``array[index]`` equals ``array[rows][rest]``.

    The rows are rising and unique; None means all rows. An invalid index raises an `IndexError`,
    as in NumPy.

    >>> select_rows([7, -1, 7], (9, 2))
    (array([7, 8]), array([0, 1, 0]))
    """
    first, *others = index if isinstance(index, tuple) and index else (index,)
    rows, rest = _select(first, shape)
    if rows is None:
        return None, index
    return rows, (rest, *others) if isinstance(index, tuple) else rest


def _select(first: Any, shape: tuple[int, ...]) -> tuple[Array | None, Any]:
    """Return the rows that the first item of an index needs, and the item that replaces it."""
    if isinstance(first, slice):
        numbers = range(shape[0])[first]
        if len(numbers) == shape[0]:
            return None, first
        rows = np.arange(numbers.start, numbers.stop, numbers.step)
        return rows[:: np.sign(numbers.step)], slice(None, None, np.sign(numbers.step))
    if first is None or first is Ellipsis or isinstance(first, bool | np.bool_ | tuple):
        return None, first
    array = np.asarray(to_host(first) if hasattr(first, "dtype") else first)
    if isinstance(first, list) and not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iub" or (array.dtype.kind == "b" and not array.ndim):
        return None, first  # NumPy raises its own error.
    # NumPy raises here if the index is invalid; the broadcast array needs no memory.
    np.broadcast_to(np.int8(0), shape[: array.ndim if array.dtype.kind == "b" else 1])[array]
    if array.dtype.kind == "b":
        rows = np.flatnonzero(array.any(axis=tuple(range(1, array.ndim))))
        return rows, array[rows]
    wanted = array.astype(np.int64)
    rows, places = np.unique(np.where(wanted < 0, wanted + shape[0], wanted), return_inverse=True)
    return rows, places.reshape(array.shape)
