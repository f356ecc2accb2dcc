"""What the end of one process means for its job: pure decisions, for the supervisor to act on.

Nothing here knows a process, a clock or a signal. A job of ranks has workers alone; one with
parameter servers has tasks of ``ps`` as well and may have a chief.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["TaskState", "Verdict", "verdict", "work_is_done"]


class Verdict(enum.Enum):
    """What follows from the end of a process."""

    GO_ON = "the others go on"
    AGAIN = "it is started again, alone"
    WAIT = "it only tells of another: that one gets a moment for a report of its own"
    FAIL = "the job has failed, and all are stopped"
    FINISH = "the work is done: the rest gets a moment to end by itself, and is stopped then"


@dataclass(frozen=True)
class TaskState:
    """What is known of a task.

    Args:
        task_type: chief, worker or ps.
        code: its exit code, 128 plus the number for a signal; None while it runs.
        tells_of_another: it ended with a report that it lost another one.
    """

    task_type: str
    code: int | None = None
    tells_of_another: bool = False


def verdict(ended: TaskState, tasks: Collection[TaskState], restarts_left: int) -> Verdict:
    """Return what follows from the end of a task.

    Args:
        ended: the task that ended.
        tasks: all of the job, that one as well.
        restarts_left: how many more tasks may be started again alone.

    >>> killed, others = TaskState("ps", 137), [TaskState("worker"), TaskState("worker")]
    >>> verdict(killed, [killed, *others], restarts_left=1).name
    'AGAIN'
    >>> verdict(killed, [killed, *others], restarts_left=0).name
    'FAIL'
    """
    if work_is_done(tasks):
        return Verdict.FINISH
    if ended.code == 0:
        return Verdict.GO_ON
    # What the others do is worth nothing without the chief, who alone knows the result.
    chief_failed = any(task.task_type == "chief" and task.code for task in tasks)
    if restarts_left > 0 and not chief_failed:
        return Verdict.AGAIN
    return Verdict.WAIT if ended.tells_of_another else Verdict.FAIL


def work_is_done(tasks: Collection[TaskState]) -> bool:
    """Say whether the chief, or where there is none every worker, ended well.

    >>> work_is_done([TaskState("worker", 0), TaskState("ps")])
    True
    >>> work_is_done([TaskState("worker", 0), TaskState("chief")])
    False
    """
    chiefs = [task.code for task in tasks if task.task_type == "chief"]
    codes = chiefs or [task.code for task in tasks if task.task_type == "worker"]
    return all(code == 0 for code in codes)
