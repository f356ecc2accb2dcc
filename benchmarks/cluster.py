"""A cluster of real processes on this machine, which benchmarks use, look into and do harm to."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from unittest import mock

from benchmarks.case import OURS
from benchmarks.workers import END_SECONDS, ROOT, WorkerError, free_addresses, read_line

__all__ = ["DEADLINE", "Cluster", "commanded", "until_at_work"]

DEADLINE = 240.0


class Cluster:
    """Start, kill and start again the tasks of a cluster; at the end of the block none is left.

    Args:
        workers: how many.
        servers: how many.
        environ: what all tasks have in their environment besides.
        chief: whether there is one.
        side: whose servers they are; they run on this interpreter.
    """

    def __init__(
        self,
        workers: int,
        servers: int,
        environ: dict[str, str],
        *,
        chief: bool = True,
        side: str = OURS,
    ) -> None:
        jobs = {"ps": servers, "worker": workers, "chief": int(chief)}
        self.addresses = free_addresses(jobs)
        self.environ = {"NDISTRIBUTE_SECRET": secrets.token_hex(16), **environ}
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._side = side
        self._buffers: dict[tuple[str, int], bytearray] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__

    def config(self, job: str, index: int) -> str:
        """Return the `TF_CONFIG` of a task."""
        return json.dumps({"cluster": self.addresses, "task": {"type": job, "index": index}})

    def start(self, job: str, index: int, does: str = "") -> None:
        """Start a task.

        Args:
            job: of the task.
            index: in the job.
            does: what `task.py` is told, if not to serve.
        """
        self._buffers[job, index] = bytearray()
        self.processes[job, index] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.task", does or self._side],
            env={
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                **self.environ,
                "TF_CONFIG": self.config(job, index),
            },
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )

    def start_all(self, job: str, does: str = "") -> None:
        """Start every task of a job."""
        for index in range(len(self.addresses.get(job, ()))):
            self.start(job, index, does)

    def send(self, job: str, index: int, number: signal.Signals) -> float:
        """Send a task a signal, and return when."""
        when = time.monotonic()
        self.processes[job, index].send_signal(number)
        return when

    def kill(self, job: str, index: int) -> float:
        """End a task without a warning; return when that was, once the process is gone."""
        process = self.processes.pop((job, index))
        when = time.monotonic()
        process.kill()
        process.wait(END_SECONDS)
        _close(process)
        return when

    def answer(self, job: str, index: int) -> dict[str, Any]:
        """Return the next line that a task writes."""
        pipe = self.processes[job, index].stdout
        buffer = self._buffers[job, index]
        try:
            line = read_line(pipe.fileno(), buffer, time.monotonic() + DEADLINE)
        except (OSError, EOFError) as error:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            raise WorkerError(f"{job}:{index}: {error}; all said:\n{said[-4000:]}") from None
        return dict(json.loads(line))

    def facts(self, job: str, index: int) -> dict[str, Any]:
        """Return what a task says of itself, see `task.facts`; it has nothing else to say now."""
        self.tell(job, index, "facts")
        return self.answer(job, index)

    def tell(self, job: str, index: int, line: str) -> None:
        """Write a line for a task."""
        self.processes[job, index].stdin.write(line.encode() + b"\n")

    def ended(self) -> float:
        """Wait until the last task has ended, and return when that was."""
        for process in self.processes.values():
            process.wait(DEADLINE)
        return time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGCONT)
            process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_SECONDS)
            _close(process)
        self._errors.close()


@contextlib.contextmanager
def commanded(cluster: Cluster) -> Iterator[tuple[Any, Any]]:
    """Start servers and workers, and yield the strategy and coordinator of their chief."""
    import ndistribute as nd

    with mock.patch.dict(os.environ, cluster.environ), cluster:
        cluster.start_all("ps")
        cluster.start_all("worker")
        resolver = nd.SimpleClusterResolver(cluster.addresses, task_type="chief", task_id=0)
        with (
            contextlib.closing(
                nd.ParameterServerStrategy(resolver, timeout_seconds=DEADLINE)
            ) as strategy,
            nd.ClusterCoordinator(strategy) as coordinator,
        ):
            for index in range(len(cluster.addresses["worker"])):
                until_at_work(coordinator, index)
            yield strategy, coordinator


def until_at_work(coordinator: Any, worker: int) -> float:
    """Keep workers busy until a certain one has run something, and return when it did."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        done = coordinator.fetch([coordinator.schedule(_who) for _ in range(4)])
        times = [when for index, when in done if index == worker]
        if times:
            return min(times)
    raise TimeoutError(f"worker {worker} did not come")


def _who() -> tuple[int, float]:
    import ndistribute as nd

    time.sleep(0.001)  # So that no worker takes all.
    return nd.cluster.worker_index(), time.monotonic()


def _close(process: subprocess.Popen[bytes]) -> None:
    process.stdin.close()
    process.stdout.close()
