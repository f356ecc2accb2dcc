"""The jobs of the fault tests: ranks on each wire, scripts as workers, this process as a task."""

import contextlib
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np

import ndistribute as nd
from tests.coordinator import errands
from tests.processes import Ranks, Tasks, find_mpiexec

DEADLINE = 60.0
HEARTBEAT = 1.0
FAST = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(HEARTBEAT)}

WIRES: dict[str, Callable[[], Ranks]] = {
    "shared": lambda: Ranks(2, environ=FAST),
    "ring": lambda: Ranks(3, environ={**FAST, "FAULTS_WIRE": "ring"}),
    "hosts": lambda: Ranks(
        3, environ=[{**FAST, "NDISTRIBUTE_HOST_ID": host} for host in ("red", "red", "blue")]
    ),
}
if find_spec("mpi4py") and find_mpiexec():
    WIRES["mpi"] = lambda: Ranks(2, "mpi", environ={**FAST, "FAULTS_WIRE": "mpi"})


@dataclass
class Ended:
    """How a script ended."""

    code: int
    output: str


class Scripts(Tasks):
    """Run one script as several workers, each with more in its environment."""

    def __init__(
        self, folder: Path, body: str, environs: Sequence[Mapping[str, str]] = ({}, {})
    ) -> None:
        secret = "the secret of this test"
        super().__init__(len(environs), 0, chief=False, NDISTRIBUTE_SECRET=secret, **FAST)
        script = folder / "script.py"
        script.write_text(textwrap.dedent(body))
        for index, environ in enumerate(environs):
            self.start("worker", index, TASK_SCRIPT=str(script), **environ)

    def ended(self) -> list[Ended]:
        """Wait until all have ended, and say how."""
        indices = range(len(self.cluster["worker"]))
        codes = [self.code("worker", index) for index in indices]
        return [Ended(codes[index], self.said(f"worker:{index}")) for index in indices]


@contextlib.contextmanager
def taking_part(tasks: Tasks, job: str = "evaluator", **options: Any) -> Iterator[Any]:
    """Yield this process's strategy as a task of a cluster."""
    options.setdefault("timeout_seconds", DEADLINE)
    with (
        mock.patch.dict(os.environ, tasks.environ),
        contextlib.closing(nd.ParameterServerStrategy(tasks.resolver(job), **options)) as strategy,
    ):
        yield strategy


@contextlib.contextmanager
def commanded(tasks: Tasks, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the strategy and the coordinator of the tasks' chief, which this process is."""
    with (
        taking_part(tasks, "chief", **options) as strategy,
        nd.ClusterCoordinator(strategy) as coordinator,
    ):
        yield strategy, coordinator


@contextlib.contextmanager
def training(
    options: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Iterator[tuple[Tasks, Any, Any]]:
    """Yield a cluster that runs, and the strategy and coordinator of its chief; see `Tasks`."""
    with Tasks(**settings) as tasks:
        tasks.start_all()
        with commanded(tasks, **options) as (strategy, coordinator):
            yield tasks, strategy, coordinator


def marked(strategy: Any, count: int) -> tuple[nd.Variable, Callable[[int], int]]:
    """Return a variable, and a function that adds one at a place of it and returns the worker."""
    with strategy.scope():
        marks = nd.Variable(np.zeros(count, np.int8))

    def mark(number: int) -> int:
        marks.scatter_add([number], np.ones(1, np.int8))
        return nd.cluster.worker_index()

    return marks, mark


def schedule_all(coordinator: Any, fn: Callable[[int], Any], numbers: Iterable[int]) -> None:
    for number in numbers:
        coordinator.schedule(fn, args=(number,))


def meet_workers(coordinator: Any, fifo: Path) -> list[int]:
    """Return which workers met, when both are there."""
    if not fifo.exists():
        os.mkfifo(fifo)
    sides = [coordinator.schedule(errands.meet, (str(fifo), side)) for side in ("in", "out")]
    coordinator.join(timeout=DEADLINE)
    return sorted(coordinator.fetch(sides))
