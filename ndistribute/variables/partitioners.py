"""Partitioners, which split a variable along its first axis into shards.

A partitioner is a function of a shape and a dtype that returns the number of shards for each axis.
Those here choose it by number or by size. The lengths of a variable's shards differ by at most one
row.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "number_of_shards",
]

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
        raise NotImplementedError(f"{type(self).__name__} defines no number of shards.")


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
    """Return the number of a variable's shards; a variable without elements or axes has one.

    Raises:
        ValueError: the partitioner did not return a positive integer for each axis, or it splits
            another axis than the first, or into more shards than there are rows.

    >>> number_of_shards(FixedShardsPartitioner(3), (7, 2), np.dtype(float))
    3
    """
    shape = tuple(shape)
    if partitioner is None or not shape or not prod(shape):
        return 1
    answer = partitioner(shape, dtype)
    try:
        counts: list[int] = [operator.index(count) for count in answer]
    except TypeError:
        counts = []
    given = f"partitioner {partitioner!r} returned {answer!r} for a variable of shape {shape}"
    if len(counts) != len(shape) or min(counts) < 1:
        raise ValueError(
            f"{given}: it must return a list with the number of shards, 1 or more, for each axis."
        )
    if any(count != 1 for count in counts[1:]) or counts[0] > shape[0]:
        raise ValueError(
            f"{given}: only the first axis can be split, into at most one shard for each row."
        )
    return counts[0]
