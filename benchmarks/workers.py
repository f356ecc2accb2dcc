"""The parent's side of the worker processes: start them pinned, ask, wait with a deadline.

Threads are pinned by the environment and cores by affinity before a worker loads NumPy or
TensorFlow, alike for both. A worker that does not answer in time is killed and its last words are
shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from benchmarks.case import Contender

if TYPE_CHECKING:
    from benchmarks.team import Team

__all__ = [
    "ROOT",
    "Worker",
    "WorkerError",
    "Workers",
    "free_addresses",
    "on_cores",
    "pinned",
    "read_line",
]

ROOT = Path(__file__).resolve().parents[1]

# Importing TensorFlow takes ten seconds on a busy machine, tracing a step about as long.
ANSWER_SECONDS = 180.0
END_SECONDS = 10.0

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerError(RuntimeError):
    """A worker failed, ended or did not answer."""


def pinned(blas_threads: int) -> dict[str, str]:
    """Return the environment that all workers get, whoever's they are."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    return dict.fromkeys(_THREAD_VARIABLES, str(blas_threads)) | quiet


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let processes that are started meanwhile run on the first so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_addresses(jobs: Mapping[str, int]) -> dict[str, list[str]]:
    """Return a cluster with so many tasks of each job, at addresses where nobody listens now.

    Somebody else may take a port before it is used: then what listens there fails, and says so.
    """
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


def read_line(pipe: int, buffer: bytearray, deadline: float) -> bytes:
    """Return the next line that comes, and keep in the buffer what comes behind it.

    Raises:
        EOFError: the other side has ended.
        TimeoutError: no line came in time.
    """
    while b"\n" not in buffer:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError("no answer in time")
        piece = os.read(pipe, 1 << 16)
        if not piece:
            raise EOFError("the worker has ended")
        buffer += piece
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return line


class Worker:
    """One worker process.

    Args:
        python: the interpreter.
        cores: the process runs on so many.
        blas_threads: what the environment pins.
    """

    def __init__(self, python: str, cores: int, blas_threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by close
        self._buffer = bytearray()
        with on_cores(cores):
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                cwd=ROOT,
                env=os.environ | pinned(blas_threads),
            )

    def ask(self, timeout: float = ANSWER_SECONDS, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            WorkerError: the worker raised, ended, or did not answer in time.
        """
        pipe = self._process.stdout.fileno()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            answer = json.loads(read_line(pipe, self._buffer, time.monotonic() + timeout))
        except (OSError, EOFError) as error:
            self.kill()
            raise WorkerError(f"{request}: {error}\n{self._last_words()}") from None
        if "error" in answer:
            raise WorkerError(f"{request}:\n{answer['error']}")
        return answer

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]


class Workers:
    """The workers of a run, started when they are first needed.

    Args:
        pythons: the interpreter of each side.
        cores: how many cores each worker, or team of them, may use.
    """

    def __init__(self, pythons: dict[str, str], cores: int) -> None:
        self._pythons = pythons
        self._cores = cores
        self._started: dict[tuple[Any, ...], Worker | Team] = {}

    def of(self, contender: Contender) -> Worker | Team:
        """Return the worker or the team that does this contender's work."""
        key = self._key(contender)
        if key not in self._started:
            self._started[key] = self._start(contender)
        return self._started[key]

    def alone(self, side: str) -> Worker:
        """Return a worker of a side that does nobody's work."""
        if (side,) not in self._started:
            self._started[side,] = Worker(self._pythons[side], self._cores, self._cores)
        return self._started[side,]  # type: ignore[return-value]

    def discard(self, contender: Contender) -> None:
        """End what failed; the next contender that needs it gets a fresh one."""
        failed = self._started.pop(self._key(contender), None)
        if failed is not None:
            failed.kill()
            failed.close()

    def _key(self, one: Contender) -> tuple[Any, ...]:
        return (one.side, self._threads(one), one.process, one.team, one.wire)

    def _threads(self, one: Contender) -> int:
        return one.blas_threads or max(1, self._cores // one.team)

    def _start(self, one: Contender) -> Worker | Team:
        python, threads = self._pythons[one.side], self._threads(one)
        if not one.wire:
            return Worker(python, self._cores, threads)
        from benchmarks.team import Team

        return Team(python, one.team, one.wire, self._cores, threads)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._started.values():
            if error is not None:
                worker.kill()
            worker.close()
