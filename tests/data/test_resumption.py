"""An iterator that is loaded from a state goes on with exactly the batches that were left."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.data import Dataset, InputOptions
from tests.data.workers import cpus, distribute, distribute_from_function


def rows_of(steps):
    """Return the rows of each step, whatever the number of replicas."""
    return [np.concatenate(step.values).tolist() for step in steps]


def distributed(build, replicas=2, prefetch=0):
    return distribute(build(), cpus(replicas), InputOptions(prefetch=prefetch))


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


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES)
@settings(max_examples=15)
@given(
    epochs=st.integers(0, 2),
    taken=st.integers(0, 3),
    prefetch=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    replicas=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_the_rest_of_the_epoch_and_the_next_one_are_the_same(
    build, epochs, taken, prefetch, replicas
):
    before = distributed(build, replicas[0], prefetch[0])
    for _ in range(epochs):
        list(before)
    interrupted = iter(before)
    for _ in range(taken):
        next(interrupted)
    state = json.loads(json.dumps(interrupted.state_dict()))

    after = distributed(build, replicas[1], prefetch[1])
    resumed = iter(after)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert rows_of(resumed) == rows_of(interrupted)
    assert rows_of(after) == rows_of(before)


def test_an_iterator_can_be_taken_back_also_when_it_is_over():
    iterator = iter(distributed(PIPELINES["shuffled with a seed"], prefetch=2))
    next(iterator)
    state = iterator.state_dict()
    rest = rows_of(iterator)
    over = iterator.state_dict()
    iterator.load_state_dict(state)
    assert rows_of(iterator) == rest
    iterator.load_state_dict(over)
    assert rows_of(iterator) == []


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_batches_that_replicas_take_one_by_one_are_resumed(replicas, others, taken):
    def make(_):
        return Dataset.range(12).shuffle(12, seed=3).batch(1)

    def over(count):
        return iter(distribute_from_function(make, cpus(count)))

    interrupted, resumed = over(replicas), over(others)
    for _ in range(taken):
        next(interrupted)
    resumed.load_state_dict(interrupted.state_dict())
    assert list(chain(*rows_of(resumed))) == list(chain(*rows_of(interrupted)))


def test_a_state_of_another_pipeline_is_refused():
    state = iter(distributed(PIPELINES["in order"])).state_dict()
    with pytest.raises(ValueError, match="0 shuffle"):
        iter(distributed(PIPELINES["window"])).load_state_dict(state)
    with pytest.raises(ValueError, match="'sharding', 'files' and 'shards'"):
        iter(distributed(PIPELINES["window"])).load_state_dict({"step": 3})
