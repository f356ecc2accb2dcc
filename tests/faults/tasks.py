"""A cluster of real processes to do harm to: they are killed, stopped and started again."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import ndistribute as nd
from ndistribute.cluster import SimpleClusterResolver
from ndistribute.coordinator import server
from tests.zygote import Forked, shared_zygote

__all__ = ["ROOT", "Tasks", "free_addresses", "run_task", "wait_until"]

ROOT = Path(__file__).parents[2]
END_SECONDS = 40.0

Task = tuple[str, int]


class Tasks:
    """Run the servers and workers of a cluster whose chief is this process.

    Args:
        workers: how many.
        servers: how many.
        chief: whether the cluster has one.
        environ: what the tasks have in their environment besides.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 1,
        chief: bool = True,
        **environ: str,
    ) -> None:
        jobs = {"ps": servers, "worker": workers, "chief": int(chief)}
        self.cluster = free_addresses(jobs)
        self.environ = {"NDISTRIBUTE_SECRET": secrets.token_hex(16), **environ}
        self._processes: dict[Task, Forked] = {}
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115, closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for job, index in self._processes:
            self.kill(job, index)
        if error is not None:
            error.add_note(f"What the tasks said:\n{self.said()}")
        self._log.close()

    def start(self, job: str, index: int, **environ: str) -> None:
        """Start a task that was not started before, or has ended since.

        Args:
            job: of the task.
            index: in the job.
            environ: what it has in its environment besides; TASK_RUNS names a function of
                `loops.py` that it calls instead of serving, TASK_LIMITS are set before,
                TASK_USER is whose process it becomes, and after TASK_CUT_SECONDS without its
                chief it ends.
        """
        config = {"cluster": self.cluster, "task": {"type": job, "index": index}}
        own = {"TF_CONFIG": json.dumps(config)}
        self._processes[job, index] = shared_zygote().start(
            "tests.faults.tasks:run_task",
            {**os.environ, **self.environ, **environ, **own},
            output=self._log.fileno(),
        )

    def start_all(self, job: str | None = None, **environ: str) -> None:
        """Start every server and worker, or every task of a job; see `start`."""
        for each in ("ps", "worker") if job is None else (job,):
            for index in range(len(self.cluster.get(each, ()))):
                self.start(each, index, **environ)

    def pid(self, job: str, index: int) -> int:
        """Return which process a task is."""
        return self._processes[job, index].pid

    def send(self, job: str, index: int, number: signal.Signals) -> None:
        """Send a task a signal."""
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            self._processes[job, index].send_signal(number)

    def stop(self, job: str, index: int) -> None:
        """Stop a task, and wait until it has stopped."""
        self.send(job, index, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid(job, index)}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def resident_megabytes(self, job: str, index: int) -> float:
        """Return how much memory a task holds."""
        lines = Path(f"/proc/{self.pid(job, index)}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def kill(self, job: str, index: int) -> None:
        """End a task without a warning, and wait until it has ended."""
        self.send(job, index, signal.SIGKILL)
        self.code(job, index)

    def code(self, job: str, index: int, timeout: float = END_SECONDS) -> int:
        """Wait until a task has ended, and return its exit status."""
        try:
            return self._processes[job, index].wait(timeout)
        except subprocess.TimeoutExpired:
            late = f"{job}:{index} has not ended in {timeout} s:\n{self.said()}"
            raise TimeoutError(late) from None

    def resolver(self, job: str = "chief", index: int = 0) -> SimpleClusterResolver:
        """Return the resolver of a task that this process is."""
        return SimpleClusterResolver(self.cluster, task_type=job, task_id=index)

    def said(self) -> str:
        """Return what all tasks have written so far."""
        return Path(self._log.name).read_text(errors="replace")


def wait_until(condition: Callable[[], bool], seconds: float = 50.0) -> None:
    """Wait for what no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it has not come about in {seconds:g} s"
        threading.Event().wait(0.002)


def run_task() -> None:
    """Be a task, in a process of its own, as the environment says."""
    for name, value in json.loads(os.environ.get("TASK_LIMITS", "{}")).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    server.CUT_SECONDS = float(os.environ.get("TASK_CUT_SECONDS", server.CUT_SECONDS))
    if "TASK_USER" in os.environ:
        os.setuid(int(os.environ["TASK_USER"]))
    if "TASK_RUNS" in os.environ:
        getattr(importlib.import_module("tests.faults.loops"), os.environ["TASK_RUNS"])()
        return
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    nd.Server(config["cluster"], task["type"], task["index"]).join()


def free_addresses(jobs: Mapping[str, int]) -> dict[str, list[str]]:
    """Return a cluster with so many tasks of each job, at addresses where nobody listens now."""
    listeners = {
        job: [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for job, count in jobs.items()
        if count
    }
    try:
        return {
            job: [f"127.0.0.1:{listener.getsockname()[1]}" for listener in some]
            for job, some in listeners.items()
        }
    finally:
        for some in listeners.values():
            for listener in some:
                listener.close()
