"""How a variable is split along its first axis into shards, and which rows an index needs.

A partitioner is a function of a shape and a dtype that returns the number of shards for each axis.
The partitioners of this file use a fixed number or a size. Shards are consecutive rows. If the rows
do not divide evenly, the first shards have one row more.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ndistribute.devices import Array, Device, to_host
from ndistribute.exports import export as _export
from ndistribute.indexed_slices import IndexedSlices

Partitioner = Callable[[tuple[int, ...], np.dtype[Any]], Sequence[int]]


class _Partitioner:
    """A base class that splits the first axis into `_count` shards, at most one for each row."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and operator.index(value) < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}.")

    def __call__(self, shape: Sequence[int], dtype: Any) -> list[int]:
        """Return the number of shards for each axis; 1 for each axis but the first."""
        counts = [1] * len(shape)
        if counts and 0 not in shape:
            itemsize: int = np.dtype(dtype).itemsize
            row_bytes = prod(shape[1:]) * itemsize
            counts[0] = max(1, min(self._count(shape[0], row_bytes), shape[0]))
        return counts

    def _count(self, rows: int, row_bytes: int) -> int:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FixedShardsPartitioner(_Partitioner):
    """A partitioner that splits every variable into the same number of shards.

    Args:
        num_shards: the number of shards, 1 or more; a variable with fewer rows has one per row.

    Raises:
        ValueError: the number is below 1.

    >>> partitioner = FixedShardsPartitioner(2)
    >>> partitioner((10, 3), np.float32), partitioner((1, 3), np.float32)
    ([2, 1], [1, 1])
    """

    num_shards: int

    def _count(self, rows: int, row_bytes: int) -> int:
        return self.num_shards


@dataclasses.dataclass(frozen=True)
class MinSizePartitioner(_Partitioner):
    """A partitioner that splits a variable into the most shards of at least a minimum size.

    A variable that is smaller than the minimum is not split.

    Args:
        min_shard_bytes: the minimum size of a shard, in bytes.
        max_shards: the maximum number of shards.

    Raises:
        ValueError: a number is below 1.

    >>> partitioner = MinSizePartitioner(min_shard_bytes=100, max_shards=8)
    >>> partitioner((100, 1), np.float32), partitioner((90, 1), np.float32)
    ([4, 1], [3, 1])
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def _count(self, rows: int, row_bytes: int) -> int:
        least_rows = -(-self.min_shard_bytes // row_bytes)
        return min(self.max_shards, rows // least_rows)


@dataclasses.dataclass(frozen=True)
class MaxSizePartitioner(_Partitioner):
    """A partitioner that splits a variable into the fewest shards of at most a maximum size.

    A shard exceeds the maximum only if a single row does, or if `max_shards` requires it.

    Args:
        max_shard_bytes: the maximum size of a shard, in bytes.
        max_shards: the maximum number of shards; None: any number.

    Raises:
        ValueError: a number is below 1.

    >>> partitioner = MaxSizePartitioner(max_shard_bytes=100)
    >>> partitioner((100, 1), np.float32), partitioner((101, 1), np.float32)
    ([4, 1], [5, 1])
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def _count(self, rows: int, row_bytes: int) -> int:
        count = -(-rows // max(1, self.max_shard_bytes // row_bytes))
        return min(count, self.max_shards or count)


def number_of_shards(
    partitioner: Partitioner | None, shape: Sequence[int], dtype: np.dtype[Any]
) -> int:
    """Return the number of a variable's shards; 1 for a variable without elements or axes.

    Raises:
        ValueError: the partitioner did not return a positive integer for each axis, or it splits
            another axis than the first, or asks for more shards than there are rows.
    """
    shape = tuple(shape)
    if partitioner is None or not shape or not prod(shape):
        return 1
    answer = partitioner(shape, dtype)
    try:
        counts: list[int] = [operator.index(count) for count in answer]
    except TypeError:
        counts = []
    problem = (
        f"variable_partitioner {partitioner!r} returned {answer!r} for a variable of shape {shape}"
    )
    if len(counts) != len(shape) or min(counts) < 1:
        raise ValueError(
            f"{problem}: it must return a list with the number of shards, 1 or more, for each axis."
        )
    if any(count != 1 for count in counts[1:]) or counts[0] > shape[0]:
        raise ValueError(
            f"{problem}: only the first axis can be split, into at most one shard for each row."
        )
    return counts[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """The division of a variable's rows into shards; a variable without axes has one shard."""

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
        """Return the part of each shard: views of a whole array, or its rows of `IndexedSlices`."""
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
        """Return, for each shard, where its rows are in `rows`, and their indices in the shard."""
        starts = np.array(self.starts)
        rows = rows.astype(np.int64, copy=False)  # uint64 minus int64 is float64.
        owners: Array = np.searchsorted(starts[1:], rows, side="right")
        parts = [np.flatnonzero(owners == shard) for shard in range(self.count)]
        return [(part, rows[part] - start) for part, start in zip(parts, starts, strict=False)]


def joined(parts: Sequence[Array]) -> Array:
    """Return the whole array, given its shards in order."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def select_rows(index: Any, shape: tuple[int, ...]) -> tuple[Array | None, Any]:
    """Return ``(rows, rest)``, so that ``array[index]`` equals ``array[rows][rest]``.

    The rows are in ascending order and unique; None means all rows.

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


_export(vars(), "Partitioner", but="Shards joined select_rows")
