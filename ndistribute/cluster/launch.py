"""Starts a job: on this machine, over ssh or through mpiexec; again where that was asked for.

The only part that brings together what a plan says, what is fresh for each attempt (sockets, the
secret, a mark), and the supervisor that runs it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

from ndistribute.cluster import guardian
from ndistribute.cluster.blas_kernel import blas_settings
from ndistribute.cluster.mpiexec import (
    Mpiexec,
    blamed_rank,
    exit_code,
    find_mpiexec,
    mpiexec_command,
    parse_tagged,
    redirection,
    require_mpi4py,
)
from ndistribute.cluster.output import MPIEXEC, Console, last_report
from ndistribute.cluster.plan import (
    HIDDEN,
    SECRET,
    JobOptions,
    Rank,
    addresses_of,
    local_count,
    plan_ranks,
)
from ndistribute.cluster.processes import Start
from ndistribute.cluster.ssh import remote_script, ssh_command
from ndistribute.cluster.supervisor import Outcome, Supervisor

__all__ = ["dry_run", "launch"]

_LISTEN_FD = "NDISTRIBUTE_LISTEN_FD"
# Those of a surrounding job: each process gets its own.
_OURS = ("TF_CONFIG", _LISTEN_FD, guardian.MARK)


def launch(
    options: JobOptions, stdout: BinaryIO | None = None, stderr: BinaryIO | None = None
) -> int:
    """Run a job to its end, starting it again where it fails and that was asked for.

    Args:
        options: what to run, and where.
        stdout: where the processes' output goes; this process's own by default.
        stderr: where their errors and the launcher's own messages go.

    Returns:
        0, or the exit code of the rank that failed first, 128 plus the number for a signal; 124
        for a timeout.

    Raises:
        MissingDependencyError: MPI was asked for and is not installed.
        ValueError: the options do not fit each other.
    """
    stdout, stderr = stdout or sys.stdout.buffer, stderr or sys.stderr.buffer
    mpi = _mpi() if options.mpi else None
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    for attempt in range(options.max_restarts + 1):
        with contextlib.closing(Console(stdout, stderr, options.log_dir, attempt)) as console:
            outcome = _attempt(options, mpi, console, deadline)
            left = options.max_restarts - attempt
            for line in _message(options, outcome, console, left):
                with contextlib.suppress(BrokenPipeError):
                    stderr.write(line + b"\n")
                    stderr.flush()
        if outcome.reason != "failed":
            break
    return outcome.code


def dry_run(options: JobOptions, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield what a job would start, line by line, with the secret left out.

    Raises:
        MissingDependencyError: MPI was asked for and is not installed.
        ValueError: the options do not fit each other.
    """
    if options.mpi:
        mpi = _mpi()
        settings = {**_mpi_settings(mpi, options, environ), SECRET: HIDDEN}
        command = _mpi_command(mpi, options, environ, "")
        yield f"{_shown(settings)} {shlex.join(command)}"
        return
    local = options.is_local
    count = range(options.processes)
    addresses = [f"127.0.0.1:PORT{n}" for n in count] if local else addresses_of(options)
    for rank in plan_ranks(options, addresses, environ):
        settings = {**rank.settings, SECRET: HIDDEN, **({_LISTEN_FD: "FD"} if local else {})}
        if rank.remote:
            variables = f"{_shown(settings)} {shlex.join(rank.argv)}"
            yield f"[{rank.index}] {shlex.join(ssh_command(rank.host))} <<< {variables!r}"
        else:
            yield f"[{rank.index}] {_shown(settings)} {shlex.join(rank.argv)}"


def _attempt(
    options: JobOptions, mpi: Mpiexec | None, console: Console, deadline: float | None
) -> Outcome:
    job = secrets.token_hex(16)
    environ = {name: value for name, value in os.environ.items() if name not in _OURS}
    if not (environ.get(SECRET) or environ.get(f"{SECRET}_FILE")):
        environ[SECRET] = secrets.token_hex(32)
    supervisor = Supervisor(job, console, deadline)
    if mpi is not None:
        outcome = supervisor.run([_mpi_start(mpi, options, environ, job)])
        return _explained(outcome, options, console) if outcome.reason == "failed" else outcome
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(listener) for listener in _listeners(options)]
        starts = _starts(options, listeners, environ, job)
        return supervisor.run(starts)


def _explained(outcome: Outcome, options: JobOptions, console: Console) -> Outcome:
    """Add what only mpiexec's own messages tell: the signal, and the rank."""
    rank = outcome.rank
    if rank == MPIEXEC:
        ranks = [MPIEXEC, *map(str, range(options.processes))]
        rank = blamed_rank([line for name in ranks for line in console.kept(name)]) or MPIEXEC
    return replace(outcome, rank=rank, code=exit_code(outcome.code, console.kept(MPIEXEC)))


def _listeners(options: JobOptions) -> list[socket.socket]:
    """Listen for local ranks before they start, so that nobody else can take their ports."""
    if not options.is_local:
        return []
    listeners = []
    for _ in range(options.processes):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(max(128, options.processes))
        listeners.append(listener)
    return listeners


def _starts(
    options: JobOptions,
    listeners: Sequence[socket.socket],
    environ: Mapping[str, str],
    job: str,
) -> list[Start]:
    if listeners:
        addresses = ["{}:{}".format(*listener.getsockname()) for listener in listeners]
    else:
        addresses = addresses_of(options)
    ranks = plan_ranks(options, addresses, environ)
    on_host = Counter(rank.host for rank in ranks)
    starts = []
    for rank in ranks:
        if rank.remote:
            starts.append(_remote_start(rank, environ, f"{job}-{rank.index}", on_host[rank.host]))
        else:
            listener = listeners[rank.index] if listeners else None
            starts.append(_local_start(rank, environ, job, listener))
    return starts


def _local_start(
    rank: Rank, environ: Mapping[str, str], job: str, listener: socket.socket | None
) -> Start:
    mine = {**environ, **rank.settings, guardian.MARK: job}
    if listener is not None:
        mine[_LISTEN_FD] = str(listener.fileno())
    return Start(str(rank.index), rank.argv, mine, listener)


def _remote_start(rank: Rank, environ: Mapping[str, str], job: str, on_host: int) -> Start:
    script = remote_script(job, rank.argv, rank.settings, environ, on_host)
    return Start(str(rank.index), ssh_command(rank.host), os.environ, script=script.encode())


def _mpi() -> Mpiexec:
    require_mpi4py()
    return find_mpiexec()


def _mpi_settings(mpi: Mpiexec, options: JobOptions, environ: Mapping[str, str]) -> dict[str, str]:
    # MPICH marks every write with the rank; what is not buffered would be marked in mid-line.
    in_pieces = mpi.family == "mpich" and not options.is_local
    live = {} if in_pieces else {"PYTHONUNBUFFERED": "1"}
    return {**live, **blas_settings(environ, local_count(options))}


def _mpi_command(
    mpi: Mpiexec, options: JobOptions, environ: Mapping[str, str], redirect: str
) -> list[str]:
    ours = [name for name in environ if name.startswith(("NDISTRIBUTE_", "OMP_", "OPENBLAS_"))]
    names = {*ours, *_mpi_settings(mpi, options, environ), SECRET, guardian.MARK}
    return mpiexec_command(
        mpi,
        options.hosts,
        options.python,
        sorted(names),
        local=options.is_local,
        redirect=redirect,
    )


def _mpi_start(mpi: Mpiexec, options: JobOptions, environ: Mapping[str, str], job: str) -> Start:
    mine = {**environ, **_mpi_settings(mpi, options, environ), guardian.MARK: job}
    if not options.is_local:
        command = _mpi_command(mpi, options, mine, "")
        return Start(MPIEXEC, command, mine, parse=parse_tagged)
    pipes, writers = [], []
    for rank in range(options.processes):
        for stream in ("stdout", "stderr"):
            reader, writer = os.pipe()
            pipes.append((reader, str(rank), stream))
            writers.append(writer)
    redirect = redirection(os.getpid(), list(zip(writers[::2], writers[1::2], strict=True)))
    command = _mpi_command(mpi, options, mine, redirect)
    return Start(MPIEXEC, command, mine, pipes=tuple(pipes), writers=tuple(writers))


def _message(
    options: JobOptions, outcome: Outcome, console: Console, restarts_left: int
) -> Iterator[bytes]:
    """Say how it ended, where it did not end well."""
    said = {
        "timeout": f"stopped after --timeout {options.timeout} s",
        "signal": f"stopped by signal {outcome.code - 128}",
    }
    if outcome.reason in said:
        yield f"ndistribute run: {said[outcome.reason]}.".encode()
    if outcome.reason != "failed" or outcome.rank is None:
        return
    who = outcome.rank if outcome.rank == MPIEXEC else f"rank {outcome.rank}"
    how = f"signal {outcome.code - 128}" if outcome.code > 128 else f"exit code {outcome.code}"
    report = last_report(console.kept(outcome.rank))
    last = " Its last words:" if report else ""
    yield f"ndistribute run: {who} failed first ({how}); all were stopped.{last}".encode()
    yield from (b"[%b] %b" % (outcome.rank.encode(), line) for line in report)
    if restarts_left:
        yield f"ndistribute run: starting again ({restarts_left} left).".encode()


def _shown(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(settings.items()))
