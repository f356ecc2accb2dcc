"""BLAS threads are shared out between replicas while they run, and given back afterwards."""

from __future__ import annotations

import gc
import os
import signal

import numpy as np
import pytest
import threadpoolctl

import ndistribute as nd
from ndistribute import blas
from ndistribute.blas import THREAD_VARIABLES, cores, limited_blas, shared_blas
from tests.kinds import closing, in_thread, inside_worker, mirrored, raised_in
from tests.processes import Ranks


def threads() -> list[int]:
    """Return how many threads each BLAS library of the process may use."""
    libraries = threadpoolctl.threadpool_info()
    return [library["num_threads"] for library in libraries if library["user_api"] == "blas"]


@pytest.fixture(autouse=True)
def _all_cores():
    """Use all cores, as a program does; other tests use one."""
    np.ones((2, 2)) @ np.ones((2, 2))
    if not threads():
        pytest.skip("threadpoolctl knows no BLAS library of this NumPy")
    with threadpoolctl.threadpool_limits(1 if inside_worker() else cores(), "blas"):
        yield


def test_replicas_share_the_cores(several):
    before = threads()
    share = max(1, cores() // len(several.devices))
    inside = several.run(lambda: max(threads())).values
    assert all(count <= share for count in inside)
    assert threads() == before
    with raised_in(several, None, ZeroDivisionError):
        several.run(lambda: 1 / 0)
    assert threads() == before


def test_the_last_of_two_strategies_gives_them_back():
    before = threads()
    with closing(mirrored(2)) as two, closing(mirrored(3)) as three:
        with in_thread(lambda: [two.run(threads) for _ in range(20)]):
            for _ in range(20):
                three.run(threads)
        assert threads() == before


def threads_of_a_worker(rank, size):
    """Return how many threads a worker has in a step, and once it has left its group."""
    np.ones((2, 2)) @ np.ones((2, 2))
    with nd.MultiWorkerMirroredStrategy() as strategy:
        inside = strategy.run(lambda: max(threads())).values[0]
    return inside, max(threads())


@pytest.mark.parametrize("given", ["", "2"])
def test_workers_of_one_host_share_its_cores_unless_the_user_has_said_how(given):
    environ = {"OPENBLAS_NUM_THREADS": given, "OMP_NUM_THREADS": "", "MKL_NUM_THREADS": ""}
    with Ranks(2, "python", environ=environ) as workers:
        found = [outcome.result() for outcome in workers.run(threads_of_a_worker)]
    for inside, after in found:
        assert inside == (after if given else max(1, cores() // 2))
        assert given or after == cores()


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "2"}])
def test_tasks_with_one_address_share_the_cores_of_their_host(given):
    before = threads()
    spec = {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:1", "127.0.0.1:2", "elsewhere:3"]}
    environ = {"NDISTRIBUTE_SECRET": "0" * 32, **given}
    for job in "ps", "worker":
        with nd.Server({**spec, job: ["127.0.0.1:0", *spec[job][1:]]}, job, 0, environ=environ):
            shared = all(count <= max(1, cores() // 2) for count in threads())
            assert shared or given
            assert not given or threads() == before
        assert threads() == before


def test_a_task_alone_on_its_host_keeps_all_cores():
    before = threads()
    with shared_blas(1):
        assert threads() == before


def test_a_worker_of_parameter_servers_shares_cores_until_it_closes_its_strategy(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "0" * 32)
    monkeypatch.setenv("NDISTRIBUTE_JOB_ID", "this one")
    for name in (*THREAD_VARIABLES, "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = threads()
    with nd.Server({"ps": ["127.0.0.1:0"]}) as server:
        assert threads() == before
        cluster = {"ps": [server.target], "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
        resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
        with nd.ParameterServerStrategy(resolver):
            assert all(count <= max(1, cores() // 2) for count in threads())
        assert threads() == before


def test_a_limit_runs_nothing_when_it_is_dropped_at_the_end_of_the_interpreter():
    before, limit = threads(), limited_blas(1)
    limit.__enter__()
    try:
        del limit
        gc.collect()
        assert set(threads()) == {1}
    finally:
        blas._blas.remove(1)
    assert threads() == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_what_a_thread_of_its_parent_held():
    with blas._blas._lock:  # As another thread may hold it.
        child = os.fork()
        if not child:
            signal.alarm(10)  # Ends it if it waits.
            with limited_blas(1):
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
