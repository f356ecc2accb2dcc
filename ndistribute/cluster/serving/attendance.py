"""Who has come to a server and gone again, and what that says of its end.

No server is told that its job is over: it sees its clients leave. Here is what it may conclude, as
a machine without clock or threads: whoever uses it says when something happened.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from ndistribute.cluster.spec import ClusterSpec

__all__ = ["GRACE_SECONDS", "RETURN_SECONDS", "Attendance", "Outlook"]

GRACE_SECONDS = 2.0
"""How long a server waits for a task that left cleanly: it may close one strategy for another."""
RETURN_SECONDS = 60.0
"""How long it waits for a task that died, which somebody may start again."""


@dataclass(frozen=True)
class Outlook:
    """Say when a server's work ends, unless somebody comes before.

    Args:
        at: the time.
        lost: who died or never came; empty where all went well.
    """

    at: float
    lost: str = ""


@dataclass
class _Task:
    """A task whose end matters; of its processes, the one that came last speaks for it."""

    present: dict[str, int] = field(default_factory=dict)
    last: tuple[int, bool] | None = None  # Which one left, by its arrival, and whether it died.

    @property
    def died(self) -> bool:
        return self.last is not None and self.last[1]


class Attendance:
    """Follow the clients of a server.

    A cluster with a chief lives as long as the chief; one without lives until every worker has
    come and gone. All other clients, such as evaluators, come and go as they like.

    Args:
        cluster: all tasks.
        return_seconds: how long a worker may be away, once all others are gone too.
        grace_seconds: how long after the last one left cleanly the work is over.
        resumed: whether an earlier process of this server may have seen workers leave.

    >>> attendance = Attendance(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]}))
    >>> for name in ("worker:0#f00", "worker:1#ba4"):
    ...     attendance.came(name)
    >>> attendance.left("worker:0#f00", died=False, now=10.0)
    >>> attendance.outlook()
    >>> attendance.left("worker:1#ba4", died=False, now=11.0)
    >>> attendance.outlook()
    Outlook(at=13.0, lost='')
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        *,
        return_seconds: float = RETURN_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        resumed: bool = False,
    ) -> None:
        self._led = "chief" in cluster.jobs
        job = "chief" if self._led else "worker"
        indices = cluster.task_indices(job) if job in cluster.jobs else []
        self._tasks = {f"{job}:{index}": _Task() for index in indices}
        self._return_seconds = return_seconds
        self._grace_seconds = grace_seconds
        self.resumed = resumed
        self._arrivals = itertools.count(1)
        self._last_departure = 0.0

    def came(self, client: str) -> None:
        """Note that a client is here; it may have been for long.

        Args:
            client: its name, ``job:index#random``; the random part is another one after a restart.
        """
        task = self._tasks.get(_task_of(client))
        if task is not None and client not in task.present:
            task.present[client] = next(self._arrivals)

    def left(self, client: str, died: bool, now: float) -> None:
        """Note that a client said good-bye, or that its process died."""
        task = self._tasks.get(_task_of(client))
        if task is None:
            return
        arrival = task.present.pop(client, 0) or next(self._arrivals)
        if task.last is None or arrival > task.last[0] or (self._led and died):
            task.last = (arrival, died)
        self._last_departure = now

    def outlook(self) -> Outlook | None:
        """Return when the work is over as things stand; None: not before somebody leaves."""
        tasks = self._tasks
        if self._led and any(task.died for task in tasks.values()):
            # What it had sent to workers is under way still: only a fresh start is consistent.
            return Outlook(self._last_departure, "the chief died")
        if any(task.present for task in tasks.values()):
            return None
        if not any(task.last for task in tasks.values()):
            return None
        missing = [name for name, task in tasks.items() if task.last is None]
        died = [name for name, task in tasks.items() if task.died]
        if not died and not missing:
            return Outlook(self._last_departure + self._grace_seconds)
        at = self._last_departure + self._return_seconds
        if not died and self.resumed:
            return Outlook(at)  # They left before this process was started, most likely.
        return Outlook(at, _described(died, missing, self._return_seconds))


def _task_of(client: str) -> str:
    return client.partition("#")[0]


def _described(died: list[str], missing: list[str], seconds: float) -> str:
    parts = [f"{', '.join(died)} died and did not come back"] if died else []
    parts += [f"{', '.join(missing)} never came"] if missing else []
    return f"{' and '.join(parts)} within {seconds:g} s after all others left"
