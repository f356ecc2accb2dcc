"""A server that is started again from an older snapshot: work goes on, the loss is counted."""

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tensor_files
from ndistribute.parameter_server.client import ServerClient, Servers
from ndistribute.parameter_server.messages import Aggregate, AwaitStep, Gradient, Read
from ndistribute.parameter_server.snapshot import Disk
from ndistribute.parameter_server.store_service import LocalServer, StoreService
from ndistribute.strategies.update_mode import update_mode_of
from ndistribute.transport.failure_detector import detector
from tests.kinds import DEADLINE, closing, in_thread
from tests.parameter_server.calls import apply
from tests.processes import free_addresses


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A cluster of one worker and one server, which share a secret."""
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "a secret of thirty-two characters")
    return free_addresses({"worker": 1, "ps": 1})


def worker(cluster: Any, **options: Any) -> nd.ParameterServerStrategy:
    resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    options = {"devices": ["cpu:0"], "timeout_seconds": DEADLINE, **options}
    return nd.ParameterServerStrategy(resolver, **options)


def killed_after(server: nd.Server, directory: Path, work: Callable[[], None]) -> None:
    """Do some work that no snapshot of the server holds when it is gone."""
    kept = directory.with_name("kept")
    shutil.copytree(directory, kept)
    work()
    server.stop()
    shutil.rmtree(directory)
    kept.rename(directory)


@pytest.mark.parametrize("together", [False, True])
def test_work_goes_on_and_what_is_lost_is_counted(
    cluster: dict[str, list[str]], tmp_path: Path, together: bool
) -> None:
    directory = tmp_path / "snapshots"
    options = {"snapshot_directory": directory, "snapshot_seconds": 1000.0}
    first = nd.Server(cluster, "ps", 0, **options)
    with first, worker(cluster, replicas_to_aggregate=1 if together else None) as strategy:
        with strategy.scope():
            weights = nd.Variable(np.zeros(1000))
        optimizer = nd.optimizers.SGD(1.0)

        def steps(count: int) -> None:
            for _ in range(count):
                with strategy.scope():
                    assert np.isfinite(weights[0])
                optimizer.apply_gradients([(np.ones(1000), weights)])

        steps(3)
        strategy.save_snapshots()
        killed_after(first, directory, lambda: steps(2))
        with nd.Server(cluster, "ps", 0, **options):
            optimizer.apply_gradients([(np.ones(1000), weights)])  # What it read last is no more.
            assert float(weights[0]) == -4.0
            steps(1)
            assert weights.numpy().tolist() == [-5.0] * 1000
            assert optimizer.iterations == 5
            assert strategy.lost_updates == 2
            assert max(strategy.staleness()) <= 1
            strategy.close()


def test_a_start_whose_file_was_damaged_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []
    for now in (1e9, 1e8, 1e7, 1e6):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        disk = Disk(tmp_path, "ps:0", log=False)
        starts.append(disk.store.start)
        disk.close()
        if now == 1e7:
            newest = tensor_files.newest(tmp_path, "ps-0.starts")
            next(newest.path.glob("*.safetensors")).write_bytes(b"damaged")
    assert starts == sorted(set(starts))


def test_a_strategy_may_be_collected_while_another_one_connects(
    cluster: dict[str, list[str]],
) -> None:
    """It was closed on the heartbeat thread that another thread was starting, and both hung."""
    with nd.Server(cluster, "ps", 0), worker(cluster), ThreadPoolExecutor(1) as pool:
        dropped = worker(cluster)
        dropped.itself = dropped  # type: ignore[attr-defined]
        seen = weakref.ref(dropped)
        del dropped
        with detector._lock:  # As in the middle of connecting.
            pool.submit(gc.collect).result(DEADLINE)
        assert seen() is None


def test_closing_does_not_wait_for_a_read_that_a_server_does_not_answer(
    cluster: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), threading.Event()
    handle = StoreService.handle

    def slow(service: StoreService, peer: Any, call: Any, request: Any) -> Any:
        if isinstance(request, Read):
            asked.set()
            assert answer.wait(DEADLINE)
        return handle(service, peer, call, request)

    monkeypatch.setattr(StoreService, "handle", slow)
    with nd.Server(cluster, "ps", 0), closing(worker(cluster)) as strategy:
        with strategy.scope():
            weights = nd.Variable(np.zeros(3))
        with in_thread(weights.numpy) as reading:
            assert asked.wait(DEADLINE)
            with in_thread(strategy.close) as closed:
                try:
                    closed.result(DEADLINE / 4)
                    assert isinstance(reading.exception(DEADLINE / 4), nd.WorkerLostError)
                finally:
                    answer.set()


class Restarted:
    """Carry requests to a server, and to the one in its place from the first wait there on."""

    instance = ""

    def __init__(self, before: LocalServer, after: LocalServer, name: str) -> None:
        self.name, self.waiting = name, threading.Event()
        self._now, self._after = (one.connect(name, DEADLINE) for one in (before, after))

    def start(self, request: Any) -> Any:
        if isinstance(request, AwaitStep):
            self._now = self._after
        call = self._now.start(request)
        if isinstance(request, AwaitStep):
            self.waiting.set()
        return call

    def close(self) -> None:
        self._after.close()


def test_a_worker_that_is_told_of_a_loss_does_not_wait_for_another_server_first() -> None:
    """It waited there for a worker that waited for what it had to give once more: for ever."""
    old, fresh, other = LocalServer(), LocalServer(), LocalServer()
    applies = {i: apply("sgd", "w", Gradient(np.ones(2))) for i in range(2)}
    callers = Restarted(old, fresh, "worker:0#a"), Restarted(fresh, fresh, "worker:1#a")
    users = [
        Servers([ServerClient(caller, "ps:0"), ServerClient(other.connect(caller.name, 9.0), "")])
        for caller in callers
    ]
    for server in (old, fresh, other):
        local = Servers([ServerClient(server.connect("chief:0#a", 9.0), "")])
        local.create({0: [("w", np.zeros(2)), ("n", np.array(0))]})
        local.close()
    # The first step was made on both servers, but the first one's snapshot is older.
    for user in users:
        user.change({i: [Aggregate("sgd", 0, 2, one)] for i, one in applies.items()})
    modes = [update_mode_of(2, 2, None, None, coordinated=False, timeout=DEADLINE) for _ in users]
    modes[0]._steps = {("sgd", 0): 1, ("sgd", 1): 1}  # The other worker has not heard of it.
    push = [
        lambda mode=mode, user=user: mode.push(user, "sgd", applies, lambda outcomes: None)
        for mode, user in zip(modes, users, strict=True)
    ]
    with ThreadPoolExecutor(1) as pool:
        behind = pool.submit(lambda: (push[1](), push[1]()))
        assert callers[1].waiting.wait(DEADLINE)
        push[0]()
        behind.result(DEADLINE)
    for user in users:
        user.close()
