"""Sessions whose servers are killed, stopped and started again in the middle of steps."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute import graph as g
from tests.graph.conftest import PS, WORKER, reaches
from tests.processes import HANG_SECONDS, Tasks, wait_until


@pytest.fixture(params=["1", "0"], ids=["unix", "tcp"])
def tasks(request: Any, monkeypatch: Any) -> Iterator[Tasks]:
    """Start a server for variables and one for a worker, and use a new graph."""
    with Tasks(1, 1, chief=False, NDISTRIBUTE_UNIX_SOCKETS=request.param) as tasks:
        for name, value in tasks.environ.items():
            monkeypatch.setenv(name, value)
        tasks.start_all()
        with g.Graph().as_default():
            yield tasks


def target_of(tasks: Tasks, job: str = "worker") -> str:
    return f"grpc://{tasks.cluster[job][0]}"


def initialized(tasks: Tasks, operation: Any, job: str = "worker") -> g.Session:
    """Return a session in which an operation has run, once all tasks can be reached."""
    session = g.Session(target_of(tasks, job))
    wait_until(lambda: reaches(session, operation))
    return session


class Endless:
    """A graph whose step computes for ever on one task while the other task waits for it."""

    def __init__(self, where: str, waits: str) -> None:
        with g.device(PS):
            self.begun = g.Variable(0.0, name="begun")
            begin = self.begun.assign_add(1.0)
        with g.device(where), g.get_default_graph().control_dependencies([begin]):
            zero = g.identity(g.constant(0.0))
            endless = g.while_loop(lambda x: np.equal(x, 0.0), lambda x: x * 1.0, [zero])[0]
        with g.device(waits):
            self.step = endless + 1.0
        self.initialize = g.global_variables_initializer()

    def run(self, tasks: Tasks, harm: Callable[[], Any], **options: Any) -> Any:
        """Do harm in the middle of a step, and return the step's error."""
        config = g.ConfigProto(**options)
        with (
            initialized(tasks, self.initialize) as other,
            g.Session(target_of(tasks), config=config) as session,
            ThreadPoolExecutor(1) as threads,
        ):
            run = threads.submit(session.run, self.step)
            wait_until(lambda: other.run(self.begun) == 1.0)
            harm()
            return run.exception(HANG_SECONDS)


def test_a_step_over_two_processes_and_clients_that_share_its_variables(tasks):
    with g.device(PS):
        total = g.Variable(np.zeros(3), name="total")
    with g.device(WORKER):
        delta = g.constant(np.ones(3)) * 2.0
    add = g.group(total.assign_add(delta))
    with (
        initialized(tasks, g.global_variables_initializer()) as one,
        g.Session(target_of(tasks, "ps")) as other,
        ThreadPoolExecutor() as threads,
    ):
        runs = [threads.submit(session.run, add) for session in (one, other) * 50]
        for run in runs:
            run.result(HANG_SECONDS)
        np.testing.assert_array_equal(other.run(total), np.full(3, 200.0))


@pytest.mark.parametrize("killed", ["ps", "worker"])
def test_a_killed_task_fails_the_step_at_once_and_a_new_session_goes_on(tasks, killed):
    graph = Endless(where=WORKER, waits=PS)
    error = graph.run(tasks, lambda: tasks.kill(killed, 0))
    assert isinstance(error, errors.UnavailableError)
    tasks.start(killed, 0)
    with initialized(tasks, graph.initialize) as session:
        assert session.run(graph.begun + 1.0) == 1.0


def test_a_session_that_outlives_its_server_is_aborted_and_a_new_one_goes_on(tasks):
    with g.device(PS):
        v = g.Variable(5.0, name="v")
    with g.device(WORKER):
        doubled = v * 2.0
    initialize = g.global_variables_initializer()
    for killed in ("ps", "worker"):
        old = initialized(tasks, initialize)
        assert old.run(doubled) == 10.0
        tasks.kill(killed, 0)
        for fetched in (doubled, doubled + v):  # Of a part that is registered, and of another.
            with pytest.raises(errors.UnavailableError):
                old.run(fetched)
        tasks.start(killed, 0)
        initialized(tasks, initialize).close()
        with pytest.raises(errors.AbortedError, match="restarted"):
            old.run(doubled)
        old.close()
        with g.Session(target_of(tasks)) as new:
            assert new.run(doubled) == 10.0


def test_a_session_without_a_job_does_not_go_on_in_another_job(tasks):
    v, begun = g.Variable(5.0, name="v"), g.constant(1.0)
    session = initialized(tasks, begun)
    training = g.MonitoredTrainingSession(target_of(tasks), max_wait_secs=HANG_SECONDS)
    for job in ("ps", "worker"):
        tasks.kill(job, 0)
        tasks.start(job, 0, NDISTRIBUTE_JOB_ID="another")
    initialized(tasks, begun).close()
    with pytest.raises(errors.UnavailableError, match="to job another"):
        session.run(begun)
    session.close()
    with pytest.raises(errors.AuthenticationError, match="to job another"):
        training.run(v)
    training.close()
    with g.Session(target_of(tasks), job="another") as new:
        assert new.run(begun) == 1.0


@pytest.mark.parametrize("where", [PS, WORKER])
def test_a_step_that_takes_too_long_ends_on_all_tasks(tasks, where):
    graph = Endless(where, waits=WORKER if where == PS else PS)
    error = graph.run(tasks, lambda: None, operation_timeout_in_ms=300)
    assert isinstance(error, errors.DeadlineExceededError)
    with g.Session(target_of(tasks)) as session:
        assert session.run(graph.begun) == 1.0


def test_a_step_with_a_timeout_does_not_wait_for_a_stopped_task(tasks):
    with g.device(PS):
        v = g.Variable(1.0)
    initialized(tasks, v.initializer).close()
    with g.Session(target_of(tasks), config=g.ConfigProto(operation_timeout_in_ms=200)) as session:
        assert session.run(v) == 1.0
        tasks.stop("ps", 0)
        with pytest.raises(errors.DeadlineExceededError):
            session.run(v)
        tasks.send("ps", 0, signal.SIGCONT)
        assert session.run(v) == 1.0


def test_a_failure_on_one_task_ends_endless_work_on_another(tasks):
    graph = Endless(where=WORKER, waits=PS)
    with g.device(PS), g.get_default_graph().control_dependencies([graph.begun.assign_add(1.0)]):
        bad = g.constant([1.0, 2.0]) + g.identity(g.constant([1.0, 2.0, 3.0]))
    initialized(tasks, graph.initialize).close()
    with g.Session(target_of(tasks)) as session:
        with pytest.raises(errors.InvalidArgumentError, match="broadcast") as caught:
            session.run([graph.step, bad])
        assert (caught.value.op, caught.value.task) == (bad.op.name, PS)
        assert session.run(graph.begun) > 0.0


def test_a_server_of_variables_ends_when_the_workers_have_left(monkeypatch):
    with Tasks(1, 1, chief=False) as tasks, g.Graph().as_default():
        monkeypatch.setenv("NDISTRIBUTE_SECRET", tasks.environ["NDISTRIBUTE_SECRET"])
        tasks.start("ps", 0)
        with g.device(PS):
            v = g.Variable(1.0)
        with nd.Server(tasks.cluster, "worker", 0):
            initialized(tasks, v.initializer).close()
        assert tasks.code("ps", 0) == 0
