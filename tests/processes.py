"""Runs functions on several real processes: starts them, collects results and tracebacks, kills.

The benchmarks start theirs here too, as tasks of a cluster or with the interpreter of a peer.

The processes stay, so that one start serves many tests. They are started like the workers of a job:
over TCP with `TF_CONFIG` and a listening socket that they inherit, or by a real `mpiexec`. Those
over TCP are forked from one that has imported the package: a start is a matter of milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.zygote import shared_zygote

__all__ = ["AT_ONCE", "LISTEN", "ROOT", "Outcome", "Ranks", "find_mpiexec"]

ROOT = Path(__file__).parent.parent
START_SECONDS = 60.0
# What is noticed within this is noticed at once, and not because a deadline was over: those are
# longer. How fast it is, benchmarks.faults measures.
AT_ONCE = 15.0
LISTEN = "NDISTRIBUTE_LISTEN_FD"
_LENGTH = struct.Struct("<Q")


class _Process(Protocol):
    pid: int

    def wait(self, timeout: float) -> int: ...


@dataclass
class Outcome:
    """What a function did on one process: returned, raised, or ended with the process."""

    value: Any = None
    error: str | None = None  # The name of the exception's class; "Lost" where the process ended.
    text: str = ""
    traceback: str = ""
    seconds: float = 0.0
    attributes: dict[str, Any] = field(default_factory=dict)

    def result(self) -> Any:
        """Return what the function returned; raise what it raised, with the remote traceback."""
        if self.error is not None:
            raise AssertionError(f"{self.error}: {self.text}\n{self.traceback}")
        return self.value


class Ranks:
    """Keep some processes that run the same function together.

    Args:
        size: how many.
        wire: ``"tcp"`` for `TF_CONFIG` and sockets, ``"python"`` for the same with a new
            interpreter for each, where the environment matters at import, ``"mpi"`` for `mpiexec`.
        environ: more environment variables; a list gives each rank its own.
        jobs: which job of the cluster each rank is a task of; all are workers otherwise.
        python: their interpreter.
    """

    def __init__(
        self,
        size: int,
        wire: str = "tcp",
        environ: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        *,
        jobs: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self.size = size
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"{self._directory}/door")
        self._door.listen(size)
        self._lines: list[socket.socket] = []
        self.pids: list[int] = []
        each = [environ] * size if isinstance(environ, Mapping) else (list(environ) or [{}] * size)
        base = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",
            "RANKS_DOOR": f"{self._directory}/door",
        }
        command = [python, "-m", "tests.processes"]
        self._processes = _STARTS[wire](list(jobs) or ["worker"] * size, base, each, command)
        try:
            self._welcome()
        except BaseException:
            self.close()
            raise

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        ranks: Sequence[int] | None = None,
    ) -> list[Outcome]:
        """Call ``function(rank, size, *args)`` on every process and return what each one did.

        The function is found by its module's name and its own. A process that has no answer after
        `timeout` seconds is killed, and with it the whole group.
        """
        self.start(function, *args, ranks=ranks)
        return self.collect(timeout, ranks)

    def results(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function returned on every process; raise what it raised on one."""
        return [outcome.result() for outcome in self.run(function, *args)]

    def start(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """Begin what `collect` ends."""
        order = pickle.dumps((function.__module__, function.__qualname__, args))
        for rank in range(self.size) if ranks is None else ranks:
            with contextlib.suppress(OSError):
                _send(self._lines[rank], order)

    def collect(self, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """Return the outcomes of what was started."""
        deadline = time.monotonic() + timeout
        outcomes = []
        for rank in range(self.size) if ranks is None else ranks:
            line = self._lines[rank]
            try:
                line.settimeout(max(0.01, deadline - time.monotonic()))
                outcomes.append(pickle.loads(_receive(line)))
            except TimeoutError:
                self.kill()
                outcomes.append(Outcome(error="Hang", text=f"rank {rank}: {timeout:g} s are over"))
            except (OSError, EOFError) as error:
                outcomes.append(Outcome(error="Lost", text=str(error)))
        return outcomes

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one process."""
        os.kill(self.pids[rank], number)

    def kill(self) -> None:
        """Kill every process."""
        for pid in self.pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End every process; kill those that do not end in time."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 20.0
        late = []
        for process in self._processes:
            try:
                process.wait(timeout=max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(process.pid)
                self.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=10.0)
        for line in self._lines:
            line.close()
        self._door.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if late:
            raise AssertionError(f"processes {late} did not end by themselves.")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _welcome(self) -> None:
        self._door.settimeout(START_SECONDS)
        came: dict[int, tuple[int, socket.socket]] = {}
        while len(came) < self.size:
            line, _ = self._door.accept()
            line.settimeout(START_SECONDS)
            rank, pid = pickle.loads(_receive(line))
            came[rank] = (pid, line)
        self.pids = [came[rank][0] for rank in range(self.size)]
        self._lines = [came[rank][1] for rank in range(self.size)]


def find_mpiexec(python: str = sys.executable) -> str | None:
    """Return the `mpiexec` beside a Python, or another one."""
    beside = Path(python).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _start_forks(
    jobs: Sequence[str],
    base: Mapping[str, str],
    each: Sequence[Mapping[str, str]],
    command: Sequence[str],
) -> list[_Process]:
    with contextlib.ExitStack() as stack:
        return [
            shared_zygote().start(
                "tests.processes:serve", {**base, **environ}, {LISTEN: door.fileno()}
            )
            for door, environ in _doors(stack, jobs, each)
        ]


def _start_pythons(
    jobs: Sequence[str],
    base: Mapping[str, str],
    each: Sequence[Mapping[str, str]],
    command: Sequence[str],
) -> list[_Process]:
    with contextlib.ExitStack() as stack:
        return [
            subprocess.Popen(
                command,
                env={**base, **environ, LISTEN: str(door.fileno())},
                cwd=ROOT,
                pass_fds=[door.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            for door, environ in _doors(stack, jobs, each)
        ]


def _doors(
    stack: contextlib.ExitStack, jobs: Sequence[str], each: Sequence[Mapping[str, str]]
) -> list[tuple[socket.socket, dict[str, str]]]:
    """Listen for every rank, and return what its environment says of it."""
    doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in jobs]
    cluster: dict[str, list[str]] = {}
    for job, door in zip(jobs, doors, strict=True):
        cluster.setdefault(job, []).append(f"127.0.0.1:{door.getsockname()[1]}")
    secret = secrets.token_hex(16)
    environs = []
    for rank, extra in enumerate(each):
        task = {"type": jobs[rank], "index": list(jobs[:rank]).count(jobs[rank])}
        config = {"cluster": cluster, "task": task}
        environs.append(
            {
                "TF_CONFIG": json.dumps(config),
                "NDISTRIBUTE_SECRET": secret,
                "RANKS_RANK": str(rank),
                "RANKS_SIZE": str(len(jobs)),
                **extra,
            }
        )
    return list(zip(doors, environs, strict=True))


def _start_over_mpi(
    jobs: Sequence[str],
    base: Mapping[str, str],
    each: Sequence[Mapping[str, str]],
    command: Sequence[str],
) -> list[_Process]:
    mpiexec = find_mpiexec(command[0])
    if mpiexec is None:
        raise FileNotFoundError("no mpiexec: pip install 'ndistribute[mpi]'")
    started = [mpiexec, *base.get("RANKS_MPIEXEC", "").split()]
    for rank in range(len(jobs)):
        # By env, for each MPI has a flag of its own for this.
        extra = ["env", *(f"{name}={value}" for name, value in each[rank].items())]
        started += [":"] * (rank > 0) + ["-n", "1", *(extra if each[rank] else []), *command]
    plain = {k: v for k, v in base.items() if k not in ("TF_CONFIG", LISTEN)}
    return [
        subprocess.Popen(started, env=plain, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0)
    ]


_STARTS = {"tcp": _start_forks, "python": _start_pythons, "mpi": _start_over_mpi}


def _send(line: socket.socket, payload: bytes) -> None:
    line.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(line: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise EOFError("the process ended")
        data += part
    return bytes(data)


def _rank_and_size() -> tuple[int, int]:
    for rank, size in (("RANKS_RANK", "RANKS_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])


def serve() -> None:
    """Run on a process: call what is asked for until nobody asks any more."""
    rank, size = _rank_and_size()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["RANKS_DOOR"])
        _send(line, pickle.dumps((rank, os.getpid())))
        while True:
            try:
                module, name, args = pickle.loads(_receive(line))
            except (EOFError, OSError):
                return
            _send(line, pickle.dumps(_outcome(module, name, rank, size, args)))


def _outcome(module: str, name: str, rank: int, size: int, args: tuple[Any, ...]) -> Outcome:
    start = time.monotonic()
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        outcome = Outcome(value=function(rank, size, *args))
    except BaseException as error:
        outcome = Outcome(
            error=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(error)),
            attributes={
                name: getattr(error, name)
                for name in ("rank", "op", "sequence")
                if hasattr(error, name)
            },
        )
    outcome.seconds = time.monotonic() - start
    return outcome


if __name__ == "__main__":
    # Under its own name, so that what is pickled here is found there.
    importlib.import_module("tests.processes").serve()
