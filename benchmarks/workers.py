"""What all processes of benchmarks are started with: cores, threads, addresses, and a deadline.

Threads are pinned by the environment and cores by affinity before a process loads NumPy or
TensorFlow, alike for both.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["ROOT", "WorkerError", "free_addresses", "on_cores", "pinned", "read_line"]

ROOT = Path(__file__).resolve().parents[1]

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
