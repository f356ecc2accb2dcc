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

from ndistribute.cluster.blas_kernel import blas_settings
from ndistribute.cluster.hosts import Host, is_this_machine

__all__ = ["HIDDEN", "SECRET", "JobOptions", "Rank", "addresses_of", "local_count", "plan_ranks"]

SECRET = "NDISTRIBUTE_SECRET"
HIDDEN = "(hidden)"
# Below those that Linux gives to outgoing connections; only used where there are several hosts.
DEFAULT_PORT = 23_450


@dataclass(frozen=True)
class JobOptions:
    """What the user asked for.

    Args:
        command: the script and its arguments.
        hosts: where, and how many processes on each; the local machine alone by default.
        module: the command names a module, as after ``python -m``.
        mpi: start through mpiexec rather than over TCP.
        port: the first port on each host, where there are several hosts.
        max_restarts: how many times a job that failed is started again.
        log_dir: a folder that gets each process's output in a file of its own.
        timeout: seconds after which everything is stopped.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    module: bool = False
    mpi: bool = False
    port: int = DEFAULT_PORT
    max_restarts: int = 0
    log_dir: Path | None = None
    timeout: float | None = None

    @property
    def processes(self) -> int:
        """Return how many processes the job has."""
        return sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Say whether all of them are on this machine."""
        return all(is_this_machine(host.name) for host in self.hosts)

    @property
    def python(self) -> tuple[str, ...]:
        """Return what comes after the interpreter on the command line."""
        return ("-m", *self.command) if self.module else self.command


@dataclass(frozen=True)
class Rank:
    """One process of the job.

    Args:
        index: its rank.
        host: the machine it runs on.
        remote: whether that is another machine.
        argv: its command line.
        settings: the variables that are added to the environment; the secret is not among them.
    """

    index: int
    host: str
    remote: bool
    argv: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


def plan_ranks(
    options: JobOptions, addresses: Sequence[str], environ: Mapping[str, str]
) -> list[Rank]:
    """Return what to start, for a job without MPI.

    Args:
        options: what the user asked for.
        addresses: the address of each rank.
        environ: the environment of the launcher.
    """
    here = blas_settings(environ, local_count(options))
    ranks = []
    for index, host in enumerate(_hosts_of_ranks(options.hosts)):
        remote = not is_this_machine(host)
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": list(addresses)}, "task": task})
        settings = {"TF_CONFIG": config, "PYTHONUNBUFFERED": "1", **({} if remote else here)}
        ranks.append(Rank(index, host, remote, (sys.executable, *options.python), settings))
    return ranks


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
    """Return how many processes share this machine's cores, at least 1."""
    return max(1, sum(host.slots for host in options.hosts if is_this_machine(host.name)))


def _hosts_of_ranks(hosts: Sequence[Host]) -> list[str]:
    return [host.name for host in hosts for _ in range(host.slots)]
