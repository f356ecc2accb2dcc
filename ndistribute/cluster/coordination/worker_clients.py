"""How a coordinator reaches its workers; without a cluster the process itself is the worker."""

from __future__ import annotations

import contextlib
import secrets

from ndistribute.cluster.coordination.worker_desk import WorkerDesk
from ndistribute.cluster.resolvers import ClusterResolver
from ndistribute.cluster.serving.local import LocalTransport
from ndistribute.cluster.wire.client import Client, connect
from ndistribute.cluster.wire.guard import Guard
from ndistribute.cluster.wire.service import Service

__all__ = ["connect_workers"]


def connect_workers(resolver: ClusterResolver | None) -> dict[str, Client]:
    """Return a client for each worker, by the worker's name; none has been spoken to yet.

    Raises:
        AuthenticationError: there is no secret.
        MissingDependencyError: gRPC is not installed.
        ValueError: the cluster has no workers, or this process is not its chief.
    """
    cluster = None if resolver is None else resolver.cluster_spec()
    if resolver is None or not cluster:
        return {"worker:0": _own_worker()}
    me = f"{resolver.task_type}:{resolver.task_id}"
    if resolver.task_type != "chief":
        raise ValueError(
            f"This process is {me}: a coordinator runs on the chief alone. Give the cluster a job "
            "'chief', or let each worker run its own loop."
        )
    if "worker" not in cluster.jobs:
        raise ValueError(f"The cluster has no workers: its jobs are {cluster.jobs}.")
    with contextlib.ExitStack() as opened:
        clients = {}
        for index in cluster.task_indices("worker"):
            name, address = f"worker:{index}", cluster.task_address("worker", index)
            clients[name] = opened.enter_context(connect(address, me, audience=name))
        opened.pop_all()
    return clients


def _own_worker() -> Client:
    """Return a client of a worker inside this process."""
    secret = secrets.token_bytes(32)
    service = Service(Guard(secret), WorkerDesk("worker:0"))
    return Client(LocalTransport(service, owned=True), secret, "chief:0")
