"""Collectives between replicas on GPUs, and reductions across them."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from tests.gpu.placing import components, here, hosts, on, rank, replica

OPS = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "prod": np.prod,
}
LARGE = 140_000  # above the size that the last replica to arrive reduces alone


def values(size, length, dtype=np.float64):
    return np.random.default_rng(length).integers(-4, 5, (size, length)).astype(dtype)


@pytest.mark.parametrize("length", [7, LARGE])
def test_all_reduce_gives_each_replica_its_own_result(strategy, length):
    table = values(strategy.num_replicas_in_sync, length)

    def step():
        totals = [replica().all_reduce(op, here(table[rank()])) for op in OPS]
        assert all(on(total, replica().device) for total in totals)
        return totals

    for own in strategy.local_results(strategy.run(step)):
        for total, function in zip(hosts(own), OPS.values(), strict=True):
            np.testing.assert_allclose(total, function(table, axis=0), rtol=1e-15)


def test_all_reduce_keeps_the_dtype(strategy):
    dtypes = ["bool", "int16", "float16", "complex64"]
    tables = [values(strategy.num_replicas_in_sync, 5, dtype) for dtype in dtypes]
    found = strategy.run(lambda: replica().all_reduce("sum", [here(t[rank()]) for t in tables]))
    for own in strategy.local_results(found):
        for total, table in zip(hosts(own), tables, strict=True):
            assert total.dtype == table.dtype
            np.testing.assert_array_equal(total, np.add.reduce(table, dtype=table.dtype))


def test_all_gather_joins_ragged_parts(strategy):
    def part(index):
        return np.full((2, index), index, np.float32)

    whole = np.concatenate([part(i) for i in range(strategy.num_replicas_in_sync)], axis=1)
    joined = strategy.run(lambda: replica().all_gather(here(part(rank())), -1)).values
    for own, device in zip(joined, strategy.devices, strict=True):
        assert on(own, device)
        np.testing.assert_array_equal(*hosts([own, whole]))


def test_results_may_be_used_at_once_and_inputs_written_again(strategy):
    def step():
        x = here(np.ones(LARGE))
        for _ in range(3):
            x[...] = replica().all_reduce("mean", x) * 2
        return x.sum()

    assert {float(total) for total in strategy.run(step).values} == {8.0 * LARGE}


def test_slices_are_summed_sparsely_and_alike_on_all_replicas(strategy):
    size = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    indices, rows = rng.integers(0, 5, (size, 40)), rng.normal(size=(size, 40, 3))

    def step():
        own = nd.IndexedSlices(here(rows[rank()]), here(indices[rank()]), (9, 3))
        total = replica().all_reduce("sum", own)
        assert on(total.values, replica().device)
        assert on(total.indices, replica().device)
        return total.values, total.indices, total.to_dense()

    expected = np.zeros((9, 3))
    np.add.at(expected, indices.ravel(), rows.reshape(-1, 3))
    found = [hosts(own) for own in strategy.local_results(strategy.run(step))]
    mixed = any(device.kind == "cpu" for device in strategy.devices)
    for sums, where, dense in found:
        np.testing.assert_array_equal(where, np.unique(indices))
        np.testing.assert_allclose(dense, expected, rtol=1e-12, atol=1e-12)
        assert mixed or np.array_equal(sums, found[0][0]), "replicas hold different bits"


def test_reduce_brings_values_together_on_the_first_device(strategy):
    table = values(strategy.num_replicas_in_sync, 6)
    for op, function in OPS.items():
        total = strategy.reduce(op, components(strategy, table.__getitem__))
        assert on(total, strategy.devices[0])
        np.testing.assert_allclose(hosts([total])[0], function(table, axis=0), rtol=1e-15)


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 1e-3), ("int32", 1e-15)])
def test_reduce_along_an_axis_counts_what_is_there(strategy, dtype, digits):
    parts = [np.full((i + 1, 2), i + 1, dtype) for i in range(strategy.num_replicas_in_sync)]
    whole = np.concatenate(parts).astype(np.float64)
    for axis in (0, (0, 1)):
        for op, function in OPS.items():
            total = strategy.reduce(op, components(strategy, parts.__getitem__), axis=axis)
            np.testing.assert_allclose(hosts([total])[0], function(whole, axis=axis), rtol=digits)


def test_a_plain_value_on_a_gpu_counts_as_the_same_on_every_replica(strategy):
    device = strategy.devices[-1]
    plain = components(strategy, lambda _: np.array([1.0, 2.0])).values[-1]
    assert on(plain, device)
    for op, factor in (("sum", strategy.num_replicas_in_sync), ("mean", 1), ("max", 1)):
        total = strategy.reduce(op, plain)
        np.testing.assert_array_equal(hosts([total])[0], np.array([1.0, 2.0]) * factor)


def test_gather_joins_in_replica_order(strategy):
    size = strategy.num_replicas_in_sync
    whole = strategy.gather(components(strategy, lambda i: np.full((i, 2), i)), axis=0)
    assert on(whole, strategy.devices[0])
    np.testing.assert_array_equal(
        hosts([whole])[0], np.concatenate([np.full((i, 2), i) for i in range(size)])
    )


def test_replicas_that_differ_are_told(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica agrees with itself")
    with pytest.raises(nd.CollectiveMismatchError, match="all_reduce #1"):
        strategy.run(lambda: replica().all_reduce("sum", here(np.ones(3 + rank()))))
    totals = strategy.run(lambda: replica().all_reduce("sum", here(1.0))).values
    assert {float(total) for total in totals} == {float(strategy.num_replicas_in_sync)}
