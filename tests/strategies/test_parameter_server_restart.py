"""A server that is started again from an older snapshot: work goes on, the loss is counted."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ndistribute.cluster.coordination import this_task
from ndistribute.cluster.serving.server import Server
from tests.cluster.desks import free_port

import ndistribute as nd
from ndistribute.strategies.handles import strategy_of
from tests.kinds import DEADLINE


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A cluster of one worker and one server, which share a secret."""
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "a secret of thirty-two characters")
    return {
        "worker": [f"localhost:{free_port()}"],
        "ps": [f"localhost:{free_port()}"],
    }


def worker(cluster: Any, **options: Any) -> nd.ParameterServerStrategy:
    resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    options = {"devices": ["cpu:0"], "timeout_seconds": DEADLINE, **options}
    return nd.ParameterServerStrategy(resolver, **options)


def killed_after(server: Server, directory: Path, work: Callable[[], None]) -> None:
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
    first = Server(cluster, "ps", 0, **options)
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
        with Server(cluster, "ps", 0, **options):
            assert float(weights[0]) == -3.0
            steps(1)
            assert weights.numpy().tolist() == [-4.0] * 1000
            assert optimizer.iterations == 4
            assert strategy.lost_updates == 2
            assert max(strategy.staleness()) <= 1
            strategy.close()


def test_the_same_numbers_from_shared_memory_and_over_the_wire(
    cluster: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    with Server(cluster, "ps", 0):
        for near in ("1", "0"):
            monkeypatch.setenv("NDISTRIBUTE_NEAR", near)
            with worker(cluster) as strategy:
                with strategy.scope():
                    weights = nd.Variable(np.arange(5.0), name=f"near{near}")
                for _ in range(3):
                    weights.assign_add(weights * 0.5)
                    seen.append(weights.numpy().tolist())
    assert seen[:3] == seen[3:]


def test_a_strategy_that_is_sent_becomes_the_workers_own(cluster: dict[str, list[str]]) -> None:
    with Server(cluster, "ps", 0), worker(cluster) as strategy:
        with strategy.scope():
            weights = nd.Variable([1.0, 2.0])
        _, (handle,) = strategy.__reduce__()
        elsewhere = dataclasses.replace(handle, token="another process")
        with pytest.raises(RuntimeError, match="no worker of its cluster"):
            strategy_of(elsewhere)
        this_task.enter(this_task.Task(nd.ClusterSpec(cluster), "worker", 0))
        try:
            sent = strategy_of(elsewhere)
            assert strategy_of(elsewhere) is sent
            assert sent.__reduce__() == (strategy_of, (elsewhere,))  # So it can be sent back.
        finally:
            this_task.enter(None)
        with sent:
            make, (_, *rest) = weights.__reduce__()
            theirs = make(sent, *rest)
            assert make(sent, *rest) is theirs
            theirs.assign_add([1.0, 1.0])
            assert weights.numpy().tolist() == [2.0, 3.0]
