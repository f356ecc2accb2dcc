"""Which task of a cluster this process is, known once its `Server` was made.

What is sent to a worker asks here when it is unpickled: a strategy becomes that worker's own, and a
function learns which worker runs it. A process is one task, so this is one value for all threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ndistribute.cluster.spec import ClusterSpec

__all__ = ["Task", "current", "enter", "worker_index"]


@dataclass(frozen=True)
class Task:
    """Name a task by its cluster, its job, and its index in the job."""

    cluster: ClusterSpec
    job: str
    index: int


_entered: list[Task] = []


def enter(task: Task | None) -> None:
    """Set which task this process is from now on; None: no task any more."""
    _entered[:] = [] if task is None else [task]


def current() -> Task | None:
    """Return which task this process is, or None if nobody has set it."""
    return _entered[0] if _entered else None


def worker_index() -> int:
    """Return the index of the worker that this process is, 0 for a process without a cluster.

    A function that a coordinator sends to a worker calls it there, to know its share of the input.

    Raises:
        RuntimeError: this process is another task than a worker.

    >>> worker_index()
    0
    """
    task = current()
    if task is None:
        return 0
    if task.job != "worker":
        raise RuntimeError(
            f"worker_index() was called on {task.job}:{task.index}, which is no worker: call it "
            "in a function that is given to ClusterCoordinator.schedule."
        )
    return task.index
