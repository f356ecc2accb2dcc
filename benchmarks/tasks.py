"""Starts the servers and workers that a chief commands, as processes of the chief's process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.case import OURS
from benchmarks.workers import END_SECONDS, ROOT, free_addresses

__all__ = ["cluster"]


@contextlib.contextmanager
def cluster(side: str, workers: int, servers: int) -> Iterator[None]:
    """Run a cluster whose chief is this process, as `TF_CONFIG` then says.

    Args:
        side: whose servers they are; they run on this interpreter.
        workers: how many processes compute.
        servers: how many hold variables.
    """
    jobs = {"chief": 1, "worker": workers, "ps": servers}
    addresses = free_addresses(jobs)
    os.environ["NDISTRIBUTE_SECRET"] = secrets.token_hex(16)
    tasks = [(job, index) for job in ("ps", "worker") for index in range(jobs[job])]
    with contextlib.ExitStack() as stack:
        for job, index in tasks:
            config = json.dumps({"cluster": addresses, "task": {"type": job, "index": index}})
            stack.enter_context(_task(side, config))
        task = {"type": "chief", "index": 0}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": addresses, "task": task})
        yield


@contextlib.contextmanager
def _task(side: str, config: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.task", side],
        env={**os.environ, "TF_CONFIG": config},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=sys.stderr if side == OURS else subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_SECONDS)
