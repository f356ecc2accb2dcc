"""Cuts are balanced, contiguous and lose nothing, whatever the numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ndistribute.data.steps import balanced_slices, replica_slices

lengths = st.integers(0, 200)
parts = st.integers(1, 9)


@given(lengths, parts)
def test_pieces_follow_each_other_and_cover_the_batch(length, count):
    pieces = balanced_slices(length, count)
    assert [i for piece in pieces for i in range(length)[piece]] == list(range(length))


@given(lengths, parts)
def test_the_first_remainder_pieces_get_one_more(length, count):
    sizes = [piece.stop - piece.start for piece in balanced_slices(length, count)]
    longer = length % count
    assert sizes == [length // count + 1] * longer + [length // count] * (count - longer)


@given(lengths, st.lists(parts, min_size=1, max_size=5))
def test_workers_cut_a_batch_as_one_worker_with_all_replicas_would(length, replica_counts):
    over_workers = [replica_slices(length, replica_counts, w) for w in range(len(replica_counts))]
    assert [len(pieces) for pieces in over_workers] == replica_counts
    joined = [piece for pieces in over_workers for piece in pieces]
    assert joined == list(balanced_slices(length, sum(replica_counts)))
