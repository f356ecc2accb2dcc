"""Resolvers that read the task of this process from the variables of its launcher.

Errors name the malformed part. People and templates write `TF_CONFIG`, and with a wrong entry the
processes of a cluster would wait for each other until the timeout. All ranks of MPI and torchrun
are workers. MPI's ranks exchange their addresses through MPI later; torchrun's ranks send theirs to
rank 0, at the port after torchrun's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ndistribute.cluster.resolvers import ClusterResolver, number_in, number_of
from ndistribute.cluster.slurm import SlurmClusterResolver
from ndistribute.cluster.spec import ClusterSpec

_ADDRESS = re.compile(r".+:(\d+)", re.ASCII)
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
# The variables of the rank and of the number of ranks. PMIx sets only the rank: the launcher, Open
# MPI's mpiexec or Slurm's srun, sets the number.
_OF_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def resolver_of_job(resolver: ClusterResolver | None) -> ClusterResolver:
    """Return `resolver`, or if it is None, the resolver for the launcher of this process.

    Without a launcher, the resolver has an empty cluster.

    Raises:
        TypeError: `resolver` is neither a `ClusterResolver` nor None.
    """
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"cluster_resolver must be a resolver such as nd.TFConfigClusterResolver(), or None to "
            f"read the environment; got {resolver!r}. Pass devices by name: devices=['cpu:0']."
        )
    return resolver or resolve() or ClusterResolver(ClusterSpec({}))


def resolve(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver for the launcher that started this process, or None if there is none.

    ``TF_CONFIG`` has priority, because it was written for this process. Next is torchrun, which MPI
    or Slurm may have started, then MPI and Slurm, and last torchrun's variables if another program
    set them. MPI, Slurm and torchrun count only with more than one process.

    Args:
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: the variables are malformed, or some of a launcher's variables are missing.

    >>> resolve({}) is None
    True
    >>> resolve({"PMI_RANK": "0", "PMI_SIZE": "2"}).bootstrap
    'mpi'
    """
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG", "").strip():
        return TFConfigClusterResolver(environ=environ)
    # If only some variables of a launcher are set, its resolver raises: do not train alone.
    of_torchrun = any(map(environ.get, _OF_TORCHRUN[:2])) and environ.get("WORLD_SIZE") != "1"
    if of_torchrun and "TORCHELASTIC_RUN_ID" in environ:
        return TorchrunClusterResolver(environ=environ)
    mpi = _mpi_rank_and_size(environ)
    if mpi is not None and mpi[1] > 1:
        return MPIClusterResolver(environ=environ)
    # A batch script is not a step, although Slurm sets the number of tasks it may start.
    in_step = mpi is None and "SLURM_STEP_NUM_TASKS" in environ
    if in_step and number_in(environ, "SLURM_STEP_NUM_TASKS") > 1:
        return SlurmClusterResolver(environ=environ)
    if of_torchrun:
        return TorchrunClusterResolver(environ=environ)
    return MPIClusterResolver(environ=environ) if mpi is None and _of_mpi(environ) else None


class TFConfigClusterResolver(ClusterResolver):
    """The resolver that reads the cluster and the task of this process from ``TF_CONFIG``.

    Args:
        task_type: the job of this process; None: the job in the variable.
        task_id: its index within the job; None: the index in the variable.
        rpc_layer: the protocol before addresses in ``master()``; None: the protocol in the
            variable.
        environment: the name of the environment; None: the name in the variable.
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: the variable is malformed; the message names the part.

    >>> cluster = '{"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}'
    >>> resolver = TFConfigClusterResolver(environ={"TF_CONFIG": '{"cluster": %s}' % cluster})
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'b:1')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        text = environ.get("TF_CONFIG", "")
        try:
            config = _object(json.loads(text) if text.strip() else {}, "it")
            cluster = _cluster(_object(config.get("cluster", {}), "'cluster'"))
            task = _object(config.get("task", {}), "'task'")
            task_type = task.get("type") if task_type is None else task_type
            if not isinstance(task_type, str | None):
                raise ValueError(f"'type' in 'task' is {task_type!r}, not a string.")
            if task_id is None and task.get("index") is not None:
                task_id = number_of(task["index"], "'index' in 'task'")
            if task and not cluster and (task_id or "cluster" not in config):
                raise ValueError("it has a 'task', but no 'cluster' with the task's address.")
            where = config.get("environment", "") if environment is None else environment
            super().__init__(cluster, task_type, task_id, str(where))
            self._master = config.get("session_master", "")
            self.rpc_layer = config.get("rpc_layer", "") if rpc_layer is None else rpc_layer
        except (TypeError, ValueError) as error:
            what = f"it is not JSON: {error}." if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"TF_CONFIG is malformed: {what} An example: {_EXAMPLE}") from None


class MPIClusterResolver(ClusterResolver):
    """The resolver for processes that MPI's launchers started.

    Every rank is a worker. `cluster_spec` has placeholders for addresses, because MPI needs none.

    Args:
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: MPI did not start this process, or its variables contradict each other.

    >>> resolver = MPIClusterResolver(environ={"PMI_RANK": "1", "PMI_SIZE": "4"})
    >>> resolver.worker_index, resolver.num_workers, resolver.worker_addresses
    (1, 4, ())
    """

    bootstrap = "mpi"

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        process = _mpi_rank_and_size(environ)
        if process is None:
            raise ValueError(
                "MPI did not start this process: none of the pairs "
                f"{', '.join(map(' and '.join, _OF_MPI))} is set, only "
                f"{', '.join(_of_mpi(environ)) or 'nothing'}. Start it with "
                "`mpiexec -n 4 python script.py` or `ndistribute run --mpi -n 4 script.py`."
            )
        rank, size = process
        cluster = ClusterSpec({"worker": [f"mpi:{other}" for other in range(size)]})
        super().__init__(cluster, "worker", rank, "mpi")


class TorchrunClusterResolver(ClusterResolver):
    """The resolver for processes that ``torchrun`` started.

    Every rank is a worker. Only the address of rank 0 is known: ``MASTER_ADDR``, or loopback if all
    processes are on one host, and the port ``MASTER_PORT`` + 1. The other addresses are empty.

    Args:
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: ``torchrun`` did not start this process, or its variables contradict each other.

    >>> environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    >>> TorchrunClusterResolver(environ=environ).worker_addresses
    ('node1:29501', '')
    """

    address_hint = "The port is MASTER_PORT + 1: choose another with torchrun's --master-port."

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        missing = [name for name in _OF_TORCHRUN if not environ.get(name)]
        if missing:
            raise ValueError(
                "torchrun did not start this process: the environment lacks "
                f"{', '.join(missing)}, and has only "
                f"{', '.join(name for name in _OF_TORCHRUN if environ.get(name)) or 'nothing'}. "
                "Start it with `torchrun --nproc-per-node 2 script.py`, or unset the variables "
                "that it has."
            )
        rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
        port = number_in(environ, "MASTER_PORT") + 1
        if port >= 1 << 16:
            raise ValueError(f"MASTER_PORT={port - 1} is too high: rank 0 uses the next port.")
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
        host = "127.0.0.1" if on_one_host else environ["MASTER_ADDR"]
        first = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        cluster = ClusterSpec({"worker": [first, *[""] * (size - 1)]})
        super().__init__(cluster, "worker", rank, "torchrun")


class TPUClusterResolver(ClusterResolver):
    """The resolver for the hosts of a TPU, which Google's machines name to each other.

    Outside a TPU it describes the cluster of this process's launcher, or this process alone.

    Args:
        tpu: empty, or ``"local"`` for this host alone.
        port: the port at which the hosts find each other.
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: `tpu` is another name, or the variables contradict each other.

    >>> hosts = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
    >>> resolver = TPUClusterResolver(environ=hosts)
    >>> resolver.worker_addresses, resolver.worker_index
    (('a:8488', 'b:8488'), 1)
    """

    def __init__(
        self, tpu: str | None = "", port: int = 8488, *, environ: Mapping[str, str] | None = None
    ) -> None:
        if tpu not in (None, "", "local"):
            raise ValueError(
                f"TPUClusterResolver({tpu!r}): a program for a TPU must run on the hosts of that "
                "TPU. Start it there, and pass '' for all hosts or 'local' for one."
            )
        environ = os.environ if environ is None else environ
        hosts = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
        job = None
        if not tpu and len(hosts) > 1:
            cluster = ClusterSpec({"worker": [f"{host.strip()}:{port}" for host in hosts]})
            rank = number_in(environ, "TPU_WORKER_ID")
            job = ClusterResolver(cluster, "worker", rank, "tpu")
        elif not tpu:
            job = resolve(environ)
        job = job or ClusterResolver(ClusterSpec({}))
        super().__init__(job.cluster_spec(), job.task_type, job.task_id, job.environment)
        self.bootstrap, self.address_hint = job.bootstrap, job.address_hint


def _cluster(described: dict[str, Any]) -> ClusterSpec:
    jobs = dict(described)
    for job, tasks in described.items():
        if isinstance(tasks, dict):  # Not all tasks are known; keys in JSON are strings.
            what = f"a task's index in job {job!r}"
            jobs[job] = {number_of(index, what): address for index, address in tasks.items()}
    cluster = ClusterSpec(jobs)
    for job, index in [(name, index) for name in jobs for index in cluster.task_indices(name)]:
        address = cluster.task_address(job, index)
        match = _ADDRESS.fullmatch(address)
        if match is None or int(match[1]) > 65535:
            text = f"task {index} of {job!r} has the address {address!r}, which is not HOST:PORT."
            raise ValueError(text)
    return cluster


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not an object in braces.")
    return value


def _of_mpi(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that only MPI's launchers set."""
    names = dict.fromkeys(name for pair in _OF_MPI for name in pair)
    return [name for name in names if environ.get(name) and not name.startswith("SLURM_")]


def _mpi_rank_and_size(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, or None if MPI did not start it."""
    for rank, size in _OF_MPI:
        if rank in environ and size in environ:
            return _rank_and_size(environ, rank, size)
    return None


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = number_in(environ, rank_name), number_in(environ, size_name)
    if rank >= size:
        what = f"{rank_name}={rank} is not below {size_name}={size}:"
        how = "different launchers set these variables. Start the job from a clean environment."
        raise ValueError(f"{what} {how}")
    return rank, size
