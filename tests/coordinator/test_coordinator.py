"""`ClusterCoordinator` with a worker in this process, and what a worker does for whom."""

import contextlib
import functools
import gc
import os
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ndistribute.cluster import SimpleClusterResolver, worker_index
from ndistribute.cluster.resolvers import enter_task
from ndistribute.coordinator import coordinator as coordinators
from ndistribute.coordinator import worker
from ndistribute.coordinator.closures import keep_until_run
from ndistribute.coordinator.coordinator import ClusterCoordinator, forget
from ndistribute.coordinator.pickling import dump, key_of, load
from ndistribute.coordinator.worker import Outcome, Run, WorkerService, keep
from ndistribute.data import Dataset
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError
from ndistribute.transport.codec import Decoder, MalformedError
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.handshake import Hello
from ndistribute.transport.rpc import RpcServer
from ndistribute.transport.secret import Credentials
from tests.coordinator.errands import Evil, double, fail
from tests.processes import wait_until

pytest.importorskip("cloudpickle")

LOCAL = SimpleNamespace(cluster_resolver=None, servers=None)
GATE = threading.Event()
BEGUN = threading.Event()
NOTED: list[Any] = []
SECONDS = 50.0


def pass_gate() -> str:
    BEGUN.set()
    GATE.wait(timeout=50)
    return "passed"


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    GATE.clear()
    BEGUN.clear()
    NOTED.clear()
    yield
    GATE.set()


@pytest.fixture
def coordinator() -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(LOCAL) as made:
        yield made
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
    def increment(values: dict[str, Any]) -> dict[str, Any]:
        for name in ("large", "small", "rows", "cut", "none"):
            values[name] += 1
        return values

    start = {
        "large": np.arange(400_000.0),
        "small": np.zeros((2, 3), np.float32),
        "rows": np.arange(40_000.0).reshape(200, 200).T,
        "cut": np.arange(100_000)[::3],
        "none": np.zeros((0, 3)),
        "text": np.array(["a", None], dtype=object),
        "path": Path("x"),
    }
    value = coordinator.schedule(increment, (start,))
    result = increment(coordinator.schedule(increment, (value,)).fetch())
    for name, array in start.items():
        more = 0 if name in ("text", "path") else 3
        np.testing.assert_array_equal(result[name], array + more if more else array)
    assert start["large"][0] == start["rows"][0, 0] == 0
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
    with pytest.raises(RuntimeError, match="only on the workers"):
        next(one)


def telling() -> Iterator[int]:
    try:
        yield from range(10)
    finally:
        NOTED.append("dropped")


def test_an_iterator_that_nobody_holds_is_dropped_on_the_worker(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(telling))
    assert coordinator.schedule(next, (iterator,)).fetch() == 0
    del iterator
    coordinator.schedule(double, (1,))  # Which tells the worker.
    wait_until(lambda: NOTED == ["dropped"])


def test_the_first_error_is_raised_once_and_the_rest_is_cancelled(coordinator):
    running = coordinator.schedule(pass_gate)
    bad = coordinator.schedule(fail, ("no",))
    later = [coordinator.schedule(double, (1,)) for _ in range(5)]
    later.append(coordinator.schedule(double, (later[0],)))
    GATE.set()
    with pytest.raises(LookupError, match="no") as caught:
        coordinator.join()
    (note,) = caught.value.__notes__
    assert "closure 2 (fail) raised this on worker:0" in note
    assert "raise LookupError(text)" in note
    assert running.fetch() == "passed"
    with pytest.raises(LookupError, match="no"):
        bad.fetch()
    with pytest.raises(ValueError, match="RemoteValue of fail, failed"):
        coordinator.schedule(double, (bad,))
    for cancelled in (later[-2], later[-1]):
        with pytest.raises(CancelledError, match=r"double.* was cancelled.*LookupError: no"):
            cancelled.fetch()
    coordinator.join()
    assert coordinator.done()
    for call in (coordinator.done, lambda: coordinator.schedule(double, (1,))):
        with pytest.raises(LookupError):
            coordinator.schedule(fail, ("no",)).fetch()
        with pytest.raises(LookupError):
            call()
    assert coordinator.schedule(double, (4,)).fetch() == 8


class UnkindError(Exception):
    """Can not be made from what it says."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_what_cannot_be_pickled_is_an_error_that_names_it(coordinator):
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
    with pytest.raises(ValueError, match="only in args or kwargs"):
        coordinator.schedule(lambda: value)
    with pytest.raises(TypeError, match="takes a function"):
        coordinator.schedule(3)
    with pytest.raises(TypeError, match=r"args is a ndarray, not a tuple: write args=\(x,\)"):
        coordinator.schedule(double, np.ones(3))
    elsewhere = SimpleNamespace(cluster_resolver=None, servers=None)
    refused = pytest.raises(ValueError, match="another coordinator")
    with ClusterCoordinator(elsewhere) as other, refused:
        other.schedule(double, (value,))
    assert value.fetch() == 2


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
    with pytest.raises(CollectiveTimeoutError, match="running: 1; waiting: 0"):
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


def test_only_the_chief_of_a_cluster_with_workers_has_a_coordinator():
    def made(cluster, job):
        resolver = SimpleClusterResolver(cluster, task_type=job, task_id=0)
        return ClusterCoordinator(SimpleNamespace(cluster_resolver=resolver, servers=None))

    with pytest.raises(ValueError, match="runs only on the chief"):
        made({"worker": ["localhost:1"]}, "worker")
    with pytest.raises(ValueError, match="no workers"):
        made({"chief": ["localhost:1"], "ps": ["localhost:2"]}, "chief")


def test_a_strategy_has_one_coordinator_until_it_is_closed():
    strategy = SimpleNamespace(cluster_resolver=None, servers=None)
    with ClusterCoordinator(strategy) as first:
        assert ClusterCoordinator(strategy) is first
        with pytest.raises(ValueError, match="leave out timeout_seconds"):
            ClusterCoordinator(strategy, timeout_seconds=1.0)
        made = first.create_per_worker_dataset(lambda: Dataset.range(3))
        assert made.element_spec == Dataset.range(3).element_spec
    with ClusterCoordinator(strategy) as second:
        assert second is not first


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


def note(thing: Any) -> int:
    NOTED.append(thing)
    return len(NOTED)


class Caller:
    """A worker, and whoever connects to it."""

    def __init__(self) -> None:
        self.credentials = Credentials(secrets.token_bytes(32), "job")
        self.service = WorkerService("worker:0")
        services = {"coordinator": self.service}
        self.server = RpcServer("localhost:0", self.credentials, "worker:0", services)

    def connect(
        self, name: str = "chief:0#1", secret: bytes = b"", port: int = 0, **options: bool
    ) -> Connection:
        return connect(
            f"localhost:{port or self.server.port}",
            Credentials(secret or self.credentials.secret, "job"),
            Hello(name=name, purpose="coordinator", audience="worker:0"),
            Decoder(Outcome),
            deadline=time.monotonic() + SECONDS,
            **{"macs": True, **options},
        )

    def close(self) -> None:
        self.server.close()
        self.service.close()


@pytest.fixture
def caller() -> Iterator[Caller]:
    with contextlib.closing(Caller()) as caller:
        yield caller
        GATE.set()


def order(number: int, function: Callable[..., Any], *args: Any, known: bool = False) -> Run:
    pickled = dump(function)
    key = key_of(pickled)
    return Run("series", number, 1, {key: None if known else pickled}, dump((args, {})), ())


def value(connection: Connection) -> Any:
    _, outcome = connection.receive(time.monotonic() + SECONDS)
    return load(outcome.value)


def test_outcomes_come_as_they_are_there_and_a_function_is_sent_once(caller):
    with contextlib.closing(caller.connect()) as connection:
        connection.send(order(1, double, 4))
        connection.send(order(2, double, 5, known=True))
        connection.send(order(3, pass_gate))
        assert [value(connection), value(connection)] == [8, 10]
        with pytest.raises(TimeoutError):
            connection.receive(time.monotonic() + 0.05)
        GATE.set()
        assert value(connection) == "passed"


def test_a_result_that_is_too_long_is_an_error(caller, monkeypatch):
    monkeypatch.setattr("ndistribute.coordinator.worker.RESULT_BYTES", 1000)
    with contextlib.closing(caller.connect()) as connection:
        connection.send(order(1, np.ones, 1000))
        with pytest.raises(ValueError, match=r"returned \d+ bytes: at most 1000 can be sent"):
            raise value(connection)


def test_an_idle_worker_holds_no_arguments_and_no_inputs():
    outcomes = []
    peer = Mock(send=outcomes.append)
    with contextlib.closing(WorkerService("worker:0")) as service:
        service.connected(peer)
        run, big = order(1, len, np.ones(10_000)), dump(np.ones(10_000))
        run = Run(run.client_id, 1, 1, run.functions, run.arguments, (big,))
        held = [weakref.ref(run.arguments.buffers[0]), weakref.ref(big.buffers[0])]
        service.handle(peer, 0, run)
        del run, big
        wait_until(
            lambda: outcomes and not any(array() is not None for array in held), seconds=20.0
        )
    assert load(outcomes[0].value) == 10_000


def test_a_function_that_was_not_sent_is_no_outcome(caller):
    with contextlib.closing(caller.connect()) as connection:
        connection.send(order(1, double, 1, known=True))
        with pytest.raises(MalformedError):
            connection.receive(time.monotonic() + SECONDS)


def test_what_a_coordinator_left_behind_is_not_run(caller):
    with contextlib.closing(caller.connect("chief:0#2")) as other:
        with contextlib.closing(caller.connect()) as connection:
            connection.send(order(1, pass_gate))
            connection.send(order(2, note, 1))
            assert BEGUN.wait(SECONDS)
        wait_until(lambda: len(caller.service._sessions) == 1)
        other.send(order(1, double, 2))
        GATE.set()
        assert value(other) == 4
    assert NOTED == []


def test_nothing_is_unpickled_for_a_stranger(caller, tmp_path):
    path = tmp_path / "evil"
    evil = order(1, double, Evil(str(path)))
    with pytest.raises(AuthenticationError, match="another secret"):
        caller.connect(secret=b"another secret, and a long one")
    with contextlib.closing(caller.connect(macs=False)) as without_macs:  # Its frames have no MAC.
        for _ in range(2):  # The worker takes the next bytes for the MAC.
            without_macs.send(evil)
        with pytest.raises(ConnectionLostError):
            without_macs.receive(time.monotonic() + SECONDS)
    assert not path.exists()
    with contextlib.closing(caller.connect()) as chief:
        chief.send(evil)
        assert isinstance(value(chief), TypeError)
    assert path.exists()  # Whoever has the secret may: so the pickle would have made the file.


class Shop:
    """Like a strategy: where it is sent, the worker makes one of its own, and keeps it."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __reduce__(self) -> tuple[Any, ...]:
        keep_until_run(self)
        return shop_of, (self.token,)


def shop_of(token: str) -> Shop:
    return keep(token, functools.partial(Shop, f"worker's {token}"), lambda shop: note(shop.token))


def token_of(shop: Shop) -> tuple[str, int]:
    return shop.token, id(shop)


def test_a_worker_drops_what_the_chief_dropped():
    with ClusterCoordinator(LOCAL) as coordinator:
        first, second = Shop("first"), Shop("second")
        made = [coordinator.schedule(token_of, (shop,)) for shop in (first, first, second)]
        one, again, other = coordinator.fetch(made)
        assert one == again
        assert (one[0], other[0]) == ("worker's first", "worker's second")
        coordinator.schedule(token_of, (first,)).fetch()
        forget("first")
        assert coordinator.schedule(double, (1,)).fetch() == 2
        assert NOTED == ["worker's first"]
    assert NOTED == ["worker's first", "worker's second"]
    with pytest.raises(RuntimeError, match="only a function that a ClusterCoordinator sent"):
        shop_of("first")


def test_a_scheduled_function_keeps_what_it_refers_to_until_it_has_run(coordinator):
    shop, gone = Shop("kept"), threading.Event()
    weakref.finalize(shop, gone.set)
    coordinator.schedule(pass_gate)
    result = coordinator.schedule(token_of, (shop,))
    del shop
    gc.collect()
    assert not gone.is_set()
    GATE.set()
    assert result.fetch(SECONDS)[0] == "worker's kept"
    assert gone.wait(SECONDS)


def test_functions_that_differ_in_a_large_array_alone_are_two(coordinator):
    def sums(fill: float) -> Callable[[], float]:
        array = np.full(100_000, fill)
        return lambda: float(array.sum())

    results = [coordinator.schedule(sums(fill)) for fill in (1.0, 2.0)]
    assert coordinator.fetch(results) == [100_000.0, 200_000.0]
