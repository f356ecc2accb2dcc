"""Starts a job: on this machine, over ssh or through mpiexec; again where that was asked for.

What each task gets to know is a plain value (`task_environment`), and so is what is started, so
that a dry run shows exactly what a real one does. The supervisor runs it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import secrets
import select
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ndistribute.cluster.seconds import seconds_of
from ndistribute.launcher.doctor import blas_settings, usable_cores
from ndistribute.launcher.hosts import LISTEN_FD, Host, is_this_machine, ssh_command
from ndistribute.launcher.mpiexec import (
    Mpiexec,
    exit_code,
    find_mpiexec,
    mpiexec_command,
    parse_tagged,
    redirection,
)
from ndistribute.launcher.output import MPIEXEC, Console, ending, last_report
from ndistribute.launcher.supervisor import (
    Outcome,
    Start,
    Supervisor,
    restart_delay,
    signals_as_bytes,
)

__all__ = ["JobOptions", "dry_run", "job_environment", "launch", "task_environment"]

# Below those that Linux gives to outgoing connections; only used where there are several hosts.
DEFAULT_PORT = 23_450
_SECRET = "NDISTRIBUTE_SECRET"
_JOB_ID = "NDISTRIBUTE_JOB_ID"
_SNAPSHOT_DIR = "NDISTRIBUTE_SNAPSHOT_DIR"
_SAVING_SECONDS = 600.0
# Those of a surrounding job: each process gets its own.
_OURS = ("TF_CONFIG", LISTEN_FD)


@dataclass(frozen=True)
class JobOptions:
    """What the user asked for."""

    command: tuple[str, ...]  # What comes after the interpreter: a script, or ``-m`` and a module.
    hosts: tuple[Host, ...]  # Where, and how many workers on each.
    servers: int = 0  # Parameter servers; with any, all tasks are on this machine.
    chief: bool = False  # Beside the servers and workers, a chief runs the script.
    mpi: bool = False
    port: int = DEFAULT_PORT  # The first on each host, where there are several.
    max_restarts: int = 0  # Of a job of workers as a whole, or else of its tasks alone.
    log_dir: Path | None = None
    timeout: float | None = None  # Seconds after which everything is stopped.
    snapshot_dir: Path | None = None
    snapshot_seconds: float | None = None
    durable: bool = False  # Servers log each update there before they acknowledge it.

    @property
    def processes(self) -> int:
        """Return how many processes the job has."""
        return self.servers + self.chief + sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Return True if all of them are on this machine."""
        return all(is_this_machine(host.name) for host in self.hosts)

    @property
    def server_settings(self) -> dict[str, str]:
        """Return the variables that parameter servers get beside those of all tasks."""
        settings = {"NDISTRIBUTE_DURABILITY": "log"} if self.durable else {}
        if self.snapshot_dir is not None:
            settings[_SNAPSHOT_DIR] = str(self.snapshot_dir.absolute())
        if self.snapshot_seconds is not None:
            settings["NDISTRIBUTE_SNAPSHOT_SECONDS"] = str(self.snapshot_seconds)
        return settings

    @property
    def sharing(self) -> int:
        """Return how many workers share this machine's cores, at least 1."""
        return max(1, sum(host.slots for host in self.hosts if is_this_machine(host.name)))


def job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all tasks of a job share: its id and its secret.

    What the user has set is kept; the rest is made afresh.

    >>> job_environment({"NDISTRIBUTE_JOB_ID": "7", "NDISTRIBUTE_SECRET_FILE": "f"})
    {'NDISTRIBUTE_JOB_ID': '7', 'NDISTRIBUTE_SECRET_FILE': 'f'}
    """
    job = {_JOB_ID: environ.get(_JOB_ID) or secrets.token_hex(16)}
    given = {name: environ[name] for name in (_SECRET, f"{_SECRET}_FILE") if environ.get(name)}
    return job | (given or {_SECRET: secrets.token_hex(32)})


def task_environment(
    cluster: Mapping[str, Sequence[str]],
    task_type: str,
    index: int,
    job: Mapping[str, str],
    *,
    sharing: int | None = 1,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables to add to the environment of one task.

    They limit its linear algebra to its share of this machine's cores, which a number of workers
    divide; if it is None, the task runs on another machine. What is set in environ is kept.

    >>> cluster = {"worker": ["a:1", "b:1"]}
    >>> task_environment(cluster, "worker", 1, {"NDISTRIBUTE_JOB_ID": "7"}, sharing=None)
    {'TF_CONFIG': '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
     'PYTHONUNBUFFERED': '1', 'NDISTRIBUTE_JOB_ID': '7'}
    """
    config = {
        "cluster": {name: list(addresses) for name, addresses in cluster.items()},
        "task": {"type": task_type, "index": index},
    }
    blas = {}
    if sharing is not None:
        # Servers add arrays up, which no BLAS does for them; the workers have the cores.
        parts = usable_cores() if task_type == "ps" else sharing
        blas = blas_settings(os.environ if environ is None else environ, parts)
    return {"TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1", **job, **blas}


def launch(options: JobOptions, stdout: int = 1, stderr: int = 2) -> int:
    """Run a job to its end, starting again what fails where that was asked for.

    Workers that compute together lose each other when one fails, so all of them start again. A
    server or worker of a job with servers is started again alone. The launcher's own messages go
    where the processes' errors go.

    Returns:
        0, or the exit code of the rank or task that failed first, 128 plus the number for a
        signal; 124 for a timeout.

    Raises:
        MissingDependencyError: MPI was asked for and is not installed.
        OSError: a port is in use, or a limit of this process is too low.
        ValueError: the options do not fit each other.
    """
    _open_standard_streams()
    _check_limits(options.processes)
    mpi = find_mpiexec() if options.mpi else None
    # Ranks that MPI brings together need no secret, and mpiexec would send it to them in the open.
    dropped = (*_OURS, _SECRET) if mpi else _OURS
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ[_JOB_ID] = job_environment(environ)[_JOB_ID]
    saving = seconds_of(environ, "NDISTRIBUTE_SNAPSHOT_WAIT_SECONDS", _SAVING_SECONDS)
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    restarts, again = (options.max_restarts, 0) if options.servers else (0, options.max_restarts)
    with contextlib.ExitStack() as opened:
        console = opened.enter_context(contextlib.closing(Console(stdout, stderr, options.log_dir)))
        ports = [] if mpi else [opened.enter_context(port) for port in _ports(options)]
        # Ranks of this machine write to pipes of ours, one for each stream.
        pipes = [os.pipe() for _ in range(2 * options.processes) if mpi and options.is_local]
        for fd in itertools.chain.from_iterable(pipes):
            opened.callback(os.close, fd)
        signals = opened.enter_context(signals_as_bytes())
        for attempt in range(again + 1):
            if attempt:
                console.begin(attempt)
                _refuse_waiting(ports)
            if mpi:
                starts = [_mpi_start(mpi, options, environ, pipes)]
            else:
                starts = _tasks(options, environ, ports)  # With a fresh secret.
            supervisor = Supervisor(environ, console, signals, deadline, restarts, saving)
            outcome = supervisor.run(starts, restart_delay(attempt - 1))
            if mpi and outcome.reason == "failed":
                code = exit_code(outcome.code, console.kept(MPIEXEC))
                outcome = replace(outcome, code=code)
            _report(options, outcome, console, attempt)
            if outcome.reason != "failed":
                break
    return outcome.code


def dry_run(options: JobOptions) -> Iterator[str]:
    """Yield what a job would start, line by line, with the secret left out; raise as `launch`."""
    if options.mpi:
        starts = [_mpi_start(find_mpiexec(), options, os.environ)]
    else:
        starts = _tasks(options, os.environ)
    for start in starts:
        settings = {n: "(hidden)" if n == _SECRET else v for n, v in start.settings.items()}
        shown = " ".join(f"{name}={shlex.quote(v)}" for name, v in sorted(settings.items()))
        line = f"{shown} {shlex.join(start.argv)}"
        if start.host is not None:
            line = f"{shlex.join(ssh_command(start.host.name))} <<< {line!r}"
        yield f"[{start.label}] {line}"


def _tasks(
    options: JobOptions, environ: Mapping[str, str], ports: Sequence[socket.socket] = ()
) -> list[Start]:
    """Return what to start; servers first, as all others need them."""
    here = Host("localhost", 1)
    places = [("ps", index, here) for index in range(options.servers)]
    hosts = [host for host in options.hosts for _ in range(host.slots)]
    places += [("worker", index, host) for index, host in enumerate(hosts)]
    places += [("chief", 0, here)] if options.chief else []
    cluster: dict[str, list[str]] = {}
    for (task_type, _, _), address in zip(places, _addresses(options, ports), strict=True):
        cluster.setdefault(task_type, []).append(address)
    job = job_environment(environ)
    listeners = iter(ports)
    starts = []
    for task_type, index, host in places:
        is_here = is_this_machine(host.name)
        settings = task_environment(
            cluster,
            task_type,
            index,
            job,
            sharing=options.sharing if is_here else None,
            environ=environ,
        )
        settings |= options.server_settings if task_type == "ps" else {}
        label = f"{task_type}:{index}" if options.servers else str(index)
        starts.append(
            Start(
                label="chief" if task_type == "chief" else label,
                argv=(sys.executable, *options.command),
                settings=settings,
                task_type=task_type,
                host=None if is_here else host,
                listener=next(listeners, None) if is_here else None,
                saves=task_type == "ps" and bool({**environ, **settings}.get(_SNAPSHOT_DIR)),
            )
        )
    return starts


def _addresses(options: JobOptions, ports: Sequence[socket.socket]) -> list[str]:
    """Return the addresses of the tasks; on several hosts consecutive ports on each of them."""
    if options.is_local:
        known = ["{}:{}".format(*port.getsockname()) for port in ports]
        return known or [f"127.0.0.1:PORT{number}" for number in range(options.processes)]
    addresses = []
    for host in options.hosts:
        # The other hosts must find this one: its name for itself would lead them to themselves.
        name = socket.gethostname() if is_this_machine(host.name) else host.name.rpartition("@")[2]
        addresses += [f"{name}:{options.port + slot}" for slot in range(host.slots)]
        if not 0 < options.port <= options.port + host.slots - 1 < 1 << 16:
            raise ValueError(f"--port {options.port} leaves no {host.slots} ports below 65536.")
    return addresses


def _ports(options: JobOptions) -> list[socket.socket]:
    """Listen for every task of this machine, for as long as the job runs.

    No port can be taken by others then, not even between two lives of a task, and who connects
    meanwhile waits.
    """
    places = [("127.0.0.1", 0)] * options.processes
    if not options.is_local:
        own = [host.slots for host in options.hosts if is_this_machine(host.name)]
        places = [(socket.gethostname(), options.port + slot) for slot in range(sum(own))]
    with contextlib.ExitStack() as opened:
        ports = [opened.enter_context(socket.socket()) for _ in places]
        for port, (host, number) in zip(ports, places, strict=True):
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                port.bind((host, number))
            except OSError as error:
                raise OSError(f"can not listen at {host}:{number}: {error.strerror}") from error
            port.listen(max(128, options.processes))
        opened.pop_all()
    return ports


def _refuse_waiting(ports: Sequence[socket.socket]) -> None:
    """Close the connections that nobody accepted: all who made them have ended."""
    while waiting := select.select(ports, [], [], 0)[0]:
        for port in waiting:
            port.accept()[0].close()


def _mpi_start(
    mpi: Mpiexec,
    options: JobOptions,
    environ: Mapping[str, str],
    pipes: Sequence[tuple[int, int]] = (),
) -> Start:
    """Return what to start through MPI; with pipes, each rank has one for each of its streams."""
    settings = blas_settings(environ, options.sharing)
    if mpi.family != "mpich" or options.is_local:
        # MPICH marks every write with the rank; what is not buffered would be marked in mid-line.
        settings["PYTHONUNBUFFERED"] = "1"
    ours = [name for name in environ if name.startswith(("NDISTRIBUTE_", "OMP_", "OPENBLAS_"))]
    command = mpiexec_command(
        mpi,
        options.hosts,
        options.command,
        sorted({*ours, *settings, _JOB_ID} - {_SECRET}),
        local=options.is_local,
        redirect=redirection(os.getpid(), [writer for _, writer in pipes]) if pipes else "",
    )
    relayed = [
        (reader, str(number // 2), ("stdout", "stderr")[number % 2])
        for number, (reader, _) in enumerate(pipes)
    ]
    parse = None if pipes else parse_tagged
    return Start(MPIEXEC, command, settings, pipes=tuple(relayed), parse=parse)


def _report(options: JobOptions, outcome: Outcome, console: Console, attempt: int) -> None:
    """Say how it ended, where it did not end well."""
    label = outcome.label
    if label is None:
        if outcome.reason == "timeout":
            console.say(f"stopped after --timeout {options.timeout} s.")
        if outcome.reason == "signal":
            console.say(f"stopped by signal {outcome.code - 128}.")
        return
    report = [b"[%b] %b" % (label.encode(), line) for line in last_report(console.kept(label))]
    who = f"rank {label}" if label.isdigit() else label
    what, then = "failed first", "; all were stopped"
    if outcome.reason == "unsaved":
        what, then = "ended without a last snapshot", ""
    last = " Its last words:" if report else ""
    console.say(f"{who} {what} ({ending(outcome.code)}){then}.{last}", report)
    left = 0 if options.servers else options.max_restarts - attempt
    if left and outcome.reason == "failed":
        console.say(f"starting again in {restart_delay(attempt):g} s ({left} left).")


def _open_standard_streams() -> None:
    """Open what is closed, or the next file that is opened would take its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _check_limits(processes: int) -> None:
    """Check that the limits of this process allow for the job, before anything is started."""
    status = Path("/proc/self/status").read_text()
    memory = int(status.partition("VmSize:")[2].split()[0]) << 10
    files = len(os.listdir("/proc/self/fd"))
    needed = {"NOFILE n": files + 8 * processes + 16, "AS v": memory + (64 << 20)}
    if os.getuid() != 0:  # Whose threads have no limit.
        needed["NPROC u"] = 2 * processes + 3
        for path in Path("/proc").glob("[0-9]*/task"):
            with contextlib.suppress(OSError):
                mine = path.stat().st_uid == os.getuid()
                needed["NPROC u"] += len(os.listdir(path)) if mine else 0
    for limit, number in needed.items():
        name, flag = limit.split()
        allowed = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        if allowed != resource.RLIM_INFINITY and number > allowed:
            raise OSError(
                f"the limit RLIMIT_{name} is {allowed} and this job of {processes} processes needs "
                f"{number}: raise it (ulimit -{flag}), or start fewer processes."
            )
