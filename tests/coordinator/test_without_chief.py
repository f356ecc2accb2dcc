"""A process without a task in the cluster coordinates workers and servers that list no chief."""

import os

import pytest

import ndistribute as nd
from tests.coordinator import errands
from tests.processes import Tasks

pytest.importorskip("cloudpickle")


def test_a_cluster_without_a_chief_is_coordinated_and_ends_with_it(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with Tasks(workers=2, servers=1, chief=False) as tasks:
        for name, value in tasks.environ.items():
            monkeypatch.setenv(name, value)
        tasks.start_all()
        resolver = nd.SimpleClusterResolver(tasks.cluster)
        strategy = nd.ParameterServerStrategy(resolver, devices=["cpu:0"])
        with strategy, nd.ClusterCoordinator(strategy) as coordinator:
            sides = [(str(tmp_path / "fifo"), side) for side in ("in", "out")]
            met = [coordinator.schedule(errands.meet, side) for side in sides]
            assert sorted(coordinator.fetch(met)) == [0, 1]
            total = nd.Variable(0.0)
            seen = nd.Variable(0, synchronization="on_read", aggregation="sum")

            def whole():
                return strategy.distribute_dataset(nd.Dataset.range(6).batch(3))

            def step(iterator):
                (batch,) = next(iterator).values
                total.assign_add(float(batch.sum()))
                seen.assign_add(len(batch))
                return nd.cluster.worker_index(), batch.tolist()

            iterator = iter(coordinator.create_per_worker_dataset(whole))
            assert isinstance(iterator, nd.PerWorkerValue)
            results = coordinator.fetch([coordinator.schedule(step, (iterator,)) for _ in range(2)])
            by_worker = {}
            for worker, batch in results:
                by_worker.setdefault(worker, []).append(batch)
            # Each worker goes through all of the dataset.
            assert all(got == [[0, 1, 2], [3, 4, 5]][: len(got)] for got in by_worker.values())
            assert float(total) == sum(sum(batch) for _, batch in results)
            assert int(seen) == 6

            def take(iterator, *side):
                return errands.meet(*side), next(iterator).values[0].tolist()

            # A dataset that is sent, distributed or not, has an order of its own on each worker.
            shuffled = nd.Dataset.range(40).shuffle(40, seed=1).batch(40)
            sent = coordinator.create_per_worker_dataset(strategy.distribute_dataset(shuffled))
            order = iter(sent)
            first, second = coordinator.fetch(
                [coordinator.schedule(take, (order, *side)) for side in sides]
            )
            assert first[1] != second[1]
            assert sorted(first[1]) == sorted(second[1]) == list(range(40))
        assert [tasks.code(*task) for task in (("ps", 0), ("worker", 0), ("worker", 1))] == [0] * 3
