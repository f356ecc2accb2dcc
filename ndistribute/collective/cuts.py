"""Cuts of flat leaves: into parts that replicas own, and into blocks that fit into a cache."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from ndistribute.collective.backend import Arrays, Call, Update
from ndistribute.timeline import span

# The size of blocks: the total and the variable that it updates stay in a core's second-level
# cache.
_UPDATE_ELEMENTS = 64 * 1024
# Cuts between owners are at multiples of this: 16 float32 are a cache line.
OWNED_ALIGNMENT = 16


@functools.lru_cache(maxsize=256)
def owned_ranges(sizes: tuple[int, ...], owners: int, owner: int) -> list[tuple[int, int, int]]:
    """Cut concatenated flat leaves into balanced parts, and return the part of one owner.

    A cut is between two leaves, or at a multiple of `OWNED_ALIGNMENT` inside a leaf, so two owners
    never write to one cache line. For that, a cut moves from the even cut by at most half of the
    alignment.

    The result has non-empty ranges ``(leaf, start, stop)`` in ascending order; the caller must not
    change it. The ranges of all owners together contain every element exactly once.

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
    """Return the start of a part: the allowed position that is nearest to the even cut.

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


def update_in_blocks(call: Call, inputs: Arrays, totals: Arrays, update: Update) -> Any:
    """Apply an update to the totals, in the inputs' dtypes; return the result of `begin`."""
    with span("update", call.title):
        prepared = update.begin()
        for leaf, (array, total) in enumerate(zip(inputs, totals, strict=True)):
            for start, stop in blocks(0, total.size, _UPDATE_ELEMENTS):
                part = total[start:stop].astype(array.dtype, copy=False)
                update.apply(prepared, leaf, start, stop, part)
    return prepared
