"""Claims about the packing plan: nothing overlaps, nothing is lost, parts are aligned and even."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.buckets import (
    OWNED_ALIGNMENT,
    LeafKey,
    blocks,
    cut,
    owned_ranges,
    pack,
)

ALIGNMENT = 64
DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64, np.int64, np.complex128, bool)]
LEAVES = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 500)), max_size=30)
BUDGET = st.sampled_from([0, 1, 64, 256, 1000, 4096, 10**9])
SIZES = st.lists(st.integers(0, 200), max_size=12).map(tuple)
F4 = np.dtype(np.float32)


@given(LEAVES, BUDGET)
def test_every_leaf_but_empty_ones_has_one_place_of_its_size_and_dtype(
    leaves: list[LeafKey], budget: int
) -> None:
    found = [
        (leaf, dtype, place.stop - place.start)
        for dtype, places in pack(leaves, budget)
        for leaf, place in places.items()
    ]
    assert sorted(leaf for leaf, _, _ in found) == [i for i, leaf in enumerate(leaves) if leaf[1]]
    assert all(leaves[leaf] == (dtype, size) for leaf, dtype, size in found)


@given(LEAVES, BUDGET)
def test_places_are_disjoint_and_aligned(leaves: list[LeafKey], budget: int) -> None:
    for dtype, places in pack(leaves, budget):
        slots = list(places.values())
        assert all(first.stop <= second.start for first, second in itertools.pairwise(slots))
        assert all(slot.start * dtype.itemsize % ALIGNMENT == 0 for slot in slots)


@given(LEAVES, BUDGET)
def test_a_bucket_stays_in_budget_unless_one_leaf_fills_it(
    leaves: list[LeafKey], budget: int
) -> None:
    for dtype, places in pack(leaves, budget):
        length = max(place.stop for place in places.values())
        assert length * dtype.itemsize <= budget or len(places) == 1


@given(LEAVES, BUDGET)
def test_buckets_of_a_dtype_fill_from_the_last_leaf_to_the_first(
    leaves: list[LeafKey], budget: int
) -> None:
    buckets = pack(leaves, budget)
    for dtype in DTYPES:
        order = [leaf for kind, places in buckets if kind == dtype for leaf in places]
        assert order == sorted(order, reverse=True)


@given(LEAVES)
def test_no_bucket_bytes_means_one_bucket_per_leaf(leaves: list[LeafKey]) -> None:
    assert all(len(places) == 1 for _, places in pack(leaves, 0))


@given(LEAVES)
def test_an_unlimited_budget_gives_one_bucket_per_dtype(leaves: list[LeafKey]) -> None:
    assert len(pack(leaves, 10**12)) == len({dtype for dtype, size in leaves if size})


def test_a_large_leaf_gets_its_own_bucket() -> None:
    buckets = pack([(F4, n) for n in (4, 1000, 0, 4)], bucket_bytes=256)
    assert [list(places) for _, places in buckets] == [[3], [1], [0]]


@given(SIZES, st.integers(1, 9))
def test_owners_cover_every_element_exactly_once(sizes: tuple[int, ...], owners: int) -> None:
    parts = [owned_ranges(sizes, owners, owner) for owner in range(owners)]
    seen = [(leaf, i) for part in parts for leaf, a, b in part for i in range(a, b)]
    assert seen == [(leaf, i) for leaf, size in enumerate(sizes) for i in range(size)]
    assert all(start < stop for part in parts for _, start, stop in part)


@given(SIZES, st.integers(1, 9))
def test_owners_cut_a_leaf_only_at_aligned_places(sizes: tuple[int, ...], owners: int) -> None:
    for owner in range(owners):
        for leaf, start, stop in owned_ranges(sizes, owners, owner):
            assert start % OWNED_ALIGNMENT == 0
            assert stop % OWNED_ALIGNMENT == 0 or stop == sizes[leaf]


@given(st.lists(st.integers(0, 10**7), max_size=12).map(tuple), st.integers(1, 64))
def test_parts_are_even_within_one_alignment(sizes: tuple[int, ...], owners: int) -> None:
    for owner in range(owners):
        part = sum(b - a for _, a, b in owned_ranges(sizes, owners, owner))
        assert abs(part - sum(sizes) / owners) <= OWNED_ALIGNMENT + 1


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 100))
def test_blocks_cover_a_range_in_order(start: int, length: int, block: int) -> None:
    pieces = list(blocks(start, start + length, block))
    assert [i for a, b in pieces for i in range(a, b)] == list(range(start, start + length))
    assert all(0 < b - a <= block for a, b in pieces)
    assert all(b - a == block for a, b in pieces[:-1])


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 300)), max_size=8).map(tuple),
    st.sampled_from([128, 256, 4096]),
)
def test_chunks_cover_every_element_once_at_places_of_their_own(leaves: Any, limit: int) -> None:
    chunks = cut(leaves, limit)
    found = [(p.leaf, i) for chunk in chunks for p in chunk for i in range(p.start, p.stop)]
    assert found == [(leaf, i) for leaf, (_, size) in enumerate(leaves) for i in range(size)]
    for chunk in chunks:
        free = 0
        for piece in chunk:
            assert piece.offset >= free
            assert piece.offset % ALIGNMENT == 0
            free = piece.offset + (piece.stop - piece.start) * piece.dtype.itemsize
        assert free <= limit
