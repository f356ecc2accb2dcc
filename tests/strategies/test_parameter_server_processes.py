"""`ParameterServerStrategy` with servers and workers that are processes: what is sent and shared,
and what becomes of it when processes are killed, stopped and forked."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.transport.codec import encode
from ndistribute.transport.connection import Connection
from tests.jobs.loops import Shared
from tests.kinds import DEADLINE, closing, in_thread, wait_until_in
from tests.processes import ROOT, Tasks, wait_until

LARGE = np.random.default_rng(3).normal(size=(400, 400))
Job = Callable[..., Tasks]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Return what starts the servers of a cluster of which this process is a task."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Tasks:
            tasks = stack.enter_context(Tasks(**{"chief": False, **options}))
            monkeypatch.setenv("NDISTRIBUTE_SECRET", tasks.environ["NDISTRIBUTE_SECRET"])
            tasks.start_all("ps")
            return tasks

        yield start


def strategy_of(tasks: Tasks, job: str = "worker", **options: Any) -> nd.ParameterServerStrategy:
    options = {"devices": ["cpu:0"], "timeout_seconds": DEADLINE, **options}
    return nd.ParameterServerStrategy(tasks.resolver(job), **options)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long each record was that this process sent."""
    lengths: list[int] = []
    send = Connection.send

    def count(connection: Connection, record: Any, *args: Any) -> None:
        control, buffers = encode(record)
        lengths.append(len(control) + sum(map(len, buffers)))
        send(connection, record, *args)

    monkeypatch.setattr(Connection, "send", count)
    return lengths


def test_no_value_is_sent_that_the_servers_have(job: Job, sent: list[int]) -> None:
    tasks = job(servers=2)
    options = {"variable_partitioner": nd.partitioners.FixedShardsPartitioner(2)}
    with closing(strategy_of(tasks, **options)) as first:
        with first.scope():
            variable = nd.Variable(LARGE)
        del sent[:]
        with strategy_of(tasks, restore=True, **options):
            same = nd.Variable(np.zeros_like(LARGE))
            assert sum(sent) < 10_000
            assert np.array_equal(same, LARGE)
            optimizer = nd.optimizers.Adam(0.1)
            del sent[:]
            optimizer.apply_gradients([(LARGE, same)])
            assert LARGE.nbytes < sum(sent) < LARGE.nbytes + 10_000
        assert not np.array_equal(variable, LARGE)


def test_strategies_of_one_process_share_when_told_and_those_of_workers_do(job: Job) -> None:
    tasks = job(workers=2)
    tasks.start("worker", 1, TASK_RUNS="train")
    with closing(strategy_of(tasks)) as first:
        shared = Shared(first)
        wait_until(lambda: int(shared.steps[1]) >= 3)
        shared.stop.assign(1)
        assert tasks.code("worker", 1) == 0
        weights = shared.weights.numpy()
        assert weights[0] <= -3
        with closing(strategy_of(tasks)) as second:
            other = Shared(second)
            assert other.weights.numpy().tolist() == [0, 0, 0]
            with second.scope():
                optimizer = nd.optimizers.Adam(1.0)
            for _ in range(3):
                optimizer.apply_gradients([(np.ones(3), other.weights)])
            trained = other.weights.numpy()
        assert np.array_equal(shared.weights, weights)
        with first.scope():
            assert nd.optimizers.SGD(1.0, name="descent").iterations == -weights[0]
    with strategy_of(tasks, restore=True) as again:
        assert np.array_equal(Shared(again).weights, trained)
        with again.scope():
            optimizer = nd.optimizers.Adam(1.0)
        assert optimizer.iterations == 3
    with strategy_of(tasks) as fresh, fresh.scope():
        assert nd.optimizers.Adam(1.0).iterations == 0


def test_a_strategy_that_could_not_be_made_is_not_the_first_one(job: Job) -> None:
    tasks = job(servers=1)
    tasks.kill("ps", 0)
    with pytest.raises(nd.WorkerLostError):
        strategy_of(tasks, timeout_seconds=0.2)
    tasks.start("ps", 0)
    with strategy_of(tasks) as strategy:
        assert strategy.namespace == ""


def test_a_log_needs_a_directory_and_servers(job: Job) -> None:
    with pytest.raises(nd.DistributeError, match="directory"):
        strategy_of(job(), durability="log")
    with pytest.raises(ValueError, match="has no cluster"):
        nd.ParameterServerStrategy(durability="log")


def test_a_fork_has_no_part_in_what_its_parent_trains(job: Job) -> None:
    """Nothing that it tries reaches the servers, however it ends, but by a strategy of its own."""
    with forking(job()) as parent:
        said = json.loads(parent.communicate(timeout=60)[0])
    assert parent.returncode == 0
    assert said["codes"] == [0] * 4
    assert said["acknowledged"] > 30
    assert said["found"] == [said["acknowledged"]] * 4


def test_a_fork_does_not_hide_that_its_parent_died(job: Job) -> None:
    tasks = job(workers=1, NDISTRIBUTE_RETURN_SECONDS="0.1")
    with forking(tasks, "leave") as parent:
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait(timeout=DEADLINE)
            assert tasks.code("ps", 0) == 1
            assert "worker:0 died and did not come back" in tasks.said()
            os.kill(child, 0)  # It lives.
        finally:
            os.kill(child, signal.SIGKILL)


@contextlib.contextmanager
def forking(tasks: Tasks, *arguments: str) -> Iterator[Any]:
    """Run the worker of a cluster that forks; see `forks.py`."""
    config = {"cluster": tasks.cluster, "task": {"type": "worker", "index": 0}}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.jobs.forks", *arguments],
        cwd=ROOT,
        env={**os.environ, **tasks.environ, "TF_CONFIG": json.dumps(config)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_worker_drops_strategies_that_the_chief_has_dropped(job: Job) -> None:
    pytest.importorskip("cloudpickle")
    tasks = job(chief=True, workers=1)
    tasks.start("worker", 0)

    def strategies() -> int:
        gc.collect()
        kind = nd.ParameterServerStrategy
        return sum(isinstance(one, kind) and not one._refusal for one in gc.get_objects())

    def add(variable: nd.Variable) -> float:
        return float(variable.assign_add(1.0))

    made, variables = [], []
    for _ in range(3):
        made.append(strategy_of(tasks, "chief"))
        with made[-1].scope():
            variables.append(nd.Variable(0.0))
    with made[0], nd.cluster.ClusterCoordinator(made[0]) as coordinator:
        for variable in variables * 2:  # What is sent again meets the same strategy.
            coordinator.schedule(add, (variable,)).fetch(DEADLINE)
        del variable
        coordinator.join(DEADLINE)
        assert coordinator.schedule(strategies).fetch(DEADLINE) == 3
        made[2].close()
        assert coordinator.schedule(strategies).fetch(DEADLINE) == 2
        del made[1:], variables[1:]
        gc.collect()
        assert coordinator.schedule(strategies).fetch(DEADLINE) == 1
        assert coordinator.schedule(add, (variables[0],)).fetch(DEADLINE) == 3.0


def test_a_strategy_goes_nowhere_but_to_workers(job: Job) -> None:
    with strategy_of(job()) as strategy:
        make, sent = strategy.__reduce__()
        assert make(*sent) is strategy
        del strategy
    gc.collect()
    with pytest.raises(RuntimeError, match="not a worker of its cluster"):
        make(*sent)


def test_an_interrupt_is_not_held_up_by_a_server_that_is_away(job: Job) -> None:
    tasks = job(servers=2)
    main = threading.main_thread().ident
    interrupts: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        if len(interrupts) == 1:
            raise KeyboardInterrupt

    def interrupt_main() -> None:
        wait_until_in("_poll", [main])
        while not interrupts:
            signal.pthread_kill(main, signal.SIGINT)
            threading.Event().wait(0.05)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with strategy_of(tasks) as strategy:
            with strategy.scope():
                variables, optimizer = [nd.Variable(0.0), nd.Variable(0.0)], nd.optimizers.SGD(1.0)
            optimizer.apply_gradients([(1.0, variable) for variable in variables])
            tasks.stop("ps", 1)
            # The server is stopped until the interrupt has come through.
            with in_thread(interrupt_main), pytest.raises(KeyboardInterrupt):
                optimizer.apply_gradients([(1.0, variable) for variable in variables])
            tasks.send("ps", 1, signal.SIGCONT)
            optimizer.apply_gradients([(1.0, variable) for variable in variables])
            # The update that was interrupted was made or not, on each server whole.
            assert {float(variable) for variable in variables} <= {-2.0, -3.0}
    finally:
        signal.signal(signal.SIGINT, before)
