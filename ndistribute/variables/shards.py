"""Which rows of a variable belong to which shard: pure arithmetic.

Shards are consecutive rows. All but the last few are one row longer where the rows do not divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array

__all__ = ["Portion", "Shards"]


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Say which of some rows one shard has.

    Args:
        shard: its number.
        positions: where among the rows asked for they stand, rising.
        indices: which rows of the shard they are.
    """

    shard: int
    positions: Array
    indices: Array


@dataclass(frozen=True, slots=True)
class Shards:
    """Cut the rows of a variable into shards.

    Args:
        shape: of the variable, with at least one axis.
        count: of shards.

    >>> Shards((7, 2), 3).starts
    (0, 3, 5, 7)
    """

    shape: tuple[int, ...]
    count: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first row of each shard, and the end of the last."""
        each, longer = divmod(self.shape[0], self.count)
        return tuple(k * each + min(k, longer) for k in range(self.count + 1))

    def shape_of(self, shard: int) -> tuple[int, ...]:
        """Return the shape of a shard."""
        start, stop = self.starts[shard : shard + 2]
        return (stop - start, *self.shape[1:])

    def cut(self, array: Array) -> list[Array]:
        """Return each shard's rows of a whole array, as views."""
        starts = self.starts
        return [array[start:stop] for start, stop in pairwise(starts)]

    def portions(self, rows: Array) -> Iterator[Portion]:
        """Yield, for each shard that has any of them, which of some rows it has.

        Args:
            rows: their numbers from 0 on, in any order, also repeated.

        >>> for portion in Shards((7, 2), 3).portions(np.array([6, 0, 6, 2])):
        ...     print(portion.shard, portion.positions, portion.indices)
        0 [1 3] [0 2]
        2 [0 2] [1 1]
        """
        starts = np.array(self.starts)
        owners: Array = np.searchsorted(starts[1:], rows, side="right")
        order = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[order], np.arange(self.count + 1)).tolist()
        for shard, (begin, end) in enumerate(pairwise(ends)):
            if begin < end:
                positions = order[begin:end]
                yield Portion(shard, positions, rows[positions] - starts[shard])

    def cut_rows(self, rows: IndexedSlices) -> list[IndexedSlices]:
        """Return each shard's part of some rows, which may be none.

        Their order, in which equal indices follow each other, stays.
        """
        none = slice(0)
        parts = [
            IndexedSlices(rows.values[none], rows.indices[none], self.shape_of(shard))
            for shard in range(self.count)
        ]
        for portion in self.portions(rows.indices):
            values = rows.values[portion.positions]
            shape = self.shape_of(portion.shard)
            parts[portion.shard] = IndexedSlices(values, portion.indices, shape)
        return parts

    def join(self, parts: Sequence[Array]) -> Array:
        """Return the whole array of which `parts` are the shards."""
        joined: np.ndarray[Any, Any] = np.concatenate(parts)
        return joined
