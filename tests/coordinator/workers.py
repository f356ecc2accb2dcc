"""What a task does that serves coordinators and nothing else."""

from __future__ import annotations

import json
import os
import threading

from ndistribute.cluster import ClusterSpec
from ndistribute.cluster.task import Task, enter
from ndistribute.coordinator.worker import WorkerService
from ndistribute.transport.rpc import RpcServer
from ndistribute.transport.secret import credentials_of

__all__ = ["serve_coordinators"]


def serve_coordinators() -> None:
    """Be the worker that TF_CONFIG names, until the process is killed."""
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, index = ClusterSpec(config["cluster"]), config["task"]["index"]
    name = f"worker:{index}"
    enter(Task(cluster, "worker", index))
    addresses = [one for job in cluster.jobs for one in cluster.job_tasks(job) if one is not None]
    address = cluster.task_address("worker", index)
    RpcServer(address, credentials_of(addresses), name, {"coordinator": WorkerService(name)})
    threading.Event().wait()
