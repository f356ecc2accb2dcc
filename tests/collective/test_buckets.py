"""Claims about the packing plan: nothing overlaps, nothing is lost, parts are aligned and even."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.buckets import (
    ALIGNMENT,
    Layout,
    LeafSpec,
    blocks,
    cut,
    owned_ranges,
    pack,
)

DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64, np.int64, np.complex128, bool)]
LEAVES = st.lists(st.builds(LeafSpec, st.sampled_from(DTYPES), st.integers(0, 500)), max_size=30)
BUDGET = st.sampled_from([0, 1, 64, 256, 1000, 4096, 10**9])
SIZES = st.lists(st.integers(0, 200), max_size=12).map(tuple)
F4 = np.dtype(np.float32)


@given(LEAVES, BUDGET)
def test_every_leaf_has_a_slot_of_its_size_and_dtype(leaves: list[LeafSpec], budget: int) -> None:
    layout = pack(leaves, budget)
    assert len(layout.slots) == len(leaves)
    for leaf, slot in zip(leaves, layout.slots, strict=True):
        assert slot.stop - slot.start == leaf.size
        assert slot.stop <= layout.buckets[slot.bucket].size
        assert layout.buckets[slot.bucket].dtype == leaf.dtype


@given(LEAVES, BUDGET)
def test_slots_are_disjoint_and_aligned(leaves: list[LeafSpec], budget: int) -> None:
    layout = pack(leaves, budget)
    for index, bucket in enumerate(layout.buckets):
        slots = sorted((s.start, s.stop) for s in layout.slots if s.bucket == index)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(slots))
        assert all(start * bucket.dtype.itemsize % ALIGNMENT == 0 for start, _ in slots)
        assert max(stop for _, stop in slots) == bucket.size


@given(LEAVES, BUDGET)
def test_a_bucket_stays_in_budget_unless_one_leaf_fills_it(
    leaves: list[LeafSpec], budget: int
) -> None:
    layout = pack(leaves, budget)
    for index, bucket in enumerate(layout.buckets):
        filled = [s for s in layout.slots if s.bucket == index and s.stop > s.start]
        in_budget = max((s.stop for s in filled), default=0) * bucket.dtype.itemsize <= budget
        assert in_budget or len(filled) == 1


@given(LEAVES, BUDGET)
def test_buckets_of_a_dtype_fill_from_the_last_leaf_to_the_first(
    leaves: list[LeafSpec], budget: int
) -> None:
    layout = pack(leaves, budget)
    for dtype in DTYPES:
        places = [
            (slot.bucket, slot.start)
            for leaf, slot in zip(leaves, layout.slots, strict=True)
            if leaf.dtype == dtype
        ]
        assert places == sorted(places, reverse=True)


@given(LEAVES, BUDGET)
def test_pack_is_deterministic_and_hashable(leaves: list[LeafSpec], budget: int) -> None:
    assert hash(pack(leaves, budget)) == hash(pack(tuple(leaves), budget))
    assert pack(leaves, budget) == pack(leaves, budget)


@given(LEAVES)
def test_no_bucket_bytes_means_one_bucket_per_leaf(leaves: list[LeafSpec]) -> None:
    assert sorted(slot.bucket for slot in pack(leaves, 0).slots) == list(range(len(leaves)))


@given(LEAVES)
def test_an_unlimited_budget_gives_one_bucket_per_dtype(leaves: list[LeafSpec]) -> None:
    assert len(pack(leaves, 10**12).buckets) == len({leaf.dtype for leaf in leaves})


def test_a_large_leaf_gets_its_own_bucket() -> None:
    layout = pack([LeafSpec(F4, n) for n in (4, 1000, 4)], bucket_bytes=256)
    assert [slot.bucket for slot in layout.slots] == [2, 1, 0]


def test_an_empty_leaf_opens_no_bucket_beside_a_large_one() -> None:
    layout = pack([LeafSpec(F4, n) for n in (0, 1000, 0)], bucket_bytes=256)
    assert [slot.bucket for slot in layout.slots] == [0, 0, 0]
    assert pack([], 256) == Layout((), ())


@pytest.mark.parametrize("call", [
    lambda: pack([], -1),
    lambda: pack([LeafSpec(F4, -1)], 64),
    lambda: owned_ranges((1,), 0, 0),
    lambda: owned_ranges((1,), 2, 2),
    lambda: owned_ranges((1,), 2, -1),
    lambda: owned_ranges((1,), 2, 0, align=0),
    lambda: owned_ranges((3, -1), 2, 0),
    lambda: blocks(0, 4, 0),
])  # fmt: skip
def test_senseless_arguments_are_value_errors(call: object) -> None:
    with pytest.raises(ValueError, match=r"must be|negative"):
        call()  # type: ignore[operator]


@given(SIZES, st.integers(1, 9), st.sampled_from([1, 3, 16, 64]))
def test_owners_cover_every_element_exactly_once(
    sizes: tuple[int, ...], owners: int, align: int
) -> None:
    parts = [owned_ranges(tuple(sizes), owners, owner, align) for owner in range(owners)]
    seen = [(leaf, i) for part in parts for leaf, a, b in part for i in range(a, b)]
    assert seen == [(leaf, i) for leaf, size in enumerate(sizes) for i in range(size)]
    assert all(start < stop for part in parts for _, start, stop in part)


@given(SIZES, st.integers(1, 9), st.sampled_from([1, 3, 16, 64]))
def test_owners_cut_a_leaf_only_at_aligned_places(
    sizes: tuple[int, ...], owners: int, align: int
) -> None:
    for owner in range(owners):
        for leaf, start, stop in owned_ranges(tuple(sizes), owners, owner, align):
            assert start % align == 0
            assert stop % align == 0 or stop == sizes[leaf]


@given(
    st.lists(st.integers(0, 10**7), max_size=12).map(tuple),
    st.integers(1, 64),
    st.sampled_from([1, 3, 16, 64]),
)
def test_parts_are_even_within_one_alignment(
    sizes: tuple[int, ...], owners: int, align: int
) -> None:
    for owner in range(owners):
        part = sum(b - a for _, a, b in owned_ranges(tuple(sizes), owners, owner, align))
        assert abs(part - sum(sizes) / owners) <= align + 1


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
