"""Jobs of `ndistribute run --hosts` when a host vanishes, is cut off or comes back."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.rig import Host, Process, Rig, skip_reason
from tests.processes import HANG_SECONDS, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(skip_reason()), reason=skip_reason())]
HEARTBEAT = 4
# Ends when the file `go` is there. SIGTERM does not end rank 1, so the reaper takes its time.
WAITING = """
import json, os, signal, socket, sys
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank:  # As a worker, it needs its port for itself.
    name, port = config["cluster"]["worker"][rank].split(":")
    own = socket.create_server((name, int(port)), reuse_port=False)
print("runs", flush=True)
while not Path(__file__).with_name("go").exists():
    signal.sigtimedwait([signal.SIGUSR2], 0.05)
"""
REDUCING = """
import numpy as np
import ndistribute as nd
with nd.MultiWorkerMirroredStrategy() as strategy:
    total = strategy.run(lambda: nd.get_replica_context().all_reduce("sum", np.ones(4)))
    print("runs", flush=True)
    while True:
        strategy.run(lambda: nd.get_replica_context().all_reduce("sum", np.ones(4)))
"""


class Job:
    """A job on all hosts of a rig, whose launcher runs on the first one."""

    def __init__(self, rig: Rig, script: Path, *options: str, heartbeat: int = HEARTBEAT) -> None:
        self.script, self.lines = script, list[str]()
        names = ",".join(host.name for host in rig.hosts)
        command = [sys.executable, "-m", "ndistribute", "run", "--hosts", names, *options]
        with (script.parent / "output").open("wb") as output:
            self.process: Process = rig.hosts[0].start(
                [*command, str(script)],
                env={"NDISTRIBUTE_HEARTBEAT_SECONDS": str(heartbeat)},
                stdout=output,
                stderr=output,
            )

    def output(self) -> str:
        return (self.script.parent / "output").read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the output has a text so often."""
        wait_until(lambda: self.output().count(text) >= count or self.process.poll() is not None)
        assert self.output().count(text) >= count, self.output()

    def wait(self) -> int:
        return self.process.wait(HANG_SECONDS)

    def wait_until_nothing_runs(self) -> None:
        """Wait until no process on any host has the script in its command line."""
        wait_until(lambda: not self._running())

    def _running(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().decode(errors="replace")
            except OSError:
                continue
            found += [line] if str(self.script) in line else []
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(3, shared=[tmp_path]) as rig:
        yield rig


@pytest.fixture
def running(rig: Rig, tmp_path: Path) -> Callable[..., Job]:
    """Return a function that starts a job of a script, and waits until all its tasks run."""

    def start(text: str, *options: str, heartbeat: int = HEARTBEAT) -> Job:
        script = tmp_path / "script.py"
        script.write_text(text)
        job = Job(rig, script, *options, heartbeat=heartbeat)
        job.wait_for("runs", 3)
        return job

    return start


def given_up(host: Host) -> str:
    reached = f"ssh could not connect to {host.name}, or {host.name} did not answer"
    return f"exit code 255: {reached} for {HEARTBEAT} s; check that"


def vanish(rig: Rig) -> None:
    rig.hosts[1].vanish()


def cut(rig: Rig) -> None:
    rig.cut(rig.hosts[0], rig.hosts[1])


def launcher_vanishes(rig: Rig) -> None:
    rig.hosts[0].vanish()


@pytest.mark.parametrize(
    ("text", "fault"),
    [(WAITING, vanish), (REDUCING, vanish), (WAITING, cut), (WAITING, launcher_vanishes)],
    ids=["idle", "reducing", "cut", "launcher"],
)
def test_a_fault_for_ever_ends_all_tasks_and_the_host_is_named(rig, running, text, fault):
    job = running(text)
    fault(rig)
    if fault is not launcher_vanishes:
        assert job.wait() == 255, job.output()
        assert f"rank 1 failed first ({given_up(rig.hosts[1])}" in job.output()
    job.wait_until_nothing_runs()


def test_a_cut_of_two_seconds_is_survived(rig, running, tmp_path):
    job = running(WAITING, heartbeat=8)
    rig.cut(rig.hosts[1])
    threading.Event().wait(2.0)
    rig.heal(rig.hosts[1])
    threading.Event().wait(8.0)  # Until the cut would have ended the job.
    assert job.process.poll() is None, job.output()
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.output()


def test_an_elastic_job_goes_on_without_a_host_and_takes_it_in_again(rig, running, tmp_path):
    job = running(WAITING.replace("rank == 1", "False"), "--elastic", "--max-restarts", "1")
    first, second, third = rig.hosts
    rig.cut(first, second)
    job.wait_for(f"worker 1 ended ({given_up(second)}", 2)  # Which costs no restart.
    rig.heal(first, second)
    job.wait_for("runs", 4)
    third.vanish()
    job.wait_for(f"worker 2 ended ({given_up(third)}")
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.output()
    assert job.output().count("[0] runs") == 1


@pytest.mark.parametrize("fault", ["vanishes", "cut"])
def test_a_job_starts_again_on_a_host_that_comes_back(rig, running, tmp_path, fault):
    """What a cut left behind ends before that."""
    job = running(WAITING, "--max-restarts", "1")
    first, second = rig.hosts[:2]
    second.vanish() if fault == "vanishes" else rig.cut(first, second)
    job.wait_for("restarting in 0 s, once ssh reaches all hosts (restarts left: 1)")
    if fault == "vanishes":
        job.wait_for(f"ssh {second.name} ended (exit code 255", 2)  # Which costs no restart.
        second.boot()
    else:
        rig.heal(first, second)
    job.wait_for("runs", 6)
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.output()
