"""`ClusterSpec`: the tasks of a cluster and their addresses, as in `tf.train.ClusterSpec`.

A `ClusterSpec` is a plain value. Only resolvers read the environment and know the task of this
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ClusterSpec:
    """The jobs of a cluster, and the network address of each task.

    Args:
        cluster: a dictionary from the name of each job to the list of its addresses ``host:port``,
            or to a dictionary from task indices to addresses; or another `ClusterSpec`.

    Raises:
        TypeError: `cluster` has another form.
        ValueError: a task index is negative, or two tasks have the same address. The methods also
            raise it for an unknown job or task.

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
        jobs = cluster._jobs if isinstance(cluster, ClusterSpec) else cluster
        if not isinstance(jobs, Mapping):
            raise TypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network "
                f"addresses, or a `ClusterSpec`; got {cluster!r}."
            )
        # The tasks of a job are in the order of their indices.
        self._jobs = {_text(job, "job names"): _tasks(job, tasks) for job, tasks in jobs.items()}
        _check_distinct(self._jobs)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order of the description."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return a list of addresses for each job; a dictionary by index if indices are missing."""
        return {
            job: list(tasks.values()) if 0 < len(tasks) == max(tasks) + 1 else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """Return the number of known tasks of a job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the known tasks of a job, in ascending order."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task."""
        address = self._job(job_name).get(task_index)
        if address is None:
            raise ValueError(f"No task with index {task_index!r} in job {job_name!r}")
        return address

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by task index, with None for unknown tasks."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def addresses(self) -> list[str]:
        """Return the addresses of all known tasks, by job name and task index."""
        return [address for job in sorted(self._jobs) for address in self._jobs[job].values()]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"No such job in cluster: {name!r}")
        return self._jobs[name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    # Specs are compared by value, and a subclass may change the dictionary.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def task_names(cluster: ClusterSpec) -> list[str]:
    """Return the names of all tasks, such as ``"ps:0"``."""
    return [f"{job}:{index}" for job in cluster.jobs for index in cluster.task_indices(job)]


def num_sharing_host(cluster: ClusterSpec, job: str, index: int) -> int:
    """Return how many tasks compute on the host of a task; those of ``ps`` do not count.

    It is 1 for a task that the cluster does not list, such as an evaluator.

    >>> num_sharing_host(ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "a:3", "b:2"]}), "worker", 0)
    2
    """
    if job not in cluster.jobs:
        return 1
    host = cluster.task_address(job, index).rpartition(":")[0]
    jobs = [job for job in cluster.jobs if job != "ps"]
    addresses = [a for job in jobs for a in cluster.job_tasks(job) if a is not None]
    return sum(address.rpartition(":")[0] == host for address in addresses)


def only_task(cluster: ClusterSpec, job: str | None, index: int | None) -> tuple[str, int]:
    """Return a job and a task index; None selects the only job or task, or raises ValueError."""
    jobs = cluster.jobs if job is None else [job]
    if len(jobs) != 1:
        raise ValueError(f"The cluster has the jobs {jobs}: choose one by job_name.")
    indices = cluster.task_indices(jobs[0]) if index is None else [index]
    if len(indices) != 1:
        raise ValueError(f"The job {jobs[0]!r} has the tasks {indices}: choose one by task_index.")
    cluster.task_address(jobs[0], indices[0])
    return jobs[0], indices[0]


def _tasks(job: Any, tasks: Any) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        pairs = dict(tasks)
    elif isinstance(tasks, list | tuple):
        pairs = dict(enumerate(tasks))
    else:
        what = f"The tasks for job {job!r} must be a list or a dictionary from integers to strings;"
        raise TypeError(f"{what} got {tasks!r}.")
    for index in pairs:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"All task keys must be integers; job {job!r} has {index!r}.")
        if index < 0:
            raise ValueError(f"All task keys must be 0 or more; job {job!r} has {index}.")
    return {index: _text(pairs[index], "task addresses") for index in sorted(pairs)}


def _check_distinct(jobs: Mapping[str, Mapping[int, str]]) -> None:
    """Raise ValueError if two tasks share an address, unless it is empty or has port 0."""
    tasks: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in addresses.items():
            host, _, port = address.removeprefix("grpc://").lower().rpartition(":")
            place = f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
            other = tasks.setdefault(place, f"{job}:{index}")
            if other != f"{job}:{index}" and address and port != "0":
                raise ValueError(
                    f"{other} and {job}:{index} have the same address {address!r}, where only one "
                    "process can listen: give each task its own host or port."
                )


def _text(value: Any, what: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"All {what} must be bytes or unicode; got {value!r}.")
    return value
