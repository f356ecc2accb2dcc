"""What one iterator began, others finish: each element is used once, whatever replicas and workers.

With as many workers and replicas as before, exactly the batches that were left follow.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.data import Dataset, InputOptions
from tests.data.test_workers import number_files, replica_counts
from tests.data.workers import (
    all_raise,
    cpus,
    distribute,
    distribute_from_function,
    on_workers,
    pieces_of,
    raised,
    rows_of,
)

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


def test_what_a_function_made_is_gone_on_with_by_as_many_workers_only():
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
    refused = on_workers(3, lambda workers: work(workers, state))
    all_raise(refused, ValueError, r"the state is of 2 worker\(s\).*there are 3 now")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: number_files(LENGTHS[1:]).batch(5), r"of 6 file\(s\), this one reads 5"),
        (lambda: number_files(LENGTHS).shuffle(3).batch(5), r"0 shuffle\(s\), this one has 1"),
        (lambda: FILES["in order"]().with_options(InputOptions("off")), "FILE, this one by OFF"),
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
    with pytest.raises(ValueError, match="'sharding', 'files' and 'shards'"):
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
