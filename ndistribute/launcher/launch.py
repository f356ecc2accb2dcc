"""Starts a job: on this machine, over ssh or through mpiexec; again where that was asked for.

What each task gets to know is a plain value (`task_environment`), and so is what is started, so
that a dry run shows exactly what a real one does. The supervisor runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import select
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ndistribute.cluster.seconds import seconds_of
from ndistribute.launcher import mpiexec, reaper
from ndistribute.launcher.doctor import blas_settings, usable_cores
from ndistribute.launcher.hosts import Host, is_this_machine, remote_script, ssh_command
from ndistribute.launcher.output import MPIEXEC, Console, ending, last_report
from ndistribute.launcher.supervisor import (
    Outcome,
    Start,
    Supervisor,
    reaped,
    restart_delay,
    signals_as_bytes,
)

__all__ = ["JobOptions", "dry_run", "job_environment", "launch", "task_environment"]

# Below those that Linux gives to outgoing connections; only used where there are several hosts.
DEFAULT_PORT = 23_450
_SECRET = "NDISTRIBUTE_SECRET"
_JOB_ID = "NDISTRIBUTE_JOB_ID"
_LISTEN_FD = "NDISTRIBUTE_LISTEN_FD"
_SNAPSHOT_DIR = "NDISTRIBUTE_SNAPSHOT_DIR"
_SAVING_SECONDS = 600.0
# Those of a surrounding job: each process gets its own.
_OURS = ("TF_CONFIG", _LISTEN_FD, reaper.MARK)


@dataclass(frozen=True)
class JobOptions:
    """What the user asked for.

    Args:
        command: the script and its arguments.
        hosts: where, and how many workers on each; the local machine alone by default.
        servers: how many parameter servers; with any, all tasks are on this machine.
        chief: whether a chief beside the servers and workers runs the script.
        module: the command names a module, as after ``python -m``.
        mpi: start through mpiexec rather than over TCP.
        port: the first port on each host, where there are several hosts.
        max_restarts: how many times what failed is started again: a job of workers as a whole, one
            with servers task by task.
        log_dir: a folder that gets each process's output in a file of its own.
        timeout: seconds after which everything is stopped.
        snapshot_dir: where servers keep what they hold, or None.
        snapshot_seconds: how often they do so; None: as they do by themselves.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    servers: int = 0
    chief: bool = False
    module: bool = False
    mpi: bool = False
    port: int = DEFAULT_PORT
    max_restarts: int = 0
    log_dir: Path | None = None
    timeout: float | None = None
    snapshot_dir: Path | None = None
    snapshot_seconds: float | None = None

    @property
    def processes(self) -> int:
        """Return how many processes the job has."""
        return self.servers + self.chief + sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Return True if all of them are on this machine."""
        return all(is_this_machine(host.name) for host in self.hosts)

    @property
    def python(self) -> tuple[str, ...]:
        """Return what comes after the interpreter on the command line."""
        return ("-m", *self.command) if self.module else self.command

    @property
    def sharing(self) -> int:
        """Return how many workers share this machine's cores, at least 1."""
        return max(1, sum(host.slots for host in self.hosts if is_this_machine(host.name)))


def job_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that all tasks of a job share: its id and its secret.

    What the user has set is kept; the rest is made afresh.

    >>> job_environment({"NDISTRIBUTE_JOB_ID": "7", "NDISTRIBUTE_SECRET_FILE": "f"})
    {'NDISTRIBUTE_JOB_ID': '7', 'NDISTRIBUTE_SECRET_FILE': 'f'}
    """
    environ = os.environ if environ is None else environ
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

    Args:
        cluster: the addresses of the tasks of each type, as in ``TF_CONFIG``.
        task_type: chief, worker or ps.
        index: which of those.
        job: what all tasks of the job share, see ``job_environment``.
        sharing: how many workers share the cores of this machine, on which the task will run; None
            if it will run on another one: nothing is said of its linear algebra then.
        environ: what the task gets otherwise: settings of the user's that stand in it are kept.

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
    server or worker of a job with servers is started again alone.

    Args:
        options: what to run, and where.
        stdout: the descriptor where the processes' output goes.
        stderr: the one where their errors and the launcher's own messages go.

    Returns:
        0, or the exit code of the rank or task that failed first, 128 plus the number for a
        signal; 124 for a timeout.

    Raises:
        MissingDependencyError: MPI was asked for and is not installed.
        OSError: a port is in use, or a limit of this process is too low.
        ValueError: the options do not fit each other.
    """
    _open_standard_streams()
    _check_limits(options)
    mpi = mpiexec.find_mpiexec() if options.mpi else None
    mark = secrets.token_hex(16)
    environ = {name: value for name, value in os.environ.items() if name not in _OURS}
    environ[_JOB_ID] = job_environment(environ)[_JOB_ID]
    saving = seconds_of(environ, "NDISTRIBUTE_SNAPSHOT_WAIT_SECONDS", _SAVING_SECONDS)
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    again = 0 if options.servers else options.max_restarts
    with contextlib.ExitStack() as opened:
        console = opened.enter_context(contextlib.closing(Console(stdout, stderr, options.log_dir)))
        ports = [opened.enter_context(port) for port in _ports(options)]
        signals = opened.enter_context(signals_as_bytes())
        opened.enter_context(reaped(mark, saving, options.mpi))
        for attempt in range(again + 1):
            if attempt:
                console.begin(attempt)
                _refuse_waiting(ports)
            restarts = options.max_restarts if options.servers else 0
            supervisor = Supervisor(mark, console, signals, deadline, restarts, saving)
            if mpi is None:
                starts = _starts(options, ports, environ, mark)
            else:
                starts = [_mpi_start(mpi, options, environ, mark)]
            outcome = supervisor.run(starts, restart_delay(attempt - 1))
            if mpi is not None and outcome.reason == "failed":
                outcome = _explained(outcome, options, console)
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
        mpi = mpiexec.find_mpiexec()
        settings = _mpi_settings(mpi, options, environ)
        yield f"{_shown(settings)} {shlex.join(_mpi_command(mpi, options, environ, ''))}"
        return
    count = range(options.processes)
    addresses = [f"127.0.0.1:PORT{n}" for n in count] if options.is_local else _addresses(options)
    job = {
        name: "(hidden)" if name == _SECRET else v for name, v in job_environment(environ).items()
    }
    for task in _tasks(options, addresses, environ, job):
        if task.remote:
            variables = f"{_shown(task.settings)} {shlex.join(task.argv)}"
            yield f"[{task.label}] {shlex.join(ssh_command(task.host))} <<< {variables!r}"
        else:
            settings = {**task.settings, _LISTEN_FD: "FD"}
            yield f"[{task.label}] {_shown(settings)} {shlex.join(task.argv)}"


class _Task(NamedTuple):
    """One process of a job without MPI, and the variables that are added to its environment."""

    label: str
    task_type: str
    host: str
    remote: bool
    argv: tuple[str, ...]
    settings: dict[str, str]


def _tasks(
    options: JobOptions,
    addresses: Sequence[str],
    environ: Mapping[str, str],
    job: Mapping[str, str],
) -> list[_Task]:
    """Return what to start; servers first, as all others need them."""
    hosts = [host.name for host in options.hosts for _ in range(host.slots)]
    places = [("ps", index, "localhost") for index in range(options.servers)]
    places += [("worker", index, host) for index, host in enumerate(hosts)]
    places += [("chief", 0, "localhost")] if options.chief else []
    cluster: dict[str, list[str]] = {}
    for (task_type, _, _), address in zip(places, addresses, strict=True):
        cluster.setdefault(task_type, []).append(address)
    tasks = []
    for task_type, index, host in places:
        remote = not is_this_machine(host)
        sharing = None if remote else options.sharing
        settings = task_environment(
            cluster, task_type, index, job, sharing=sharing, environ=environ
        )
        if task_type == "ps" and options.snapshot_dir is not None:
            settings[_SNAPSHOT_DIR] = str(options.snapshot_dir.absolute())
        if task_type == "ps" and options.snapshot_seconds is not None:
            settings["NDISTRIBUTE_SNAPSHOT_SECONDS"] = str(options.snapshot_seconds)
        label = f"{task_type}:{index}" if options.servers else str(index)
        label = "chief" if task_type == "chief" else label
        argv = (sys.executable, *options.python)
        tasks.append(_Task(label, task_type, host, remote, argv, settings))
    return tasks


def _addresses(options: JobOptions) -> list[str]:
    """Return the addresses of a job on several hosts: consecutive ports on each of them."""
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
    meanwhile waits. Tasks beside servers get sockets that are only bound: they listen there
    themselves, or close theirs and open another one, as gRPC does.
    """
    if options.mpi:
        return []
    if options.is_local:
        places = [("127.0.0.1", 0)] * options.processes
    else:
        mine = f"{socket.gethostname()}:"
        own = [address for address in _addresses(options) if address.startswith(mine)]
        places = [(mine[:-1], int(address.rpartition(":")[2])) for address in own]
    with contextlib.ExitStack() as opened:
        ports = []
        for host, number in places:
            port = opened.enter_context(socket.socket())
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                port.bind((host, number))
            except OSError as error:
                raise OSError(f"can not listen at {host}:{number}: {error.strerror}") from error
            if not options.servers:
                port.listen(max(128, options.processes))
            ports.append(port)
        opened.pop_all()
    return ports


def _refuse_waiting(ports: Sequence[socket.socket]) -> None:
    """Close the connections that nobody accepted: all who made them have ended."""
    while waiting := select.select(ports, [], [], 0)[0]:
        for port in waiting:
            port.accept()[0].close()


def _starts(
    options: JobOptions, ports: Sequence[socket.socket], environ: Mapping[str, str], mark: str
) -> list[Start]:
    if options.is_local:
        addresses = ["{}:{}".format(*port.getsockname()) for port in ports]
    else:
        addresses = _addresses(options)
    job = job_environment(environ)
    tasks = _tasks(options, addresses, environ, job)
    on_host = Counter(task.host for task in tasks)
    own_ports = iter(ports)
    starts = []
    for number, task in enumerate(tasks):
        if task.remote:
            script = remote_script(
                f"{mark}-{number}", task.argv, task.settings, environ, on_host[task.host]
            )
            command = ssh_command(task.host)
            starts.append(Start(task.label, command, os.environ, script=script.encode()))
            continue
        port = next(own_ports)
        whole = {**environ, **task.settings, _LISTEN_FD: str(port.fileno())}
        saves = task.task_type == "ps" and bool(whole.get(_SNAPSHOT_DIR))
        whole[reaper.MARK] = mark + reaper.SAVING if saves else mark
        starts.append(Start(task.label, task.argv, whole, task.task_type, saves, port))
    return starts


def _mpi_settings(
    mpi: mpiexec.Mpiexec, options: JobOptions, environ: Mapping[str, str]
) -> dict[str, str]:
    # MPICH marks every write with the rank; what is not buffered would be marked in mid-line.
    in_pieces = mpi.family == "mpich" and not options.is_local
    live = {} if in_pieces else {"PYTHONUNBUFFERED": "1"}
    return {**live, **blas_settings(environ, options.sharing)}


def _mpi_command(
    mpi: mpiexec.Mpiexec, options: JobOptions, environ: Mapping[str, str], redirect: str
) -> list[str]:
    ours = [name for name in environ if name.startswith(("NDISTRIBUTE_", "OMP_", "OPENBLAS_"))]
    names = {*ours, *_mpi_settings(mpi, options, environ), _JOB_ID, reaper.MARK} - {_SECRET}
    return mpiexec.mpiexec_command(
        mpi,
        options.hosts,
        options.python,
        sorted(names),
        local=options.is_local,
        redirect=redirect,
    )


def _mpi_start(
    mpi: mpiexec.Mpiexec, options: JobOptions, environ: Mapping[str, str], mark: str
) -> Start:
    # Ranks that MPI brings together need no secret, and mpiexec would send it to them in the open.
    mine = {name: value for name, value in environ.items() if name != _SECRET}
    mine |= {**_mpi_settings(mpi, options, environ), reaper.MARK: mark}
    if not options.is_local:
        command = _mpi_command(mpi, options, mine, "")
        return Start(MPIEXEC, command, mine, parse=mpiexec.parse_tagged)
    pipes, writers = [], []
    for rank in range(options.processes):
        for stream in ("stdout", "stderr"):
            reader, writer = os.pipe()
            pipes.append((reader, str(rank), stream))
            writers.append(writer)
    redirect = mpiexec.redirection(os.getpid(), list(zip(writers[::2], writers[1::2], strict=True)))
    command = _mpi_command(mpi, options, mine, redirect)
    return Start(MPIEXEC, command, mine, pipes=tuple(pipes), writers=tuple(writers))


def _explained(outcome: Outcome, options: JobOptions, console: Console) -> Outcome:
    """Add what only mpiexec's own messages tell: the signal, and the rank."""
    rank = outcome.label
    if rank == MPIEXEC:
        ranks = [MPIEXEC, *map(str, range(options.processes))]
        said = [line for name in ranks for line in console.kept(name)]
        rank = mpiexec.blamed_rank(said) or MPIEXEC
    code = mpiexec.exit_code(outcome.code, console.kept(MPIEXEC))
    return replace(outcome, label=rank, code=code)


def _report(options: JobOptions, outcome: Outcome, console: Console, restarts_left: int) -> None:
    """Say how it ended, where it did not end well."""
    if outcome.reason == "timeout":
        console.say(f"stopped after --timeout {options.timeout} s.")
    if outcome.reason == "signal":
        console.say(f"stopped by signal {outcome.code - 128}.")
    if outcome.reason not in ("failed", "unsaved") or outcome.label is None:
        return
    label = outcome.label
    report = [b"[%b] %b" % (label.encode(), line) for line in last_report(console.kept(label))]
    who = f"rank {label}" if label.isdigit() else label
    last = " Its last words:" if report else ""
    how = ending(outcome.code)
    if outcome.reason == "failed":
        console.say(f"{who} failed first ({how}); all were stopped.{last}", report)
    else:
        console.say(f"{who} ended without a last snapshot ({how}).{last}", report)
    if restarts_left and outcome.reason == "failed":
        attempt = options.max_restarts - restarts_left
        delay = restart_delay(attempt)
        when = f" in {delay} s" if delay else ""
        console.say(f"starting again{when} ({restarts_left} left).")


def _open_standard_streams() -> None:
    """Open what is closed, or the next file that is opened would take its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _check_limits(options: JobOptions) -> None:
    """Check that the limits of this process allow for the job, before anything is started.

    Raises:
        OSError: one does not.
    """
    status = Path("/proc/self/status").read_text()
    memory = int(status.partition("VmSize:")[2].split()[0]) << 10
    threads = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            other = path.read_text()
            if other.partition("Uid:")[2].split()[0] == str(os.getuid()):
                threads += int(other.partition("Threads:")[2].split()[0])
    most = options.processes
    for limit, flag, what, used, more in (
        (
            resource.RLIMIT_NOFILE,
            "n",
            "open files",
            len(os.listdir("/proc/self/fd")),
            8 * most + 16,
        ),
        (resource.RLIMIT_NPROC, "u", "threads", threads, most + 4),
        (resource.RLIMIT_AS, "v", "bytes of memory", memory, 64 << 20),
    ):
        allowed = resource.getrlimit(limit)[0]
        exempt = limit == resource.RLIMIT_NPROC and os.geteuid() == 0
        if allowed != resource.RLIM_INFINITY and used + more > allowed and not exempt:
            name = {"n": "RLIMIT_NOFILE", "u": "RLIMIT_NPROC", "v": "RLIMIT_AS"}[flag]
            raise OSError(
                f"the limit {name} is {allowed} {what}, and this job of {most} processes needs "
                f"{used + more}: raise it (ulimit -{flag}), or start fewer processes."
            )


def _shown(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(settings.items()))
