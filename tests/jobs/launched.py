"""Starts `ndistribute run` as a user does, for the tests, and watches its processes end."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ndistribute.errors import MissingDependencyError
from ndistribute.launcher.commands import find_mpiexec
from tests.processes import ROOT

SECONDS = 60
# What a job sets itself must not come from whoever runs the tests.
UNSET = (
    "TF_CONFIG NDISTRIBUTE_SECRET NDISTRIBUTE_SECRET_FILE NDISTRIBUTE_LISTEN_FD "
    "OMP_NUM_THREADS OPENBLAS_NUM_THREADS OPENBLAS_CORETYPE "
    "NDISTRIBUTE_SNAPSHOT_DIR NDISTRIBUTE_SNAPSHOT_SECONDS"
).split()


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which the package is found and nothing of a job is set."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ndistribute", *map(str, arguments)]


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@contextlib.contextmanager
def started(
    *arguments: str | Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start the command, and end it at the latest when the block does."""
    with subprocess.Popen(
        command(*arguments),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.kill()
            job.wait(SECONDS)


def read_pids(job: subprocess.Popen[str], count: int) -> list[int]:
    """Read lines such as ``[0] pid 123`` until there are as many."""
    pids: list[int] = []
    while len(pids) < count:
        line = job.stdout.readline()
        if not line:
            raise EOFError(f"the job ended early: {job.stderr.read()}")
        if " pid " in line:
            pids.append(int(line.rpartition(" ")[2]))
    return pids


def lasting(pids: Sequence[int], seconds: float = 30.0) -> list[int]:
    """Return those processes that have not ended in a number of seconds."""
    return [pid for pid in pids if not _ends(pid, seconds)]


def _ends(pid: int, seconds: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = bool(poll.poll(seconds * 1000))
    os.close(fd)
    return ended


def _has_mpi() -> bool:
    try:
        return bool(find_mpiexec())
    except MissingDependencyError:
        return False


real_mpi = pytest.mark.skipif(not _has_mpi(), reason="mpi4py and mpiexec are not installed")
