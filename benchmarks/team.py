"""One worker process or several that do a contender's work together, asked as if they were one.

Several are started as the workers of a job: with `TF_CONFIG` and, for ours, a listening socket that
they inherit, or by `mpiexec`. One that does not answer in time is killed, and its last words are
shown. Requests and answers go over a socket of our own, because `mpiexec`
keeps standard input and output to itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.case import OURS, Contender
from benchmarks.workers import (
    END_SECONDS,
    ROOT,
    WorkerError,
    free_addresses,
    on_cores,
    pinned,
    read_line,
)

__all__ = ["Team", "Workers"]

# Importing TensorFlow takes ten seconds on a busy machine, tracing a step about as long.
ANSWER_SECONDS = 180.0

START_SECONDS = 30.0
LISTENING = "NDISTRIBUTE_LISTEN_FD"


class Team:
    """The processes of one contender.

    Args:
        python: the interpreter.
        size: how many processes.
        wire: empty for one process alone; ``"inherited"`` for processes that meet by `TF_CONFIG`
            and inherit their listening socket, ``"tcp"`` for those that listen
            themselves, ``"mpi"`` for those of `mpiexec`, ``"servers-2"`` for those that keep their
            variables on two parameter servers.
        cores: all of them run on so many.
        blas_threads: what the environment pins, for each.
    """

    def __init__(self, python: str, size: int, wire: str, cores: int, blas_threads: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by close
        self._lines: dict[int, socket.socket] = {}
        self._buffers = [bytearray() for _ in range(size)]
        self._processes: list[subprocess.Popen[bytes]] = []
        door = f"{self._directory.name}/door"
        environ = {
            **os.environ,
            **pinned(blas_threads),
            "BENCHMARK_DOOR": door,
            "BENCHMARK_SIZE": str(size),
            "BENCHMARK_DIRECTORY": self._directory.name,
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(size)
            try:
                with on_cores(cores):
                    self._processes = _started(wire, python, size, environ, self._errors)
                self._welcome(listener, size)
            except BaseException:
                self.kill()
                self.close()
                raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Return what was started: the processes, or the one `mpiexec`."""
        return tuple(process.pid for process in self._processes)

    def ask(self, timeout: float = ANSWER_SECONDS, **request: Any) -> dict[str, Any]:
        """Send a request to all, and return what they answer together.

        Raises:
            WorkerError: one of them raised, ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout
        try:
            for line in self._lines.values():
                line.sendall(json.dumps(request).encode() + b"\n")
            answers = [
                json.loads(read_line(line.fileno(), self._buffers[rank], deadline))
                for rank, line in self._lines.items()
            ]
        except (OSError, EOFError) as error:
            self.kill()
            raise WorkerError(f"{request}: {error}\n{self._last_words()}") from None
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise WorkerError(f"{request}, rank {rank}:\n{answer['error']}")
        return _together(answers)

    def kill(self) -> None:
        """End the processes at once, and what they started."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let the processes end, and kill those that do not."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                process.wait(END_SECONDS)
        self._errors.close()
        self._directory.cleanup()

    def _welcome(self, listener: socket.socket, size: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        listener.settimeout(0.2)
        came: dict[int, socket.socket] = {}
        while len(came) < size:
            if any(process.poll() is not None for process in self._processes):
                raise WorkerError(f"a process ended at once.\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise WorkerError(f"{len(came)} of {size} processes came.\n{self._last_words()}")
            with contextlib.suppress(TimeoutError):
                line, _ = listener.accept()
                line.setblocking(True)
                hello = bytearray()
                rank = json.loads(read_line(line.fileno(), hello, deadline))["rank"]
                came[rank] = line
        self._lines = {rank: came[rank] for rank in sorted(came)}

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]


class Workers:
    """The teams of a run, started when they are first needed.

    Args:
        pythons: the interpreter of each side.
        cores: how many cores each team may use.
    """

    def __init__(self, pythons: dict[str, str], cores: int) -> None:
        self._pythons = pythons
        self._cores = cores
        self._started: dict[tuple[Any, ...], Team] = {}

    def of(self, contender: Contender) -> Team:
        """Return the team that does this contender's work."""
        key = self._key(contender)
        if key not in self._started:
            self._started[key] = self._start(contender)
        return self._started[key]

    def alone(self, side: str) -> Team:
        """Return a worker of a side that does nobody's work."""
        if (side,) not in self._started:
            self._started[side,] = Team(self._pythons[side], 1, "", self._cores, self._cores)
        return self._started[side,]

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

    def _start(self, one: Contender) -> Team:
        python = self._pythons[one.side]
        return Team(python, one.team, one.wire, self._cores, self._threads(one))

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


def _together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer: the slowest's time, the worst check, everybody's cores."""
    merged = dict(answers[0])
    if "seconds" in merged:
        own = sum(answer["own_cpu"] for answer in answers)
        # Each counted the others' cores as somebody else's.
        busy = max(answer["own_cpu"] + answer["others_cpu"] for answer in answers)
        slowest = max(answer["seconds"] for answer in answers)
        merged.update(seconds=slowest, own_cpu=own, others_cpu=max(0.0, busy - own))
    checks = [answer["check"] for answer in answers if answer.get("check") is not None]
    if checks:
        merged["check"] = max(checks)
    return merged


def _by_inheritance(
    python: str, size: int, environ: dict[str, str], errors: IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    try:
        return [
            _start([python], environ | own | {LISTENING: str(door.fileno())}, errors, door.fileno())
            for own, door in zip(_tf_configs(addresses), listeners, strict=True)
        ]
    finally:
        for listener in listeners:
            listener.close()


def _by_tf_config(
    python: str, size: int, environ: dict[str, str], errors: IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    addresses = free_addresses({"worker": size})["worker"]
    return [_start([python], environ | own, errors) for own in _tf_configs(addresses)]


def _beside_servers(
    python: str, size: int, environ: dict[str, str], errors: IO[bytes], servers: int
) -> list[subprocess.Popen[bytes]]:
    cluster = free_addresses({"worker": size, "ps": servers})
    own = environ | {"NDISTRIBUTE_SECRET": secrets.token_hex(16)}
    processes = []
    for job, command in (("ps", ["benchmarks.task", OURS]), ("worker", ["benchmarks.worker"])):
        for index in range(len(cluster[job])):
            config = {"cluster": cluster, "task": {"type": job, "index": index}}
            task = {"TF_CONFIG": json.dumps(config), "BENCHMARK_RANK": str(index)}
            processes.append(_start([python], own | task, errors, module=command))
    return processes


def _tf_configs(addresses: Sequence[str]) -> Iterator[dict[str, str]]:
    secret = secrets.token_hex(16)
    for rank in range(len(addresses)):
        task = {"type": "worker", "index": rank}
        yield {
            "TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": task}),
            "NDISTRIBUTE_SECRET": secret,
            "BENCHMARK_RANK": str(rank),
        }


def _by_mpiexec(
    python: str, size: int, environ: dict[str, str], errors: IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    mpiexec = _mpiexec_of(python)
    command = [mpiexec, "-n", str(size)]
    own = {k: v for k, v in environ.items() if k not in ("TF_CONFIG", LISTENING)}
    if "Open MPI" in _said([mpiexec, "--version"]):
        # As many processes as asked for, on any core, also for the user of a container.
        command += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        own |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [_start([*command, python], own, errors)]


def _mpiexec_of(python: str) -> str:
    beside = Path(python).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise WorkerError(f"no mpiexec beside {python}, nor on the path")
    return found


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def _start(
    command: Sequence[str],
    environ: Mapping[str, str],
    errors: IO[bytes],
    *inherited: int,
    module: Sequence[str] = ("benchmarks.worker",),
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, "-m", *module],
        env=environ,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=inherited,
        start_new_session=True,  # So that all of it can be killed at once.
    )


def _started(
    wire: str, python: str, size: int, environ: dict[str, str], errors: IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    way, _, count = wire.partition("-")
    if way == "servers":
        return _beside_servers(python, size, environ, errors, int(count))
    return _STARTS[wire](python, size, environ, errors)


def _alone(
    python: str, size: int, environ: dict[str, str], errors: IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    return [_start([python], environ | {"BENCHMARK_RANK": "0"}, errors)]


_STARTS = {
    "": _alone,
    "inherited": _by_inheritance,
    "tcp": _by_tf_config,
    "mpi": _by_mpiexec,
}
