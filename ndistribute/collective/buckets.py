"""Where every leaf of a gradient tree lies in the communication buffers, and who reduces what.

One message per leaf would cost a latency each, so leaves of one dtype share buckets. Everything
here is arithmetic on sizes: no array is touched, and equal arguments give equal, hashable answers,
so a caller may keep a layout for as long as its shapes stay the same.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ALIGNMENT",
    "BucketSpec",
    "Chunk",
    "Layout",
    "LeafKey",
    "LeafSpec",
    "Piece",
    "Slot",
    "blocks",
    "cut",
    "owned_ranges",
    "pack",
]

ALIGNMENT = 64  # bytes: a cache line, and a full AVX-512 register


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """Describe one array of a tree: its dtype and its number of elements."""

    dtype: np.dtype[Any]
    size: int


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Describe one flat buffer to allocate: its dtype and its number of elements.

    Elements between two slots are padding: nobody reads them, but reductions run over them, so
    a buffer must start as zeros, or stray bits would raise floating-point warnings.
    """

    dtype: np.dtype[Any]
    size: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Say where a leaf lies: elements ``[start, stop)`` of a bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold a packing: buckets in the order in which they fill, one slot per leaf, in leaf order."""

    buckets: tuple[BucketSpec, ...]
    slots: tuple[Slot, ...]


def pack(leaves: Sequence[LeafSpec], bucket_bytes: int) -> Layout:
    """Give every leaf a place in a bucket of its dtype.

    The last leaf is placed first, because a backward pass yields the last layer's gradient first:
    bucket 0 is full, and can travel, while earlier layers are still computing. The idea is that of
    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
    section 3.2.3. A leaf is never cut. One that is larger than `bucket_bytes` fills a bucket
    alone, empty leaves aside. Slots start at multiples of `ALIGNMENT` bytes.

    Args:
        leaves: dtype and size of each leaf.
        bucket_bytes: how large a bucket may grow; 0 gives every leaf its own.

    Returns:
        The layout. A bucket without elements occurs only where a dtype has empty leaves alone, or
        where `bucket_bytes` is 0.

    Raises:
        ValueError: a size or `bucket_bytes` is negative.

    >>> f4 = np.dtype(np.float32)
    >>> layout = pack([LeafSpec(f4, 100), LeafSpec(f4, 20), LeafSpec(f4, 3)], bucket_bytes=256)
    >>> [bucket.size for bucket in layout.buckets]
    [36, 100]
    >>> [(slot.bucket, slot.start, slot.stop) for slot in layout.slots]
    [(1, 0, 100), (0, 16, 36), (0, 0, 3)]
    """
    if bucket_bytes < 0:
        raise ValueError(f"bucket_bytes must be 0 or more, got {bucket_bytes}.")
    _check_sizes([leaf.size for leaf in leaves])
    dtypes: list[np.dtype[Any]] = []
    ends: list[int] = []
    newest: dict[np.dtype[Any], int] = {}  # dtype -> the bucket that is still filling
    slots: list[Slot] = []
    for leaf in reversed(leaves):
        bucket = newest.get(leaf.dtype)
        if bucket is None or not _fits(leaf, ends[bucket], bucket_bytes):
            bucket = newest[leaf.dtype] = len(ends)
            dtypes.append(leaf.dtype)
            ends.append(0)
        start = _aligned(ends[bucket], leaf.dtype)
        ends[bucket] = start + leaf.size
        slots.append(Slot(bucket, start, start + leaf.size))
    buckets = tuple(BucketSpec(dtype, size) for dtype, size in zip(dtypes, ends, strict=True))
    return Layout(buckets, tuple(reversed(slots)))


LeafKey = tuple[np.dtype[Any], int]  # dtype and number of elements of a leaf


class Piece(NamedTuple):
    """Say where a range of a leaf lies in a chunk."""

    leaf: int
    dtype: np.dtype[Any]
    start: int  # elements of the leaf
    stop: int
    offset: int  # bytes from the chunk's start

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


Chunk = tuple[Piece, ...]


@functools.lru_cache(maxsize=256)
def cut(leaves: tuple[LeafKey, ...], limit: int) -> tuple[Chunk, ...]:
    """Lay leaves end to end and cut them into chunks of limited size.

    Args:
        leaves: dtype and number of elements of each; empty ones take no part.
        limit: how many bytes a chunk may take, a multiple of `ALIGNMENT`.

    Returns:
        The chunks, none of them empty but where there is nothing to move at all. There is at least
        one.

    >>> f4 = np.dtype(np.float32)
    >>> for chunk in cut(((f4, 20), (f4, 40)), limit=128):
    ...     print([(piece.leaf, piece.start, piece.stop, piece.offset) for piece in chunk])
    [(0, 0, 20, 0)]
    [(1, 0, 32, 0)]
    [(1, 32, 40, 0)]
    """
    chunks: list[list[Piece]] = [[]]
    used = 0
    for leaf, (dtype, size) in enumerate(leaves):
        start = 0
        while start < size:
            room = (limit - used) // dtype.itemsize
            # A small leaf is not worth being moved in two parts.
            if room < min(size - start, limit // 2 // dtype.itemsize):
                chunks.append([])
                used = 0
                continue
            stop = min(size, start + room)
            chunks[-1].append(Piece(leaf, dtype, start, stop, used))
            used += -(-(stop - start) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            start = stop
    return tuple(map(tuple, chunks))


@functools.lru_cache(maxsize=256)
def owned_ranges(
    sizes: tuple[int, ...], owners: int, owner: int, align: int = 16
) -> list[tuple[int, int, int]]:
    """Cut flat leaves, laid end to end, into balanced parts and return the part of one owner.

    A cut falls between two leaves, or at a multiple of `align` elements inside one, so that two
    owners never write to one cache line. It moves by at most ``align / 2`` for that, so a part
    differs from ``sum(sizes) / owners`` by at most ``align + 1`` elements.

    Args:
        sizes: the number of elements of each leaf.
        owners: the number of parts.
        owner: which part.
        align: where a leaf may be cut, in elements; 16 float32 are a cache line.

    Returns:
        Ranges ``(leaf, start, stop)`` in rising order, none of them empty; not to be changed. Over
        all owners they cover every element exactly once.

    Raises:
        ValueError: there is no such owner, or a size or `align` makes no sense.

    >>> owned_ranges((40, 8, 60), owners=2, owner=0)
    [(0, 0, 40), (1, 0, 8)]
    >>> owned_ranges((100,), owners=3, owner=1)
    [(0, 32, 64)]
    """
    if not 0 <= owner < owners:
        raise ValueError(f"owner must be in [0, owners), got owner {owner} of {owners}.")
    if align < 1:
        raise ValueError(f"align must be 1 or more, got {align}.")
    _check_sizes(sizes)
    ends = list(itertools.accumulate(sizes))
    begin = _cut(sizes, ends, owners, owner, align)
    end = _cut(sizes, ends, owners, owner + 1, align)
    ranges: list[tuple[int, int, int]] = []
    if begin == end:
        return ranges
    for leaf in range(bisect.bisect_right(ends, begin), len(ends)):
        offset = ends[leaf] - sizes[leaf]
        if offset >= end:
            break
        if sizes[leaf]:
            ranges.append((leaf, max(begin - offset, 0), min(end - offset, sizes[leaf])))
    return ranges


def blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Walk a range in pieces that fit the cache.

    Args:
        start: the first element.
        stop: the end, exclusive; nothing is yielded where it is not above `start`.
        block: the most elements of a piece.

    Returns:
        An iterator of ``(start, stop)``, adjacent and in rising order; the last may be shorter.

    Raises:
        ValueError: `block` is below 1.

    >>> list(blocks(3, 10, 4))
    [(3, 7), (7, 10)]
    """
    if block < 1:
        raise ValueError(f"block must be 1 or more, got {block}.")
    return ((first, min(first + block, stop)) for first in range(start, stop, block))


def _fits(leaf: LeafSpec, end: int, bucket_bytes: int) -> bool:
    """Say whether a bucket that is filled up to `end` takes a leaf."""
    if bucket_bytes == 0:
        return False
    if end == 0 or leaf.size == 0:
        return True
    return (_aligned(end, leaf.dtype) + leaf.size) * leaf.dtype.itemsize <= bucket_bytes


def _aligned(end: int, dtype: np.dtype[Any]) -> int:
    """Return the first element at or after `end` that starts at a multiple of `ALIGNMENT` bytes."""
    step = ALIGNMENT // math.gcd(ALIGNMENT, dtype.itemsize)
    return -(-end // step) * step


def _cut(sizes: Sequence[int], ends: list[int], owners: int, index: int, align: int) -> int:
    """Return where part `index` begins: the permitted place nearest to the even cut.

    Rounding is monotone in the even cut, so parts can not overlap, whatever `align` is.
    """
    total = ends[-1] if ends else 0
    even = total * index // owners
    leaf = bisect.bisect_right(ends, even)
    if leaf == len(ends):
        return total
    offset = ends[leaf] - sizes[leaf]
    below = offset + (even - offset) // align * align
    above = min(below + align, ends[leaf])
    return below if even - below <= above - even else above


def _check_sizes(sizes: Sequence[int]) -> None:
    if sizes and min(sizes) < 0:
        raise ValueError(f"A leaf has a negative number of elements: {min(sizes)}.")
