"""Loaders of other libraries say themselves where they are; workers must have equal ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.data import Dataset, InputOptions, as_dataset
from tests.data.workers import (
    cpus,
    distribute,
    distribute_from_function,
    on_workers,
    pieces_of,
    raised,
)
from tests.processes import Ranks


class Loader:
    """Six batches of four rows, in another order each epoch."""

    def __init__(self, seed=0):
        self.seed = seed
        self.epoch = 0
        self.given = 0

    def __iter__(self):
        order = np.random.default_rng((self.seed, self.epoch)).permutation(6)
        for number in order[self.given :].tolist():
            self.given += 1
            yield np.arange(4 * number, 4 * number + 4)
        self.epoch, self.given = self.epoch + 1, 0


class Stateful(Loader):
    """Knows where it is, as a `StatefulDataLoader` does."""

    def state_dict(self):
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state):
        vars(self).update(state)


def over_replicas(loader, options):
    return distribute(loader, cpus(2), options)


def of_a_function(loader, options):
    return distribute_from_function(lambda context: loader, cpus(2), options)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [over_replicas, of_a_function])
@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_loader_resumes_by_its_own_state(make, prefetch, taken, epochs):
    before, after = (make(Stateful(), InputOptions(prefetch=prefetch)) for _ in range(2))
    for _ in range(epochs):
        list(before)
    interrupted = iter(before)
    for _ in range(taken):
        next(interrupted)
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = iter(after)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert pieces_of(resumed) == pieces_of(interrupted)
    assert pieces_of(after) == pieces_of(before)


def test_the_state_of_a_loader_is_taken_between_its_batches():
    """Without sharding a worker's replica takes a third of each batch at a step."""

    def iterator():
        return iter(distribute(Stateful(), cpus(1), InputOptions("off"), 3, 1))

    interrupted, resumed = iterator(), iterator()
    next(interrupted)
    with pytest.raises(ValueError, match="Take the state after 3 pieces"):
        interrupted.state_dict()
    for _ in range(2):
        next(interrupted)
    resumed.load_state_dict(interrupted.state_dict())
    assert pieces_of(resumed) == pieces_of(interrupted)


def test_the_state_of_a_loader_that_is_over_leaves_nothing():
    over, after = iter(distribute(Stateful(), cpus(1))), distribute(Stateful(), cpus(1))
    list(over)
    resumed = iter(after)
    resumed.load_state_dict(over.state_dict())
    assert list(resumed) == []
    assert len(list(after)) == 6


@pytest.mark.parametrize(
    "build",
    [
        Loader,
        lambda: Dataset.zip((Stateful(), Dataset.range(16).batch(4))),
        lambda: Dataset.range(4).batch(4).concatenate(Stateful()),
    ],
    ids=["no state", "in a zip", "in a concatenation"],
)
def test_a_loader_that_can_not_be_resumed_says_so(build):
    iterator = iter(distribute(build(), cpus(2)))
    next(iterator)
    for call in (iterator.state_dict, lambda: iterator.load_state_dict({})):
        with pytest.raises(ValueError, match=r"nobody can tell.*Dataset\.from_generator"):
            call()


def test_an_iterator_that_was_closed_is_gone_on_with():
    closed, resumed = (iter(distribute(Stateful(), cpus(1))) for _ in range(2))
    next(closed)
    closed.close()
    resumed.load_state_dict(closed.state_dict())
    assert len(list(resumed)) == 5


def test_a_part_of_a_loader_is_taken_by_position():
    everything = [batch.tolist() for batch in Stateful()]
    assert [batch.tolist() for batch in as_dataset(Stateful()).skip(2).take(3)] == everything[2:5]


def test_a_part_of_a_loader_with_a_state_is_not_read_ahead():
    """A worker of a `ParameterServerStrategy` takes its part of the batches."""
    loader = Stateful()
    iterator = iter(distribute(as_dataset(loader).shard(2, 0), cpus(1)))
    next(iterator)
    assert loader.given == 1


def test_the_state_of_a_loader_is_loaded_by_a_loader_alone():
    state = iter(distribute(Stateful(), cpus(1))).state_dict()
    with pytest.raises(ValueError, match="Distribute the same input"):
        iter(distribute(Dataset.range(4).batch(2), cpus(1))).load_state_dict(state)
    del state["loader"]
    with pytest.raises(ValueError, match="Distribute the same input"):
        iter(distribute(Stateful(), cpus(1))).load_state_dict(state)


def test_each_worker_loads_the_state_of_its_own_loader():
    def make(worker):
        dataset = distribute_from_function(lambda _: Stateful(worker), cpus(1), None, 2, worker)
        return iter(dataset)

    states = [make(worker).state_dict() for worker in range(2)]
    make(1).load_state_dict(states[1])
    with pytest.raises(ValueError, match="loader of worker 0, this is worker 1"):
        make(1).load_state_dict(states[0])


def test_under_data_one_worker_s_state_serves_all():
    def take(workers):
        iterator = iter(distribute(Stateful(), cpus(1), workers=workers))
        next(iterator)
        return iterator.state_dict(), pieces_of(iterator)

    (state, *_), (_, *rest) = raised(on_workers(2, take))

    def resume(workers):
        iterator = iter(distribute(Stateful(), cpus(1), workers=workers))
        iterator.load_state_dict(state)
        return pieces_of(iterator)

    assert raised(on_workers(2, resume))[1] == rest[0]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loaders_whose_order_differs_between_workers_are_refused(prefetch):
    def work(workers):
        loader = Loader(seed=workers.rank)
        return list(distribute(loader, cpus(1), InputOptions(prefetch=prefetch), workers=workers))

    for error in on_workers(2, work):
        assert isinstance(error, ValueError)
        assert "digest of the first batch" in str(error)
        assert "seed the loader alike on all workers" in str(error)


def augmented(rank):
    """Return labels that all workers have, beside values that each draws for itself."""
    noise = np.random.default_rng(rank)
    return [(np.arange(4) + 4 * i, noise.random((4, 3))) for i in range(3)]


def of_objects(rank):
    return [np.array([object(), {"a", "b", str(rank)}], object) for _ in range(3)]


@pytest.mark.parametrize("build", [augmented, of_objects])
def test_loaders_of_one_order_may_differ_in_what_does_not_tell_the_order(build):
    def work(workers):
        return len(list(distribute(build(workers.rank), cpus(1), workers=workers)))

    assert raised(on_workers(2, work)) == [3, 3]


def test_a_refused_loader_may_be_given_as_a_generator():
    def work(workers):
        loader = [images for _, images in augmented(workers.rank)]
        with pytest.raises(ValueError, match=r"Dataset\.from_generator\(lambda: iter\(loader\)\)"):
            list(distribute(loader, cpus(1), workers=workers))
        generated = Dataset.from_generator(lambda: iter(loader))
        return len(list(distribute(generated, cpus(1), workers=workers)))

    assert raised(on_workers(2, work)) == [3, 3]


def shared_by_processes(rank, size):
    """Go through loaders of one order, and then through those of another order each."""
    with nd.MultiWorkerMirroredStrategy() as strategy:
        alike = len(list(strategy.distribute_dataset(Loader())))
        try:
            list(strategy.distribute_dataset(Loader(seed=rank)))
        except ValueError as error:
            return alike, str(error)


def test_processes_refuse_loaders_whose_order_differs():
    with Ranks(2) as ranks:
        for outcome in ranks.run(shared_by_processes):
            steps, refusal = outcome.result()
            assert steps == 6
            assert "digest of the first batch" in refusal


def test_loaders_of_one_order_are_shared():
    def work(workers):
        return pieces_of(distribute(Loader(), cpus(1), workers=workers)), workers.calls_made

    (first, calls), (second, _) = raised(on_workers(2, work))
    rows = [row for step in first + second for piece in step for row in piece]
    assert sorted(rows) == list(range(24))
    assert calls == 3  # At the begin, for the first batch and at the end.


def test_each_worker_may_have_another_order_without_sharding():
    def work(workers):
        dataset = distribute(Loader(workers.rank), cpus(1), InputOptions("off"), workers=workers)
        return len(pieces_of(dataset))

    assert raised(on_workers(2, work)) == [12, 12]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda rank: Dataset.range(8 - rank).batch(4), "length of its sources is 8 on worker 0"),
        (lambda rank: Dataset.range(8).batch(4 + rank), "batch size is 4 on worker 0"),
        (
            lambda rank: Dataset.from_generator(lambda: iter(range(8 - rank))).batch(4),
            "number of rows of the epoch is 8 on worker 0 and 7 on worker 1",
        ),
        (
            lambda rank: Dataset.from_generator(lambda: iter(range(4 - rank))).batch(4),
            r"first batch is int64\[4\] on worker 0 and int64\[3\] on worker 1",
        ),
        (
            lambda rank: Dataset.from_generator(lambda: iter(range(4 * rank))).batch(4),
            "number of rows of the epoch is 0 on worker 0 and missing on worker 1",
        ),
        (
            lambda rank: [np.zeros(4), np.zeros(4 - rank)],
            "number of rows of the epoch is 8 on worker 0 and 7 on worker 1",
        ),
        (
            lambda rank: [np.zeros(2, object), np.zeros(2 - rank, object)],
            "number of rows of the epoch is 4 on worker 0 and 3 on worker 1",
        ),
    ],
    ids=["arrays", "batch size", "generator", "first batch", "none", "list", "objects"],
)
def test_workers_whose_data_differ_in_rows_but_not_in_batches_are_told(build, message):
    def work(workers):
        return list(distribute(build(workers.rank), cpus(1), workers=workers))

    for error in on_workers(2, work):
        with pytest.raises(ValueError, match=message):
            raise error
