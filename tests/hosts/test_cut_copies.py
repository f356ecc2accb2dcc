"""Networks are cut between the copies of shards: one side at most goes on, and loses nothing."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts.rig import Process, Rig, skip_reason
from tests.processes import HANG_SECONDS

pytestmark = pytest.mark.skipif(
    bool(skip_reason(ssh=False)), reason=skip_reason(ssh=False) or "none"
)
_SERVE = "import ndistribute as nd; r = nd.TFConfigClusterResolver(); \
nd.Server(r.cluster_spec(), r.task_type, r.task_id).join()"
# For each line that it reads, a worker adds 1 to a variable of each server, or reads them.
_WORK = """
import sys, time
import ndistribute as nd
with nd.ParameterServerStrategy(replicas=2, timeout_seconds=60) as strategy:
    with strategy.scope():
        both = [nd.Variable(0.0) for _ in range(2)]
    print("ready", flush=True)
    for line in sys.stdin:
        begun = time.monotonic()
        if line == "add\\n":
            for each in both:
                each.assign_add(1.0)
            print(time.monotonic() - begun, flush=True)
        else:
            print(*(int(each.numpy()) for each in both), flush=True)
"""
SERVERS, WORKERS, TURNS = (0, 1), (2, 3), 5
SECRET = "a secret of thirty-two characters"


class Pair:
    """Two servers and two workers, each on a host of its own; the first worker is the witness."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        addresses = [f"{host.address}:4000" for host in rig.hosts]
        cluster = {"ps": addresses[:2], "worker": addresses[2:]}
        self.logs = [rig.folder / f"log of {host.name}" for host in rig.hosts]
        self.tasks = [
            self._start(cluster, *task) for task in enumerate(2 * ["ps"] + 2 * ["worker"])
        ]
        for worker in WORKERS:
            assert self.line(worker) == "ready\n", self.said()

    def _start(self, cluster: Any, number: int, job: str) -> Process:
        config = {"cluster": cluster, "task": {"type": job, "index": number % 2}}
        env = {"TF_CONFIG": json.dumps(config), "NDISTRIBUTE_SECRET": SECRET}
        program = [sys.executable, "-c", _SERVE if job == "ps" else _WORK]
        with self.logs[number].open("wb") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            return self.rig.hosts[number].start(program, env, text=True, **pipes)

    def tell(self, worker: int, what: str = "add") -> None:
        self.tasks[worker].stdin.write(f"{what}\n")
        self.tasks[worker].stdin.flush()

    def line(self, worker: int) -> str:
        return self.tasks[worker].stdout.readline() or f"nothing: {self.said()}"

    def added(self, worker: int) -> float:
        """Return how long it took a worker, which was told, to add."""
        return float(self.line(worker))

    def add(self, worker: int) -> float:
        self.tell(worker)
        return self.added(worker)

    def totals(self, worker: int) -> list[int]:
        self.tell(worker, "read")
        return [int(word) for word in self.line(worker).split()]

    def whole(self) -> None:
        """Wait until the servers are equal, and their witness knows them."""
        for _ in range(TURNS):
            self.add(2)
            threading.Event().wait(0.25)

    def said(self) -> list[str]:
        return [log.read_text() for log in self.logs]


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    with Rig(4, ssh=False) as rig:
        pair = Pair(rig)
        pair.whole()
        yield pair
        for worker in WORKERS:
            pair.tasks[worker].stdin.close()
            assert pair.tasks[worker].wait(HANG_SECONDS) == 0, pair.said()


def test_of_two_halves_of_a_network_the_one_with_the_witness_goes_on():
    with pair() as job:
        hosts = job.rig.hosts
        halves = [(hosts[a], hosts[b]) for a in (0, 3) for b in (1, 2)]
        for cut in halves:
            job.rig.cut(*cut)
        job.tell(3)
        print(f"{job.add(2):.3f} s")
        answered = threading.Event()
        waiting = threading.Thread(target=lambda: (job.added(3), answered.set()))
        waiting.start()
        assert not answered.wait(2.0)
        job.add(2)
        for cut in halves:
            job.rig.heal(*cut)
        waiting.join(HANG_SECONDS)
        job.whole()
        assert job.totals(2) == job.totals(3) == [TURNS + 3 + TURNS] * 2, job.said()


@pytest.mark.hosts
def test_two_servers_that_lose_each_other_alone_do_not_diverge():
    with pair() as job:
        job.rig.cut(job.rig.hosts[0], job.rig.hosts[1])
        print([f"{job.add(worker):.3f} s" for worker in (*WORKERS, *WORKERS)])
        job.rig.heal(job.rig.hosts[0], job.rig.hosts[1])
        job.whole()
        assert job.totals(2) == job.totals(3) == [TURNS + 4 + TURNS] * 2, job.said()


@pytest.mark.hosts
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_whose_host_vanishes_is_left_out(server):
    with pair() as job:
        job.rig.hosts[server].vanish()
        print([f"{job.add(worker):.3f} s" for worker in (*WORKERS, *WORKERS)])
        assert job.totals(2) == job.totals(3) == [TURNS + 4] * 2, job.said()
