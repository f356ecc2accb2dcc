"""The parent's side of the worker processes: start them pinned, ask, wait with a deadline.

Threads are pinned by the environment and cores by affinity before a worker loads NumPy or
TensorFlow, alike for both. A worker that does not answer in time is killed and its last words are
shown.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.case import Contender

__all__ = ["ROOT", "Worker", "WorkerError", "Workers"]

ROOT = Path(__file__).resolve().parents[1]

# Importing TensorFlow takes ten seconds on a busy machine, tracing a step about as long.
ANSWER_SECONDS = 180.0
END_SECONDS = 10.0

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerError(RuntimeError):
    """A worker failed, ended or did not answer."""


class Worker:
    """One worker process.

    Args:
        python: the interpreter.
        cores: the process runs on so many.
        blas_threads: what the environment pins.
    """

    def __init__(self, python: str, cores: int, blas_threads: int) -> None:
        pinned = dict.fromkeys(_THREAD_VARIABLES, str(blas_threads))
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        allowed = sorted(os.sched_getaffinity(0))[:cores]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by close
        self._buffer = b""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, allowed)  # Inherited by the child; ours is put back below.
        try:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                cwd=ROOT,
                env=os.environ | pinned | quiet,
            )
        finally:
            os.sched_setaffinity(0, before)

    def ask(self, timeout: float = ANSWER_SECONDS, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            WorkerError: the worker raised, ended, or did not answer in time.
        """
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerError(f"{request}: the worker has ended.\n{self._last_words()}") from None
        answer = json.loads(self._line(request, time.monotonic() + timeout))
        if "error" in answer:
            raise WorkerError(f"{request}:\n{answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
        self._process.stdout.close()
        self._errors.close()

    def _line(self, request: dict[str, Any], deadline: float) -> bytes:
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(pipe, 1 << 16) if ready else b""
            if not piece:
                why = "the worker has ended" if ready else "no answer in time"
                self._process.kill()
                raise WorkerError(f"{request}: {why}.\n{self._last_words()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]


class Workers:
    """The workers of a run, started when they are first needed.

    Args:
        pythons: the interpreter of each side.
        cores: how many cores each worker may use.
    """

    def __init__(self, pythons: dict[str, str], cores: int) -> None:
        self._pythons = pythons
        self._cores = cores
        self._started: dict[tuple[str, int, str], Worker] = {}

    def of(self, contender: Contender) -> Worker:
        """Return the worker that does this contender's work."""
        return self.get(contender.side, contender.blas_threads, contender.process)

    def get(self, side: str, blas_threads: int | None = None, process: str = "") -> Worker:
        """Return one of a side's workers."""
        key = (side, blas_threads or self._cores, process)
        if key not in self._started:
            self._started[key] = Worker(self._pythons[side], self._cores, key[1])
        return self._started[key]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._started.values():
            worker.close()
