"""Loaders of other libraries say themselves where they are; workers must have equal ones."""

import json
import threading

import numpy as np
import pytest

from ndistribute.data import Dataset, InputOptions, as_dataset, elements
from tests.data.workers import (
    DEADLINE_SECONDS,
    all_raise,
    cpus,
    distribute,
    distribute_from_function,
    on_workers,
    pieces_of,
    raised,
    shared,
)


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


class Sized(Stateful):
    """Has fewer batches than its parent."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def __iter__(self):
        for number in range(self.given, self.size):
            self.given += 1
            yield np.arange(4) + 4 * number
        self.epoch, self.given = self.epoch + 1, 0


def interrupted(dataset, taken):
    """Return the state after some steps, the steps that were left, and an epoch after them."""
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    return iterator.state_dict(), pieces_of(iterator), pieces_of(dataset)


def resumed(dataset, state):
    """Return the steps that are left by a state, and an epoch after them."""
    iterator = iter(dataset)
    iterator.load_state_dict(state)
    assert iterator.state_dict()["loader"]["state"] == state["loader"]["state"]
    return pieces_of(iterator), pieces_of(dataset)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize(("taken", "epochs"), [(0, 1), (1, 0), (3, 1)])
def test_a_loader_resumes_by_its_own_state(by_function, prefetch, taken, epochs):
    def make():
        options = InputOptions(prefetch=prefetch)
        if by_function:
            return distribute_from_function(lambda context: Stateful(), cpus(2), options)
        return distribute(Stateful(), cpus(2), options)

    before, after = make(), make()
    for _ in range(epochs):
        list(before)
    state, *rest = interrupted(before, taken)
    assert resumed(after, json.loads(json.dumps(state))) == tuple(rest)


def sized(workers, options):
    size = 2 if workers.rank else 6
    return distribute_from_function(lambda _: Sized(size), cpus(1), options, workers=workers)


def stateful(workers, options):
    return distribute(Stateful(), cpus(1), options, workers=workers)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("make", "policy", "of_worker"),
    [(stateful, "off", None), (sized, "auto", None), (stateful, "data", 0), (stateful, "data", 1)],
    ids=["without sharding", "ended before others", "by the first's state", "by the other's state"],
)
def test_loaders_resume_on_each_worker(make, policy, of_worker, prefetch):
    options = InputOptions(policy, prefetch)
    before = raised(on_workers(2, lambda workers: interrupted(make(workers, options), 4)))

    def resume(workers):
        state = before[workers.rank if of_worker is None else of_worker][0]
        return resumed(make(workers, options), state)

    assert raised(on_workers(2, resume)) == [tuple(rest) for _, *rest in before]
    assert make is not sized or before[1][1] == [[[]], [[]]]


def test_a_loader_is_read_ahead_only_on_request():
    third = threading.Event()

    class Watched(Stateful):
        def __iter__(self):
            for batch in super().__iter__():
                if self.given == 3:
                    third.set()
                yield batch

    for prefetch in (None, 0, 1):
        loader = Watched()
        iterator = iter(distribute(loader, cpus(2), InputOptions(prefetch=prefetch)))
        next(iterator)
        assert third.wait(DEADLINE_SECONDS) if prefetch else loader.given == 1
        assert iterator.state_dict()["loader"]["state"] == {"epoch": 0, "given": 1}
        iterator.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_state_of_a_loader_is_taken_between_its_batches(prefetch):
    """Without sharding a worker's replica takes a third of each batch at a step."""

    def iterator():
        return iter(distribute(Stateful(), cpus(1), InputOptions("off", prefetch), 3, 1))

    before, after = iterator(), iterator()
    next(before)
    with pytest.raises(ValueError, match="Take the state after all 3 parts"):
        before.state_dict()
    for _ in range(2):
        next(before)
    after.load_state_dict(before.state_dict())
    assert pieces_of(after) == pieces_of(before)


def test_the_state_of_a_loader_that_is_over_leaves_nothing_and_of_a_closed_iterator_the_rest():
    over, closed = (iter(distribute(Stateful(), cpus(1))) for _ in range(2))
    list(over)
    next(closed)
    closed.close()
    assert list(closed) == []
    for iterator, left in ((over, 0), (closed, 5)):
        rest, after = resumed(distribute(Stateful(), cpus(1)), iterator.state_dict())
        assert (len(rest), len(after)) == (left, 6)


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
    other = iter(distribute(Dataset.range(4).batch(4), cpus(2))).state_dict()
    for call in (iterator.state_dict, lambda: iterator.load_state_dict(other)):
        with pytest.raises(ValueError, match=r"position cannot be saved.*Dataset\.from_generator"):
            call()


def test_a_part_of_a_loader_is_taken_by_position_and_not_read_ahead():
    """A worker of a `ParameterServerStrategy` takes its part of the batches."""
    loader, everything = Stateful(), [batch.tolist() for batch in Stateful()]
    iterator = iter(distribute(as_dataset(loader).shard(2, 0).skip(1), cpus(1)))
    assert next(iterator).values[0].tolist() == everything[2]
    assert loader.given == 3


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
    with pytest.raises(
        ValueError, match="worker 0 of 2 saved this state of its loader, but this is worker 1"
    ):
        make(1).load_state_dict(states[0])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loaders_whose_order_differs_between_workers_are_refused(prefetch):
    steps = shared(2, Loader, InputOptions(prefetch=prefetch))
    all_raise(steps, ValueError, "digest of the first batch.*seed all loaders equally")


def augmented(rank):
    """Return labels that all workers have, beside values that each draws for itself."""
    noise = np.random.default_rng(rank)
    return [(np.arange(4) + 4 * i, noise.random((4, 3))) for i in range(3)]


def values_alone(rank):
    return [images for _, images in augmented(rank)]


@pytest.mark.parametrize(
    "build",
    [
        augmented,
        lambda rank: [np.array([object(), {"a", "b", str(rank)}], object) for _ in range(3)],
        lambda rank: Dataset.from_generator(lambda: iter(values_alone(rank))),
    ],
    ids=["labels", "objects", "generator"],
)
def test_loaders_of_one_order_may_differ_in_what_does_not_tell_the_order(build):
    assert [len(steps) for steps in shared(2, build)] == [3, 3]


def test_loaders_of_one_order_are_shared():
    def work(workers):
        return pieces_of(distribute(Loader(), cpus(1), workers=workers)), workers.calls_made

    (first, calls), (second, _) = raised(on_workers(2, work))
    rows = [row for step in first + second for piece in step for row in piece]
    assert sorted(rows) == list(range(24))
    assert calls == 3  # At the begin, for the first batch and at the end.


def generated(count):
    return Dataset.from_generator(lambda: iter(range(count))).batch(4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda rank: Dataset.range(8 - rank).batch(4), "length of its sources is 8 on worker 0"),
        (lambda rank: Dataset.range(8 + rank).batch(2), "number of batches is 4 on worker 0 and 5"),
        (lambda rank: Dataset.range(8).batch(4 + rank), "batch size is 4 on worker 0"),
        (lambda rank: [Dataset.range(4), Dataset.range(4).shuffle(2)][rank].batch(2), "shuffles"),
        (lambda rank: Dataset.from_files(["a.npy"] * (2 + rank)).batch(2), "number of files is 2"),
        (lambda rank: generated(8 - rank), "rows of the epoch is 8 on worker 0 and 7 on worker 1"),
        (lambda rank: generated(4 - rank), r"first batch is int64\[4\] on worker 0 and int64\[3\]"),
        (lambda rank: generated(4 * rank), "rows of the epoch is 0 on worker 0 and missing on"),
        (
            lambda rank: [np.zeros(2, object), np.zeros(2 - rank, object)],
            "rows of the epoch is 4 on worker 0 and 3 on worker 1",
        ),
    ],
)
def test_an_error_names_the_difference_of_the_workers_data(build, message):
    all_raise(shared(2, build), ValueError, message)


ROWS = np.random.default_rng(0).random((3000, 1000))  # 24 MB, several pieces of a checksum.
LABELS = np.arange(3000)


def arrays_of(rank, change):
    """Return arrays that worker 1 has otherwise."""
    x, y = ROWS, LABELS
    order = np.random.default_rng(rank).permutation(len(y)) if rank else np.arange(len(y))
    if rank and change == "a value":
        x = x.copy()
        x[1700, 3] += 1e-9
    return {
        "the labels' order": (x, y[order]),
        "the order": (x[order], y[order]),
        "a value": (x, y),
        "strings": (x[:9], np.array(["ab", "cd", "ef"] * 3, object)[order[:9] % 9]),
        "nothing": (np.asfortranarray(x) if rank else x, y),
    }[change]


@pytest.mark.parametrize(
    ("change", "array"),
    [("the labels' order", 1), ("the order", 0), ("a value", 0), ("strings", 1)],
)
def test_an_error_names_the_array_in_which_workers_differ(change, array):
    steps = shared(2, lambda rank: Dataset.from_tensor_slices(arrays_of(rank, change)).batch(500))
    message = rf"array {array} is \w+\[.*on worker 0 .*on worker 1"
    all_raise(steps, ValueError, message)


def test_arrays_are_compared_once_and_only_where_workers_divide_them():
    def work(workers, change, options=None):
        dataset = Dataset.from_tensor_slices(arrays_of(workers.rank, change)).batch(500)
        distributed = distribute(dataset, cpus(1), options, workers=workers)
        calls = workers.calls_made
        iter(distributed).close()
        begun = workers.calls_made - calls
        source = dataset._node.inputs[0]
        return begun, len(vars(source).get("contents", ())), len(list(distributed))

    assert raised(on_workers(2, lambda workers: work(workers, "nothing"))) == [(1, 2, 6)] * 2
    apart = InputOptions("off")
    own = raised(on_workers(2, lambda workers: work(workers, "the order", apart)))
    assert own == [(1, 0, 12)] * 2


def test_an_array_above_the_limit_is_compared_by_pieces(monkeypatch):
    monkeypatch.setattr(elements, "_PIECE", 80)
    whole = np.arange(10_000.0).reshape(100, 100)
    last, shuffled, one = whole.copy(), np.random.default_rng(0).permutation(whole), whole.copy()
    last[-1, -1], one[0, 15] = -1, -1
    assert elements.checksum(whole) == elements.checksum(np.asfortranarray(whole))
    assert elements.checksum(last) != elements.checksum(whole) != elements.checksum(shuffled)
    assert elements.checksum(one) == elements.checksum(whole)  # Between two pieces.
