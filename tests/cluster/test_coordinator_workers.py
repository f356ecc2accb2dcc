"""`ClusterCoordinator` with workers that are processes: what they run, and what becomes of it when
they are killed, stopped and started again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ndistribute.cluster.coordination import worker_link
from ndistribute.cluster.coordination.coordinator import ClusterCoordinator
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, WorkerLostError
from tests.cluster import errands
from tests.faults.tasks import Tasks, Zygote

grpc = pytest.importorskip("grpc")
pytest.importorskip("cloudpickle")

SECONDS = 20.0


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    zygote = Zygote()
    with Tasks(zygote, workers=2, servers=0, NDISTRIBUTE_HEARTBEAT_SECONDS="1") as tasks:
        yield tasks
    zygote.close()


@pytest.fixture(scope="module", autouse=True)
def _grpc_is_up() -> None:
    """Let gRPC open, before any test counts them, the files that it keeps."""
    grpc.insecure_channel("127.0.0.1:1").close()


@pytest.fixture
def command(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ClusterCoordinator]]:
    """Start the workers, and return what makes their coordinator."""
    for name, value in tasks.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", "5")
    monkeypatch.setattr(worker_link, "_ROUND_SECONDS", 0.25)
    made = []

    def make(**options: float) -> ClusterCoordinator:
        strategy = SimpleNamespace(cluster_resolver=tasks.resolver(), servers=None)
        made.append(ClusterCoordinator(strategy, **options))
        return made[-1]

    tasks.start_all()
    try:
        yield make
    finally:
        for one in made:
            one.close()
        for index in range(2):
            tasks.send("worker", index, signal.SIGCONT)
            tasks.kill("worker", index)


@pytest.fixture
def coordinator(command: Callable[..., ClusterCoordinator]) -> ClusterCoordinator:
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


def test_two_workers_run_functions_at_once_and_pass_results_on(coordinator, fifo):
    assert meet(coordinator, fifo) == [0, 1]
    big = coordinator.schedule(errands.double, (np.arange(1_000_000),))
    again = [coordinator.schedule(errands.double, (big,)) for _ in range(4)]
    coordinator.join(timeout=SECONDS)
    for value in coordinator.fetch(again):
        np.testing.assert_array_equal(value, 4 * np.arange(1_000_000))


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


def test_errors_of_all_workers_are_raised_once(coordinator, fifo):
    def fail(fifo: str, side: str) -> None:
        errands.fail(str(errands.meet(fifo, side)))

    sides = [coordinator.schedule(fail, (fifo, side)) for side in ("in", "out")]
    with pytest.raises(LookupError, match=r"[01]") as caught:
        coordinator.join(timeout=SECONDS)
    assert "raised this on worker:" in caught.value.__notes__[0]
    coordinator.join(timeout=SECONDS)
    for value in sides:
        with pytest.raises(LookupError):
            value.fetch()
    assert meet(coordinator, fifo) == [0, 1]


def test_a_result_that_is_too_large_is_refused(coordinator):
    coordinator.schedule(np.zeros, (257 << 20, np.uint8))
    with pytest.raises(ValueError, match=r"returned 269484.* bytes: at most 268435456 travel"):
        coordinator.join(timeout=SECONDS)
    assert coordinator.schedule(errands.double, (1,)).fetch(SECONDS) == 2


def test_a_function_may_take_longer_than_any_call(coordinator, fifo, tmp_path):
    marks = tmp_path / "marks"

    def wait() -> int:
        with marks.open("ab") as file:
            file.write(b".")
        return errands.meet(fifo, "in")

    waiting = coordinator.schedule(wait)
    with pytest.raises(CollectiveTimeoutError):
        coordinator.join(timeout=0.6)
    index = coordinator.schedule(errands.meet, (fifo, "out"))
    coordinator.join(timeout=SECONDS)
    assert {waiting.fetch(), index.fetch()} == {0, 1}
    assert marks.read_bytes() == b"."


def test_what_a_killed_worker_had_runs_elsewhere_and_it_comes_back(
    coordinator, tasks, tmp_path, fifo
):
    assert meet(coordinator, fifo) == [0, 1]
    marks = str(tmp_path / "marks")
    killed = coordinator.schedule(errands.once, (marks, signal.SIGKILL))
    others = [coordinator.schedule(errands.double, (n,)) for n in range(20)]
    coordinator.join(timeout=SECONDS)
    survivor = killed.fetch()
    assert Path(marks).read_bytes() == b".."
    assert coordinator.fetch(others) == list(range(0, 40, 2))
    assert tasks.code("worker", 1 - survivor) == -signal.SIGKILL
    tasks.start("worker", 1 - survivor)
    assert meet(coordinator, fifo) == [0, 1]


def test_what_a_stopped_worker_had_runs_elsewhere_and_it_comes_back(
    command, tasks, tmp_path, fifo, monkeypatch
):
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", "0.5")
    coordinator = command()
    assert meet(coordinator, fifo) == [0, 1]
    survivor = coordinator.schedule(errands.once, (str(tmp_path / "marks"), signal.SIGSTOP)).fetch()
    coordinator.join(timeout=SECONDS)
    assert len((tmp_path / "marks").read_bytes()) >= 2
    tasks.send("worker", 1 - survivor, signal.SIGCONT)
    assert meet(coordinator, fifo) == [0, 1]


def test_all_workers_gone_is_an_error_until_they_are_back(command, tasks, fifo):
    coordinator = command(timeout_seconds=0.5)
    assert meet(coordinator, fifo) == [0, 1]
    for index in range(2):
        tasks.kill("worker", index)
    value = coordinator.schedule(errands.double, (1,))
    with pytest.raises(WorkerLostError, match=r"No worker was there for 0.5 s.*worker:0.*worker:1"):
        coordinator.join(timeout=SECONDS)
    assert value.error is not None
    tasks.start("worker", 0)
    value = None
    while value is None or value.error is not None:  # Until the worker is up again.
        value = coordinator.schedule(errands.double, (2,))
        with contextlib.suppress(WorkerLostError):
            coordinator.join(timeout=SECONDS)
    assert value.fetch() == 4


def test_another_secret_lets_nobody_in(command, monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "f" * 32)
    coordinator = command()
    coordinator.schedule(errands.double, (1,))
    with pytest.raises(AuthenticationError, match="No worker let this process in"):
        coordinator.join(timeout=SECONDS)
