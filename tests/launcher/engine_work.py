"""What the tests let the tasks of a job on Ray or Dask do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ndistribute as nd


def note(folder: str) -> str:
    """Write down that this task runs, under its name, with what ends with it; return the name."""
    me = nd.cluster.resolve()
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    name = f"{me.task_type}-{me.task_id}"
    with Path(folder, name).open("a") as file:
        file.write(f"{os.getpid()} {grandchild.pid}\n")
    return name


def total(start: float) -> tuple[int, float, str]:
    with nd.MultiWorkerMirroredStrategy() as strategy:
        index = strategy.cluster_resolver.worker_index
        print(f"I am {index}")
        ones = strategy.run(lambda: start + index)
        return index, float(strategy.reduce("SUM", ones)), os.environ["GREETING"]


def fail_once(folder: str) -> int:
    """Fail in worker 1, the first time."""
    name = note(folder)
    if name == "worker-1" and len(Path(folder, name).read_text().splitlines()) == 1:
        raise LookupError("not this time")
    return len(Path(folder, name).read_text().splitlines())


def fail(folder: str) -> None:
    """Fail in worker 1 once the other waits for it."""
    name = note(folder)
    with nd.MultiWorkerMirroredStrategy() as strategy:
        if name == "worker-1":
            raise LookupError("no such thing")
        strategy.reduce("SUM", strategy.run(lambda: 1.0))


def be_killed(folder: str) -> None:
    """Kill worker 1, or what the engine has beside it."""
    name = note(folder)
    wait_for_others(folder, 2)
    if name == "worker-1":
        os.kill(engine_process() if "ENGINE" in os.environ else os.getpid(), signal.SIGKILL)
    time.sleep(300)


def engine_process() -> int:
    """Return the process of the engine's that started this task, by way of a shell and a reaper."""
    pid = os.getppid()
    while b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def wait_for_others(folder: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(Path(folder).iterdir())) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def serve_or_work(folder: str) -> int:
    """Serve for ever as a server and beside a chief; fail in worker 0 the first time."""
    name = note(folder)
    wait_for_others(folder, 3)
    starts = len(Path(folder, name).read_text().splitlines())
    if name == "worker-0" and starts == 1:
        sys.exit(3)
    if name.startswith("ps") or ("CHIEF" in os.environ and name != "chief-0"):
        time.sleep(300)
    return starts


def sleep(folder: str) -> None:
    note(folder)
    time.sleep(300)
