"""Cuts are balanced, contiguous and lose nothing, whatever the numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ndistribute.data.sharding import balanced_slices, worker_batches, worker_slices

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


@given(lengths, parts, parts)
def test_workers_cut_a_batch_as_one_worker_with_all_replicas_would(length, replicas, workers):
    over_workers = [
        piece
        for worker in range(workers)
        for piece in worker_slices(length, replicas, workers, worker)
    ]
    assert over_workers == list(balanced_slices(length, replicas * workers))


@given(lengths, parts)
def test_each_batch_goes_to_exactly_one_worker(batches, workers):
    taken = [b for w in range(workers) for b in worker_batches(batches, workers, w)]
    assert sorted(b for b in taken if b is not None) == list(range(batches))


@given(lengths, parts)
def test_all_workers_make_the_same_number_of_steps(batches, workers):
    steps = {len(worker_batches(batches, workers, w)) for w in range(workers)}
    assert steps == {-(-batches // workers)}


@given(lengths, parts)
def test_a_worker_that_has_run_out_stays_so(batches, workers):
    for worker in range(workers):
        plan = worker_batches(batches, workers, worker)
        ran_out = plan.index(None) if None in plan else len(plan)
        assert set(plan[ran_out:]) <= {None}
