"""Which processes a job has, and the address of each: a plain value, as `tf.train.ClusterSpec`.

Nothing here looks at the environment, opens a socket or knows which process it runs in; that is
the resolvers' part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ClusterSpec:
    """Describe the jobs of a cluster and the network address of each of their tasks.

    Args:
        cluster: for each job's name either the list of its tasks' addresses, or a dictionary from
            task index to address where only some tasks are known; or another ClusterSpec.

    Raises:
        TypeError: the description has another form.
        ValueError: a task's index is negative, or two tasks have the same address.

    >>> cluster = ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": {1: "c:2222"}})
    >>> cluster.jobs, cluster.num_tasks("worker"), cluster.task_address("ps", 1)
    (['worker', 'ps'], 2, 'c:2222')
    >>> cluster.as_dict()
    {'worker': ['a:2222', 'b:2222'], 'ps': {1: 'c:2222'}}
    """

    def __init__(
        self, cluster: Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec
    ) -> None:
        self._jobs: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
        elif isinstance(cluster, Mapping):
            self._jobs = {_text(job, "job names"): _tasks(job, t) for job, t in cluster.items()}
        else:
            raise TypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network "
                f"addresses, or a `ClusterSpec`; got {cluster!r}."
            )
        _check_distinct(self._jobs)

    @property
    def jobs(self) -> list[str]:
        """Return the names of the jobs, in the order in which they were given."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return what describes this cluster: a list for each dense job, else a dictionary."""
        described: dict[str, list[str] | dict[int, str]] = {}
        for job, tasks in self._jobs.items():
            indices = sorted(tasks)
            is_dense = bool(tasks) and indices[-1] + 1 == len(indices)
            ordered = {index: tasks[index] for index in indices}
            described[job] = list(ordered.values()) if is_dense else ordered
        return described

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks of a job are known.

        Raises:
            ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's known tasks, in rising order.

        Raises:
            ValueError: there is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task.

        Raises:
            ValueError: there is no such job, or no such task.
        """
        address = self._job(job_name).get(task_index)
        if address is None:
            raise ValueError(f"No task with index {task_index!r} in job {job_name!r}")
        return address

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return a job's addresses by task index, None where a task is not known.

        Raises:
            ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def addresses(self) -> list[str]:
        """Return the addresses of all known tasks, job after job in the order of their names."""
        jobs = [self._jobs[job] for job in sorted(self._jobs)]
        return [tasks[index] for tasks in jobs for index in sorted(tasks)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"No such job in cluster: {name!r}")
        return self._jobs[name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    # It compares by value, and its dictionary might have been changed by a subclass.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def task_names(cluster: ClusterSpec) -> list[str]:
    """Return the names of all tasks, such as ``"ps:0"``."""
    return [f"{job}:{index}" for job in cluster.jobs for index in cluster.task_indices(job)]


def only_task(cluster: ClusterSpec, job: str | None, index: int | None) -> tuple[str, int]:
    """Return a task's job and index; what is None is known where there is only one."""
    jobs = cluster.jobs if job is None else [job]
    if len(jobs) != 1:
        raise ValueError(f"The cluster has the jobs {jobs}: say which by job_name.")
    indices = cluster.task_indices(jobs[0]) if index is None else [index]
    if len(indices) != 1:
        raise ValueError(f"The job {jobs[0]!r} has the tasks {indices}: say which by task_index.")
    cluster.task_address(jobs[0], indices[0])
    return jobs[0], indices[0]


def _tasks(job: Any, tasks: Any) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        pairs = dict(tasks)
    elif isinstance(tasks, list | tuple):
        pairs = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings; "
            f"got {tasks!r}."
        )
    for index in pairs:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"All task keys must be integers; job {job!r} has {index!r}.")
        if index < 0:
            raise ValueError(f"All task keys must be 0 or more; job {job!r} has {index}.")
    return {index: _text(address, "task addresses") for index, address in pairs.items()}


def _check_distinct(jobs: Mapping[str, Mapping[int, str]]) -> None:
    """Refuse two tasks at one address; it may be unknown, or have port 0, for any free one."""
    tasks: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in addresses.items():
            host, _, port = address.removeprefix("grpc://").lower().rpartition(":")
            place = f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
            other = tasks.setdefault(place, f"{job}:{index}")
            if other != f"{job}:{index}" and address and port != "0":
                raise ValueError(
                    f"{other} and {job}:{index} have the same address {address!r}, and only one "
                    "process can listen there: give each task a host or a port of its own."
                )


def _text(value: Any, what: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"All {what} must be bytes or unicode; got {value!r}.")
    return value
