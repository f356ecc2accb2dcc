"""The supervisor of an elastic job: workers are started again, added and removed one by one.

It tells the others nothing: a worker that starts finds the job by the addresses in its `TF_CONFIG`,
and joins by itself. Which workers there should be is a pure function of the hosts, `replan`.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ndistribute.launcher import reaper
from ndistribute.launcher.commands import Host, parse_hosts
from ndistribute.launcher.spare import Spare
from ndistribute.launcher.supervisor import (
    PREEMPTED,
    JobEnd,
    Process,
    Start,
    Task,
    TaskSupervisor,
    Verdict,
    restart_delay,
    verdict,
)

# How often a worker is started again if --max-restarts does not say.
RESTARTS = 5
# The same after ssh failed: a host may be away for some minutes, such as for a reboot.
TRIES = 20
# Seconds after SIGTERM in which a worker whose host was removed has to end its step.
HANDOVER_SECONDS = 30.0
_LOOK_SECONDS = 1.0
# A restart is immediate if the worker ran for as long.
_STEADY_SECONDS = 10.0
# Whoever was started later than this before the work was done may not have joined.
_JOINING_SECONDS = 60.0

Place = tuple[str, int]  # A host and the number of the worker there.


def places_on(hosts: Sequence[Host]) -> list[Place]:
    """Return the places of the workers by index; a host that is named again goes on counting.

    >>> places_on([Host("a", 2), Host("b", 1), Host("a", 1)])
    [('a', 0), ('a', 1), ('b', 0), ('a', 2)]
    """
    places: list[Place] = []
    for host in hosts:
        first = sum(name == host.name for name, _ in places)
        places += [(host.name, first + slot) for slot in range(host.slots)]
    return places


def replan(
    known: Sequence[Place], present: Collection[int], hosts: Sequence[Host], most: int | None
) -> tuple[list[int], list[Place]]:
    """Return the indexes of the workers that there should be, and the places of new ones.

    Args:
        known: the place of each worker that there ever was, by index.
        present: the indexes of those that were not removed.
        hosts: the hosts that the job may use now.
        most: the largest number of workers; None: as many as fit.

    >>> replan([("a", 0), ("a", 1)], [0, 1], [Host("a", 1), Host("b", 2)], 2)
    ([0], [('b', 0)])
    """
    room = places_on(hosts)
    stay = [index for index in present if known[index] in room]
    free = [place for place in room if place not in [known[index] for index in stay]]
    free = free if most is None else free[: max(0, most - len(stay))]
    # A worker that comes back has its index and address again.
    stay += [known.index(place) for place in free if place in known]
    return stay, [place for place in free if place not in known]


def refuse_waiting(ports: Sequence[socket.socket]) -> None:
    """Close connections that were not accepted; the processes that should accept have ended."""
    while waiting := select.select(ports, [], [], 0)[0]:
        for port in waiting:
            port.accept()[0].close()


class Spares:
    """Starts tasks: those of this machine in processes that have imported in advance."""

    def __init__(self, number: int, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._number, self._environ, self._say = number, environ, say
        self._waiting: list[Spare] = []

    def begin(self, task: Start) -> Process:
        """Return the process of a task: a spare's, or a new one."""
        for spare in [spare for spare in self._waiting if spare.fits(task)]:
            self._waiting.remove(spare)
            if spare.become(task):
                return spare
            spare.dismiss()
        return Process(self._environ, task)

    def fill(self, task: Start) -> None:
        """Start spares for the settings of a task until there are enough."""
        for spare in [spare for spare in self._waiting if not spare.fits(task)]:
            if spare.has_ended():
                # Each new one might end as well, so it is not replaced.
                self._number -= 1
                self._say(f"a spare ended; {self._number} left.")
            self._waiting.remove(spare)
            spare.dismiss()
        while len(self._waiting) < self._number:
            self._waiting.append(Spare(self._environ, task))

    def close(self) -> None:
        for spare in self._waiting:
            spare.dismiss()


@dataclass(kw_only=True)
class ElasticSupervisor(TaskSupervisor):
    """A job whose workers come and go; `restarts` counts for each worker."""

    min_workers: int
    max_workers: int | None
    hosts: tuple[Host, ...]  # All that were ever named, in the order of the workers' indexes.
    hosts_file: Path | None  # It is watched.
    start_all: Callable[[tuple[Host, ...]], list[Start]]  # Returns how each worker is started.
    spares: Spares
    _seen: str = field(default="", init=False)  # The hosts' file at the last look.
    _applied: str = field(default="", init=False)  # The text that the workers follow.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts_file is not None:
            self._seen = self._applied = self.hosts_file.read_text()
        self._look_later()

    def _look_later(self) -> None:
        self._due[self._look] = time.monotonic() + _LOOK_SECONDS

    def _look(self) -> None:
        """Start missing spares, later than the worker that took one, and read the hosts' file."""
        if any(task.code == 0 for task in self._tasks):  # The work is done.
            return
        self._look_later()
        local = [task for task in self._tasks if task.start.host is None]
        if local:
            self.spares.fill(max(local, key=lambda task: task.since).start)
        text = self._seen
        if self.hosts_file is not None:
            with contextlib.suppress(OSError):  # An editor may be replacing it.
                text = self.hosts_file.read_text()
        # What has changed since the last look may not be written to its end.
        if text == self._seen != self._applied:
            self._applied = text
            try:
                self._follow(parse_hosts(text, "\n"))
            except (ValueError, OSError) as error:
                self.console.say(f"{self.hosts_file}: {error} The workers stay as they are.")
        self._seen = text

    def _follow(self, hosts: Sequence[Host]) -> None:
        """Remove, bring back and add workers."""
        present = [index for index, task in enumerate(self._tasks) if not task.removed]
        stay, new = replan(places_on(self.hosts), present, hosts, self.max_workers)
        if len(stay) + len(new) < self.min_workers:
            raise ValueError(f"it has fewer places than --min-workers {self.min_workers}.")
        grown = (*self.hosts, *(Host(name, 1) for name, _ in new))
        starts = self.start_all(grown)
        self.hosts = grown
        for index, task in enumerate(self._tasks):
            if task.removed is (index not in stay):
                continue
            task.removed = not task.removed
            if task.removed:
                self.console.say(
                    f"worker {task.start.label} is removed: its host has no place for it."
                )
                task.code = PREEMPTED if task.running is None else task.code
                self._ask_to_end(task)
            elif task.code is not None:
                task.restarts = task.quick = 0
                self._add(task)
        for start in starts[len(self._tasks) :]:
            self._tasks.append(Task(start))
            self._add(self._tasks[-1])

    def _add(self, task: Task) -> None:
        self.console.say(f"worker {task.start.label} is added.")
        task.joins = True
        self._start_later(task, 0.0)

    def _start(self, task: Task) -> None:
        # It may have been removed, or started otherwise, since this was planned.
        if task not in self._tasks or task.removed or task.running is not None:
            return
        if task.joins:  # It may find the job only by the addresses of workers that were added.
            task.start = self.start_all(self.hosts)[self._tasks.index(task)]
        task.since = time.monotonic()
        port = task.start.listener
        if port is not None and port in self._selector.get_map():
            self._selector.unregister(port)
        super()._start(task)

    def _judge(self, task: Task, can_restart: bool) -> Verdict:
        if (port := task.start.listener) is not None:
            # Others that look for it learn at once that it does not run.
            self._selector.register(port, selectors.EVENT_READ, partial(refuse_waiting, [port]))
        if task.code == 0:
            newest = time.monotonic() - _JOINING_SECONDS
            for other in self._tasks:
                other.late |= other.joins and other.since > newest
            self._drop_waiting()
        tries = TRIES if task.start.host is not None and task.code == 255 else self.restarts
        left = tries - task.restarts if can_restart else 0
        decided = verdict(task, self._tasks, left, self.min_workers)
        if task.code and decided is Verdict.GO_ON:
            self._say_end(task, "the others go on.", "worker ")
        return decided

    def _start_again(self, task: Task) -> None:
        if time.monotonic() - task.since >= _STEADY_SECONDS:
            task.quick = 0
        delay = restart_delay(task.quick)
        task.quick += 1
        task.joins = True
        then = f"starting it again in {delay:g} s"
        if task.code != PREEMPTED:
            task.restarts += 1
            then += f" ({max(0, self.restarts - task.restarts)} left)"
        self._say_end(task, f"{then}.", "worker ")
        self._start_later(task, delay)

    def _stop(self, outcome: JobEnd) -> None:
        is_first = self._outcome is None
        super()._stop(outcome)
        # The long time to hand over is for workers that leave alone.
        for task in self._tasks if is_first else ():
            if task.running is not None and task.code is None:
                self._due[task.running.hang_up] = time.monotonic() + reaper.GRACE_SECONDS
