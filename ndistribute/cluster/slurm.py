"""Reads from Slurm's environment which task of a step this process is, and where the others are.

Every task can work out all addresses by itself: hosts in the order of Slurm's list, tasks in the
order of Slurm's ranks, consecutive ports for those that share a node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndistribute.cluster.base import ClusterResolver
from ndistribute.cluster.slurm_syntax import expand_hosts, expand_tasks
from ndistribute.cluster.spec import ClusterSpec

__all__ = ["SlurmClusterResolver", "slurm_tasks"]

# Below the ports that Linux gives to outgoing connections (32768 and up); 16 for each of the jobs
# that may share a node, told apart by their number.
_FIRST_PORT, _PORTS_PER_JOB, _DISTINCT_JOBS = 10_000, 16, 1_400


class SlurmClusterResolver(ClusterResolver):
    """Read the cluster from the environment that ``srun`` gives to each of its tasks.

    Args:
        jobs: the number of tasks of each job, in the order of Slurm's ranks, for example
            ``{"chief": 1, "worker": 3}``; by default all are workers.
        port_base: the port of the first task of each node, the next ones counting up. By default
            the ports that ``srun --resv-ports`` reserved, else some by the job's number.
        tasks_per_node: for each node, in place of what the environment says.
        environ: the environment to read.

    Raises:
        ValueError: ``srun`` did not start this process, or its variables contradict each other.

    >>> step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    >>> resolver = SlurmClusterResolver(port_base=9000, environ={**step, "SLURM_PROCID": "3"})
    >>> resolver.worker_addresses, resolver.worker_index
    (('n1:9000', 'n1:9001', 'n2:9000', 'n2:9001'), 3)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        tasks_per_node: list[int] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        hosts = expand_hosts(_need(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
        if tasks_per_node is None:
            tasks = _need(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
            tasks_per_node = expand_tasks(tasks)
        if len(hosts) != len(tasks_per_node):
            raise ValueError(
                f"Slurm names {len(hosts)} nodes, but tasks for {len(tasks_per_node)} of them."
            )
        nodes = _nodes_of_ranks(tasks_per_node, environ.get("SLURM_DISTRIBUTION", "block"))
        rank = _number("SLURM_PROCID", _need(environ, "SLURM_PROCID"))
        _check_node(nodes, rank, environ)
        base = _port_base(environ) if port_base is None else port_base
        addresses = _addresses(hosts, nodes, base)
        cluster, task_type, task_id = _assign(
            {"worker": len(nodes)} if jobs is None else jobs, addresses, rank
        )
        super().__init__(cluster, task_type, task_id, "slurm")


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks the job step has that this process belongs to; 0 outside of one.

    A batch script itself is no step, although Slurm tells it how many tasks it may start.

    >>> slurm_tasks({"SLURM_NTASKS": "4"}), slurm_tasks({"SLURM_STEP_NUM_TASKS": "4"})
    (0, 4)
    """
    return _number("SLURM_STEP_NUM_TASKS", environ.get("SLURM_STEP_NUM_TASKS", "0"))


def _nodes_of_ranks(tasks_per_node: list[int], distribution: str) -> list[int]:
    """Return the node of each rank."""
    across_nodes = distribution.partition(":")[0].partition(",")[0].lower()
    if across_nodes in ("block", "*", ""):
        return [node for node, count in enumerate(tasks_per_node) for _ in range(count)]
    if across_nodes == "cyclic":
        rounds = range(max(tasks_per_node, default=0))
        return [n for turn in rounds for n, count in enumerate(tasks_per_node) if turn < count]
    raise ValueError(
        f"SLURM_DISTRIBUTION={distribution!r}: where each rank is can be told for the block and "
        "cyclic distributions only. Start the step with `srun --distribution=block`."
    )


def _check_node(nodes: list[int], rank: int, environ: Mapping[str, str]) -> None:
    if rank >= len(nodes):
        raise ValueError(f"SLURM_PROCID={rank}, but Slurm's nodes have {len(nodes)} tasks in all.")
    said = environ.get("SLURM_NODEID")
    if said is not None and _number("SLURM_NODEID", said) != nodes[rank]:
        raise ValueError(
            f"Rank {rank} should be on node {nodes[rank]} but is on node {said}: the tasks are "
            "spread in an unknown way. Start the step with `srun --distribution=block`."
        )


def _addresses(hosts: list[str], nodes: list[int], base: int) -> list[str]:
    used = [0] * len(hosts)
    addresses = []
    for node in nodes:
        port = base + used[node]
        if not 0 < port < 1 << 16:
            raise ValueError(f"Port {port} is out of range: choose another port_base than {base}.")
        addresses.append(f"{hosts[node]}:{port}")
        used[node] += 1
    return addresses


def _assign(
    jobs: Mapping[str, int], addresses: list[str], rank: int
) -> tuple[ClusterSpec, str, int]:
    """Deal the tasks out to the jobs, in order of rank."""
    if sum(jobs.values()) != len(addresses):
        raise ValueError(
            f"The jobs {dict(jobs)} have {sum(jobs.values())} tasks, but Slurm started "
            f"{len(addresses)}."
        )
    cluster: dict[str, list[str]] = {}
    owners = [(job, index) for job, count in jobs.items() for index in range(count)]
    for (job, _), address in zip(owners, addresses, strict=True):
        cluster.setdefault(job, []).append(address)
    return ClusterSpec(cluster), *owners[rank]


def _port_base(environ: Mapping[str, str]) -> int:
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "").partition("-")[0].partition(",")[0]
    if reserved:
        return _number("SLURM_STEP_RESV_PORTS", reserved)
    job = environ.get("SLURM_JOB_ID", "0")
    number = int(job) if job.isascii() and job.isdigit() else 0
    return _FIRST_PORT + number % _DISTINCT_JOBS * _PORTS_PER_JOB


def _need(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    raise ValueError(
        f"Slurm did not start this process: {' and '.join(names)} are not set. Start it with "
        "`srun --ntasks=4 python script.py`."
    )


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r} is no number.")
    return int(text)
