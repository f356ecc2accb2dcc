"""How leaves stream through a window of fixed size: what travels in which chunk, and where.

Everything here is arithmetic on sizes, so that all processes find the same answer by themselves,
and equal arguments give equal answers, which a caller may keep.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.collective.buckets import ALIGNMENT, owned_ranges
from ndistribute.device import Array

__all__ = ["Chunk", "LeafKey", "Piece", "aligned", "cut", "leaf_keys", "share"]

LeafKey = tuple[np.dtype[Any], int]  # dtype and number of elements of a leaf


class Piece(NamedTuple):
    """Say where a range of a leaf lies in the window."""

    leaf: int
    dtype: np.dtype[Any]
    start: int  # elements of the leaf
    stop: int
    offset: int  # bytes from the window's start


Chunk = tuple[Piece, ...]


def leaf_keys(arrays: Sequence[Array]) -> tuple[LeafKey, ...]:
    """Return dtype and number of elements of each array."""
    return tuple([(array.dtype, array.size) for array in arrays])


def aligned(count: int) -> int:
    """Return the first multiple of a cache line at or after a number of bytes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(maxsize=256)
def cut(leaves: tuple[LeafKey, ...], window: int, head: int = 0) -> tuple[Chunk, ...]:
    """Lay leaves end to end and cut them into chunks that fit a window.

    Args:
        leaves: dtype and number of elements of each; empty ones take no part.
        window: how many bytes a chunk may take, a multiple of `ALIGNMENT`.
        head: how many bytes of the first window are taken.

    Returns:
        The chunks, none of them empty but where there is nothing to move at all, or nothing fits
        beside the head. There is at least one.

    >>> f4 = np.dtype(np.float32)
    >>> for chunk in cut(((f4, 20), (f4, 40)), window=128):
    ...     print([(piece.leaf, piece.start, piece.stop, piece.offset) for piece in chunk])
    [(0, 0, 20, 0)]
    [(1, 0, 32, 0)]
    [(1, 32, 40, 0)]
    """
    chunks: list[list[Piece]] = [[]]
    used = aligned(head)
    for leaf, (dtype, size) in enumerate(leaves):
        start = 0
        while start < size:
            room = (window - used) // dtype.itemsize
            # A small leaf is not worth being moved in two parts.
            if room < min(size - start, window // 2 // dtype.itemsize):
                chunks.append([])
                used = 0
                continue
            stop = min(size, start + room)
            chunks[-1].append(Piece(leaf, dtype, start, stop, used))
            used += aligned((stop - start) * dtype.itemsize)
            start = stop
    return tuple(map(tuple, chunks))


def share(chunk: Chunk, owners: int) -> tuple[Chunk, ...]:
    """Cut a chunk into balanced parts, one for each owner, without moving anything.

    >>> (chunk,) = cut(((np.dtype(np.float32), 64),), window=1024)
    >>> [[(piece.start, piece.offset) for piece in part] for part in share(chunk, 2)]
    [[(0, 0)], [(32, 128)]]
    """
    sizes = tuple(piece.stop - piece.start for piece in chunk)
    return tuple(
        tuple(_inside(chunk, *owned) for owned in owned_ranges(sizes, owners, owner))
        for owner in range(owners)
    )


def _inside(chunk: Sequence[Piece], index: int, start: int, stop: int) -> Piece:
    piece = chunk[index]
    return piece._replace(
        start=piece.start + start,
        stop=piece.start + stop,
        offset=piece.offset + start * piece.dtype.itemsize,
    )
