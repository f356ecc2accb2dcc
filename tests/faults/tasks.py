"""A cluster of real processes to do harm to: they are killed, stopped and started again."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ndistribute.cluster import SimpleClusterResolver

__all__ = ["Tasks", "Zygote", "free_addresses", "wait_until"]

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
END_SECONDS = 10.0

Task = tuple[str, int]


class Zygote:
    """Start tasks by forking; see `zygote.py`."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._told = threading.Condition()
        self._started: queue.Queue[int] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.faults.zygote"],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = self._process.stdin, self._process.stdout
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def start(self, environ: Mapping[str, str]) -> int:
        """Start a task, and return its process."""
        self._pipes[0].write(json.dumps(environ).encode() + b"\n")
        self._pipes[0].flush()
        return self._started.get(timeout=START_SECONDS)

    def code(self, pid: int, timeout: float) -> int | None:
        """Wait until a task has ended, and return its exit status; None where it has not."""
        with self._told:
            self._told.wait_for(lambda: pid in self._codes, timeout)
            return self._codes.get(pid)

    def close(self) -> None:
        """End all tasks."""
        self._pipes[0].close()
        self._process.wait(END_SECONDS)
        self._listener.join(END_SECONDS)
        self._pipes[1].close()

    def _listen(self) -> None:
        for line in self._pipes[1]:
            told: dict[str, Any] = json.loads(line)
            if "started" in told:
                self._started.put(told["started"])
                continue
            with self._told:
                self._codes[told["ended"]] = told["code"]
                self._told.notify_all()


class Tasks:
    """Run the servers and workers of a cluster whose chief is this process.

    Args:
        zygote: what starts them.
        workers: how many.
        servers: how many.
        chief: whether the cluster has one.
        environ: what the tasks have in their environment besides.
    """

    def __init__(
        self,
        zygote: Zygote,
        workers: int = 2,
        servers: int = 1,
        chief: bool = True,
        **environ: str,
    ) -> None:
        jobs = {"ps": servers, "worker": workers, "chief": int(chief)}
        self.cluster = free_addresses(jobs)
        self.environ = {"NDISTRIBUTE_SECRET": secrets.token_hex(16), **environ}
        self._zygote = zygote
        self._pids: dict[Task, int] = {}
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115, closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for job, index in self._pids:
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
                `loops.py` that it calls instead of serving.
        """
        config = {"cluster": self.cluster, "task": {"type": job, "index": index}}
        own = {"TF_CONFIG": json.dumps(config), "TASK_LOG": self._log.name}
        self._pids[job, index] = self._zygote.start({**self.environ, **environ, **own})

    def start_all(self, job: str | None = None, **environ: str) -> None:
        """Start every server and worker, or every task of a job; see `start`."""
        for each in ("ps", "worker") if job is None else (job,):
            for index in range(len(self.cluster.get(each, ()))):
                self.start(each, index, **environ)

    def pid(self, job: str, index: int) -> int:
        """Return which process a task is."""
        return self._pids[job, index]

    def send(self, job: str, index: int, number: signal.Signals) -> None:
        """Send a task a signal."""
        _signal(self._pids[job, index], number)

    def stop(self, job: str, index: int) -> None:
        """Stop a task, and wait until it has stopped."""
        self.send(job, index, signal.SIGSTOP)
        stat = Path(f"/proc/{self._pids[job, index]}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def resident_megabytes(self, job: str, index: int) -> float:
        """Return how much memory a task holds."""
        lines = Path(f"/proc/{self._pids[job, index]}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def kill(self, job: str, index: int) -> None:
        """End a task without a warning, and wait until it has ended."""
        self.send(job, index, signal.SIGKILL)
        self.code(job, index)

    def code(self, job: str, index: int, timeout: float = END_SECONDS) -> int:
        """Wait until a task has ended, and return its exit status."""
        code = self._zygote.code(self._pids[job, index], timeout)
        if code is None:
            raise TimeoutError(f"{job}:{index} has not ended in {timeout} s:\n{self.said()}")
        return code

    def resolver(self, job: str = "chief", index: int = 0) -> SimpleClusterResolver:
        """Return the resolver of a task that this process is."""
        return SimpleClusterResolver(self.cluster, task_type=job, task_id=index)

    def said(self) -> str:
        """Return what all tasks have written so far."""
        return Path(self._log.name).read_text(errors="replace")


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it has not come about in {seconds:g} s"
        threading.Event().wait(0.002)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # It has ended already.
        os.kill(pid, number)


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
