"""`ClusterCoordinator` with a worker in this very process: what it promises whoever schedules."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest

from ndistribute.cluster import SimpleClusterResolver, worker_index
from ndistribute.cluster.resolvers import enter_task
from ndistribute.coordinator import coordinator as coordinators
from ndistribute.coordinator import worker
from ndistribute.coordinator.coordinator import ClusterCoordinator
from ndistribute.data import Dataset
from ndistribute.errors import CollectiveTimeoutError
from tests.coordinator.errands import double, fail
from tests.faults.tasks import wait_until

pytest.importorskip("cloudpickle")

GATE = threading.Event()
BEGUN = threading.Event()


def pass_gate() -> str:
    BEGUN.set()
    GATE.wait(timeout=50)
    return "passed"


@pytest.fixture
def coordinator() -> Iterator[ClusterCoordinator]:
    GATE.clear()
    BEGUN.clear()
    strategy = SimpleNamespace(cluster_resolver=None, servers=None)
    try:
        with ClusterCoordinator(strategy) as made:
            yield made
            GATE.set()
    finally:
        GATE.set()


def test_results_come_back(coordinator):
    results = [coordinator.schedule(double, (n,)) for n in range(20)]
    coordinator.join()
    assert coordinator.done()
    assert all(result.done() for result in results)
    assert coordinator.fetch({"all": results, "other": 7}) == {
        "all": list(range(0, 40, 2)),
        "other": 7,
    }


def test_functions_of_all_kinds_travel(coordinator):
    offset = 5

    class Adder:
        def __init__(self) -> None:
            self.by = offset

        def add(self, x: int, *, twice: bool = False) -> int:
            return x + self.by * (1 + twice)

    adder = Adder()
    first = coordinator.schedule(adder.add, args=[1], kwargs={"twice": True})
    coordinator.join()
    adder.by = 6
    assert coordinator.fetch([first, coordinator.schedule(adder.add, (1,))]) == [11, 7]
    assert coordinator.schedule(max, ([3, 9, 4],)).fetch() == 9


def test_results_are_arguments_wherever_they_stand(coordinator):
    gate = coordinator.schedule(pass_gate)
    text = coordinator.schedule(
        lambda nest: nest["deep"][0] + nest["deep"][1], ({"deep": [gate, "!"]},)
    )
    again = coordinator.schedule(lambda a, b: a + b, (text,), {"b": text})
    assert not again.done()
    GATE.set()
    assert again.get() == "passed!passed!"


def test_arrays_travel_and_can_be_written_to(coordinator):
    def increment(array: np.ndarray) -> np.ndarray:
        array += 1
        return array

    start = np.arange(400_000.0)
    small = coordinator.schedule(increment, (np.zeros((2, 3), np.float32),)).fetch()
    value = coordinator.schedule(increment, (start,))
    result = coordinator.schedule(increment, (value,)).fetch()
    result[:] += 1
    assert small.tolist() == [[1, 1, 1], [1, 1, 1]]
    np.testing.assert_array_equal(result, np.arange(400_000.0) + 3)
    np.testing.assert_array_equal(start, np.arange(400_000.0))
    assert value.fetch() is value.fetch()


def test_a_dataset_with_a_shuffle_is_sent_and_begins_with_the_epoch_it_had_next(coordinator):
    dataset = Dataset.range(9).shuffle(9, seed=1).batch(9)
    (first,), (second,) = ([batch.tolist() for batch in dataset] for _ in range(2))
    sent = coordinator.create_per_worker_dataset(dataset)
    third = coordinator.schedule(next, (iter(sent),)).fetch().tolist()
    assert third == next(iter(dataset)).tolist()
    assert third not in (first, second)
    assert sorted(third) == list(range(9))


def test_a_per_worker_iterator_goes_on_where_it_was(coordinator):
    dataset = coordinator.create_per_worker_dataset(lambda: [worker_index() + n for n in range(3)])
    one, two = iter(dataset), iter(dataset)
    results = [coordinator.schedule(next, (it,)) for it in (one, one, two, one)]
    assert coordinator.fetch(results) == [0, 1, 0, 2]
    coordinator.schedule(next, (one,))
    with pytest.raises(StopIteration):
        coordinator.join()
    assert coordinator.schedule(next, (two,)).fetch() == 1
    assert coordinator.schedule(len, (dataset,)).fetch() == 3
    assert (
        coordinator.schedule(next, (iter(coordinator.create_per_worker_dataset([8])),)).get() == 8
    )
    with pytest.raises(RuntimeError, match="workers alone"):
        next(one)


def test_an_iterator_that_nobody_holds_is_dropped_on_the_worker(coordinator):
    dropped = threading.Event()
    _dropped.append(dropped)
    try:
        iterator = iter(coordinator.create_per_worker_dataset(telling))
        assert coordinator.schedule(next, (iterator,)).fetch() == 0
        del iterator
        coordinator.schedule(double, (1,))  # Which tells the worker.
        assert dropped.wait(timeout=50)
    finally:
        _dropped.clear()


_dropped: list[threading.Event] = []


def telling() -> Iterator[int]:
    try:
        yield from range(10)
    finally:
        _dropped[0].set()


def test_the_first_error_is_raised_once_and_the_rest_is_cancelled(coordinator):
    running = coordinator.schedule(pass_gate)
    bad = coordinator.schedule(fail, ("no",))
    later = [coordinator.schedule(double, (1,)) for _ in range(5)]
    GATE.set()
    with pytest.raises(LookupError, match="no") as caught:
        coordinator.join()
    (note,) = caught.value.__notes__
    assert "closure 2 (fail) raised this on worker:0" in note
    assert "raise LookupError(text)" in note
    assert running.fetch() == "passed"
    with pytest.raises(LookupError, match="no"):
        bad.fetch()
    with pytest.raises(CancelledError, match=r"double.* was cancelled.*LookupError: no"):
        later[-1].fetch()
    coordinator.join()
    assert coordinator.done()
    for call in (coordinator.done, lambda: coordinator.schedule(double, (1,))):
        with pytest.raises(LookupError):
            coordinator.schedule(fail, ("no",)).fetch()
        with pytest.raises(LookupError):
            call()
    assert coordinator.schedule(double, (4,)).fetch() == 8


def test_a_value_that_failed_is_no_argument(coordinator):
    bad = coordinator.schedule(fail, ("no",))
    with pytest.raises(LookupError):
        coordinator.join()
    with pytest.raises(ValueError, match="RemoteValue of fail, failed"):
        coordinator.schedule(double, (bad,))
    assert coordinator.schedule(double, (1,)).fetch() == 2


class UnkindError(Exception):
    """Can not be made from what it says."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_what_can_not_travel_back_is_told_in_words(coordinator):
    def raise_unkind() -> None:
        raise UnkindError(1, 2)

    def leave() -> None:
        raise SystemExit(3)

    coordinator.schedule(raise_unkind)
    with pytest.raises(RuntimeError, match="UnkindError: 1 and 2"):
        coordinator.join()
    coordinator.schedule(leave)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        coordinator.join()
    coordinator.schedule(threading.Lock)
    with pytest.raises(ValueError, match="returned a lock, which cannot be pickled"):
        coordinator.join()


def test_what_can_not_be_sent_is_named(coordinator):
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"the function .*<lambda> cannot be sent.*lock"):
        coordinator.schedule(lambda: lock)
    with pytest.raises(ValueError, match=r"args\[1\] of double, a lock, cannot be sent"):
        coordinator.schedule(double, (1, lock))
    with pytest.raises(ValueError, match=r"kwargs\['x'\] of double"):
        coordinator.schedule(double, kwargs={"x": [lock]})
    with pytest.raises(ValueError, match="the dataset cannot be sent"):
        coordinator.create_per_worker_dataset(lambda: lock)
    value = coordinator.schedule(double, (1,))
    with pytest.raises(ValueError, match="among the args or kwargs"):
        coordinator.schedule(lambda: value)
    with pytest.raises(TypeError, match="takes a function"):
        coordinator.schedule(3)
    with pytest.raises(TypeError, match=r"args is a ndarray, not a tuple: write args=\(x,\)"):
        coordinator.schedule(double, np.ones(3))
    assert value.fetch() == 2


def test_a_value_belongs_to_its_coordinator(coordinator):
    strategy = SimpleNamespace(cluster_resolver=None, servers=None)
    with ClusterCoordinator(strategy) as other:
        value = other.schedule(double, (1,))
        with pytest.raises(ValueError, match="another coordinator"):
            coordinator.schedule(double, (value,))


def test_a_full_queue_lets_schedule_wait(coordinator, monkeypatch):
    monkeypatch.setattr(coordinator._queue, "capacity", 3)
    coordinator.schedule(pass_gate)
    assert BEGUN.wait(timeout=50)
    results = []
    full = threading.Event()

    def produce() -> None:
        for n in range(10):
            if n == 3:
                full.set()
            results.append(coordinator.schedule(double, (n,)))

    producer = threading.Thread(target=produce)
    producer.start()
    assert full.wait(timeout=50)
    assert len(results) <= 4
    GATE.set()
    producer.join(timeout=50)
    coordinator.join()
    assert coordinator.fetch(results) == list(range(0, 20, 2))


class SilentError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("it has no words")


class StayingError(SilentError):
    def __reduce__(self) -> str:
        raise TypeError("it cannot be pickled either")


def throw(kind: type[Exception]) -> None:
    raise kind


@pytest.mark.parametrize(
    ("thrown", "raised"), [(SilentError, SilentError), (StayingError, RuntimeError)]
)
def test_an_error_without_words_is_raised_like_any_other(coordinator, thrown, raised):
    coordinator.schedule(pass_gate)
    values = [coordinator.schedule(throw, (thrown,)) for _ in range(20)]
    GATE.set()
    with pytest.raises(raised):
        coordinator.join(timeout=50)
    with pytest.raises(CancelledError, match=thrown.__name__):
        values[-1].fetch()
    assert coordinator.schedule(double, (1,)).fetch(timeout=50) == 2


def test_join_has_a_deadline_and_everything_goes_on(coordinator):
    value = coordinator.schedule(pass_gate)
    with pytest.raises(CollectiveTimeoutError, match=r"1 function\(s\) still run"):
        coordinator.join(timeout=0.05)
    with pytest.raises(CollectiveTimeoutError, match="pass_gate"):
        value.fetch(timeout=0.01)
    assert not coordinator.done()
    GATE.set()
    coordinator.join(timeout=50)
    assert value.fetch() == "passed"


def interrupt_main() -> str:
    main = threading.main_thread().ident
    wait_until(lambda: sys._current_frames()[main].f_code.co_name == "wait")
    while not BEGUN.wait(timeout=0.1):  # Python misses a signal just before it waits for a lock.
        os.kill(os.getpid(), signal.SIGINT)
    return pass_gate()


def test_an_interrupted_join_leaves_everything_as_it_was(coordinator):
    def once(*_: object) -> None:
        if not BEGUN.is_set():
            BEGUN.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, once)
    try:
        value = coordinator.schedule(interrupt_main)
        with pytest.raises(KeyboardInterrupt):
            coordinator.join()
    finally:
        signal.signal(signal.SIGINT, before)
    GATE.set()
    coordinator.join()
    assert value.fetch() == "passed"


def test_closing_cancels_what_is_not_over(coordinator):
    running = coordinator.schedule(pass_gate)
    waiting = [coordinator.schedule(double, (1,)) for _ in range(3)]
    assert BEGUN.wait(timeout=50)
    closer = threading.Thread(target=coordinator.close)
    closer.start()
    for value in (running, *waiting):
        with pytest.raises(CancelledError):
            value.fetch(timeout=50)
    GATE.set()
    closer.join(timeout=50)
    with pytest.raises(RuntimeError, match="closed"):
        coordinator.schedule(double, (1,))
    coordinator.close()


def test_many_functions_make_way_for_each_other(coordinator, monkeypatch):
    for module in (worker, coordinators):
        monkeypatch.setattr(module, "MAX_FUNCTIONS", 3)
    functions = [lambda x, n=n: x * n for n in range(8)]
    order = [n % 8 for n in range(30)] + [7, 0, 7, 0]
    results = [coordinator.schedule(functions[n], (2,)) for n in order]
    assert coordinator.fetch(results) == [2 * n for n in order]


def test_neither_side_keeps_anything_of_functions_that_are_over(coordinator):
    def schedule(count: int) -> None:
        for number in range(count):
            coordinator.schedule(double, (coordinator.schedule(double, (number,)),))
        coordinator.join()
        gc.collect()

    schedule(1000)
    before = sys.getallocatedblocks()
    schedule(5000)
    assert sys.getallocatedblocks() - before < 1000


def test_only_the_chief_of_a_cluster_with_workers_has_a_coordinator():
    def made(cluster, job):
        resolver = SimpleClusterResolver(cluster, task_type=job, task_id=0)
        return ClusterCoordinator(SimpleNamespace(cluster_resolver=resolver, servers=None))

    with pytest.raises(ValueError, match="runs on the chief alone"):
        made({"worker": ["localhost:1"]}, "worker")
    with pytest.raises(ValueError, match="no workers"):
        made({"chief": ["localhost:1"], "ps": ["localhost:2"]}, "chief")


def test_only_a_worker_has_an_index():
    jobs = {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]}
    try:
        enter_task(SimpleClusterResolver(jobs, task_type="worker", task_id=1))
        assert worker_index() == 1
        enter_task(SimpleClusterResolver(jobs, task_type="ps", task_id=0))
        with pytest.raises(RuntimeError, match="ps:0, which is not a worker"):
            worker_index()
    finally:
        enter_task(None)
