"""Which rows of a variable lie in which shard, and which of them an index needs: pure arithmetic.

Shards are consecutive rows. All but the last few are one row longer where the rows do not divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, Device, to_host

__all__ = ["Portion", "Selection", "Shards", "select_rows"]


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
        shape: of the variable; without axes it is one shard.
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
        if self.count == 1:
            return self.shape
        start, stop = self.starts[shard : shard + 2]
        return (stop - start, *self.shape[1:])

    def cut(self, value: Any) -> list[Any]:
        """Return each shard's rows of a whole array, as views, or of some rows.

        Of some rows the order, in which equal indices follow each other, stays; a shard may have
        none of them.
        """
        if self.count == 1:
            return [value]
        if not isinstance(value, IndexedSlices):
            return [value[start:stop] for start, stop in pairwise(self.starts)]
        rows, none = value.on(Device("cpu:0")), slice(0)
        parts = [
            IndexedSlices(rows.values[none], rows.indices[none], self.shape_of(shard))
            for shard in range(self.count)
        ]
        for portion in self.portions(rows.indices):
            values, shape = rows.values[portion.positions], self.shape_of(portion.shard)
            parts[portion.shard] = IndexedSlices(values, portion.indices, shape)
        return parts

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

    def join(self, parts: Sequence[Array]) -> Array:
        """Return the whole array of which `parts` are the shards."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Plan the read of part of an array: ``array[index]`` is ``array[rows][rest]``.

    Args:
        rows: the numbers of the rows that are needed, rising and each once; None for all.
        rest: what to ask of those rows.
    """

    rows: Array | None
    rest: Any


def select_rows(index: Any, shape: tuple[int, ...]) -> Selection:
    """Return which rows an index needs.

    Args:
        index: any that NumPy takes.
        shape: of the array, with at least one axis.

    Raises:
        IndexError: a row is out of range, or a mask has another shape.

    >>> plan = select_rows([7, -1, 7], (9, 2))
    >>> plan.rows, plan.rest
    (array([7, 8]), array([0, 1, 0]))
    """
    first, *others = index if isinstance(index, tuple) and index else (index,)
    found = _selected(first, shape)
    if found is None:
        return Selection(None, index)
    rows, rest = found
    return Selection(rows, (rest, *others) if isinstance(index, tuple) else rest)


def _selected(first: Any, shape: tuple[int, ...]) -> tuple[Array, Any] | None:
    """Return the rows that the first item of an index needs, and what takes its place."""
    if first is None or first is Ellipsis or isinstance(first, bool | np.bool_ | tuple):
        return None
    if isinstance(first, slice):
        return _sliced(first, shape[0])
    array = np.asarray(to_host(first) if hasattr(first, "dtype") else first)
    if array.dtype.kind == "b" and array.ndim:
        return _masked(array, shape)
    if isinstance(first, list) and not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        return None  # NumPy itself knows what to say.
    return _numbered(array, shape[0])


def _sliced(first: slice, length: int) -> tuple[Array, Any] | None:
    numbers = range(*first.indices(length))
    if len(numbers) == length:
        return None
    if numbers.step > 0:
        return np.arange(numbers.start, numbers.stop, numbers.step), slice(None)
    return np.arange(numbers.start, numbers.stop, numbers.step)[::-1], slice(None, None, -1)


def _masked(mask: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
    if mask.shape != shape[: mask.ndim]:
        raise IndexError(
            f"a boolean index of shape {mask.shape} does not fit an array of shape {shape}: the "
            "lengths of its axes must be the same."
        )
    rows = np.flatnonzero(mask.any(axis=tuple(range(1, mask.ndim))))
    return rows, mask[rows]


def _numbered(numbers: Array, length: int) -> tuple[Array, Any]:
    outside = numbers[(numbers < -length) | (numbers >= length)]
    if outside.size:
        raise IndexError(f"index {outside.flat[0]} is out of bounds for axis 0 with size {length}.")
    wanted = numbers.astype(np.int64)
    wanted = np.where(wanted < 0, wanted + length, wanted)
    if not numbers.ndim:
        return wanted.reshape(1), 0
    rows, places = np.unique(wanted, return_inverse=True)
    return rows, places.reshape(numbers.shape)
