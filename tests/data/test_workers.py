"""Each element is used exactly once an epoch: by several workers, and by those that resume.

With as many workers and replicas as before, exactly the batches that were left follow.
"""

import json
import threading
from collections import Counter
from itertools import chain, islice, pairwise
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
        (lambda dataset: number_files([3]), r"2 workers and only 1 file\."),
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


LENGTHS = (3, 0, 7, 1, 5, 2)
TOTAL = sum(LENGTHS)
FILES = {
    "in order": lambda: number_files(LENGTHS).batch(5),
    "mapped": lambda: number_files(LENGTHS).map(lambda x: x, 2).shuffle(30).batch(4),
    "cached": lambda: number_files(LENGTHS).shuffle(4).cache().shuffle(9).batch(3),
    "shuffled batches": lambda: number_files(LENGTHS).batch(2).shuffle(3),
}
PIPELINES = {
    "in order": lambda: Dataset.range(20).batch(3),
    "shuffled with a seed": lambda: Dataset.range(20).shuffle(20, seed=1).batch(3),
    "shuffled once": lambda: Dataset.range(20).shuffle(20, None, False).batch(3),
    "window": lambda: Dataset.range(20).shuffle(5).batch(3),
    "repeated": lambda: Dataset.range(20).shuffle(20).repeat(3).batch(3),
    "cached": lambda: Dataset.range(20).shuffle(20).cache().shuffle(20).batch(3).repeat(2),
    "elements": lambda: (
        Dataset.range(20).map(lambda x: x).shuffle(9).filter(lambda x: x % 5).batch(3)
    ),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(20))).shuffle(7).batch(3),
    "unbatched": lambda: Dataset.range(20).batch(7).shuffle(3).unbatch().batch(3),
    "parallel": lambda: Dataset.range(20).shuffle(20).batch(3).map(lambda x: x, 2).prefetch(2),
    "two shuffles": lambda: (
        Dataset.range(9)
        .shuffle(9)
        .concatenate(Dataset.range(20, 30).shuffle(4))
        .shuffle(6)
        .batch(3)
    ),
    "loader": lambda: [np.arange(3), np.arange(2), np.arange(3)],
}
ROWS = [
    *(pytest.param(build, "data", id=f"data {name}") for name, build in PIPELINES.items()),
    *(
        pytest.param(build, policy, id=f"{policy} files {name}")
        for name, build in FILES.items()
        for policy in ("file", "data", "off")
    ),
]


def job(build, counts, options, do, state=None, epochs=0):
    """Return each worker's ``do(iterator)``, and an epoch after it; iterators load the state."""

    def work(workers):
        mine = cpus(counts[workers.rank])
        dataset = distribute(build(), mine, options, workers=workers, replica_counts=counts)
        for _ in range(epochs):
            list(dataset)
        iterator = iter(dataset)
        if state is not None:
            iterator.load_state_dict(json.loads(state))
            assert json.dumps(iterator.state_dict()) == state
        return do(iterator), pieces_of(dataset)

    return list(zip(*raised(on_workers(len(counts), work)), strict=True))


def begun(build, counts, options, steps, state=None, epochs=0):
    """Return the first steps of each worker, the state that all have, the other steps, an epoch."""

    def take(iterator):
        taken = pieces_of(islice(iterator, steps))
        return taken, json.dumps(iterator.state_dict()), pieces_of(iterator)

    interrupted, after = job(build, counts, options, take, state, epochs)
    taken, states, left = zip(*interrupted, strict=True)
    assert len(set(states)) == 1
    return taken, states[0], left, after


def used_by(policy, *parts):
    """Count what all workers used in some parts of an epoch; each worker's own if all have all."""
    if policy == "off":
        workers = zip(*parts, strict=True)
        return [Counter(rows_of([list(chain(*steps))])) for steps in workers]
    return [Counter(chain(*map(rows_of, parts)))]


@pytest.mark.parametrize(("build", "policy"), ROWS)
@settings(max_examples=20)
@given(
    counts=replica_counts,
    others=replica_counts,
    epochs=st.integers(0, 2),
    steps=st.integers(0, 12),
    prefetch=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_the_rest_of_an_epoch_is_the_same_or_is_used_exactly_once_by_other_workers(
    build, policy, counts, others, epochs, steps, prefetch
):
    options = InputOptions(policy, prefetch[0])
    first, state, left, after = begun(build, counts, options, steps, epochs=epochs)
    options = InputOptions(policy, prefetch[1])
    assert job(build, counts, options, pieces_of, state) == [left, after]
    if policy == "off":  # Each worker has all elements, and finishes what it began.
        others = (others * len(counts))[: len(counts)]
    rest, next_epoch = job(build, others, options, pieces_of, state)
    whole = used_by(policy, first, left)
    assert used_by(policy, first, rest) == used_by(policy, next_epoch) == whole
    if build in FILES.values():
        assert whole[0] == Counter(range(TOTAL))
    elif policy == "data":  # In the order of one worker, whose steps are cut otherwise.
        assert rows_of(rest) == rows_of(left)
        assert rows_of(next_epoch) == rows_of(after)


@pytest.mark.parametrize("policy", ["file", "data"])
@pytest.mark.parametrize("counts", [[(1, 2), (3, 1), (2,)], [(2, 3), (1, 1, 1, 1)]])
def test_an_epoch_may_be_interrupted_at_every_step(policy, counts):
    used, state = [], None
    for stage in range(100):
        here = counts[stage % len(counts)]
        taken, state, *_ = begun(FILES["mapped"], here, InputOptions(policy, 0), 1, state)
        used += rows_of(taken)
        if not taken[0]:
            break
    assert sorted(used) == list(range(TOTAL))


def test_an_iterator_can_be_taken_back_also_when_it_is_over():
    options = InputOptions(prefetch=2)
    iterator = iter(distribute(PIPELINES["shuffled with a seed"](), cpus(2), options))
    next(iterator)
    state = iterator.state_dict()
    rest = pieces_of(iterator)
    over = iterator.state_dict()
    iterator.load_state_dict(state)
    assert pieces_of(iterator) == rest
    iterator.load_state_dict(over)
    assert pieces_of(iterator) == []


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_batches_that_replicas_take_one_by_one_are_resumed(replicas, others, taken):
    def over(count):
        dataset = Dataset.range(12).shuffle(12, seed=3).batch(1)
        return iter(distribute_from_function(lambda _: dataset, cpus(count)))

    interrupted, resumed = over(replicas), over(others)
    for _ in range(taken):
        next(interrupted)
    resumed.load_state_dict(interrupted.state_dict())
    assert rows_of([pieces_of(resumed)]) == rows_of([pieces_of(interrupted)])


def test_workers_go_on_with_what_a_function_made_for_others():
    def make(context):
        rows = Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.shuffle(10).batch(1)

    def work(workers, state=None):
        iterator = iter(distribute_from_function(make, cpus(1), workers=workers))
        if state is not None:
            iterator.load_state_dict(state)
            return pieces_of(iterator)
        return pieces_of(islice(iterator, 2)), iterator.state_dict()

    taken, (state, same) = zip(*raised(on_workers(2, work)), strict=True)
    assert state == same
    rest = raised(on_workers(2, lambda workers: work(workers, state)))
    for worker in range(2):
        used = rows_of([taken[worker]]) + rows_of([rest[worker]])
        assert sorted(used) == list(range(worker, 10, 2))
    for others in (1, 3):
        rest = raised(on_workers(others, lambda workers: work(workers, state)))
        assert sorted(rows_of(taken) + rows_of(rest)) == list(range(10))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: number_files(LENGTHS[1:]).batch(5), r"reads 6 files, but this one reads 5"),
        (lambda: number_files(LENGTHS).shuffle(3).batch(5), r"0 shuffles, but this one has 1"),
        (
            lambda: FILES["in order"]().with_options(InputOptions("off")),
            "FILE, but they share this one by OFF",
        ),
    ],
    ids=["files", "shuffles", "policy"],
)
def test_a_state_of_other_input_is_refused_with_the_difference(other, message):
    _, state, *_ = begun(FILES["in order"], (1, 1), InputOptions("file"), 1)
    with pytest.raises(ValueError, match=f"load_state_dict.*{message}"):
        iter(distribute(other(), cpus(1))).load_state_dict(json.loads(state))
    alone = distribute(FILES["in order"](), cpus(1), num_workers=2)
    with pytest.raises(ValueError, match="pass their communicator"):
        iter(alone).load_state_dict(json.loads(state))
    with pytest.raises(ValueError, match="'files', 'sharding', 'shards'"):
        iter(distribute(other(), cpus(1))).load_state_dict({"step": 3})


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("other", [0, 1])
def test_workers_without_a_communicator_resume_by_the_state_of_any_of_them(worker, other):
    def make(context):
        return Dataset.range(8).shard(2, context.input_pipeline_id).batch(1)

    interrupted, resumed = (
        iter(distribute_from_function(make, cpus(1), None, 2, which)) for which in (worker, other)
    )
    next(interrupted)
    resumed.load_state_dict(interrupted.state_dict())
    assert pieces_of(resumed) == [[[row]] for row in range(other + 2, 8, 2)]
