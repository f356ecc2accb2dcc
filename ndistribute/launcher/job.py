"""The options of a job, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ndistribute.launcher.commands import Host, is_this_machine

# Below the ports of outgoing connections on Linux; used only if there are several hosts.
DEFAULT_PORT = 23_450


@dataclass(frozen=True)
class JobOptions:
    """The options of a job."""

    command: tuple[str, ...]  # The interpreter's arguments: a script, or ``-m`` and a module.
    hosts: tuple[Host, ...]  # The hosts, and the number of workers on each.
    servers: int = 0  # Parameter servers; with them, all tasks are on this machine.
    chief: bool = False  # Whether a chief runs the script too.
    mpi: bool = False
    port: int = DEFAULT_PORT  # The first port on each of several hosts.
    # For the whole job; with servers, for single tasks; in an elastic job, for each worker.
    max_restarts: int = 0
    log_dir: Path | None = None
    timeout: float | None = None  # Seconds after which the job is stopped.
    snapshot_dir: Path | None = None
    snapshot_seconds: float | None = None
    durable: bool = False  # Servers log each update there before they acknowledge it.
    verbose: bool = False  # All tracebacks in full, and the first failure's again at the end.
    min_workers: int = 0  # With fewer, an elastic job ends; 0: the job is not elastic.
    max_workers: int | None = None  # None: as many as fit on the hosts.
    spares: int = 0  # The number of processes that import in advance.
    dashboard: bool = False  # Whether a page shows the job; its data is in `log_dir`.
    hosts_file: Path | None = None  # Changes of it add and remove workers.

    @property
    def processes(self) -> int:
        return self.servers + self.chief + sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether no other host will ever take part."""
        here = all(is_this_machine(host.name) for host in self.hosts)
        return here and self.hosts_file is None

    @property
    def sharing(self) -> int:
        """The number of workers that share the cores of this machine, at least 1."""
        return max(1, sum(host.slots for host in self.hosts if is_this_machine(host.name)))
