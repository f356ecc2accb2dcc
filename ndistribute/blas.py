"""The number of BLAS threads: the share of the cores that a replica, or a process, has to itself.

If every replica uses as many BLAS threads as there are cores, the threads compete: two replicas of
512 x 512 products ran at 0.8 of the speed of one, and at 2.0 with one BLAS thread each. The setting
applies to the whole process, so this module keeps all current limits and applies the smallest.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
# The last one says that the launcher, not the user, set this number in the others.
LAUNCHER_VARIABLES = (*THREAD_VARIABLES, "NDISTRIBUTE_BLAS_THREADS")

# How often, in each second that it computes, the system takes a core from a process before the
# process tries fewer threads: 20 times on idle cores, 100 to 500 beside other busy programs.
# It is counted over so many of these seconds, and looked up after so many seconds of any kind.
CROWDED, WINDOW_SECONDS, LOOK_SECONDS = 80.0, 0.25, 0.05
# A trial measures at least so many steps and seconds with each number of threads, twice.
TRIAL_STEPS, TRIAL_SECONDS = 4, 0.02

_log = logging.getLogger("ndistribute")


class _BlasThreads:
    """The BLAS libraries of this process, their own numbers of threads, and the current limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: list[int] = []
        self._modules = -1
        self._libraries: list[Any] = []
        self._own: dict[str, int] = {}  # By file, the number of threads without a limit.

    def unlock_in_fork(self) -> None:
        """Forget that another thread, which a forked process does not have, held the lock."""
        self._lock = threading.Lock()

    def add(self, threads: int) -> None:
        with self._lock:
            if not self._limits:
                self._own.clear()
            self._limits.append(threads)
            self._apply()

    def remove(self, threads: int) -> None:
        with self._lock:
            self._limits.remove(threads)
            self._apply()

    def _apply(self) -> None:
        # A search takes milliseconds; a new library can only have been loaded with a new module.
        if self._modules != len(sys.modules):
            from threadpoolctl import ThreadpoolController

            controller = ThreadpoolController().select(user_api="blas")
            self._libraries = list(controller.lib_controllers)
            self._modules = len(sys.modules)
        for library in self._libraries:
            if library.filepath not in self._own:
                self._own[library.filepath] = library.get_num_threads()
            if hasattr(library, "clear_controlling_thread"):
                # Otherwise, only the thread that set the number first can change it.
                library.clear_controlling_thread(force=True)
            library.set_num_threads(min([self._own[library.filepath], *self._limits]))


_blas = _BlasThreads()
os.register_at_fork(after_in_child=_blas.unlock_in_fork)


class _Limited(AbstractContextManager[None]):
    """One limit. Unlike a generator, it runs nothing if the interpreter ends within the block."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        _blas.add(self._threads)

    def __exit__(self, *error: object) -> None:
        _blas.remove(self._threads)


def core_numbers() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@functools.cache
def cpu_quota() -> float:
    """Return how many cores' time the control groups of this process grant it; infinity: all."""
    with suppress(OSError):
        return quota_of(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    return math.inf


def quota_of(groups: str, root: Path) -> float:
    """Return the least quota, in cores, of control groups and those above them.

    Args:
        groups: what /proc says of a process: a group for each hierarchy, of version 1 or 2.
        root: the folder below which the hierarchies are. A container may see its own group at the
            top of one, whatever the path of the group on the host.
    """
    least = math.inf
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in root / controllers, root / ("cpu" if controllers else "unified"):
            group = mount / path.lstrip("/")
            folders = [group, *group.parents]
            least = min(least, *map(_granted, folders[: folders.index(mount) + 1]))
    return least


def cores() -> int:
    """Return the number of cores that this process may use: those of its mask, within its quota."""
    return max(1, int(min(len(core_numbers()), cpu_quota())))


def cores_of_one(
    numbers: Sequence[int], everyone: Sequence[Sequence[int]], quota: float = math.inf
) -> int:
    """Return how many of the cores of a process, by `numbers`, are its share, at least 1.

    `everyone` has the numbers of the cores of all processes that compute on its host, which also
    share the quota.

    >>> cores_of_one([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1, 2, 3]])
    2
    >>> cores_of_one([0, 1], [[0, 1], [2, 3]])  # Each is bound to cores of its own.
    2
    >>> cores_of_one([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1, 2, 3]], quota=3.0)
    1
    """
    share = sum(1 / sum(core in some for some in everyone) for core in numbers)
    return max(1, int(min(share, quota / len(everyone))))


def set_by_user(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if an environment variable, not the launcher, sets the number of BLAS threads."""
    numbers = {environ.get(name) for name in (*THREAD_VARIABLES, "MKL_NUM_THREADS")}
    return bool(numbers - {None, "", environ.get(LAUNCHER_VARIABLES[-1])})


def usage() -> tuple[float, int]:
    """Return how long this process has computed on all cores, and how often it was preempted."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nivcsw


def limited_blas(threads: int | None) -> AbstractContextManager[None]:
    """Limit the number of BLAS threads in a ``with`` block; None sets no limit."""
    return nullcontext() if threads is None else _Limited(threads)


def shared_blas(
    sharing: int, environ: Mapping[str, str] = os.environ
) -> AbstractContextManager[None]:
    """Limit BLAS in a ``with`` block to the share of one of the processes that compute on its host.

    No limit is set if an environment variable sets the number of threads.
    """
    return limited_blas(None if set_by_user(environ) else max(1, cores() // max(1, sharing)))


class StepThreads:
    """How many BLAS threads the next step of a replica uses: fewer than the most if that is faster.

    OpenBLAS's threads spin while they wait for each other, so steps take up to 70 times as long if
    other programs hold the cores. The system then preempts this process often. That starts a trial:
    steps run with each number of threads, in an order and back again. The next trial follows after
    100 times the time that this one lost. On cores of its own, a process tries nothing, so that two
    runs give the same bits: the last bits of some products depend on the number of threads.

    Args:
        most: the number of threads to begin with.

    Attributes:
        threads: the number of threads for the next step.
    """

    def __init__(self, most: int) -> None:
        self.threads = self._fastest = self._most = most
        self._candidates = [most >> k for k in reversed(range(most.bit_length()))]
        self._blocks: list[int] = []  # The numbers of threads that the trial has yet to measure.
        self._spent, self._steps = 0.0, 0  # In the first of these blocks.
        self._totals: dict[int, tuple[float, int]] = {}  # By threads, the same of ended blocks.
        self._since: tuple[float, int] | None = None  # The `usage` from which preemptions count.
        self._due = -math.inf

    def record(
        self, seconds: float, now: float, usage: Callable[[], tuple[float, int]] = usage
    ) -> None:
        """Take the time of a step, and set the number of threads for the next one.

        Args:
            seconds: how long the step took.
            now: the time after it, in seconds.
            usage: see `usage`.
        """
        if self._blocks:
            self._measure(seconds, now)
        elif now >= self._due:
            self._due = now + LOOK_SECONDS
            if self.threads < self._most or self._crowded(*usage()):
                self._blocks = self._candidates + self._candidates[::-1]
                self._totals = {}
                self.threads = self._blocks[0]

    def _crowded(self, computed: float, preemptions: int) -> bool:
        start, before = self._since or (computed, preemptions)
        if self._since is None or computed - start >= WINDOW_SECONDS:
            self._since = computed, preemptions
            return preemptions - before > CROWDED * (computed - start)
        return False

    def _measure(self, seconds: float, now: float) -> None:
        self._spent += seconds
        self._steps += 1
        least = min((spent / steps for spent, steps in self._totals.values()), default=math.inf)
        hopeless = self._spent > 4 * max(TRIAL_SECONDS, TRIAL_STEPS * least)
        if not hopeless and (self._steps < TRIAL_STEPS or self._spent < TRIAL_SECONDS):
            return
        spent, steps = self._totals.get(self.threads, (0.0, 0))
        self._totals[self.threads] = spent + self._spent, steps + self._steps
        self._spent, self._steps = 0.0, 0
        self._blocks.pop(0)
        if hopeless and self._blocks[:1] == [self.threads]:
            self._blocks.pop(0)
        if self._blocks:
            self.threads = self._blocks[0]
        else:
            self._choose(now)

    def _choose(self, now: float) -> None:
        """Choose the number that made steps fastest; of nearly equal numbers, the highest."""
        means = {threads: spent / steps for threads, (spent, steps) in self._totals.items()}
        least = min(means.values())
        self.threads = max(threads for threads, mean in means.items() if mean < 1.05 * least)
        lost = sum(spent - steps * least for spent, steps in self._totals.values())
        self._due, self._since = now + max(1.0, 100 * lost), None
        if self.threads != self._fastest:
            self._fastest = self.threads
            _log.info(
                "Other programs compete for the cores. Steps with %s BLAS threads took %s, so "
                "steps now use %d. The last bits of results may differ from those of another run. "
                "To prevent this, set the number of threads in %s.",
                ", ".join(map(str, means)),
                ", ".join(f"{1e3 * mean:.3g} ms" for mean in means.values()),
                self.threads,
                THREAD_VARIABLES[0],
            )


def _granted(folder: Path) -> float:
    """Return the quota of a control group in cores, infinity if it has none."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        return math.inf if int(quota) < 0 else int(quota) / int(period)
    return math.inf
