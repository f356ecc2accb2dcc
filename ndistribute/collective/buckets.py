"""Where every leaf of a gradient tree lies in the communication buffers, and who reduces what.

One message per leaf would cost a latency each, so leaves of one dtype share buckets. Everything
here is arithmetic on sizes: no array is touched, and equal arguments give equal answers, so a
caller may keep them for as long as its shapes stay the same.
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

LeafKey = tuple[np.dtype[Any], int]  # The dtype of a leaf, and its number of elements.

# Where a leaf may be cut between owners: 16 elements of float32 are a cache line.
OWNED_ALIGNMENT = 16


def pack(
    leaves: Sequence[LeafKey], bucket_bytes: int
) -> list[tuple[np.dtype[Any], dict[int, slice]]]:
    """Give every leaf that is not empty a place in a bucket of its dtype.

    The last leaf is placed first, because a backward pass yields the last layer's gradient first:
    bucket 0 is full, and can travel, while earlier layers are still computing. The idea is that of
    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
    section 3.2.3. A leaf is never cut. One that is larger than `bucket_bytes` fills a bucket alone.

    Args:
        leaves: dtype and size of each leaf.
        bucket_bytes: how large a bucket may grow; 0 gives every leaf its own.

    Returns:
        The dtype of each bucket, in the order in which they fill, and the places of its leaves by
        their numbers, in rising order. They start at multiples of 64 bytes. Nobody reads what lies
        between them, but reductions run over it, so a buffer must start as zeros, or stray bits
        would raise floating-point warnings.

    >>> f4 = np.dtype(np.float32)
    >>> for _, places in pack([(f4, 100), (f4, 20), (f4, 0), (f4, 3)], bucket_bytes=256):
    ...     print(places)
    {3: slice(0, 3, None), 1: slice(16, 36, None)}
    {0: slice(0, 100, None)}
    """
    buckets: list[tuple[np.dtype[Any], dict[int, slice]]] = []
    filling: dict[np.dtype[Any], tuple[dict[int, slice], int]] = {}  # The newest, and its length.
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


def cut(leaves: Sequence[LeafKey], limit: int) -> list[list[Piece]]:
    """Lay leaves end to end and cut them into chunks of limited size.

    Args:
        leaves: dtype and number of elements of each; empty ones take no part.
        limit: how many bytes a chunk may take, a multiple of 64.

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
            used += padded((stop - start) * dtype.itemsize)
            start = stop
    return chunks


@functools.lru_cache(maxsize=256)
def owned_ranges(sizes: tuple[int, ...], owners: int, owner: int) -> list[tuple[int, int, int]]:
    """Cut flat leaves, laid end to end, into balanced parts and return the part of one owner.

    A cut falls between two leaves, or at a multiple of `OWNED_ALIGNMENT` inside one, so that two
    owners never write to one cache line. For that it moves by at most half of it.

    Args:
        sizes: the number of elements of each leaf.
        owners: the number of parts.
        owner: which part.

    Returns:
        Ranges ``(leaf, start, stop)`` in rising order, none of them empty; not to be changed. Over
        all owners they cover every element exactly once.

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
    """Return where a part begins: the permitted place nearest to the even cut.

    Rounding is monotone in the even cut, so parts can not overlap, whatever the alignment is.
    """
    even = starts[-1] * owner // owners
    leaf = bisect.bisect_right(starts, even) - 1
    if leaf == len(starts) - 1:
        return even
    below = even - (even - starts[leaf]) % OWNED_ALIGNMENT
    above = min(below + OWNED_ALIGNMENT, starts[leaf + 1])
    return below if even - below <= above - even else above


def blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Return a range in adjacent pieces ``(start, stop)``, each of at most `block` elements.

    >>> list(blocks(3, 10, 4))
    [(3, 7), (7, 10)]
    """
    return ((first, min(first + block, stop)) for first in range(start, stop, block))
