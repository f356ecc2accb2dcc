"""The resolver that reads the cluster and the task of a process from Slurm's variables.

Every task computes all addresses itself: hosts in the order of Slurm's list, tasks in the order of
Slurm's ranks, and consecutive ports for tasks of one node. It does not run `scontrol`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence

from ndistribute.cluster.resolvers import ClusterResolver, number_in, number_of
from ndistribute.cluster.spec import ClusterSpec
from ndistribute.mistakes import count_of

# Below the ports of outgoing connections on Linux (32768 and up). Jobs that share a node use
# different ranges of 16 ports, chosen by their job numbers.
_FIRST_PORT, _PORTS_PER_JOB, _DISTINCT_JOBS = 10_000, 16, 1_400
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
# More than any cluster has: a typo such as [1-99999999999] must not fill the memory.
_MOST_HOSTS = 1 << 17


class SlurmClusterResolver(ClusterResolver):
    """The resolver for tasks that ``srun`` started.

    Args:
        jobs: the number of tasks of each job, in the order of Slurm's ranks, for example
            ``{"chief": 1, "worker": 3}``; None: all tasks are workers.
        port_base: the port of the first task of each node; the next tasks use the next ports. None:
            the ports that ``srun --resv-ports`` reserved, otherwise ports that depend on the job's
            number.
        gpus_per_node: the number of GPUs of each node; None: the number on this node.
        gpus_per_task: the number of GPUs of each task; None: an equal share of its node's GPUs.
        tasks_per_node: the number of tasks of each node: a number for all, a list, or a dict by
            host; None: read from the environment.
        auto_set_gpu: whether to set `CUDA_VISIBLE_DEVICES` to this process's own GPUs. It has an
            effect only if `gpus_per_node` or `gpus_per_task` is passed. Create the resolver before
            you use GPUs.
        rpc_layer: the protocol before addresses in ``master()``.
        environ: the environment variables; None: ``os.environ``.

    Raises:
        RuntimeError: the tasks of a node need more GPUs than it has.
        ValueError: ``srun`` did not start this process, or its variables contradict each other.

    >>> step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    >>> resolver = SlurmClusterResolver(port_base=9000, environ={**step, "SLURM_PROCID": "3"})
    >>> resolver.worker_addresses, resolver.worker_index
    (('n1:9000', 'n1:9001', 'n2:9000', 'n2:9001'), 3)
    """

    address_hint = (
        "The ports are those that `srun --resv-ports` reserved, or are computed from the job's "
        "number: choose others with SlurmClusterResolver(port_base=...)."
    )

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        hosts = expand_hosts(_need(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
        if tasks_per_node is None:
            counts = _need(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
            tasks_per_node = expand_tasks(counts)
        elif isinstance(tasks_per_node, Mapping):
            tasks_per_node = [tasks_per_node.get(host, 0) for host in hosts]
        elif isinstance(tasks_per_node, int):
            tasks_per_node = [tasks_per_node] * len(hosts)
        if len(hosts) != len(tasks_per_node):
            nodes = count_of(len(hosts), "node")
            text = f"Slurm lists {nodes}, but tasks for {len(tasks_per_node)}."
            raise ValueError(text)
        places = _places(tasks_per_node, environ.get("SLURM_DISTRIBUTION", "block"))
        rank = number_of(_need(environ, "SLURM_PROCID"), "SLURM_PROCID")
        _check_node([node for node, _ in places], rank, environ)
        jobs = {"worker": len(places)} if jobs is None else jobs
        if sum(jobs.values()) != len(places):
            what = f"The jobs {dict(jobs)} have {count_of(sum(jobs.values()), 'task')},"
            raise ValueError(f"{what} but Slurm started {len(places)}.")
        base = _port_base(environ) if port_base is None else port_base
        for port in (base, base + max(tasks_per_node) - 1):
            if not 0 < port < 1 << 16:
                raise ValueError(f"Port {port} is out of range: port_base={base} is not usable.")
        addresses = iter([f"{hosts[node]}:{base + slot}" for node, slot in places])
        cluster = {job: list(itertools.islice(addresses, n)) for job, n in jobs.items() if n}
        tasks = [(job, index) for job, count in jobs.items() for index in range(count)]
        super().__init__(ClusterSpec(cluster), *tasks[rank], "slurm")
        self.rpc_layer = rpc_layer
        if gpus_per_node is not None or gpus_per_task is not None:
            most, slot = max(tasks_per_node), places[rank][1]
            visible = self._share_gpus(most, slot, gpus_per_node, gpus_per_task)
            if auto_set_gpu:
                shown = environ if isinstance(environ, MutableMapping) else os.environ
                shown["CUDA_VISIBLE_DEVICES"] = visible

    def _share_gpus(self, tasks: int, slot: int, per_node: int | None, each: int | None) -> str:
        """Return the GPUs of task `slot` of a node with at most so many tasks."""
        on_node = self.num_accelerators()["GPU"] if per_node is None else per_node
        each = on_node // tasks if each is None else each
        if each * tasks > on_node:
            raise RuntimeError(
                f"{count_of(tasks, 'task')} with {count_of(each, 'GPU')} each need more than the "
                f"{count_of(on_node, 'GPU')} of a node."
            )
        self._accelerators = {"GPU": each}
        return ",".join(map(str, range(slot * each, (slot + 1) * each)))


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as ``n[001-003,7],gpu-[1-2]x[3,5]``, in order."""
    hosts: list[str] = []
    # Split at commas outside brackets.
    entries = re.split(r",(?![^\[]*\])", text.strip())
    if not all(entries):
        raise ValueError(f"The host list {text!r} is empty, or has an empty entry.")
    for entry in entries:
        # re.split puts the contents of brackets at odd indices.
        pieces = _PART.split(entry)
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise ValueError(f"The host list {text!r} has brackets that do not match in {entry!r}.")
        words = [[piece] for piece in pieces]
        words[1::2] = [_numbers(piece, text) for piece in pieces[1::2]]
        if len(hosts) + math.prod(map(len, words)) > _MOST_HOSTS:
            raise ValueError(f"The host list {text!r} names more than {_MOST_HOSTS} hosts.")
        hosts += map("".join, itertools.product(*words))
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks of each node: ``[2, 2, 2, 1]`` for ``2(x3),1``."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"The tasks per node {text!r} are malformed at {part!r}.")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_HOSTS:
            raise ValueError(f"The tasks per node {text!r} are for more than {_MOST_HOSTS} nodes.")
        counts += [int(match[1])] * times
    return counts


def _places(tasks_per_node: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """Return the node of each rank, and the number of lower ranks on that node."""
    across_nodes = distribution.partition(":")[0].partition(",")[0].lower()
    if across_nodes not in ("block", "*", "", "cyclic"):
        raise ValueError(
            f"SLURM_DISTRIBUTION={distribution!r} is not supported: only block and cyclic "
            "distributions are. Start the step with `srun --distribution=block`."
        )
    blocks = [(node, slot) for node, count in enumerate(tasks_per_node) for slot in range(count)]
    return sorted(blocks, key=lambda place: place[::-1]) if across_nodes == "cyclic" else blocks


def _check_node(nodes: list[int], rank: int, environ: Mapping[str, str]) -> None:
    if rank >= len(nodes):
        raise ValueError(
            f"SLURM_PROCID={rank}, but Slurm's nodes have {count_of(len(nodes), 'task')}."
        )
    said = environ.get("SLURM_NODEID")
    if said is not None and number_in(environ, "SLURM_NODEID") != nodes[rank]:
        raise ValueError(
            f"Rank {rank} should be on node {nodes[rank]} but is on node {said}: the distribution "
            "of the tasks is unknown. Start the step with `srun --distribution=block`."
        )


def _port_base(environ: Mapping[str, str]) -> int:
    name = "SLURM_STEP_RESV_PORTS"
    if environ.get(name):
        return number_of(re.split("[-,]", environ[name])[0], name)
    number = number_of(environ.get("SLURM_JOB_ID", 0), "SLURM_JOB_ID")
    return _FIRST_PORT + number % _DISTINCT_JOBS * _PORTS_PER_JOB


def _need(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    what = f"Slurm did not start this process, which has no {' and no '.join(names)}."
    raise ValueError(f"{what} Start it with `srun --ntasks=4 python script.py`.")


def _numbers(inside: str, text: str) -> list[str]:
    """Return the numbers in brackets with their leading zeros; stop soon after `_MOST_HOSTS`."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"The host list {text!r} has a malformed range {part!r}.")
        named = range(int(match[1]), int(match[2] or match[1]) + 1)[: _MOST_HOSTS + 1]
        numbers += [str(number).zfill(len(match[1])) for number in named]
    return numbers
