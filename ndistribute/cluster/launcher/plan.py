"""What a job starts: for each process its command line and its environment, as plain values.

Nothing is started here, so a dry run shows exactly what a real one does. Secrets and sockets are
made anew for each attempt and come in from outside.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ndistribute.cluster.launcher.blas_kernel import blas_settings, usable_cores
from ndistribute.cluster.launcher.hosts import Host, is_this_machine

__all__ = ["HIDDEN", "SECRET", "JobOptions", "Task", "addresses_of", "local_count", "plan_tasks"]

SECRET = "NDISTRIBUTE_SECRET"
HIDDEN = "(hidden)"
# Below those that Linux gives to outgoing connections; only used where there are several hosts.
DEFAULT_PORT = 23_450
SNAPSHOT_DIR = "NDISTRIBUTE_SNAPSHOT_DIR"
SNAPSHOT_SECONDS = "NDISTRIBUTE_SNAPSHOT_SECONDS"


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
        """Say whether all of them are on this machine."""
        return all(is_this_machine(host.name) for host in self.hosts)

    @property
    def python(self) -> tuple[str, ...]:
        """Return what comes after the interpreter on the command line."""
        return ("-m", *self.command) if self.module else self.command


@dataclass(frozen=True)
class Task:
    """One process of the job.

    Args:
        label: what names it: its rank, or its task where the job has servers.
        task_type: chief, worker or ps.
        index: its index among those.
        host: the machine it runs on.
        remote: whether that is another machine.
        argv: its command line.
        settings: the variables that are added to the environment; the secret is not among them.
    """

    label: str
    task_type: str
    index: int
    host: str
    remote: bool
    argv: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


def plan_tasks(
    options: JobOptions, addresses: Sequence[str], environ: Mapping[str, str]
) -> list[Task]:
    """Return what to start, for a job without MPI.

    Args:
        options: what the user asked for.
        addresses: the address of each task: servers, workers, chief.
        environ: the environment of the launcher.
    """
    places = _places(options)
    cluster: dict[str, list[str]] = {}
    for (task_type, _, _), address in zip(places, addresses, strict=True):
        cluster.setdefault(task_type, []).append(address)
    shared = blas_settings(environ, local_count(options))
    # Servers add arrays up, which no BLAS does for them; the workers have the cores.
    alone = blas_settings(environ, usable_cores())
    tasks = []
    for task_type, index, host in places:
        config = {"cluster": cluster, "task": {"type": task_type, "index": index}}
        settings = {"TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"}
        remote = not is_this_machine(host)
        if task_type == "ps":
            settings |= {**alone, **_snapshot_settings(options)}
        elif not remote:
            settings |= shared
        label = _label(options, task_type, index)
        argv = (sys.executable, *options.python)
        tasks.append(Task(label, task_type, index, host, remote, argv, settings))
    return tasks


def addresses_of(options: JobOptions) -> list[str]:
    """Return the addresses of a job on several hosts: consecutive ports on each of them.

    Raises:
        ValueError: a port is out of range.
    """
    addresses = []
    for host in options.hosts:
        # The other hosts must find this one: its name for itself would lead them to themselves.
        name = socket.gethostname() if is_this_machine(host.name) else host.name.rpartition("@")[2]
        addresses += [f"{name}:{options.port + slot}" for slot in range(host.slots)]
        if not 0 < options.port <= options.port + host.slots - 1 < 1 << 16:
            raise ValueError(f"--port {options.port} leaves no {host.slots} ports below 65536.")
    return addresses


def local_count(options: JobOptions) -> int:
    """Return how many workers share this machine's cores, at least 1."""
    return max(1, sum(host.slots for host in options.hosts if is_this_machine(host.name)))


def _places(options: JobOptions) -> list[tuple[str, int, str]]:
    """Return the type, index and host of each task; servers first, for all others need them."""
    hosts = [host.name for host in options.hosts for _ in range(host.slots)]
    servers = [("ps", index, "localhost") for index in range(options.servers)]
    workers = [("worker", index, host) for index, host in enumerate(hosts)]
    return [*servers, *workers, *([("chief", 0, "localhost")] if options.chief else [])]


def _label(options: JobOptions, task_type: str, index: int) -> str:
    if not options.servers:
        return str(index)
    return "chief" if task_type == "chief" else f"{task_type}:{index}"


def _snapshot_settings(options: JobOptions) -> dict[str, str]:
    settings = {}
    if options.snapshot_dir is not None:
        settings[SNAPSHOT_DIR] = str(options.snapshot_dir.absolute())
    if options.snapshot_seconds is not None:
        settings[SNAPSHOT_SECONDS] = str(options.snapshot_seconds)
    return settings
