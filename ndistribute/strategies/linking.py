"""Whom a parameter-server strategy talks to, and as whom, told by the cluster."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ndistribute.cluster import ClusterResolver
from ndistribute.cluster.links.link import Link
from ndistribute.cluster.links.servers import Servers
from ndistribute.cluster.serving.local import LocalServer
from ndistribute.cluster.wire.client import connect
from ndistribute.variables.copies import Copies

__all__ = ["Links", "Role", "role_of"]


@dataclass(frozen=True, slots=True)
class Role:
    """What this process is among those that use the servers.

    Args:
        task: its name, such as ``"worker:1"``.
        num_workers: how many processes train, each with a share of the data.
        index: which of them this one is.
        coordinated: whether a chief sends functions to the workers.
    """

    task: str = "worker:0"
    num_workers: int = 1
    index: int = 0
    coordinated: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """Return into how many shares data is dealt, and which of them is this process's."""
        dealt = self.task.startswith("worker:")
        return (self.num_workers, self.index) if dealt else (1, 0)


def role_of(resolver: ClusterResolver | None) -> Role:
    """Return what a process is.

    Raises:
        ValueError: it is a parameter server itself, or there is none.
    """
    if resolver is None or not resolver.cluster_spec():
        return Role()
    jobs = resolver.cluster_spec().jobs
    job, index = resolver.task_type, resolver.task_id or 0
    if job == "ps":
        raise ValueError(
            "this process is a parameter server: it runs nd.Server(cluster, 'ps', index).join() "
            "and no strategy."
        )
    if "ps" not in jobs:
        raise ValueError(
            f"the cluster has {', '.join(jobs)} and no parameter server: give it tasks of the job "
            "'ps', or use MultiWorkerMirroredStrategy."
        )
    workers = resolver.cluster_spec().task_indices("worker") if "worker" in jobs else []
    place = list(workers).index(index) if job == "worker" else 0
    return Role(f"{job}:{index}", max(1, len(workers)), place, "chief" in jobs)


class Links:
    """The connections of a strategy, and what it knows through them.

    Args:
        servers: the parameter servers.
        copies: what this process holds of their variables.
        local: the server, where it is in this process.
        farewell: ends the connections; a second call does nothing.
    """

    def __init__(
        self, servers: Servers, local: LocalServer | None, farewell: Callable[[], Any]
    ) -> None:
        self.servers = servers
        self.copies = Copies(servers)
        self.local = local
        self.farewell = farewell

    @classmethod
    def open(
        cls, owner: Any, resolver: ClusterResolver | None, role: Role, timeout: float
    ) -> Links:
        """Connect to the servers of a cluster, or to one in this process.

        Args:
            owner: with it the connections end.
            resolver: who is in the job; None or an empty cluster: nobody else.
            role: of this process.
            timeout: seconds that a request may take.
        """
        cluster = resolver.cluster_spec() if resolver is not None else None
        if not cluster:
            local = LocalServer()
            link = Link(local.connect(role.task, timeout), "the server in this process", timeout)
            servers = Servers([link])
            return cls(servers, local, weakref.finalize(owner, _close, servers, local))
        links = []
        for index in cluster.task_indices("ps"):
            address, title = cluster.task_address("ps", index), f"ps:{index}"
            client = connect(address, role.task, audience=title, timeout=timeout)
            links.append(Link(client, title, timeout))
        servers = Servers(links)
        return cls(servers, None, weakref.finalize(owner, _close, servers, None))


def _close(servers: Servers, local: LocalServer | None) -> None:
    servers.close()
    if local is not None:
        local.close()
