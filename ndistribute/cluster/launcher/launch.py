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

from ndistribute.cluster.launcher import guardian
from ndistribute.cluster.launcher.blas_kernel import blas_settings
from ndistribute.cluster.launcher.mpiexec import (
    Mpiexec,
    blamed_rank,
    exit_code,
    find_mpiexec,
    mpiexec_command,
    parse_tagged,
    redirection,
    require_mpi4py,
)
from ndistribute.cluster.launcher.output import MPIEXEC, Console, ending, last_report
from ndistribute.cluster.launcher.plan import (
    HIDDEN,
    SECRET,
    JobOptions,
    Task,
    addresses_of,
    local_count,
    plan_tasks,
)
from ndistribute.cluster.launcher.processes import Start
from ndistribute.cluster.launcher.ssh import remote_script, ssh_command
from ndistribute.cluster.launcher.supervisor import Outcome, Supervisor

__all__ = ["dry_run", "launch"]

_LISTEN_FD = "NDISTRIBUTE_LISTEN_FD"
# Those of a surrounding job: each process gets its own.
_OURS = ("TF_CONFIG", _LISTEN_FD, guardian.MARK)


def launch(
    options: JobOptions, stdout: BinaryIO | None = None, stderr: BinaryIO | None = None
) -> int:
    """Run a job to its end, starting again what fails where that was asked for.

    Workers that compute together lose each other when one fails, so all of them start again. A
    server or worker of a job with servers is started again alone.

    Args:
        options: what to run, and where.
        stdout: where the processes' output goes; this process's own by default.
        stderr: where their errors and the launcher's own messages go.

    Returns:
        0, or the exit code of the rank or task that failed first, 128 plus the number for a
        signal; 124 for a timeout.

    Raises:
        MissingDependencyError: MPI was asked for and is not installed.
        ValueError: the options do not fit each other.
    """
    stdout, stderr = stdout or sys.stdout.buffer, stderr or sys.stderr.buffer
    mpi = _mpi() if options.mpi else None
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    again = 0 if options.servers else options.max_restarts
    for attempt in range(again + 1):
        with contextlib.closing(Console(stdout, stderr, options.log_dir, attempt)) as console:
            outcome = _attempt(options, mpi, console, deadline)
            _report(options, outcome, console, again - attempt)
        if outcome.reason != "failed":
            break
    return outcome.code


def dry_run(options: JobOptions, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield what a job would start, line by line, with the secret left out.

    Raises:
        MissingDependencyError: MPI was asked for and is not installed.
        ValueError: the options do not fit each other.
    """
    environ = os.environ if environ is None else environ
    if options.mpi:
        mpi = _mpi()
        settings = {**_mpi_settings(mpi, options, environ), SECRET: HIDDEN}
        command = _mpi_command(mpi, options, environ, "")
        yield f"{_shown(settings)} {shlex.join(command)}"
        return
    local = options.is_local
    count = range(options.processes)
    addresses = [f"127.0.0.1:PORT{n}" for n in count] if local else addresses_of(options)
    listener = {_LISTEN_FD: "FD"} if local and not options.servers else {}
    for task in plan_tasks(options, addresses, environ):
        settings = {**task.settings, SECRET: HIDDEN, **listener}
        if task.remote:
            variables = f"{_shown(settings)} {shlex.join(task.argv)}"
            yield f"[{task.label}] {shlex.join(ssh_command(task.host))} <<< {variables!r}"
        else:
            yield f"[{task.label}] {_shown(settings)} {shlex.join(task.argv)}"


def _attempt(
    options: JobOptions, mpi: Mpiexec | None, console: Console, deadline: float | None
) -> Outcome:
    job = secrets.token_hex(16)
    environ = {name: value for name, value in os.environ.items() if name not in _OURS}
    if not (environ.get(SECRET) or environ.get(f"{SECRET}_FILE")):
        environ[SECRET] = secrets.token_hex(32)
    restarts = options.max_restarts if options.servers else 0
    supervisor = Supervisor(job, console, deadline, restarts)
    if mpi is not None:
        outcome = supervisor.run([_mpi_start(mpi, options, environ, job)])
        return _explained(outcome, options, console) if outcome.reason == "failed" else outcome
    with contextlib.ExitStack() as opened:
        held = [opened.enter_context(port) for port in _ports(options)]
        return supervisor.run(_starts(options, held, environ, job))


def _explained(outcome: Outcome, options: JobOptions, console: Console) -> Outcome:
    """Add what only mpiexec's own messages tell: the signal, and the rank."""
    rank = outcome.label
    if rank == MPIEXEC:
        ranks = [MPIEXEC, *map(str, range(options.processes))]
        rank = blamed_rank([line for name in ranks for line in console.kept(name)]) or MPIEXEC
    return replace(outcome, label=rank, code=exit_code(outcome.code, console.kept(MPIEXEC)))


def _ports(options: JobOptions) -> list[socket.socket]:
    """Bind the ports of local processes before they start, so that nobody else can take them.

    Ranks inherit theirs, which listen already. Those of a job with servers stay here and never
    listen: beside such a socket, which keeps the port from everyone who asks for any free one, a
    task listens itself, and so does the one that is started again in its place.
    """
    if not options.is_local:
        return []
    ports = []
    for _ in range(options.processes):
        port = socket.socket()
        if options.servers:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        if not options.servers:
            port.listen(max(128, options.processes))
        ports.append(port)
    return ports


def _starts(
    options: JobOptions, ports: Sequence[socket.socket], environ: Mapping[str, str], job: str
) -> list[Start]:
    if ports:
        addresses = ["{}:{}".format(*port.getsockname()) for port in ports]
    else:
        addresses = addresses_of(options)
    tasks = plan_tasks(options, addresses, environ)
    on_host = Counter(task.host for task in tasks)
    starts = []
    for number, task in enumerate(tasks):
        if task.remote:
            starts.append(_remote_start(task, environ, f"{job}-{number}", on_host[task.host]))
        else:
            listener = ports[number] if ports and not options.servers else None
            starts.append(_local_start(task, environ, job, listener))
    return starts


def _local_start(
    task: Task, environ: Mapping[str, str], job: str, listener: socket.socket | None
) -> Start:
    mine = {**environ, **task.settings, guardian.MARK: job}
    if listener is not None:
        mine[_LISTEN_FD] = str(listener.fileno())
    return Start(task.label, task.argv, mine, task.task_type, listener)


def _remote_start(task: Task, environ: Mapping[str, str], job: str, on_host: int) -> Start:
    script = remote_script(job, task.argv, task.settings, environ, on_host)
    return Start(task.label, ssh_command(task.host), os.environ, script=script.encode())


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


def _report(options: JobOptions, outcome: Outcome, console: Console, restarts_left: int) -> None:
    """Say how it ended, where it did not end well."""
    if outcome.reason == "timeout":
        console.say(f"stopped after --timeout {options.timeout} s.")
    if outcome.reason == "signal":
        console.say(f"stopped by signal {outcome.code - 128}.")
    if outcome.reason != "failed" or outcome.label is None:
        return
    label = outcome.label
    report = [b"[%b] %b" % (label.encode(), line) for line in last_report(console.kept(label))]
    who = f"rank {label}" if label.isdigit() else label
    last = " Its last words:" if report else ""
    console.say(f"{who} failed first ({ending(outcome.code)}); all were stopped.{last}", report)
    if restarts_left:
        console.say(f"starting again ({restarts_left} left).")


def _shown(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(settings.items()))
