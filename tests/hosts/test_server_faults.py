"""Servers, workers and chiefs whose cables are pulled: they wait, and each update counts once."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.rig import Host, Process, Rig, skip_reason
from tests.processes import HANG_SECONDS

pytestmark = pytest.mark.skipif(
    bool(skip_reason(ssh=False)), reason=skip_reason(ssh=False) or "none"
)
HEARTBEAT, SECRET = 2.0, "a secret of thirty-two characters"
PATIENCE = 12.0  # The chief's timeout_seconds where a cable is out for ever.
LONG = HEARTBEAT + 3 + 3  # After a cut of this length, each end has counted the other as lost.
_SERVE = "import ndistribute as nd; r = nd.TFConfigClusterResolver(); \
nd.Server(r.cluster_spec(), r.task_type, r.task_id).join()"
# For each line that it reads, the chief adds 1 itself or by functions on all workers.
_CHIEF = """
import sys, time
import ndistribute as nd
with nd.ParameterServerStrategy(timeout_seconds=float(sys.argv[1])) as strategy:
    with strategy.scope():
        v = nd.Variable(0.0)
        w = nd.Variable(0.0)
    if sys.argv[2] == "alone":
        for line in sys.stdin:
            v.assign_add(1.0)
            w.assign_add(1.0)
            print(int(v.numpy()), int(w.numpy()), flush=True)
        sys.exit()
    def add():
        v.assign_add(1.0)
        w.assign_add(1.0)
    with nd.ClusterCoordinator(strategy) as coordinator:
        for line in sys.stdin:
            for _ in range(int(line)):
                coordinator.schedule(add)
            coordinator.join()
            print(int(v.numpy()), int(w.numpy()), flush=True)
"""
# The same by steps of a graph, whose variables are on the server.
_GRAPH = """
import json, os, sys
import numpy as np
import ndistribute as nd
from ndistribute import graph as g
config = json.loads(os.environ["TF_CONFIG"])
server = nd.Server(config["cluster"], config["task"]["type"], config["task"]["index"])
if config["task"]["type"] == "ps":
    server.join()
    sys.exit()
here = "/job:worker/task:0"
with g.device(g.replica_device_setter(worker_device=here, cluster=config["cluster"])):
    v = g.Variable(np.zeros(1), name="v")
    w = g.Variable(np.zeros(1), name="w")
    add = [x.assign_add(np.ones(1), use_locking=True) for x in (v, w)]
with g.MonitoredTrainingSession(server.target, is_chief=True) as session:
    for line in sys.stdin:
        for _ in range(int(line)):
            session.run(add)
        print(*(int(x[0]) for x in session.run([v, w])), flush=True)
"""


class Job:
    """A job on the hosts of a rig, in the order of `jobs`: a server, a chief and others.

    Without a chief, the second one is the only worker, which runs a graph.
    """

    def __init__(
        self, rig: Rig, jobs: str, timeout: float, heartbeat: float = HEARTBEAT, alone: bool = False
    ) -> None:
        self.rig, self.names, self.heartbeat = rig, jobs.split(), heartbeat
        self.logs: list[Path] = []
        cluster: dict[str, list[str]] = {}
        self.tasks: list[Process] = []
        for host, job in zip(rig.hosts, self.names, strict=True):
            cluster.setdefault(job, []).append(f"{host.address}:4000")
        seen: dict[str, int] = {}
        for host, job in zip(rig.hosts, self.names, strict=True):
            task = {"type": job, "index": seen.setdefault(job, 0)}
            seen[job] += 1
            program = [_SERVE if "chief" in self.names else _GRAPH]
            if job == "chief":
                program = [_CHIEF, str(timeout), "alone" if alone else "schedules"]
            self.tasks.append(self._start(host, {"cluster": cluster, "task": task}, program))
        self.chief = self.tasks[1]
        self.total = 0

    def _start(self, host: Host, config: dict[str, Any], program: list[str]) -> Process:
        env = {"TF_CONFIG": json.dumps(config), "NDISTRIBUTE_SECRET": SECRET}
        env["NDISTRIBUTE_HEARTBEAT_SECONDS"] = str(self.heartbeat)
        self.logs.append(self.rig.folder / f"log of {host.name}")
        with self.logs[-1].open("wb") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            return host.start([sys.executable, "-c", *program], env, text=True, **pipes)

    def ask(self, count: int = 1) -> None:
        self.total += count
        self.chief.stdin.write(f"{count}\n")
        self.chief.stdin.flush()

    def answered(self) -> None:
        """Wait until all updates were made, each of them once."""
        line = self.chief.stdout.readline()
        assert line == f"{self.total} {self.total}\n", line or self.said()

    def cut_off(self, hosts: list[int]) -> None:
        """Cut some hosts off from all others, not from each other."""
        others = [host for host in self.rig.hosts if host.index not in hosts]
        self._cuts = [(self.rig.hosts[index], other) for index in hosts for other in others]
        for pair in self._cuts:
            self.rig.cut(*pair)

    def heal(self) -> None:
        for pair in self._cuts:
            self.rig.heal(*pair)

    def end(self) -> list[int]:
        """End the input of the chief, wait for all tasks, and return their exit codes."""
        self.chief.stdin.close()
        return [task.wait(HANG_SECONDS) for task in self.tasks]

    def said(self) -> list[str]:
        """Return what each task has logged."""
        return [log.read_text() for log in self.logs]


@pytest.mark.parametrize(
    ("jobs", "cut", "seconds", "heartbeat"),
    [
        ("ps chief", [0], LONG, HEARTBEAT),
        *(
            pytest.param("ps chief worker worker", [cut], *times, marks=pytest.mark.hosts)
            for cut in range(3)
            for times in ((2.0, 4 * HEARTBEAT), (20.0, HEARTBEAT))
        ),
        pytest.param("ps worker", [0], LONG, HEARTBEAT, marks=pytest.mark.hosts),  # A graph.
        # Halves, each with a server and a worker.
        pytest.param("ps chief worker ps worker", [3, 4], LONG, HEARTBEAT, marks=pytest.mark.hosts),
    ],
)
def test_a_cable_that_is_out_for_a_while_changes_no_result(jobs, cut, seconds, heartbeat):
    """The chief ended after a heartbeat with a timeout, and the server 3 s after that."""
    with Rig(len(jobs.split()), ssh=False) as rig:
        job = Job(rig, jobs, 60.0, heartbeat, alone="worker" not in jobs)
        for _ in range(3):
            job.ask()
            job.answered()
        job.cut_off(cut)
        job.ask(1 if "worker" not in jobs else 6)
        threading.Event().wait(seconds)  # The cable is out for so long.
        assert [task.poll() for task in job.tasks] == [None] * len(job.tasks)
        job.heal()
        job.answered()
        job.ask()
        job.answered()
        assert job.end() == [0] * len(job.tasks), job.said()


_GONE = "ends: the chief was out of reach and did not come back"
_UNREACHED = "was not reached within 12.0 s: that host does not answer: check the address"
_NO_WORKER = "No worker could be reached for 12 s while 4 functions waited; away: worker:0 ("
_WORKERS, _HALVES = "ps chief worker worker", "ps chief worker ps worker"


@pytest.mark.hosts
@pytest.mark.parametrize(
    ("jobs", "cut", "words"),
    [
        (_WORKERS, [0], ["ps:0 {}", _UNREACHED, "", ""]),
        (_WORKERS, [1], ["ps:0 {}", _NO_WORKER, "worker:0 {}", "worker:1 {}"]),
        (_HALVES, [3, 4], ["", _UNREACHED, "", "ps:1 {}", "worker:1 {}"]),
        (_WORKERS, [2], ["", "", "worker:0 {}", ""]),
    ],
    ids=["server", "chief", "halves", "worker"],
)
def test_a_cable_that_is_out_for_ever_ends_what_waits_for_it(jobs, cut, words):
    """The others go on if a worker alone is cut off."""
    with Rig(len(jobs.split()), ssh=False) as rig:
        job = Job(rig, jobs, PATIENCE)
        job.ask(4)
        job.answered()
        job.cut_off(cut)
        job.ask(4)
        if cut == [2]:
            job.answered()
            assert job.tasks[2].wait(HANG_SECONDS) == 1
            job.ask(4)
            job.answered()
        assert job.end() == [bool(text) for text in words], job.said()
        for text, said in zip(words, job.said(), strict=True):
            assert text.format(_GONE) in said


@pytest.mark.hosts
def test_idle_workers_run_what_one_cannot_end_as_it_alone_lost_a_server():
    with Rig(4, ssh=False) as rig:
        job = Job(rig, "ps chief worker worker", 60.0)
        job.ask(4)
        job.answered()
        rig.cut(rig.hosts[0], rig.hosts[2])
        begun = time.monotonic()
        job.ask(2)  # One for each worker.
        job.answered()
        took = time.monotonic() - begun
        rig.heal(rig.hosts[0], rig.hosts[2])
        job.ask(4)
        job.answered()
        assert job.end() == [0] * 4, job.said()
        said = job.said()[1]
        assert "worker:0 waits for ps:0 at" in said
        assert "idle workers run its functions: closure" in said
        assert took < 30, said  # Half of timeout_seconds.
