"""The places of arrays (leaves) in buckets, and the ranges that each replica reduces.

A message per leaf would cost a latency each, so leaves of one dtype share buckets. These are pure
functions of sizes, so callers may cache their results while shapes stay the same.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.transport.shared_memory import ALIGNMENT, padded

__all__ = ["LeafKey", "Piece", "blocks", "cut", "owned_ranges", "pack"]

LeafKey = tuple[np.dtype[Any], int]  # Its dtype and its number of elements.

# Cuts between owners are at multiples of this: 16 float32 are a cache line.
OWNED_ALIGNMENT = 16


def pack(
    leaves: Sequence[LeafKey], bucket_bytes: int
) -> list[tuple[np.dtype[Any], dict[int, slice]]]:
    """Return the place of every non-empty leaf in a bucket of its dtype.

    The last leaf comes first, in the order of a backward pass: Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", 2020, section 3.2.3. A leaf is never split;
    one that is larger than `bucket_bytes` has a bucket of its own.

    Args:
        leaves: dtype and size of each leaf.
        bucket_bytes: the most bytes of a bucket; 0 gives every leaf its own bucket.

    Returns:
        Per bucket, in the order in which they fill, its dtype and the places of its leaves by their
        indices, in ascending order. Places start at multiples of 64 bytes. Reductions also process
        the gaps between them, so a buffer must start as zeros to avoid floating-point warnings.

    >>> f4 = np.dtype(np.float32)
    >>> for _, places in pack([(f4, 100), (f4, 20), (f4, 0), (f4, 3)], bucket_bytes=256):
    ...     print(places)
    {3: slice(0, 3, None), 1: slice(16, 36, None)}
    {0: slice(0, 100, None)}
    """
    buckets: list[tuple[np.dtype[Any], dict[int, slice]]] = []
    filling: dict[np.dtype[Any], tuple[dict[int, slice], int]] = {}  # With its length.
    for leaf in reversed(range(len(leaves))):
        dtype, size = leaves[leaf]
        if size == 0:
            continue
        places, end = filling.get(dtype, ({}, 0))
        step = ALIGNMENT // math.gcd(ALIGNMENT, dtype.itemsize)
        start = -(-end // step) * step
        if not end or (start + size) * dtype.itemsize > bucket_bytes:
            places, start = {}, 0
            buckets.append((dtype, places))
        places[leaf] = slice(start, start + size)
        filling[dtype] = places, start + size
    return buckets


class Piece(NamedTuple):
    """The place of a range of a leaf in a chunk."""

    leaf: int
    dtype: np.dtype[Any]
    start: int  # elements of the leaf
    stop: int
    offset: int  # bytes from the chunk's start

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


def cut(leaves: Sequence[LeafKey], limit: int) -> list[list[Piece]]:
    """Concatenate leaves and cut them into chunks of limited size.

    Args:
        leaves: dtype and number of elements of each leaf; empty leaves are skipped.
        limit: the most bytes of a chunk, a multiple of 64.

    Returns:
        The chunks; if all leaves are empty, one empty chunk.

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
            # Do not split small leaves.
            if room < min(size - start, limit // 2 // dtype.itemsize):
                chunks.append([])
                used = 0
                continue
            stop = min(size, start + room)
            chunks[-1].append(Piece(leaf, dtype, start, stop, used))
            used += padded((stop - start) * dtype.itemsize)
            start = stop
    return chunks


@functools.lru_cache(maxsize=256)
def owned_ranges(sizes: tuple[int, ...], owners: int, owner: int) -> list[tuple[int, int, int]]:
    """Cut concatenated flat leaves into balanced parts, and return the part of one owner.

    A cut is between two leaves, or at a multiple of `OWNED_ALIGNMENT` inside one, so two owners
    never write to one cache line. For that, it moves by at most half of the alignment.

    Args:
        sizes: the number of elements of each leaf.
        owners: the number of parts.
        owner: the index of the part.

    Returns:
        Non-empty ranges ``(leaf, start, stop)`` in ascending order, which the caller must not
        change. The ranges of all owners together contain every element exactly once.

    >>> owned_ranges((40, 8, 60), owners=2, owner=0)
    [(0, 0, 40), (1, 0, 8)]
    >>> owned_ranges((100,), owners=3, owner=1)
    [(0, 32, 64)]
    """
    starts = list(itertools.accumulate(sizes, initial=0))
    begin, end = _owned_start(starts, owners, owner), _owned_start(starts, owners, owner + 1)
    ranges = []
    for leaf, (first, last) in enumerate(itertools.pairwise(starts)):
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            ranges.append((leaf, start - first, stop - first))
    return ranges


def _owned_start(starts: list[int], owners: int, owner: int) -> int:
    """Return the start of a part: the allowed place that is nearest to the even cut.

    The rounding is monotone in the even cut, so parts cannot overlap.
    """
    even = starts[-1] * owner // owners
    leaf = bisect.bisect_right(starts, even) - 1
    if leaf == len(starts) - 1:
        return even
    below = even - (even - starts[leaf]) % OWNED_ALIGNMENT
    above = min(below + OWNED_ALIGNMENT, starts[leaf + 1])
    return below if even - below <= above - even else above


def blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Return adjacent pieces ``(start, stop)`` of a range, each of at most `block` elements.

    >>> list(blocks(3, 10, 4))
    [(3, 7), (7, 10)]
    """
    return ((first, min(first + block, stop)) for first in range(start, stop, block))
