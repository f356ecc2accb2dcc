"""`ClusterResolver`: a cluster, and the task of this process in it.

A resolver reads the environment once, when it is created. It opens no connections and does not
import MPI. Strategies use only the methods of `ClusterResolver`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ndistribute.cluster.spec import ClusterSpec
from ndistribute.mistakes import count_of

Bootstrap = Literal["tcp", "mpi"]

# The jobs that take part in collectives, in the order of their ranks.
_COMPUTING = ("chief", "worker")
_KNOWN = (*_COMPUTING, "ps", "evaluator")
_ALONE = ("chief", "evaluator")


class ClusterResolver:
    """A cluster and the task of this process in it.

    Args:
        cluster: the cluster; empty or None for a process alone. Instead of calling the constructor,
            a subclass may define `cluster_spec`, `task_type` and `task_id`.
        task_type: the job of this process: chief, worker, ps or evaluator; None if it has none.
        task_id: the index of this process within its job.
        environment: the name of the environment, such as ``"slurm"``.

    Raises:
        ValueError: the cluster has no such task, or has an unknown job.

    >>> me = ClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}), "worker", 1)
    >>> me.worker_addresses, me.worker_index, me.is_chief
    (('a:1', 'b:1'), 1, False)
    """

    # How processes find each other: at their addresses, or through MPI.
    bootstrap: Bootstrap = "tcp"
    # For errors: the source of the addresses, and how to change them; empty if the program gave
    # them.
    address_hint: str = ""
    #: The protocol before the addresses that `master` returns, as in ``grpc://``; empty: none.
    rpc_layer: str | None = ""
    # The values that the program set for `master` and `num_accelerators`.
    _master = ""
    _accelerators: dict[str, int] | None = None
    # For a subclass that does not call the constructor.
    _cluster = ClusterSpec({})
    task_type: str | None = None
    task_id: int | None = None
    _needs_task = True  # Otherwise a process without a task coordinates the others.

    def __init__(
        self,
        cluster: ClusterSpec | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
    ) -> None:
        self._cluster = cluster = cluster or self._cluster
        if task_type is not None or task_id is not None:
            self.task_type, self.task_id = task_type, task_id
        self.environment = environment
        if self._needs_task or task_type is not None:
            _check(cluster, task_type, task_id)

    @property
    def _workers(self) -> list[tuple[str, int]]:
        cluster = self.cluster_spec()
        jobs = [job for job in _COMPUTING if job in cluster.jobs]
        return [(job, index) for job in jobs for index in cluster.task_indices(job)]

    def cluster_spec(self) -> ClusterSpec:
        """Return the whole cluster."""
        return self._cluster

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """The addresses of the chief and the workers in rank order; empty under MPI.

        If only the address of rank 0 is known, the others are empty strings.
        """
        workers = self._workers if self.bootstrap == "tcp" else []
        return tuple(self.cluster_spec().task_address(*task) for task in workers)

    @property
    def worker_index(self) -> int | None:
        """The rank of this process among chief and workers; None for any other process."""
        if not self.cluster_spec():
            return 0
        ranks = {task: rank for rank, task in enumerate(self._workers)}
        return ranks.get((self.task_type or "", self.task_id or 0))

    @property
    def num_workers(self) -> int:
        """The number of workers, including the chief; 1 in an empty cluster."""
        return len(self._workers) if self.cluster_spec() else 1

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, or worker 0 if there is no chief, or has no task."""
        return self.task_type is None or self.worker_index == 0

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job and the index of this process."""
        return self.task_type, self.task_id

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default of this process; empty if it has none.

        If the protocol `rpc_layer` is not empty, it precedes the address.

        Raises:
            ValueError: there is no such task.
        """
        address = self._address_of(task_type, task_id)
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{address}" if layer and address else address

    def _address_of(self, task_type: str | None, task_id: int | None) -> str:
        if self._master and task_type is None and task_id is None:
            return self._master
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        cluster = self.cluster_spec()
        if not cluster or task_type is None or task_id is None:
            return ""
        if task_type == "evaluator" and task_type not in cluster.jobs:
            return ""
        return cluster.task_address(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return the number of GPUs of this machine, as ``{"GPU": n}``, for every task."""
        if self._accelerators is not None:
            return self._accelerators
        from ndistribute.devices import list_devices

        return {"GPU": len(list_devices("gpu"))}

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self.cluster_spec()!r}, {self.task_type!r}, {self.task_id!r})"


class SimpleClusterResolver(ClusterResolver):
    """The resolver for a cluster that the program describes.

    Args:
        cluster_spec: the cluster, or a description that `ClusterSpec` accepts.
        master: the address that ``master()`` returns; empty: the address of this task.
        task_type: the job of this process; None: it coordinates the others.
        task_id: the index of this process within its job.
        environment: the name of the environment.
        num_accelerators: the result of ``num_accelerators()``; None: the GPUs of this machine.
        rpc_layer: the protocol before addresses in ``master()``.

    Raises:
        ValueError: the cluster has no such task.

    >>> resolver = SimpleClusterResolver({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=0)
    >>> resolver.num_workers, resolver.is_chief, resolver.master()
    (2, True, 'a:1')
    """

    _needs_task = False

    def __init__(
        self,
        cluster_spec: ClusterSpec | dict[str, list[str]],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = "",
    ) -> None:
        super().__init__(ClusterSpec(cluster_spec), task_type, task_id, environment)
        self._master = master
        self._accelerators = num_accelerators
        self.rpc_layer = rpc_layer


_entered: list[ClusterResolver] = []


def enter_task(task: ClusterResolver | None) -> None:
    """Set the task of this process for all of its threads; None removes it."""
    _entered[:] = [] if task is None else [task]


def current_task() -> ClusterResolver | None:
    """Return the task that this process has since it created its `Server`, or None."""
    return _entered[0] if _entered else None


def worker_index() -> int:
    """Return the index of this worker; 0 in a process without a task.

    Functions that a coordinator schedules on workers use it to choose their part of the input.

    Raises:
        RuntimeError: this process is a task of another type.

    >>> worker_index()
    0
    """
    task = current_task()
    if task is None or task.task_id is None:
        return 0
    if task.task_type != "worker":
        raise RuntimeError(
            f"worker_index() was called on {task.task_type}:{task.task_id}, which is not a worker: "
            "call it in a function that you pass to ClusterCoordinator.schedule."
        )
    return task.task_id


def number_of(value: Any, what: str) -> int:
    """Return an integer from a number or a string of digits; raise ValueError for other values."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)  # Templates often quote the numbers of an environment variable.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, expected an integer.")
    return value


def number_in(environ: Mapping[str, str], name: str) -> int:
    """Return the integer in an environment variable; raise ValueError unless it is 0 or more."""
    return number_of(environ.get(name, ""), name)


def seconds_of(environ: Mapping[str, str], name: str, usual: float) -> float:
    """Return the value of an environment variable in seconds, or `usual` if it is not set."""
    text = environ.get(name) or str(usual)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.01 <= seconds < math.inf:
        raise ValueError(f"{name} must be a number of seconds, at least 0.01; got {text!r}.")
    return seconds


def check_jobs(cluster: ClusterSpec) -> None:
    """Raise ValueError if a cluster has an unknown job, or too many tasks of one."""
    for job in cluster.jobs:
        if job not in _KNOWN:
            text = f"The cluster has an unknown job {job!r}; the known jobs are {_listed(_KNOWN)}."
            raise ValueError(text)
        if job in _ALONE and cluster.num_tasks(job) > 1:
            raise ValueError(f"A cluster has at most one {job!r}, got {cluster.num_tasks(job)}.")


def _check(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    check_jobs(cluster)
    jobs = _listed(cluster.jobs)
    # As in TensorFlow, an evaluator need not be listed in the cluster.
    is_listed = task_type in cluster.jobs
    if not cluster or (task_type == "evaluator" and not is_listed and task_id is not None):
        return
    if task_type is None and sum(map(cluster.num_tasks, cluster.jobs)) == 1:
        return  # This process, or a process that leads it.
    if task_type is None or task_id is None:
        what = f"The cluster has the jobs {jobs}, but the task of this process is unknown:"
        raise ValueError(f"{what} pass its task_type and task_id.")
    if not is_listed:
        what = f"The task type {task_type!r} is none of {jobs}:"
        raise ValueError(f"{what} the cluster must list the address of every task, a chief's too.")
    if task_id not in cluster.task_indices(task_type):
        what = f"The job {task_type!r} has {count_of(cluster.num_tasks(task_type), 'task')},"
        raise ValueError(f"{what} numbered from 0, but this process has the index {task_id}.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
