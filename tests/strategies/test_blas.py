"""BLAS threads are shared out between replicas while they run, and given back afterwards."""

import gc
import math
import os
import signal

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st

import ndistribute as nd
from ndistribute import blas
from ndistribute.blas import (
    LAUNCHER_VARIABLES,
    THREAD_VARIABLES,
    StepThreads,
    cores,
    limited_blas,
    set_by_user,
    shared_blas,
)
from tests.kinds import closing, in_thread, inside_worker, mirrored, plain_step, raised_in
from tests.processes import Ranks

pytestmark = plain_step("the threads of replicas")


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


@pytest.mark.parametrize("said", ["", "2"])
def test_workers_of_one_host_share_its_cores_unless_the_user_has_said_how(said):
    environ = {"OPENBLAS_NUM_THREADS": said, "OMP_NUM_THREADS": "", "MKL_NUM_THREADS": ""}
    with Ranks(2, "python", environ=environ) as workers:
        found = [outcome.result() for outcome in workers.run(threads_of_a_worker)]
    for inside, after in found:
        assert inside == (after if said else max(1, cores() // 2))
        assert said or after == len(blas.core_numbers())


@pytest.mark.parametrize("said", [{}, {"OMP_NUM_THREADS": "2"}])
def test_tasks_with_one_address_share_the_cores_of_their_host(said):
    before = threads()
    spec = {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:1", "127.0.0.1:2", "elsewhere:3"]}
    environ = {"NDISTRIBUTE_SECRET": "0" * 32, **said}
    for job in "ps", "worker":
        with nd.Server({**spec, job: ["127.0.0.1:0", *spec[job][1:]]}, job, 0, environ=environ):
            shared = all(count <= max(1, cores() // 2) for count in threads())
            assert shared or said
            assert not said or threads() == before
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
        with pytest.raises(nd.DistributeError, match="snapshot") as kept:
            nd.ParameterServerStrategy(resolver, durability="log")
        assert threads() == before, kept


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


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000"}, math.inf),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b\n", {"cpu.max": "400000 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/of/the/host\n", {"cpu.max": "50000 100000"}, 0.5),
        (
            "3:cpu,cpuacct:/pod\n1:memory:/\n0::/\n",
            {
                "cpu,cpuacct/pod/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "30000", "cpu/cpu.cfs_period_us": "20000"}, 1.5),
        ("2:memory:/\n", {"cpu/cpu.cfs_quota_us": "9", "cpu/cpu.cfs_period_us": "1"}, math.inf),
    ],
)
def test_the_quota_is_the_least_of_a_process_and_the_groups_above(tmp_path, groups, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert blas.quota_of(groups, tmp_path) == quota


def test_a_quota_bounds_cores_and_the_shares_of_processes(monkeypatch):
    monkeypatch.setattr(blas, "core_numbers", lambda: list(range(64)))
    for quota, expected in (2.9, 2), (0.5, 1), (math.inf, 64):
        monkeypatch.setattr(blas, "cpu_quota", lambda quota=quota: quota)
        assert cores() == expected


def test_one_replica_keeps_to_the_quota_of_its_process(monkeypatch):
    monkeypatch.setattr("ndistribute.blas.cpu_quota", lambda: 1.0)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = threads()
    with nd.OneDeviceStrategy("cpu:0") as strategy:
        assert strategy.run(lambda: max(threads())).values == (1,)
    assert threads() == before


def test_what_the_launcher_sets_is_not_the_users():
    launched = dict.fromkeys(LAUNCHER_VARIABLES, "2")
    assert not any(map(set_by_user, ({}, launched)))
    for mine in {"OMP_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "1"}:
        assert set_by_user(mine)
        assert set_by_user(launched | mine)


class Machine:
    """Cores on which a step with n threads takes `seconds[n]`, and is so often preempted."""

    def __init__(self, seconds, preempted):
        self.seconds, self.preempted = seconds, preempted
        self.now, self.computed, self.preemptions, self.used = 0.0, 0.0, 0.0, []

    def run(self, chosen, until):
        """Run steps until a time, and return how many seconds they took in the mean."""
        start, steps = self.now, 0
        while self.now < until:
            self.used.append(chosen.threads)
            took = self.seconds[chosen.threads]
            self.now += took
            self.computed += took
            self.preemptions += self.preempted * took
            chosen.record(took, self.now, lambda: (self.computed, int(self.preemptions)))
            steps += 1
        return (self.now - start) / steps


def test_a_process_with_cores_of_its_own_tries_no_other_number_of_threads():
    machine, chosen = Machine({2: 0.01, 1: 0.005}, preempted=30), StepThreads(2)
    machine.run(chosen, until=60)
    assert set(machine.used) == {2}


@pytest.mark.parametrize("step", [0.0002, 0.008, 0.3])
@pytest.mark.parametrize("slower", [2, 70])
def test_steps_beside_busy_programs_are_as_fast_as_with_one_thread(step, slower):
    machine, chosen = Machine({2: slower * step, 1: step}, preempted=200), StepThreads(2)
    machine.run(chosen, until=1 + 200 * slower * step)  # The first trial, and what led to it.
    assert machine.run(chosen, until=machine.now + 2000 * slower * step) < 1.03 * step


def test_a_process_that_others_disturb_little_keeps_its_threads():
    seconds = {16: 0.004, 8: 0.007, 4: 0.013, 2: 0.025, 1: 0.048}
    machine, chosen = Machine(seconds, preempted=200), StepThreads(16)
    machine.run(chosen, until=5)
    assert set(machine.used) == set(seconds)
    assert machine.run(chosen, until=machine.now + 600) < 1.05 * seconds[16]


def test_all_threads_are_used_again_once_other_programs_have_ended():
    machine, chosen = Machine({2: 0.2, 1: 0.01}, preempted=200), StepThreads(2)
    machine.run(chosen, until=5)
    assert chosen.threads == 1
    machine.seconds, machine.preempted = {2: 0.005, 1: 0.01}, 0
    machine.run(chosen, until=machine.now + 120)
    assert chosen.threads == 2
    machine.used.clear()
    machine.run(chosen, until=machine.now + 120)
    assert set(machine.used) == {2}


@given(
    most=st.integers(2, 64),
    seconds=st.lists(st.floats(1e-4, 1.0), min_size=64, max_size=64),
)
def test_a_trial_finds_nearly_the_fastest_number(most, seconds):
    machine, chosen = Machine(dict(enumerate(seconds, 1)), preempted=1000), StepThreads(most)
    tried = [most >> k for k in range(most.bit_length())]
    machine.run(chosen, until=0.3 + 2 * machine.seconds[most])
    while chosen._blocks:
        machine.run(chosen, until=machine.now + 1e-9)
    assert machine.seconds[chosen.threads] <= 1.05 * min(machine.seconds[n] for n in tried)
