"""Scatter: rows by their indices, outside replicas and aggregated over them."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import here, mirrored, parts, plain_step, rank, replica_ids

OPS = ["scatter_add", "scatter_sub", "scatter_update"]


def make(strategy, initial=None, **kwargs):
    with strategy.scope():
        return nd.Variable(np.arange(10.0).reshape(5, 2) if initial is None else initial, **kwargs)


def reference(method, array, indices, values):
    array = np.array(array)
    if method == "scatter_update":
        for index, row in zip(indices, values, strict=True):
            array[index] = row
    else:
        ufunc = np.add if method == "scatter_add" else np.subtract
        ufunc.at(array, np.asarray(indices, int), values)
    return array


@pytest.mark.parametrize("method", OPS)
def test_rows_outside_replicas(strategy, method):
    for indices in ([], [3], [4, 0], [2, 0, 2]):
        values = np.arange(1.0, 2 * len(indices) + 1).reshape(-1, 2)
        slices = nd.IndexedSlices(values, np.array(indices, np.int32), (5, 2))
        for rows in ((indices, values), (tuple(indices), values), (slices,)):
            v = make(strategy)
            wanted = reference(method, v.numpy(), indices, values)
            assert getattr(v, method)(*rows) is v
            for part in strategy.local_results(v):
                assert np.array_equal(part, wanted)


@pytest.mark.parametrize("how", ["on_write", "on_read"])
def test_what_does_not_fit_is_refused_and_no_copy_changes(strategy, how):
    v = make(strategy, synchronization=how, aggregation="only_first_replica")
    before = v.numpy()
    for indices, values in (
        ([5], [[1.0, 1.0]]),
        ([0, -1], np.ones((2, 2))),
        ([0.0], [[1.0, 1.0]]),
        ([True], [[1.0, 1.0]]),
        ([[0]], [[1.0, 1.0]]),
        ([0, 1], np.ones((3, 2))),
        ([0], np.ones((1, 3))),
        ([0], [[1j, 1j]]),
        ([0], parts(strategy, lambda _: np.ones((1, 2)))),
    ):
        for method in OPS:
            with pytest.raises(ValueError, match=r"scatter|lose|PerReplica"):
                getattr(v, method)(indices, values)
    for part in strategy.local_results(v):
        assert np.array_equal(part, before)
    with pytest.raises(ValueError, match="no rows"):
        make(strategy, 1.0).scatter_add([0], [1.0])


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_rows_are_aggregated_like_the_whole_array(several, aggregation):
    # Replica i adds i + 1 to its own row, and twice to the last.
    size = several.num_replicas_in_sync
    dense = np.zeros((size, 6, 2))
    for i in range(size):
        np.add.at(dense[i], [i, 5, 5], i + 1.0)
    combined = {"sum": dense.sum(0), "mean": dense.mean(0), "only_first_replica": dense[0]}

    def step(change):
        change(here(np.stack([rank(), 5, 5])), here(np.ones((3, 2)) * (rank() + 1.0)))

    for method, sign in (("scatter_add", 1), ("scatter_sub", -1)):
        v = make(several, np.zeros((6, 2)), aggregation=aggregation)
        several.run(step, (getattr(v, method),))
        for part in several.local_results(v):
            assert np.allclose(part, sign * combined[aggregation])

    v = make(several, np.full((4, 2), -1.0), aggregation=aggregation)
    several.run(
        lambda: v.scatter_update(
            [2, 0, 2], np.stack([np.full(2, 9.0), np.ones(2), np.ones(2) * (rank() + 1.0)])
        )
    )
    each = np.arange(1.0, size + 1)  # Of equal indices the last one holds.
    last = {"sum": each.sum(), "mean": each.mean(), "only_first_replica": 1}[aggregation]
    first = size if aggregation == "sum" else 1
    for part in several.local_results(v):
        assert np.allclose(part, [[first] * 2, [-1, -1], [last] * 2, [-1, -1]])


@plain_step("in a program all parts have one shape")
def test_replicas_may_pass_different_numbers_of_rows(several):
    for dtype in (float, np.int32):
        v = make(several, np.zeros(6, dtype), aggregation="sum")
        several.run(lambda v=v: v.scatter_add(np.arange(rank()), np.ones(rank(), v.dtype)))
        size = several.num_replicas_in_sync
        assert v.numpy().tolist() == [max(0, size - 1 - i) for i in range(6)]


def test_a_replica_scatters_into_its_own_component(several):
    v = make(several, np.zeros(5), synchronization="on_read", aggregation="sum")
    several.run(lambda: v.scatter_add(np.reshape(rank(), (1,)), [1.0]))
    size = several.num_replicas_in_sync
    for i, part in zip(replica_ids(several), several.local_results(v), strict=True):
        assert part.tolist() == np.eye(5)[i].tolist()
    assert v.numpy().tolist() == [1.0] * size + [0.0] * (5 - size)


def test_the_components_of_a_sum_add_up_to_what_was_scattered():
    with mirrored(2) as strategy:
        for dtype in (np.float32, np.int64):
            v = make(strategy, np.zeros(3, dtype), synchronization="on_read", aggregation="sum")
            v.scatter_update([0, 1], np.array([4, 2], dtype))
            assert v.numpy().tolist() == [4, 2, 0]
            v.scatter_add([1, 1], np.array([1, 1], dtype))
            v.scatter_sub([0], np.array([1], dtype))
            assert v.numpy().tolist() == [3, 4, 0]
