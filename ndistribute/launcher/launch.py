"""Starts a job on this machine, over ssh or through mpiexec, and restarts it after failures.

The tasks to start are plain values, `Start`, so a dry run shows exactly the commands and settings
of a real run. The supervisor runs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ndistribute import tracebacks
from ndistribute.blas import cores
from ndistribute.cluster.resolvers import seconds_of
from ndistribute.launcher import commands, supervisor
from ndistribute.launcher.commands import JOB_ID, MPIEXEC, Host, is_this_machine, ssh_command
from ndistribute.launcher.doctor import blas_settings
from ndistribute.launcher.elastic_job import HANDOVER_SECONDS, TRIES, ElasticSupervisor, places_on
from ndistribute.launcher.job import JobOptions
from ndistribute.launcher.output import Console, Writer, exit_text, last_report
from ndistribute.launcher.spare import Spares, spare_start
from ndistribute.launcher.supervisor import JobEnd, Start, TaskSupervisor, restart_delay
from ndistribute.mistakes import count_of
from ndistribute.transport.listener import LISTEN_FD, listen, reserve

_SNAPSHOT_DIR = "NDISTRIBUTE_SNAPSHOT_DIR"
_SECRET = "NDISTRIBUTE_SECRET"
# Variables that a surrounding job may have set; each process gets its own values.
_OURS = ("TF_CONFIG", LISTEN_FD)


def job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with the id and the secret of a job: the user's, or new ones."""
    job = {JOB_ID: environ.get(JOB_ID) or secrets.token_hex(16)}
    secret = {name: environ[name] for name in (_SECRET, f"{_SECRET}_FILE") if environ.get(name)}
    return job | (secret or {_SECRET: secrets.token_hex(32)})


def task_starts(
    tasks: Sequence[tuple[str, int]],
    addresses: Sequence[str],
    environ: Mapping[str, str],
    of_servers: Mapping[str, str],
) -> list[Start]:
    """Return the `Start` of each task, without commands; its settings define the task."""
    cluster: dict[str, list[str]] = {}
    for (kind, _), address in zip(tasks, addresses, strict=True):
        cluster.setdefault(kind, []).append(address)
    common = {"PYTHONUNBUFFERED": "1", **job_environment(environ)}
    seconds = seconds_of(environ, "NDISTRIBUTE_SNAPSHOT_WAIT_SECONDS", 600.0)
    keeps = environ.get(_SNAPSHOT_DIR) or of_servers.get(_SNAPSHOT_DIR)
    starts = []
    for kind, index in tasks:
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        settings = {"TF_CONFIG": json.dumps(config), **common}
        settings |= of_servers if kind == "ps" else {}
        saving = seconds if kind == "ps" and keeps else 0.0
        starts.append(Start(f"{kind}:{index}", (), settings, kind, saving=saving))
    return starts


def launch(options: JobOptions, stdout: int = 1, stderr: int = 2) -> int:
    """Run a job to its end; return the first failure's exit code, 124 after a timeout, or 0."""
    _open_standard_streams()
    _check_limits(max(options.processes, options.max_workers or 0) + options.spares)
    mpi = commands.find_mpiexec() if options.mpi else None
    environ = _environment(options, stderr)
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    # Otherwise one failed worker stops all, so the whole job restarts.
    single = options.servers or options.min_workers
    restarts, again = (options.max_restarts, 0) if single else (0, options.max_restarts)
    with contextlib.ExitStack() as opened:
        out = Writer(stdout)
        # If both are the same file, one writer keeps the order of lines.
        err = out if os.path.sameopenfile(stdout, stderr) else Writer(stderr)
        console = opened.enter_context(contextlib.closing(Console(out, err, options.log_dir)))
        console.short = not options.verbose
        if options.dashboard and options.log_dir is not None:
            from ndistribute.launcher.dashboard import begin

            opened.enter_context(begin(options.command, options.log_dir, environ, console))
        ranks = options.processes if mpi and options.is_local else 0
        pipes = commands.rank_pipes(ranks, opened) if ranks else ([], "")
        silence = 0.0 if mpi or options.is_local else commands.host_silence(environ)
        probes = [] if mpi else _probes(options, silence)
        signals = opened.enter_context(supervisor.signals_as_bytes())
        spares = Spares(options.spares, environ, console.say)
        opened.callback(spares.close)
        supervise = partial(
            TaskSupervisor, spares.begin, console, deadline, signals=signals, silence=silence
        )
        run_tasks: Callable[..., TaskSupervisor] = supervise
        start_all = partial(_tasks, environ=environ, listeners={}, opened=opened)
        if options.min_workers:
            special = {**supervise.keywords, "start_all": start_all, "spares": spares}
            run_tasks = partial(ElasticSupervisor, *supervise.args, options=options, **special)
        for attempt in range(again + 1):
            if attempt:
                console.begin(attempt)
            # Each attempt has a new secret.
            starts = [_mpi_start(mpi, options, environ, *pipes)] if mpi else start_all(options)
            outcome = supervise(restarts=TRIES * len(probes)).run(probes if attempt else [])
            if outcome.reason == "failed":
                outcome = replace(outcome, reason="unreached")
            if outcome.reason == "done":
                outcome = run_tasks(restarts=restarts).run(starts, restart_delay(attempt - 1))
            if mpi and outcome.reason == "failed":
                code = commands.exit_code(outcome.code, console.kept(MPIEXEC))
                outcome = replace(outcome, code=code)
            _report(options, outcome, console, attempt, silence)
            if outcome.reason != "failed":
                break
        console.note(end=outcome.reason, code=outcome.code)
    return outcome.code


def dry_run(options: JobOptions) -> Iterator[str]:
    """Yield a line for each process that a job would start, with the secret hidden."""
    if options.mpi:
        starts = [_mpi_start(commands.find_mpiexec(), options, os.environ)]
    else:
        starts = _tasks(options, os.environ, {}, None)
    for start in [*starts, *(spare_start(starts[0]) for _ in range(options.spares))]:
        settings = {n: "(hidden)" if n == _SECRET else v for n, v in start.settings.items()}
        shown = " ".join(f"{name}={shlex.quote(v)}" for name, v in sorted(settings.items()))
        line = f"{shown} {shlex.join(start.argv)}"
        if start.host is not None:
            ssh = ssh_command(start.host.name, commands.host_silence(os.environ))
            line = f"{shlex.join(ssh)} <<< {line!r}"
        yield f"[{start.label}] {line}"


def _places(options: JobOptions) -> list[tuple[str, int, Host | None, str]]:
    """Return type, index, host (None: this machine) and address of each task, servers first."""
    if options.is_local:
        workers = sum(host.slots for host in options.hosts)
        counts = {"ps": options.servers, "worker": workers, "chief": int(options.chief)}
        tasks = [(kind, index) for kind, count in counts.items() for index in range(count)]
        return [(*task, None, f"127.0.0.1:PORT{rank}") for rank, task in enumerate(tasks)]
    places: list[tuple[str, int, Host | None, str]] = []
    numbered = places_on(options.hosts)
    slots = Counter(name for name, _ in numbered)
    for index, (host, slot) in enumerate(numbered):
        is_here = is_this_machine(host)
        # Other hosts must reach this one, and "localhost" would be themselves.
        name = socket.gethostname() if is_here else host.rpartition("@")[2]
        port = options.port + slot
        if not 0 < port < 1 << 16:
            raise ValueError(f"--port {options.port} must leave {slots[host]} ports below 65536.")
        other = None if is_here else Host(host, slots[host])
        places.append(("worker", index, other, f"{name}:{port}"))
    return places


def _environment(options: JobOptions, stderr: int) -> dict[str, str]:
    """Return the environment of the processes of this machine."""
    # Processes under MPI need no secret, and mpiexec would send it unencrypted.
    dropped = (*_OURS, _SECRET) if options.mpi else _OURS
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ[JOB_ID] = job_environment(environ)[JOB_ID]
    if options.min_workers:  # A restarted worker needs the others' secret.
        environ |= job_environment(environ)
    if not options.verbose:
        environ.setdefault(tracebacks.VARIABLE, tracebacks.SHORT)
    if os.isatty(stderr) and (columns := os.get_terminal_size(stderr).columns):
        labels = len(f"[{'worker:' if options.servers else ''}{options.processes}] ")
        environ.setdefault("NDISTRIBUTE_COLUMNS", str(max(columns - labels, 1)))
    return environ


def _tasks(
    options: JobOptions,
    environ: Mapping[str, str],
    listeners: dict[int, socket.socket],
    opened: contextlib.ExitStack | None,
) -> list[Start]:
    """Return the `Start` of each task; `listeners` get the sockets of local tasks by rank."""
    if opened is not None:
        _listen(options, listeners, opened)
    places = _places(options)
    addresses = [address for *_, address in places]
    if options.is_local and listeners:
        addresses = ["{}:{}".format(*listener.getsockname()) for listener in listeners.values()]
    server = {
        "NDISTRIBUTE_DURABILITY": "log" if options.durable else None,
        _SNAPSHOT_DIR: options.snapshot_dir and str(options.snapshot_dir.absolute()),
        "NDISTRIBUTE_SNAPSHOT_SECONDS": options.snapshot_seconds,
    }
    of_servers = {name: str(value) for name, value in server.items() if value is not None}
    starts = task_starts([place[:2] for place in places], addresses, environ, of_servers)
    for rank, (kind, index, host, _) in enumerate(places):
        # Servers only add arrays, without BLAS; so workers get the cores.
        parts = cores() if kind == "ps" else options.sharing
        blas = blas_settings(environ, parts) if host is None else {}
        label = f"{kind}:{index}" if options.servers else str(index)
        starts[rank] = replace(
            starts[rank],
            label="chief" if kind == "chief" else label,
            argv=(sys.executable, *options.command),
            settings={**starts[rank].settings, **blas},
            host=host,
            listener=listeners.get(rank),
            leaving=HANDOVER_SECONDS if options.min_workers else 0.0,
        )
    return starts


def _probes(options: JobOptions, silence: float) -> list[Start]:
    """Return checks that must succeed on each other host before the job starts there again."""
    argv = "/bin/sh", "-c", commands.former_tasks_end(silence)
    others = [host for host in options.hosts if not is_this_machine(host.name)]
    return [Start(f"ssh {host.name}", argv, {}, host=host) for host in others]


def _listen(
    options: JobOptions, listeners: dict[int, socket.socket], opened: contextlib.ExitStack
) -> None:
    """Add sockets, by rank, for those tasks of this machine that have none yet.

    No other program can take a port, even while a task restarts and refuses connections.
    """
    with contextlib.ExitStack() as new:  # All or none.
        added = {
            rank: new.enter_context(reserve("127.0.0.1") if options.is_local else listen(address))
            for rank, (_, _, host, address) in enumerate(_places(options))
            if host is None and rank not in listeners
        }
        listeners.update(added)
        opened.push(new.pop_all())


def _mpi_start(
    mpi: commands.Mpiexec,
    options: JobOptions,
    environ: Mapping[str, str],
    outputs: Sequence[tuple[int, str, str]] = (),
    redirect: str = "",
) -> Start:
    settings = blas_settings(environ, options.sharing)
    if mpi.family != "mpich" or options.is_local:
        # MPICH adds the rank to every write, so unbuffered writes would get it within lines.
        settings["PYTHONUNBUFFERED"] = "1"
    ours = [name for name in environ if name.startswith(("NDISTRIBUTE_", "OMP_", "OPENBLAS_"))]
    names = sorted({*ours, *settings, JOB_ID} - {_SECRET})
    command = commands.mpiexec_command(
        mpi, options.hosts, options.command, names, local=options.is_local, redirect=redirect
    )
    return Start(MPIEXEC, command, settings, outputs=outputs)


def _report(
    options: JobOptions, outcome: JobEnd, console: Console, attempt: int, silence: float
) -> None:
    """Print how an attempt ended, unless it succeeded."""
    label = outcome.label
    if outcome.reason == "timeout":
        console.say(f"stopped after --timeout {options.timeout} s.")
    if outcome.reason == "signal":
        console.say(f"stopped by signal {outcome.code - 128}.")
    if label is None:
        return
    lines = last_report(console.kept(label))
    again = options.verbose or label not in console.in_sight
    report = [b"[%b] %b" % (label.encode(), line) for line in lines if again]
    who = f"rank {label}" if label.isdigit() else label
    what, then = "failed first", "; the others were stopped"
    if options.min_workers:
        who, what = f"worker {label}", "failed and is not restarted"
    if outcome.reason == "unsaved":
        what, then = "ended without a last snapshot", ""
    last = " Its last output:" if report else ""
    if label in console.reported and not options.verbose:
        last = f" --verbose prints whole tracebacks.{last}"
    why = exit_text(outcome.code, outcome.host, silence)
    console.say(f"{who} {what} ({why}){then}.{last}", report)
    left = 0 if options.servers or options.min_workers else options.max_restarts - attempt
    if left and outcome.reason == "failed":
        once = ", once ssh reaches all hosts" if silence else ""
        console.say(f"restarting in {restart_delay(attempt):g} s{once} (restarts left: {left}).")


def _open_standard_streams() -> None:
    """Open closed standard streams, whose descriptors the next opened file would get."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)


def _check_limits(processes: int) -> None:
    """Raise OSError if the resource limits of this process are too low for the job."""
    status = Path("/proc/self/status").read_text()
    memory = int(status.partition("VmSize:")[2].split()[0]) << 10
    files = len(os.listdir("/proc/self/fd"))
    needed = {"NOFILE n": files + 8 * processes + 16, "AS v": memory + (64 << 20)}
    if os.getuid() != 0:  # Root has no limit.
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
                f"the limit RLIMIT_{name} is {allowed} and this job of "
                f"{count_of(processes, 'process', 'processes')} needs {number}: raise it (ulimit "
                f"-{flag}), or start fewer processes."
            )
