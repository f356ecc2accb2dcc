"""The wires on which faults are tested, and jobs of scripts that start and end for themselves."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import LISTEN, ROOT, Ranks, find_mpiexec
from tests.zygote import Forked, shared_zygote

HEARTBEAT = 1.0
FAST = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(HEARTBEAT)}

WIRES: dict[str, Callable[[], Ranks]] = {
    "shared": lambda: Ranks(2, environ=FAST),
    "ring": lambda: Ranks(3, environ={**FAST, "FAULTS_WIRE": "ring"}),
    "hosts": lambda: Ranks(
        3, environ=[{**FAST, "NDISTRIBUTE_HOST_ID": host} for host in ("red", "red", "blue")]
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
        self.processes: list[Forked] = []
        self._outputs = [tempfile.NamedTemporaryFile() for _ in environs]  # noqa: SIM115
        for index, (door, extra) in enumerate(zip(doors, environs, strict=True)):
            environ = {
                **os.environ,
                **FAST,
                "PYTHONPATH": str(ROOT),
                "OPENBLAS_NUM_THREADS": "1",
                "NDISTRIBUTE_SECRET": "the secret of this test",
                "TF_CONFIG": config(self.addresses, index),
                "RUN_SCRIPT": str(script),
                **extra,
            }
            inherited = {} if extra.get(LISTEN) == "" else {LISTEN: door.fileno()}
            self.processes.append(
                shared_zygote().start(
                    "tests.zygote:run_script",
                    {name: value for name, value in environ.items() if value},
                    inherited,
                    self._outputs[index].fileno(),
                )
            )
        for door in doors:
            door.close()

    def ended(self, timeout: float = 50.0) -> list[Ended]:
        """Wait until all have ended, and say how."""
        codes = [process.wait(timeout) for process in self.processes]
        return [Ended(code, self.said(index)) for index, code in enumerate(codes)]

    def said(self, index: int) -> str:
        """Return what one has written so far."""
        return Path(self._outputs[index].name).read_text()

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.wait(timeout=30.0)
        for output in self._outputs:
            output.close()


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
