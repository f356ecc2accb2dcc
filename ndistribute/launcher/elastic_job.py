"""The supervisor of an elastic job: workers are started again, added and removed one by one.

It sends nothing to running workers: a new worker finds the job by the addresses in its `TF_CONFIG`,
and joins by itself. A pure function, `replan`, computes from the hosts which workers should run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ndistribute.launcher import supervisor
from ndistribute.launcher.commands import Host, parse_hosts
from ndistribute.launcher.job import JobOptions
from ndistribute.launcher.spare import Spares
from ndistribute.launcher.supervisor import PREEMPTED, Start, Task, TaskSupervisor, Verdict

# How often a worker is started again if --max-restarts does not say.
RESTARTS = 5
# The same after consecutive failures of ssh: a host may be away for minutes, as in a reboot.
TRIES = 20
# Seconds after SIGTERM within which a worker of a removed host must end its step.
HANDOVER_SECONDS = 30.0
_LOOK_SECONDS = 1.0
# A restart is immediate if the worker ran at least this long.
_STEADY_SECONDS = 10.0
# A worker started within this time before the end of the work may not have joined.
_JOINING_SECONDS = 60.0

Place = tuple[str, int]  # A host and the number of the worker on it.


def places_on(hosts: Sequence[Host]) -> list[Place]:
    """Return the workers' places by index; a host that is named again continues its count.

    >>> places_on([Host("a", 2), Host("b", 1), Host("a", 1)])
    [('a', 0), ('a', 1), ('b', 0), ('a', 2)]
    """
    names = [host.name for host in hosts for _ in range(host.slots)]
    return [(name, names[:index].count(name)) for index, name in enumerate(names)]


def replan(
    known: Sequence[Place], present: Collection[int], hosts: Sequence[Host], most: int | None
) -> tuple[list[int], list[Place]]:
    """Return the indexes of the workers that should run, and the places of new workers.

    Args:
        known: the place of each worker that was ever planned, by index.
        present: the indexes of workers that were not removed.
        hosts: the hosts that the job may use now.
        most: the largest number of workers; None: as many as fit.

    >>> replan([("a", 0), ("a", 1)], [0, 1], [Host("a", 1), Host("b", 2)], 2)
    ([0], [('b', 0)])
    """
    room = places_on(hosts)
    stay = [index for index in present if known[index] in room]
    free = [place for place in room if place not in [known[index] for index in stay]]
    free = free if most is None else free[: max(0, most - len(stay))]
    # A worker that comes back keeps its index and address.
    stay += [known.index(place) for place in free if place in known]
    return stay, [place for place in free if place not in known]


@dataclass(kw_only=True)
class ElasticSupervisor(TaskSupervisor):
    """A job whose workers may join and leave; `restarts` is the limit for each worker."""

    options: JobOptions  # All hosts that were ever named, in the order of the indexes.
    start_all: Callable[[JobOptions], list[Start]]  # Returns the `Start` of each worker.
    spares: Spares | None = None
    _texts: list[str] = field(default_factory=list)  # The hosts' file as applied and as read.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.options.hosts_file is not None:
            self._texts = [self.options.hosts_file.read_text()] * 2
        self._due[self._look] = time.monotonic() + _LOOK_SECONDS

    def _look(self) -> None:
        """Start missing spares some time after one was used, and read the hosts' file."""
        if any(task.code == 0 for task in self._tasks):  # The work is done.
            return
        self._due[self._look] = time.monotonic() + _LOOK_SECONDS
        if self.spares is not None:
            newest = max(self._tasks, key=lambda task: (task.start.host is None, task.since))
            self.spares.fill(newest.start)
        with contextlib.suppress(OSError):  # An editor may be replacing it.
            if (path := self.options.hosts_file) is not None:
                self._follow(path, path.read_text())

    def _follow(self, path: Path, text: str) -> None:
        followed, seen = self._texts
        # If the text has changed since the last look, it may be incomplete.
        self._texts = [text if text == seen else followed, text]
        if text == seen != followed:
            try:
                self._change(parse_hosts(text, "\n"))
            except (ValueError, OSError) as error:
                self.console.say(f"{path}: {error} The workers stay as they are.")

    def _change(self, hosts: Sequence[Host]) -> None:
        """Remove, bring back and add workers."""
        present = [index for index, task in enumerate(self._tasks) if not task.removed]
        known = self.options.hosts
        stay, new = replan(places_on(known), present, hosts, self.options.max_workers)
        lost = [i for i in stay if self._tasks[i].code and not self._tasks[i].removed]
        if len(stay) - len(lost) + len(new) < self.options.min_workers:
            raise ValueError(f"it has fewer places than --min-workers {self.options.min_workers}.")
        grown = replace(self.options, hosts=(*known, *(Host(name, 1) for name, _ in new)))
        starts = self.start_all(grown)
        self.options = grown
        for index, task in enumerate(self._tasks):
            if task.removed and index in stay:
                task.removed = False
                if task.code is not None:  # Otherwise it is restarted when it ends.
                    self._add(task)
            elif index not in stay and not task.removed:
                task.removed = True
                self.console.say(f"{task.start.name} is removed: its host has no place for it.")
                task.code = PREEMPTED if task.running is None else task.code
                self._ask_to_end(task)
        for start in starts[len(self._tasks) :]:
            self._tasks.append(Task(start))
            self._add(self._tasks[-1])

    def _add(self, task: Task) -> None:
        self.console.say(f"{task.start.name} is added.")
        task.restarts = task.quick = task.unreached = 0
        task.joins = True
        self._start_later(task, 0.0)

    def _start(self, task: Task) -> None:
        # Since this was planned, the task may have been removed or started.
        if task not in self._tasks or task.removed or task.running is not None:
            return
        if task.joins:  # It needs the addresses of added workers to find the job.
            task.start = self.start_all(self.options)[self._tasks.index(task)]
        task.since = time.monotonic()
        super()._start(task)

    def _judge(self, task: Task, can_restart: bool) -> Verdict:
        if task.removed and task.code == 0:  # It handed over before the work was done.
            task.code = PREEMPTED
        if task.code == 0:
            newest = time.monotonic() - _JOINING_SECONDS
            for other in self._tasks:
                other.late |= other.joins and other.since > newest
            self._drop_waiting()
        left = TRIES - task.unreached if task.is_away else self.restarts - task.restarts
        left = left if can_restart else 0
        decided = supervisor.verdict(task, self._tasks, left, self.options.min_workers)
        if task.code and decided is Verdict.GO_ON:
            self._say_end(task, "the others continue.")
        return decided

    def _start_again(self, task: Task) -> None:
        if time.monotonic() - task.since >= _STEADY_SECONDS:
            task.quick = 0
        delay = supervisor.restart_delay(task.quick)
        task.quick += 1
        task.joins = True
        task.unreached = task.unreached + 1 if task.is_away else 0
        task.restarts += task.code != PREEMPTED and not task.is_away
        left = max(0, self.restarts - task.restarts)
        self._say_end(task, f"restarting it in {delay:g} s (restarts left: {left}).")
        self._start_later(task, delay)
