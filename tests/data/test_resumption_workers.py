"""An epoch that one number of workers began is finished by another, each element used once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.data import Dataset, InputOptions
from tests.data.test_workers import number_files
from tests.data.workers import (
    cpus,
    distribute,
    distribute_from_function,
    on_workers,
    pieces_of,
    raised,
    rows_of,
)

replica_counts = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
LENGTHS = (3, 0, 7, 1, 5, 2)
TOTAL = sum(LENGTHS)


def begun(build, counts, options, steps):
    """Take some steps; return what each worker got, and the state that all of them hold."""

    def work(workers):
        mine = cpus(counts[workers.rank])
        iterator = iter(distribute(build(), mine, options, workers=workers, replica_counts=counts))
        taken = pieces_of(step for _, step in zip(range(steps), iterator, strict=False))
        return taken, json.dumps(iterator.state_dict())

    taken, states = zip(*raised(on_workers(len(counts), work)), strict=True)
    return list(taken), states


def finished(build, counts, options, state, epochs=0):
    """Return what each worker gets of the rest of the epoch, and of the epochs after it."""

    def work(workers):
        mine = cpus(counts[workers.rank])
        dataset = distribute(build(), mine, options, workers=workers, replica_counts=counts)
        iterator = iter(dataset)
        iterator.load_state_dict(json.loads(state))
        assert json.dumps(iterator.state_dict()) == state
        return [pieces_of(iterator)] + [pieces_of(dataset) for _ in range(epochs)]

    return list(zip(*raised(on_workers(len(counts), work)), strict=True))


PIPELINES = {
    "in order": lambda: number_files(LENGTHS).batch(5),
    "shuffled": lambda: number_files(LENGTHS).shuffle(6).batch(5),
    "mapped": lambda: number_files(LENGTHS).map(lambda x: x, 2).shuffle(30).batch(4),
    "cached": lambda: number_files(LENGTHS).shuffle(4).cache().shuffle(9).batch(3),
    "shuffled batches": lambda: number_files(LENGTHS).batch(2).shuffle(3),
}


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("policy", ["file", "data", "auto"])
@settings(max_examples=20)
@given(
    counts=replica_counts,
    others=replica_counts,
    steps=st.integers(0, 12),
    prefetch=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_the_rest_of_an_epoch_is_used_exactly_once_by_other_workers(
    build, policy, counts, others, steps, prefetch
):
    first, states = begun(build, counts, InputOptions(policy, prefetch[0]), steps)
    assert len(set(states)) == 1
    options = InputOptions(policy, prefetch[1])
    rest, after = finished(build, others, options, states[0], epochs=1)
    assert sorted(rows_of(first) + rows_of(rest)) == list(range(TOTAL))
    assert sorted(rows_of(after)) == list(range(TOTAL))


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("policy", ["file", "data", "off"])
@settings(max_examples=10)
@given(counts=replica_counts, steps=st.integers(0, 8))
def test_as_many_workers_go_on_with_exactly_the_steps_they_had_left(build, policy, counts, steps):
    """An interruption changes nothing: the same pieces go to the same replicas."""
    options = InputOptions(policy, 0)

    def work(workers):
        mine = cpus(counts[workers.rank])
        dataset = distribute(build(), mine, options, workers=workers, replica_counts=counts)
        iterator = iter(dataset)
        for _ in zip(range(steps), iterator, strict=False):
            pass
        state = iterator.state_dict()
        left = pieces_of(iterator)
        resumed = iter(dataset)
        resumed.load_state_dict(state)
        return left, pieces_of(resumed)

    for left, resumed in raised(on_workers(len(counts), work)):
        assert resumed == left


@pytest.mark.parametrize("policy", ["file", "data"])
@pytest.mark.parametrize("counts", [[(1, 1, 1)], [(1, 2), (3, 1), (2,)], [(2, 3), (1, 1, 1, 1)]])
def test_an_epoch_may_be_interrupted_at_every_step(policy, counts):
    options = InputOptions(policy, 0)
    build = PIPELINES["shuffled"]
    used, state = [], None
    for stage in range(100):
        here = counts[stage % len(counts)]

        def work(workers, here=here, state=state):
            mine = cpus(here[workers.rank])
            dataset = distribute(build(), mine, options, workers=workers, replica_counts=here)
            iterator = iter(dataset)
            if state is not None:
                iterator.load_state_dict(state)
            taken = pieces_of(step for _, step in zip(range(1), iterator, strict=False))
            return taken, iterator.state_dict()

        taken, states = zip(*raised(on_workers(len(here), work)), strict=True)
        used += rows_of(taken)
        state = states[-1]
        if not taken[0]:
            break
    assert sorted(used) == list(range(TOTAL))


@given(counts=replica_counts, others=replica_counts, steps=st.integers(0, 8))
def test_more_or_fewer_replicas_finish_what_each_worker_has_left_without_sharding(
    counts, others, steps
):
    options = InputOptions("off", 0)

    def build():
        return Dataset.range(11).batch(4)

    first, states = begun(build, counts, options, steps)
    if len(others) != len(counts):
        others = (others * len(counts))[: len(counts)]
    (rest,) = finished(build, others, options, states[0])
    for before, after in zip(first, rest, strict=True):
        assert rows_of([before]) + rows_of([after]) == list(range(11))


def test_what_a_function_made_is_gone_on_with_by_as_many_workers_only():
    def make(context):
        rows = Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.shuffle(10).batch(1)

    def iterator_of(workers):
        return iter(distribute_from_function(make, cpus(1), workers=workers))

    def work(workers):
        iterator = iterator_of(workers)
        first = pieces_of(next(iterator) for _ in range(2))
        return first, iterator.state_dict()

    taken, (state, same) = zip(*raised(on_workers(2, work)), strict=True)
    assert state == same

    def resume(workers):
        iterator = iterator_of(workers)
        iterator.load_state_dict(state)
        return pieces_of(iterator)

    rest = raised(on_workers(2, resume))
    for worker in range(2):
        used = rows_of([taken[worker]]) + rows_of([rest[worker]])
        assert sorted(used) == list(range(worker, 10, 2))
    for error in on_workers(3, resume):
        assert isinstance(error, ValueError)
        assert "the state is of 2 worker(s)" in str(error)
        assert "there are 3 now" in str(error)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: number_files(LENGTHS[1:]).batch(5), "of 6 file(s), this one reads 5"),
        (lambda: number_files(LENGTHS).shuffle(3).batch(5), "0 shuffle(s), this one has 1"),
        (
            lambda: PIPELINES["in order"]().with_options(InputOptions("off")),
            "FILE, this one by OFF",
        ),
    ],
    ids=["files", "shuffles", "policy"],
)
def test_a_state_of_other_input_is_refused_with_the_difference(other, named):
    _, states = begun(PIPELINES["in order"], (1, 1), InputOptions("file"), 1)
    with pytest.raises(ValueError, match="load_state_dict") as caught:
        iter(distribute(other(), cpus(1))).load_state_dict(json.loads(states[0]))
    assert named in str(caught.value)


def test_files_that_workers_shared_are_not_gone_on_with_by_workers_that_can_not_meet():
    _, states = begun(PIPELINES["in order"], (1, 1), InputOptions("file"), 1)
    dataset = distribute(PIPELINES["in order"](), cpus(1), num_workers=2)
    with pytest.raises(ValueError, match="pass their communicator"):
        iter(dataset).load_state_dict(json.loads(states[0]))


def test_workers_without_a_communicator_resume_what_they_can_by_arithmetic():
    def make(context):
        return Dataset.range(8).shard(2, context.input_pipeline_id).batch(1)

    for worker in range(2):
        dataset = distribute_from_function(make, cpus(1), None, 2, worker)
        iterator = iter(dataset)
        next(iterator)
        resumed = iter(dataset)
        resumed.load_state_dict(iterator.state_dict())
        assert np.concatenate([step.values[0] for step in resumed]).tolist() == list(
            range(worker + 2, 8, 2)
        )
