"""`ClusterCoordinator` with workers that are processes: what they run, and what becomes of it when
they are killed, stopped and started again."""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ndistribute.coordinator.coordinator import ClusterCoordinator
from ndistribute.data import Dataset
from tests.coordinator import errands
from tests.processes import Tasks, wait_until
from tests.transport.ends import forked

pytest.importorskip("cloudpickle")

SECONDS = 50.0
Command = Callable[..., ClusterCoordinator]


class Serverless:
    """A strategy without variables; workers get it for functions that run again."""

    def __init__(self, resolver: object) -> None:
        self.cluster_resolver, self.servers = resolver, self

    def ask_all(self, request: object) -> dict[int, object]:
        return {}


@pytest.fixture(scope="module")
def workers() -> Iterator[Tasks]:
    with Tasks(workers=2, servers=0, NDISTRIBUTE_HEARTBEAT_SECONDS="4") as workers:
        yield workers


@pytest.fixture
def command(workers: Tasks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Start the workers, and return what makes their coordinator."""
    for name, value in workers.environ.items():
        monkeypatch.setenv(name, value)
    made = []

    def make(**options: float) -> ClusterCoordinator:
        strategy = Serverless(workers.resolver())
        made.append(ClusterCoordinator(strategy, **options))
        return made[-1]

    workers.start_all()
    try:
        yield make
    finally:
        for one in made:
            one.close()
        for index in range(2):
            workers.kill("worker", index)


@pytest.fixture
def coordinator(command: Command) -> ClusterCoordinator:
    return command()


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path


def meet(coordinator: ClusterCoordinator, fifo: str) -> list[int]:
    """Return on which workers two functions ran that had to run at once."""
    sides = [coordinator.schedule(errands.meet, (fifo, side)) for side in ("in", "out")]
    coordinator.join(timeout=SECONDS)
    return sorted(coordinator.fetch(sides))


def test_each_worker_has_its_own_dataset(coordinator, fifo):
    def share():
        return range(errands.index(), 10, 2)

    def take(fifo: str, side: str, iterator) -> list[int]:
        errands.meet(fifo, side)
        return [next(iterator), next(iterator)]

    iterator = iter(coordinator.create_per_worker_dataset(share))
    got = []
    for _ in range(2):
        sides = [coordinator.schedule(take, (fifo, side, iterator)) for side in ("in", "out")]
        got += coordinator.fetch(sides)
    assert sorted(got) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_dataset_that_is_sent_has_an_order_of_its_own_on_each_worker(coordinator, fifo):
    def take(fifo: str, side: str, iterator) -> tuple[int, list[int]]:
        errands.meet(fifo, side)
        return errands.index(), next(iterator).tolist()

    dataset, got = Dataset.range(40).shuffle(40, seed=3).batch(40), []
    for _ in range(2):  # The same bytes, sent again, give the same orders.
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        sides = [coordinator.schedule(take, (fifo, side, iterator)) for side in ("in", "out")]
        got.append(dict(coordinator.fetch(sides)))
    assert got[0] == got[1]
    assert got[0][0] == next(iter(dataset)).tolist() != got[0][1]
    assert sorted(got[0][1]) == list(range(40))


def test_short_functions_are_sent_ahead_and_long_ones_are_not(coordinator, fifo):
    """A worker that is busy holds nothing back that the other one could run."""
    for n in range(64):
        coordinator.schedule(errands.double, (n,))
    coordinator.join(timeout=SECONDS)
    waiting = coordinator.schedule(errands.meet, (fifo, "in"))
    others = [coordinator.schedule(errands.double, (n,)) for n in range(8)]
    assert [other.fetch(SECONDS) for other in others] == list(range(0, 16, 2))
    assert not waiting.done()
    coordinator.schedule(errands.meet, (fifo, "out"))
    coordinator.join(timeout=SECONDS)


def test_a_stopped_worker_holds_nothing_up_but_what_it_has(command, workers, fifo, monkeypatch):
    """It reads nothing, and what is sent to it would fill any socket."""
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", "60")
    for index in range(2):
        workers.kill("worker", index)
        workers.start("worker", index, NDISTRIBUTE_HEARTBEAT_SECONDS="60")
    coordinator = command()
    assert meet(coordinator, fifo) == [0, 1]
    workers.stop("worker", 0)
    values = [coordinator.schedule(len, (np.zeros(1_000_000),)) for _ in range(10)]
    wait_until(lambda: sum(value.done() for value in values) == 9)
    assert not coordinator.done()
    workers.send("worker", 0, signal.SIGCONT)
    assert coordinator.fetch(values) == [1_000_000] * 10


def test_a_forked_child_is_told_and_closes_nothing(coordinator, fifo):
    assert meet(coordinator, fifo) == [0, 1]
    pending = coordinator.schedule(errands.meet, (fifo, "in"))

    def child(use: Callable[[], object]) -> str:
        try:
            return f"{use()} was possible"
        except RuntimeError as error:
            coordinator.close()
            return str(error)

    schedule = functools.partial(coordinator.schedule, errands.double, (1,))
    for use in (schedule, coordinator.join, coordinator.done, pending.fetch):
        assert "is a fork of" in forked(functools.partial(child, use))
    coordinator.schedule(errands.meet, (fifo, "out"))
    coordinator.join(timeout=SECONDS)
    assert meet(coordinator, fifo) == [0, 1]
