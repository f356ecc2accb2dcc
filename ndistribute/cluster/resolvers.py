"""Which process of a cluster this one is, and where the others are.

A resolver reads the environment once, when it is made, and is a plain value afterwards: it opens no
connection and imports no MPI. Strategies ask only for what is defined here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ndistribute.cluster.spec import ClusterSpec

Bootstrap = Literal["tcp", "mpi"]

# Those that take part in the collectives, in the order of their ranks.
_COMPUTING = ("chief", "worker")
_KNOWN = (*_COMPUTING, "ps", "evaluator")
_ALONE = ("chief", "evaluator")


class ClusterResolver:
    """Hold a cluster and the task of this process.

    Args:
        cluster: the cluster; empty for a process that works alone.
        task_type: this process's job: chief, worker, ps or evaluator; None in an empty cluster.
        task_id: its index within the job.
        environment: a name for where the job runs, such as ``"slurm"``.

    Raises:
        ValueError: the cluster has no such task, or has a job that has no meaning here.

    >>> me = ClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}), "worker", 1)
    >>> me.worker_addresses, me.worker_index, me.is_chief
    (('a:1', 'b:1'), 1, False)
    """

    # How the processes find each other: at their addresses, or through MPI.
    bootstrap: Bootstrap = "tcp"
    # Where the addresses come from and how to change them; empty if they were given.
    address_hint: str = ""

    def __init__(
        self,
        cluster: ClusterSpec,
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
    ) -> None:
        self._cluster = cluster
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        _check(cluster, task_type, task_id)

    def cluster_spec(self) -> ClusterSpec:
        """Return the whole cluster."""
        return self._cluster

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """Return the addresses of the chief and the workers in rank order; none under MPI.

        Where only that of rank 0 is known, the others are empty.
        """
        workers = self._workers() if self.bootstrap == "tcp" else []
        return tuple(self._cluster.task_address(*task) for task in workers)

    @property
    def worker_index(self) -> int | None:
        """Return this process's rank among the chief and workers; None for a ps or evaluator."""
        if not self._cluster:
            return 0
        me = (self.task_type, self.task_id)
        workers: list[tuple[str | None, int | None]] = [*self._workers()]
        return workers.index(me) if me in workers else None

    @property
    def num_workers(self) -> int:
        """Return the number of chief and workers; 1 for a process that works alone."""
        return len(self._workers()) if self._cluster else 1

    @property
    def is_chief(self) -> bool:
        """Return True for the process that does what is done once: the chief, else worker 0."""
        return self.worker_index == 0

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Return the address of a task, by default this process's own; empty if it has none.

        Raises:
            ValueError: there is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if not self._cluster or task_type is None or task_id is None:
            return ""
        if task_type == "evaluator" and task_type not in self._cluster.jobs:
            return ""
        return self._cluster.task_address(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return the number of GPUs that this process sees, as ``{"GPU": n}``, for any task."""
        from ndistribute.device import list_devices

        return {"GPU": len(list_devices("gpu"))}

    def _workers(self) -> list[tuple[str, int]]:
        jobs = [job for job in _COMPUTING if job in self._cluster.jobs]
        return [(job, index) for job in jobs for index in self._cluster.task_indices(job)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._cluster!r}, {self.task_type!r}, {self.task_id!r})"


class SimpleClusterResolver(ClusterResolver):
    """Hold a cluster that the program itself knows.

    Args:
        cluster_spec: the cluster, or what describes one.
        master: the address that ``master()`` returns; empty for this task's own.
        task_type: this process's job.
        task_id: its index within the job.
        environment: a name for where the job runs.
        num_accelerators: what ``num_accelerators()`` returns; None looks at this machine.

    Raises:
        ValueError: the cluster has no such task.

    >>> resolver = SimpleClusterResolver({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=0)
    >>> resolver.num_workers, resolver.is_chief, resolver.master()
    (2, True, 'a:1')
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | dict[str, list[str]],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
    ) -> None:
        super().__init__(ClusterSpec(cluster_spec), task_type, task_id, environment)
        self._master = master
        self._accelerators = num_accelerators

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        if self._master and task_type is None and task_id is None:
            return self._master
        return super().master(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        if self._accelerators is not None:
            return dict(self._accelerators)
        return super().num_accelerators(task_type, task_id)


_entered: list[ClusterResolver] = []


def enter_task(task: ClusterResolver | None) -> None:
    """Set which task this process is from now on, for all its threads; None: no task any more."""
    _entered[:] = [] if task is None else [task]


def current_task() -> ClusterResolver | None:
    """Return which task this process is since its `Server` was made, or None."""
    return _entered[0] if _entered else None


def worker_index() -> int:
    """Return the index of the worker that this process is, 0 for a process without a cluster.

    A function that a coordinator sends to a worker calls it there, to know its share of the input.

    Raises:
        RuntimeError: this process is another task than a worker.

    >>> worker_index()
    0
    """
    task = current_task()
    if task is None or task.task_id is None:
        return 0
    if task.task_type != "worker":
        raise RuntimeError(
            f"worker_index() was called on {task.task_type}:{task.task_id}, which is no worker: "
            "call it in a function that is given to ClusterCoordinator.schedule."
        )
    return task.task_id


def number_of(value: Any, what: str) -> int:
    """Return a number, also one in quotes; raise ValueError for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)  # Templates that fill in an environment variable often quote it.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, which is no number.")
    return value


def number_in(environ: Mapping[str, str], name: str) -> int:
    """Return the number that a variable holds; raise ValueError unless it is 0 or above."""
    return number_of(environ.get(name, ""), name)


def seconds_of(environ: Mapping[str, str], name: str, usual: float) -> float:
    """Return the seconds that a variable holds; if it is not set, the usual ones."""
    text = environ.get(name) or str(usual)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.01 <= seconds < math.inf:
        raise ValueError(f"{name} must be a number of seconds, at least 0.01; got {text!r}.")
    return seconds


def _check(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    jobs = cluster.jobs
    for job in jobs:
        if job not in _KNOWN:
            raise ValueError(
                f"The cluster has a job {job!r}; the known ones are {_listed(_KNOWN)}."
            )
        if job in _ALONE and cluster.num_tasks(job) > 1:
            raise ValueError(f"There must be at most one {job!r}; got {cluster.num_tasks(job)}.")
    # As in TensorFlow, an evaluator works beside the cluster and need not be listed.
    if not jobs or (task_type == "evaluator" and task_type not in jobs and task_id is not None):
        return
    if task_type is None or task_id is None:
        raise ValueError(
            f"The cluster has {_listed(jobs)}, but which of them this process is was not said: "
            "give its task type and its index."
        )
    if task_type not in jobs:
        raise ValueError(
            f"The task type {task_type!r} is none of {_listed(jobs)}: every task stands in the "
            "cluster with its address, a chief too."
        )
    if task_id not in cluster.task_indices(task_type):
        raise ValueError(
            f"The job {task_type!r} has {cluster.num_tasks(task_type)} tasks, counted from 0, "
            f"but this process is said to be number {task_id}."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
