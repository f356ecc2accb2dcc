"""A cluster of real processes on this machine, for `server_faults.py` to do harm to."""

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
from types import TracebackType
from typing import Any, Self

from benchmarks.case import OURS
from benchmarks.workers import END_SECONDS, ROOT, WorkerError, free_addresses, read_line

__all__ = ["DEADLINE", "Cluster"]

DEADLINE = 120.0


class Cluster:
    """Start, kill and start again the tasks of a cluster; at the end of the block none is left.

    Args:
        workers: how many.
        servers: how many.
        environ: what all tasks have in their environment besides.
        chief: whether there is one.
    """

    def __init__(
        self, workers: int, servers: int, environ: dict[str, str], *, chief: bool = True
    ) -> None:
        jobs = {"ps": servers, "worker": workers, "chief": int(chief)}
        self.addresses = free_addresses(jobs)
        self.environ = {"NDISTRIBUTE_SECRET": secrets.token_hex(16), **environ}
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._buffers: dict[tuple[str, int], bytearray] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__

    def start(self, job: str, index: int, does: str = "serve") -> None:
        """Start a task.

        Args:
            job: of the task.
            index: in the job.
            does: ``"serve"``, or what `faulty_task.py` is told.
        """
        config = {"cluster": self.addresses, "task": {"type": job, "index": index}}
        module = ["benchmarks.task", OURS] if does == "serve" else ["benchmarks.faulty_task", does]
        self._buffers[job, index] = bytearray()
        self.processes[job, index] = subprocess.Popen(
            [sys.executable, "-m", *module],
            env={
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                **self.environ,
                "TF_CONFIG": json.dumps(config),
            },
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )

    def start_all(self, job: str, does: str = "serve") -> None:
        """Start every task of a job."""
        for index in range(len(self.addresses[job])):
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


def _close(process: subprocess.Popen[bytes]) -> None:
    process.stdin.close()
    process.stdout.close()
