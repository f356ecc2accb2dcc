"""The program of a user of Ray or Dask, and the functions that it runs in the tasks of jobs.

It is a process of its own, as these engines leave threads and files in the process that uses them.
It starts a small cluster. Each line that it reads is a job, and it answers each with a line.
"""

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ndistribute as nd


def note(folder: str, others: int = 0) -> tuple[str, int]:
    """Write down this task and its child; return its name and how often it was started.

    It returns when as many tasks as `others` have been started.
    """
    me = nd.cluster.resolve()
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    path = Path(folder, f"{me.task_type}-{me.task_id}")
    with path.open("a") as file:
        file.write(f"{os.getpid()} {grandchild.pid}\n")
    deadline = time.monotonic() + 60
    while len(list(Path(folder).iterdir())) < others and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.name, len(path.read_text().splitlines())


def total(start: str) -> tuple[int, float, str]:
    with nd.MultiWorkerMirroredStrategy() as strategy:
        index = strategy.cluster_resolver.worker_index
        print(f"I am {index}")
        ones = strategy.run(lambda: float(start) + index)
        return index, float(strategy.reduce("SUM", ones)), os.environ["GREETING"]


def fail_once(folder: str) -> int:
    """Fail in worker 1, the first time."""
    name, starts = note(folder, 2)
    if (name, starts) == ("worker-1", 1):
        raise LookupError("not this time")
    return starts


def fail(folder: str) -> None:
    """Fail in worker 1 once the other waits for it."""
    name, _ = note(folder)
    with nd.MultiWorkerMirroredStrategy() as strategy:
        if name == "worker-1":
            raise LookupError("no such thing")
        strategy.reduce("SUM", strategy.run(lambda: 1.0))


def be_killed(folder: str) -> None:
    """Kill worker 1, or the process of the engine that started it by a shell and a reaper."""
    name, _ = note(folder, 2)
    pid = os.getpid()
    if name == "worker-1" and "ENGINE" in os.environ:
        pid = os.getppid()
        while b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    if name == "worker-1":
        os.kill(pid, signal.SIGKILL)
    time.sleep(300)


def be_killed_once(folder: str) -> int:
    """Kill worker 1 the first time; worker 0 waits until it has started again."""
    name, starts = note(folder, 2)
    if (name, starts) == ("worker-1", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while len(Path(folder, "worker-1").read_text().splitlines()) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("worker 1 did not start again")
        time.sleep(0.01)
    return starts


def serve_or_work(folder: str) -> int:
    """Serve for ever as a server and beside a chief; fail in worker 0 the first time."""
    name, starts = note(folder, 3)
    if (name, starts) == ("worker-0", 1):
        sys.exit(3)
    if name.startswith("ps") or ("CHIEF" in os.environ and name != "chief-0"):
        time.sleep(300)
    return starts


def sleep(folder: str) -> None:
    note(folder)
    time.sleep(300)


@contextlib.contextmanager
def cluster(engine: str, directory: str) -> Iterator[None]:
    if engine == "dask":
        from distributed import Client, LocalCluster

        workers = {"n_workers": 2, "threads_per_worker": 1, "resources": {"SLOT": 2}}
        local = LocalCluster(dashboard_address=None, local_directory=directory, **workers)
        with local, Client(local):
            yield
        return
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(num_cpus=3, object_store_memory=80 << 20, _temp_dir=directory, **options)
    yield
    ray.shutdown()


def carry_out(engine: str, job: dict[str, Any]) -> dict[str, Any]:
    run = importlib.import_module(f"ndistribute.launcher.{engine}").run
    # The tasks import the functions from this module, which is not their main one.
    work = getattr(importlib.import_module("tests.jobs.engine_program"), job["work"])
    answer: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            answer["results"] = run(work, **job["options"])
        except (Exception, KeyboardInterrupt) as error:
            answer["error"] = type(error).__name__
            answer["text"] = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {**answer, "output": output.getvalue().splitlines()}


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    with cluster(*sys.argv[1:]):
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(carry_out(sys.argv[1], json.loads(line))), flush=True)
