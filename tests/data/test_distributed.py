"""Each replica gets its piece of each global batch, and every row is used exactly once."""

import threading

import numpy as np
import pytest

from ndistribute.data import UNKNOWN_CARDINALITY, Dataset, InputContext, InputOptions
from ndistribute.values import PerReplica
from tests.data.workers import (
    all_threads_end,
    cpus,
    distribute,
    distribute_from_function,
    pieces_of,
)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_parts_are_views_for_each_replica_and_an_empty_one_keeps_rank_and_dtype(replicas):
    arrays = {"x": np.zeros((2, 28, 28), np.float16), "y": (np.arange(2),)}
    (step,) = distribute(Dataset.from_tensor_slices(arrays).batch(4), cpus(replicas))
    assert type(step["x"]) is type(step["y"][0]) is PerReplica
    rows = {1: [2], 2: [1, 1], 3: [1, 1, 0]}[replicas]
    assert [part.shape for part in step["x"].values] == [(count, 28, 28) for count in rows]
    assert {part.dtype for part in step["x"].values} == {np.dtype(np.float16)}
    assert all(np.shares_memory(part, arrays["x"]) for part in step["x"].values[: len(rows[:2])])


def test_without_sharding_each_worker_goes_through_all_data_in_its_share_of_the_batch():
    options = InputOptions(auto_shard_policy="off")
    for worker in range(2):
        distributed = distribute(Dataset.range(8).batch(8), cpus(2), options, 2, worker)
        assert pieces_of(distributed) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert distributed.cardinality() == 2


def test_any_re_iterable_of_batches_is_accepted():
    class Loader:
        def __len__(self):
            raise TypeError("a stream has no length")

        def __iter__(self):
            yield [np.arange(4).reshape(2, 2), [0, 1]]
            yield [np.arange(3).reshape(1, 3), [2]]

    distributed = distribute(Loader(), cpus(2))
    for _ in range(2):
        steps = [[x.values, y.values] for x, y in distributed]
        assert [[piece.shape for piece in x] for x, _ in steps] == [[(1, 2)] * 2, [(1, 3), (0, 3)]]
        assert [[piece.tolist() for piece in y] for _, y in steps] == [[[0], [1]], [[2], []]]
    assert distributed.cardinality() == UNKNOWN_CARDINALITY
    assert distribute([np.arange(2)], cpus(1)).cardinality() == 1
    assert pieces_of(distribute([], cpus(2))) == []


def test_several_workers_take_as_many_steps_as_one_unless_each_reads_everything():
    batches = Dataset.range(9).batch(4)
    assert distribute(batches, cpus(1), num_workers=2).cardinality() == 3
    assert distribute(batches, cpus(1), InputOptions("off"), num_workers=2).cardinality() == 6


def test_a_function_gives_each_replica_its_own_batches():
    seen = []

    def make(input_context):
        seen.append(input_context)
        return Dataset.range(10).batch(input_context.get_per_replica_batch_size(4))

    distributed = distribute_from_function(make, cpus(2), num_workers=1)
    assert pieces_of(distributed) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]
    assert pieces_of(distributed) == pieces_of(distributed)
    assert distributed.cardinality() == 3
    distribute_from_function(lambda c: seen.append(c) or [], cpus(2), None, 3, 1)
    assert seen == [InputContext(1, 0, 2), InputContext(3, 1, 6)]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_reaches_the_step_that_it_belongs_to(prefetch, failing):
    healthy = threading.Event()

    def batches():
        for number in range(4):
            if number == failing and not healthy.is_set():
                raise ZeroDivisionError
            yield np.full(2, number)

    distributed = distribute(
        Dataset.from_generator(batches), cpus(2), InputOptions(prefetch=prefetch)
    )
    iterator = iter(distributed)
    assert [next(iterator).values[0].item() for _ in range(failing)] == list(range(failing))
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    with pytest.raises(RuntimeError, match="an error has ended"):
        next(iterator)
    assert all_threads_end()
    healthy.set()
    assert len(list(distributed)) == 4


@pytest.mark.parametrize("taken", [0, 1])
def test_no_thread_is_left_when_an_iterator_is_dropped_or_closed(taken):
    endless = Dataset.range(4).repeat().batch(2).map(lambda x: x).prefetch(1)
    for leave in (lambda iterator: iterator.close(), lambda iterator: None):
        iterator = iter(distribute(endless, cpus(2), InputOptions(prefetch=2)))
        for _ in range(taken):
            next(iterator)
        leave(iterator)
        del iterator
        assert all_threads_end()


def test_a_dataset_function_is_called_for_each_replica_and_short_ones_end_with_empty_batches():
    seen = []

    def make(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id))
        return Dataset.range(3 - context.input_pipeline_id).batch(1)

    options = InputOptions(experimental_replication_mode="per_replica")
    dataset = distribute_from_function(make, cpus(2), options)
    assert seen == [(2, 0), (2, 1)]
    assert pieces_of(dataset) == [[[0], [0]], [[1], [1]], [[2], []]]
    assert dataset.cardinality() == 3
    iterator = iter(dataset)
    next(iterator)
    resumed = iter(dataset)
    resumed.load_state_dict(iterator.state_dict())
    assert pieces_of(resumed) == pieces_of(iterator) == [[[1], [1]], [[2], []]]


def test_input_options_are_checked_together():
    options = InputOptions(experimental_per_replica_buffer_size=3)
    assert options.prefetch == 3
    assert InputOptions(experimental_fetch_to_device=False).to_device is False
    on_device = {"experimental_place_dataset_on_device": True}
    assert InputOptions(experimental_fetch_to_device=False, **on_device).to_device
    for wrong, message in (
        (lambda: InputOptions(**on_device), "cannot be True while"),
        (lambda: InputOptions("off", 2, experimental_per_replica_buffer_size=3), "not both"),
        (
            lambda: distribute(
                Dataset.range(4).batch(2),
                cpus(2),
                InputOptions(experimental_replication_mode="per_replica"),
            ),
            "PER_REPLICA is for distribute_datasets_from_function",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
