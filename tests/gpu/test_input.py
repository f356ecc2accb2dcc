"""Input that reaches GPUs, and random numbers that are drawn on them."""

from __future__ import annotations

import numpy as np

import ndistribute as nd
from tests.gpu.placing import hosts, on, replica


def test_each_piece_of_a_batch_is_on_its_replica_s_device(strategy):
    size = strategy.num_replicas_in_sync
    rows = np.arange(7 * size, dtype=np.float32).reshape(-1, 1)
    columns = {"x": rows, "y": rows.astype(np.int64)}
    dataset = nd.Dataset.from_tensor_slices(columns).batch(3 * size)
    for ahead in (0, 2):
        seen = []
        for batch in strategy.distribute_dataset(dataset, nd.InputOptions(prefetch=ahead)):
            for leaf in batch.values():
                pieces = strategy.local_results(leaf)
                assert all(on(*pair) for pair in zip(pieces, strategy.devices, strict=True))
            seen += hosts(strategy.local_results(batch["x"]))
            assert seen[-1].dtype == np.float32
        np.testing.assert_array_equal(np.concatenate(seen), rows)


def test_a_replica_without_rows_gets_an_empty_array(strategy):
    size = strategy.num_replicas_in_sync
    (batch,) = strategy.distribute_dataset(nd.Dataset.range(1).batch(size))

    def step(own):
        assert on(own, replica().device)
        assert own.dtype == np.int64
        return len(own), np.sum(own * own)

    lengths, totals = strategy.run(step, args=(batch,))
    assert list(lengths.values) == [1] + [0] * (size - 1)
    assert [float(total) for total in totals.values] == [0.0] * size


def test_batches_dealt_to_replicas_are_on_their_devices(strategy):
    size = strategy.num_replicas_in_sync
    dealt = strategy.distribute_datasets_from_function(
        lambda context: nd.Dataset.range(2 * size + 1).batch(1)
    )
    found = []
    for batch in dealt:
        assert all(on(*pair) for pair in zip(batch.values, strategy.devices, strict=True))
        found += hosts(batch.values)
    np.testing.assert_array_equal(np.concatenate(found), np.arange(2 * size + 1))


def test_replicas_draw_numbers_of_their_own_on_their_devices(strategy):
    def step():
        drawn = replica().rng.random(4), replica().rng.standard_normal((2, 2), dtype=np.float32)
        assert on(drawn[0], replica().device)
        assert drawn[1].dtype == np.float32
        return drawn

    runs = []
    for _ in range(2):
        nd.set_seed(3)
        steps = [strategy.local_results(strategy.run(step)) for _ in range(2)]
        runs.append([hosts(own) for one in steps for own in one])
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
    uniform = np.stack([own[0] for own in runs[0]])
    assert len(np.unique(uniform)) == uniform.size, "two replicas or steps drew the same numbers"
