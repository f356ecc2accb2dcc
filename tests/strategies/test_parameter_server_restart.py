"""A server that is started again from an older snapshot: work goes on, the loss is counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.faults.tasks import free_addresses
from tests.kinds import DEADLINE


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A cluster of one worker and one server, which share a secret."""
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "a secret of thirty-two characters")
    return free_addresses({"worker": 1, "ps": 1})


def worker(cluster: Any, **options: Any) -> nd.ParameterServerStrategy:
    resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    options = {"devices": ["cpu:0"], "timeout_seconds": DEADLINE, **options}
    return nd.ParameterServerStrategy(resolver, **options)


def killed_after(server: nd.Server, directory: Path, work: Callable[[], None]) -> None:
    """Do some work that no snapshot of the server holds when it is gone."""
    kept = directory.with_name("kept")
    shutil.copytree(directory, kept)
    work()
    server.stop()
    shutil.rmtree(directory)
    kept.rename(directory)


@pytest.mark.parametrize("together", [False, True])
def test_work_goes_on_and_what_is_lost_is_counted(
    cluster: dict[str, list[str]], tmp_path: Path, together: bool
) -> None:
    directory = tmp_path / "snapshots"
    options = {"snapshot_directory": directory, "snapshot_seconds": 1000.0}
    first = nd.Server(cluster, "ps", 0, **options)
    with first, worker(cluster, replicas_to_aggregate=1 if together else None) as strategy:
        with strategy.scope():
            weights = nd.Variable(np.zeros(1000))
        optimizer = nd.optimizers.SGD(1.0)

        def steps(count: int) -> None:
            for _ in range(count):
                with strategy.scope():
                    assert np.isfinite(weights[0])
                optimizer.apply_gradients([(np.ones(1000), weights)])

        steps(3)
        strategy.save_snapshots()
        killed_after(first, directory, lambda: steps(2))
        with nd.Server(cluster, "ps", 0, **options):
            assert float(weights[0]) == -3.0
            steps(1)
            assert weights.numpy().tolist() == [-4.0] * 1000
            assert optimizer.iterations == 4
            assert strategy.lost_updates == 2
            assert max(strategy.staleness()) <= 1
            strategy.close()


def test_the_same_numbers_over_unix_sockets_and_over_tcp(
    cluster: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    with nd.Server(cluster, "ps", 0):
        for unix in ("1", "0"):
            monkeypatch.setenv("NDISTRIBUTE_UNIX_SOCKETS", unix)
            with worker(cluster) as strategy:
                with strategy.scope():
                    weights = nd.Variable(np.arange(5.0), name=f"unix{unix}")
                for _ in range(3):
                    weights.assign_add(weights * 0.5)
                    seen.append(weights.numpy().tolist())
    assert seen[:3] == seen[3:]
