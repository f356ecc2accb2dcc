"""Workers whose network is cut or loses packets: all of them end, and tell which two are apart."""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.hosts.rig import Process, Rig, skip_reason
from tests.processes import HANG_SECONDS, tf_config

pytestmark = pytest.mark.skipif(bool(skip_reason(ssh=False)), reason=skip_reason(ssh=False) or "-")
HEARTBEAT = 4
# Steps, until the first worker's standard input ends. With a second argument, worker 1 computes for
# so long before its fifth step, while the others send to it.
STEPS = """
import os, select, sys, time
import numpy as np
import ndistribute as nd
try:
    with nd.MultiWorkerMirroredStrategy() as strategy:
        rank = strategy.cluster_resolver.task_id
        mine = np.random.default_rng(rank).integers(9, size=int(sys.argv[1])).astype("float32")
        total, steps, stop = np.zeros_like(mine), 0, 0.0
        while not stop:
            if len(sys.argv) > 2 and (rank, steps) == (1, 4):
                time.sleep(float(sys.argv[2]))
            told = np.float32(rank == 0 and bool(select.select([0], [], [], 0)[0]))
            step = lambda: nd.get_replica_context().all_reduce("sum", [mine, told])
            got, stop = strategy.local_results(strategy.run(step))[0]
            total, steps = total + got, steps + 1
            if steps == 3:
                print("runs", flush=True)
        print("RESULT", steps, total.sum(dtype=float))
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")
"""


@dataclass
class Job:
    """A worker on each host of a rig."""

    workers: list[Process]
    size: int

    def end(self) -> list[str]:
        """Wait until all workers have ended; return what they wrote last."""
        self.stop()
        return [worker.communicate(timeout=HANG_SECONDS)[0].strip() for worker in self.workers]

    def stop(self) -> None:
        """Let the job stop after the current step, if it still makes steps."""
        self.workers[0].stdin.close()
        self.workers[0].stdin = None

    def check_result(self) -> None:
        """Stop the job, and compare its result with that of one process."""
        count = len(self.workers)
        each = [np.random.default_rng(rank).integers(9, size=self.size) for rank in range(count)]
        said = self.end()
        steps = int(said[0].split()[1])
        assert said == [f"RESULT {steps} {float(steps * np.sum(each))}"] * count


@contextlib.contextmanager
def running(rig, *more, size=100_000, heartbeat=HEARTBEAT):
    """Yield a job in which each worker has made some steps."""
    cluster = {"worker": [f"{host.address}:4000" for host in rig.hosts]}
    env = {"NDISTRIBUTE_SECRET": "the secret of these tests"}
    env["NDISTRIBUTE_HEARTBEAT_SECONDS"] = str(heartbeat)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", STEPS, str(size), *more]
    with contextlib.ExitStack() as stack:
        for host in rig.hosts:
            stack.callback(host.end_processes)
        workers = [
            host.start(command, {**env, "TF_CONFIG": tf_config(cluster, "worker", rank)}, **pipes)
            for rank, host in enumerate(rig.hosts)
        ]
        for worker in workers:
            assert worker.stdout.readline() == "runs\n"
        yield Job(workers, size)


@dataclass(frozen=True)
class Fault:
    """What breaks, and what each worker then tells."""

    do: Callable[[Rig], None]
    words: tuple[str, ...]  # For each worker; one for all if they tell the same.
    hosts: int = 3
    heals: Callable[[Rig], None] | None = None  # What happens 20 s later.


def lose(source: int, target: int) -> Callable[[Rig], None]:
    """Return what loses the packets of one worker to another."""
    return lambda rig: rig.cut(rig.hosts[source], rig.hosts[target], one_way=True)


def cut_halves(rig: Rig) -> None:
    for host in rig.hosts[:2]:
        for other in rig.hosts[2:]:
            rig.cut(host, other)


def apart(one: str, other: str, why: str = "") -> str:
    """Return a pattern of a text about two workers, of which either may notice first."""
    of_one, of_other = f"worker {one} .* worker {other}", f"worker {other} .* worker {one}"
    return f"({of_one}|{of_other}) .*{why}"


PAIR = apart("1", "2", "on their data connection for .* (does not answer|route)")
FAULTS = {
    "pair": Fault(lambda rig: rig.cut(rig.hosts[1], rig.hosts[2]), (PAIR,)),
    "one way": Fault(lose(1, 2), (PAIR,)),
    "other way": Fault(lose(2, 1), (PAIR,)),
    "to rank 0": Fault(lose(1, 0), (apart("0", "1"),)),
    "from rank 0": Fault(lose(0, 1), (apart("0", "1"),)),
    "long packets": Fault(
        lambda rig: rig.limit_frames(rig.hosts[1], rig.hosts[2], 900),
        (apart("1", "2", "loses long packets: compare the MTUs"),),
    ),
    "halves": Fault(cut_halves, (apart("[01]", "[23]"),), hosts=4),
    "cable of 1": Fault(lambda rig: rig.cut(rig.hosts[1]), (apart("0", "1"),)),
    "cable of 0": Fault(
        lambda rig: rig.cut(rig.hosts[0]), (apart("0", "[12]"), apart("0", "1"), apart("0", "2"))
    ),
    "20 s": Fault(
        lambda rig: rig.cut(rig.hosts[1]),
        (apart("0", "1"),),
        heals=lambda rig: rig.heal(rig.hosts[1]),
    ),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "pair" else pytest.param(name, marks=pytest.mark.hosts) for name in FAULTS],
)
def test_all_workers_end_and_name_the_two_that_are_apart(name):
    fault = FAULTS[name]
    with Rig(fault.hosts, ssh=False) as rig, running(rig) as job:
        fault.do(rig)
        if fault.heals:
            threading.Event().wait(20)
            fault.heals(rig)
        for worker in job.workers:
            worker.wait(HANG_SECONDS)
        found = [worker.stdout.read().strip() for worker in job.workers]
    patterns = fault.words if len(fault.words) > 1 else fault.words * fault.hosts
    for text, pattern in zip(found, patterns, strict=True):
        assert re.match(f"WorkerLostError: ({pattern})", text), found


@pytest.mark.hosts
@pytest.mark.parametrize("rank", [0, 1])
def test_a_cable_that_is_out_for_a_quarter_of_the_heartbeat_changes_nothing(rank):
    with Rig(3, ssh=False) as rig, running(rig, heartbeat=8) as job:
        rig.cut(rig.hosts[rank])
        threading.Event().wait(2)  # The cable is out for so long.
        rig.heal(rig.hosts[rank])
        job.check_result()


@pytest.mark.hosts
def test_a_worker_that_computes_for_longer_than_the_heartbeat_is_not_lost():
    """TCP_USER_TIMEOUT would end the connections to it, whose buffers are full."""
    with Rig(3, ssh=False) as rig, running(rig, str(3 * HEARTBEAT), size=3_000_000) as job:
        job.check_result()
