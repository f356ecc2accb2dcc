"""An epoch that one number of workers began is finished by another, each element used once."""

from __future__ import annotations

import json
from itertools import islice

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


def job(build, counts, options, do, state=None):
    """Return each worker's ``do(iterator)``, and an epoch after it; iterators load the state."""

    def work(workers):
        mine = cpus(counts[workers.rank])
        dataset = distribute(build(), mine, options, workers=workers, replica_counts=counts)
        iterator = iter(dataset)
        if state is not None:
            iterator.load_state_dict(json.loads(state))
            assert json.dumps(iterator.state_dict()) == state
        return do(iterator), pieces_of(dataset)

    return list(zip(*raised(on_workers(len(counts), work)), strict=True))


def begun(build, counts, options, steps, state=None):
    """Return the first steps of each worker, the state that all have, and the other steps."""

    def take(iterator):
        taken = pieces_of(islice(iterator, steps))
        return taken, json.dumps(iterator.state_dict()), pieces_of(iterator)

    taken, states, left = zip(*job(build, counts, options, take, state)[0], strict=True)
    assert len(set(states)) == 1
    return taken, states[0], left


PIPELINES = {
    "in order": lambda: number_files(LENGTHS).batch(5),
    "mapped": lambda: number_files(LENGTHS).map(lambda x: x, 2).shuffle(30).batch(4),
    "cached": lambda: number_files(LENGTHS).shuffle(4).cache().shuffle(9).batch(3),
    "shuffled batches": lambda: number_files(LENGTHS).batch(2).shuffle(3),
}


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("policy", ["file", "data", "off"])
@settings(max_examples=20)
@given(
    counts=replica_counts,
    others=replica_counts,
    steps=st.integers(0, 12),
    prefetch=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_the_rest_of_an_epoch_is_the_same_or_is_used_exactly_once_by_other_workers(
    build, policy, counts, others, steps, prefetch
):
    first, state, left = begun(build, counts, InputOptions(policy, prefetch[0]), steps)
    options = InputOptions(policy, prefetch[1])
    assert job(build, counts, options, pieces_of, state)[0] == left
    if policy == "off":  # Each worker has all elements, and finishes what it began.
        others = (others * len(counts))[: len(counts)]
    rest, after = job(build, others, options, pieces_of, state)
    for used in (first, rest), (after,):
        if policy == "off":
            shares = [
                [rows for steps in used for rows in rows_of([steps[w]])] for w in range(len(counts))
            ]
        else:
            shares = [[rows for steps in used for rows in rows_of(steps)]]
        assert all(sorted(share) == list(range(TOTAL)) for share in shares)


@pytest.mark.parametrize("policy", ["file", "data"])
@pytest.mark.parametrize("counts", [[(1, 2), (3, 1), (2,)], [(2, 3), (1, 1, 1, 1)]])
def test_an_epoch_may_be_interrupted_at_every_step(policy, counts):
    build = PIPELINES["mapped"]
    used, state = [], None
    for stage in range(100):
        here = counts[stage % len(counts)]
        taken, state, _ = begun(build, here, InputOptions(policy, 0), 1, state)
        used += rows_of(taken)
        if not taken[0]:
            break
    assert sorted(used) == list(range(TOTAL))


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
        (
            lambda: PIPELINES["in order"]().with_options(InputOptions("off")),
            "FILE, this one by OFF",
        ),
    ],
    ids=["files", "shuffles", "policy"],
)
def test_a_state_of_other_input_is_refused_with_the_difference(other, message):
    _, state, _ = begun(PIPELINES["in order"], (1, 1), InputOptions("file"), 1)
    with pytest.raises(ValueError, match=f"load_state_dict.*{message}"):
        iter(distribute(other(), cpus(1))).load_state_dict(json.loads(state))
    alone = distribute(PIPELINES["in order"](), cpus(1), num_workers=2)
    with pytest.raises(ValueError, match="pass their communicator"):
        iter(alone).load_state_dict(json.loads(state))


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
