"""Several workers share input so that each element is used exactly once an epoch."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.data import Dataset, InputOptions
from ndistribute.errors import DistributeError
from tests.data.workers import (
    all_raise,
    cpus,
    distribute,
    distribute_from_function,
    on_workers,
    pieces_of,
    raised,
    rows_of,
    shared,
)

replica_counts = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
file_lengths = st.lists(st.integers(0, 7), min_size=4, max_size=7)


def number_files(lengths, reads=None):
    """Return a dataset of imitated files that hold the numbers from 0 on."""
    bounds = np.cumsum([0, *lengths])
    paths = [f"{start}:{stop}" for start, stop in pairwise(bounds)]

    def read(path):
        if reads is not None:
            reads.append(path)
        return np.arange(*map(int, path.split(":")), dtype=np.int32)

    return Dataset.from_files(paths, read)


def shares_of(build, counts, policy="auto", prefetch=0):
    """Return what each worker got."""
    options = InputOptions(policy, prefetch)

    def work(workers):
        mine = cpus(counts[workers.rank])
        dataset = distribute(build(), mine, options, workers=workers, replica_counts=counts)
        return pieces_of(dataset)

    return raised(on_workers(len(counts), work))


@settings(max_examples=40)
@given(file_lengths, st.integers(1, 9), replica_counts)
def test_no_replica_gets_more_than_its_share_of_the_global_batch(lengths, batch, counts):
    shares = shares_of(lambda: number_files(lengths).batch(batch), counts, "file")
    largest = -(-batch // sum(counts))
    for share, replicas in zip(shares, counts, strict=True):
        assert all(len(step) == replicas for step in share)
        assert all(len(piece) <= largest for step in share for piece in step)


def test_the_last_short_batch_of_each_worker_s_files_is_not_spread_thin():
    """Each worker has 10 rows and takes 2 a step, as many as its share of a batch of 8."""
    shares = shares_of(lambda: number_files([10] * 4).batch(8), (1, 1, 1, 1), "file")
    for share in shares:
        assert [len(piece) for step in share for piece in step] == [2] * 5


@given(st.integers(0, 40), st.integers(1, 9), replica_counts)
def test_workers_of_different_size_cut_each_batch_as_one_worker_would(rows, batch, counts):
    shares = shares_of(lambda: Dataset.range(rows).batch(batch), counts)
    alone = pieces_of(distribute(Dataset.range(rows).batch(batch), cpus(sum(counts))))
    joint = [[piece for step in steps for piece in step] for steps in zip(*shares, strict=True)]
    assert joint == alone
    for pieces in joint:
        lengths = [len(piece) for piece in pieces]
        size, longer = divmod(sum(lengths), sum(counts))
        assert lengths == [size + 1] * longer + [size] * (sum(counts) - longer)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_data_of_each_worker_s_own_may_end_at_different_times(rows, replicas, by_function):
    def work(workers):
        def make(context):
            assert context.num_input_pipelines == len(rows)
            return Dataset.range(rows[context.input_pipeline_id]).batch(2)

        if by_function:
            return pieces_of(distribute_from_function(make, cpus(replicas), workers=workers))
        own = Dataset.range(rows[workers.rank]).batch(4)
        return pieces_of(distribute(own, cpus(replicas), InputOptions("off"), workers=workers))

    shares = raised(on_workers(len(rows), work))
    assert len({len(share) for share in shares}) == 1
    if by_function:
        assert len(shares[0]) == max(-(-count // (2 * replicas)) for count in rows)
    for share, count in zip(shares, rows, strict=True):
        assert rows_of([share]) == list(range(count))


class Sample(NamedTuple):
    image: np.ndarray
    label: np.ndarray


def test_a_worker_without_any_element_learns_what_an_empty_piece_looks_like():
    def read(path):
        rows = int(path)
        return {"sample": Sample(np.zeros((rows, 5, 3), np.float16), np.zeros(rows, np.int8))}

    full, empty = raised(shared(2, lambda rank: Dataset.from_files(["2", "0"], read).batch(2)))
    assert len(full) == len(empty) == 2
    for step in empty:
        assert type(step["sample"]) is Sample
        (image,), (label,) = step["sample"].image.values, step["sample"].label.values
        assert (image.shape, image.dtype) == ((0, 5, 3), np.float16)
        assert (label.shape, label.dtype) == ((0,), np.int8)


def test_elements_that_are_no_batches_can_not_be_completed_on_any_worker():
    def work(workers):
        def make(context):
            return Dataset.range(context.input_pipeline_id + 1)

        return list(distribute_from_function(make, cpus(1), workers=workers))

    all_raise(on_workers(2, work), ValueError, "elements must be batches")


@pytest.mark.parametrize("policy", ["auto", "file"])
def test_each_file_is_opened_by_one_worker_only(policy):
    reads = []
    shares = shares_of(lambda: number_files([2] * 7, reads).batch(6), (1, 1, 1), policy)
    assert len(reads) == len(set(reads)) == 7
    assert [len(rows_of([share])) for share in shares] == [6, 4, 4]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda dataset: dataset.take(9), "count elements"),
        (lambda dataset: dataset.skip(2), "count elements"),
        (lambda dataset: dataset.shard(2, 0), "count elements"),
        (lambda d: Dataset.zip((d, d)).map(lambda a, b: a), "count elements"),
        (lambda d: d.concatenate(Dataset.range(9).map(np.int32)), "other sources"),
        (lambda dataset: number_files([3]), r"1 file\(s\) for 2 workers"),
    ],
    ids=["take", "skip", "shard", "zip", "another source", "fewer files"],
)
def test_auto_does_not_deal_files_where_that_would_change_the_elements(change, reason):
    def build():
        return change(number_files([3, 1, 0, 6])).batch(4)

    alone = [int(x) for batch in build() for x in batch]
    assert Counter(rows_of(shares_of(build, (1, 2)))) == Counter(alone)
    refused = shared(2, lambda rank: build(), InputOptions("file"))
    all_raise(refused, ValueError, rf"AutoShardPolicy\.FILE .*{reason}.*DATA")


@pytest.mark.parametrize("policy", ["data", "file"])
def test_workers_shuffle_alike_without_a_seed(policy):
    """Workers that are processes draw different entropies; here each builds its own shuffle."""

    def build():
        return number_files([4] * 6).shuffle(30).batch(6)

    first, again = (rows_of(shares_of(build, (1, 2), policy)) for _ in range(2))
    assert sorted(first) == sorted(again) == list(range(24))
    assert first != again


@pytest.mark.parametrize("policy", ["file", "off"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_steps_that_are_made_ahead_end_together_too(policy, prefetch):
    """And no collective is called on a thread that prepares steps."""
    threads = set()

    class Watched:
        def __init__(self, workers):
            self._workers, self.rank, self.size = workers, workers.rank, workers.size

        def all_gather(self, *args, **kwargs):
            threads.add(threading.current_thread())
            return self._workers.all_gather(*args, **kwargs)

    def work(workers):
        dataset = number_files([1, 9, 3]).batch(4)
        options = InputOptions(policy, prefetch)
        return pieces_of(distribute(dataset, cpus(1), options, workers=Watched(workers)))

    first, second = raised(on_workers(2, work))
    assert len(first) == len(second)
    assert len(threads) == 2


@pytest.mark.parametrize(("policy", "each_step", "others"), [("data", 0, 1), ("file", 1, 2)])
def test_sharing_files_takes_one_collective_a_step_and_sharing_elements_none(
    policy, each_step, others
):
    def work(workers):
        dataset = (Dataset.range(8) if policy == "data" else number_files([4, 4])).batch(2)
        steps = list(distribute(dataset, cpus(1), InputOptions(policy), workers=workers))
        return workers.calls_made - each_step * len(steps)

    assert raised(on_workers(2, work)) == [others, others]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_input_that_fails_on_one_worker_is_an_error_on_all(prefetch):
    def read(path):
        if path == "1":
            raise OSError("the disk is gone")
        return np.arange(3)

    def build(rank):
        return Dataset.from_files(["0", "1", "2"], read).batch(2)

    other, failed, third = shared(3, build, InputOptions("file", prefetch))
    assert isinstance(failed, OSError)
    all_raise([other, third], DistributeError, "worker 1 failed")


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("failing", [0, 1])
def test_input_that_failed_under_data_is_tried_again(failing, prefetch):
    """A failure before the first batch is told at once, a later one when the worker begins anew."""

    def work(workers):
        broken = [workers.rank == 0]

        def read(number):
            if broken[0] and number == 2 * failing:
                broken[0] = False
                raise OSError("the disk is gone")
            return number

        dataset = Dataset.range(6).map(read).batch(2)
        steps = distribute(dataset, cpus(1), InputOptions("data", prefetch), workers=workers)
        errors = []
        for _ in range(1 + failing):
            with pytest.raises((OSError, DistributeError)) as caught:
                list(steps)
            errors.append(caught.value)
            if workers.rank == 1:
                break
        return errors, pieces_of(steps)

    failed, other = raised(on_workers(2, work))
    assert [type(error) for error in other[0]] == [DistributeError]
    expected = [OSError, DistributeError][: 1 + failing]
    assert [type(error) for error in failed[0]] == expected
    assert ("worker 0 failed" if not failing else "iterate again") in str(other[0][0])
    assert rows_of([failed[1], other[1]]) == list(range(6))
