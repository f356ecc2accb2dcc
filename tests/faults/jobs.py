"""The wires on which faults are tested, and jobs of scripts that start and end for themselves."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT, Ranks, find_mpiexec

HEARTBEAT = 1.0
FAST = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(HEARTBEAT)}

WIRES: dict[str, Callable[[], Ranks]] = {
    "shared": lambda: Ranks(2, "fork", FAST),
    "ring": lambda: Ranks(3, "fork", {**FAST, "FAULTS_WIRE": "ring"}),
    "hosts": lambda: Ranks(
        3, "fork", [{**FAST, "NDISTRIBUTE_HOST_ID": host} for host in ("red", "red", "blue")]
    ),
}
SIZES = {"shared": 2, "ring": 3, "hosts": 3, "mpi": 2}


def has_mpi() -> bool:
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return False
    return find_mpiexec() is not None


if has_mpi():
    WIRES["mpi"] = lambda: Ranks(2, "mpi", environ={**FAST, "FAULTS_WIRE": "mpi"})


@dataclass
class Ended:
    """How a script ended."""

    code: int
    output: str
    seconds: float


class Job:
    """Start one script as several workers, over TCP.

    Args:
        script: where it is written.
        body: what it says.
        environs: what the environment of each worker has besides the usual; one for each worker.
    """

    def __init__(self, script: Path, body: str, environs: Sequence[Mapping[str, str]]) -> None:
        script.write_text(textwrap.dedent(body))
        doors = [socket.create_server(("127.0.0.1", 0)) for _ in environs]
        self.addresses = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
        self._began = time.monotonic()
        self.processes = []
        for index, (door, extra) in enumerate(zip(doors, environs, strict=True)):
            environ = {
                **os.environ,
                **FAST,
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "NDISTRIBUTE_SECRET": "the secret of this test",
                "TF_CONFIG": config(self.addresses, index),
                "NDISTRIBUTE_LISTEN_FD": str(door.fileno()),
                **extra,
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    env={name: value for name, value in environ.items() if value},
                    pass_fds=[door.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for door in doors:
            door.close()

    def ended(self, timeout: float = 30.0) -> list[Ended]:
        """Wait until all have ended, and say how."""
        ends = []
        for process in self.processes:
            left = max(0.1, self._began + timeout - time.monotonic())
            output, _ = process.communicate(timeout=left)
            ends.append(Ended(process.returncode, output, time.monotonic() - self._began))
        return ends

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait(timeout=10.0)
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def job(folder: Path, body: str, environs: Sequence[Mapping[str, str]] = ({}, {})) -> Iterator[Job]:
    started = Job(folder / "script.py", body, environs)
    try:
        yield started
    finally:
        started.close()


def config(addresses: Sequence[str], index: int) -> str:
    """Return a `TF_CONFIG`."""
    cluster = {"worker": list(addresses)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
