"""`gather`, `local_results`, `distribute_values_from_function`: values in and out of replicas."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import each, everyones, mine, parts, replica_ids


def test_rows_are_joined_in_replica_order_also_of_different_lengths(strategy):
    for axis, make in (
        (0, lambda i: np.full((i + 1, 2), i, np.float32)),
        (-1, lambda i: np.full((2, i), i, np.float32)),
    ):
        given = parts(strategy, make)
        before = [part.copy() for part in given.values]
        result = strategy.gather(given, axis=axis)
        assert result.dtype == np.float32
        assert np.array_equal(result, np.concatenate(everyones(strategy, make), axis=axis))
        result[:] = -1  # The caller owns it.
        assert all(map(np.array_equal, given.values, before))


def test_nests_are_gathered_leaf_by_leaf(strategy):
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        v = nd.Variable([1.0])
    nest = {"b": [parts(strategy, lambda i: [i])], "a": (parts(strategy, lambda _: ["x"]),), "v": v}
    result = strategy.gather(nest, axis=0)
    assert list(result) == ["b", "a", "v"]
    assert result["b"][0].tolist() == list(range(size))
    assert result["a"][0].tolist() == ["x"] * size
    assert result["v"].tolist() == [1.0] * size
    assert strategy.gather(np.array([1, 2]), axis=0).tolist() == [1, 2] * size


def test_local_results_are_the_components(strategy):
    given = parts(strategy, lambda i: i)
    assert strategy.local_results(given) == given.values
    assert strategy.local_results(nd.Mirrored(given.values)) == given.values
    results = strategy.local_results({"b": [given, "same"], "a": None})
    assert results == mine(strategy, lambda i: {"b": [i, "same"], "a": None})
    for value in (1, None, "text", (), [], {}, (1, [2]), {"a": None}):
        (result,) = strategy.local_results(value)
        assert result is value


def test_local_results_of_variables(strategy):
    with strategy.scope():
        v = nd.Variable(1.0)
        local = nd.Variable(2.0, synchronization="on_read")
    central = isinstance(strategy, nd.CentralStorageStrategy | nd.ParameterServerStrategy)
    assert strategy.local_results(v) == ((1.0,) if central else each(strategy, 1.0))
    assert strategy.local_results(local) == each(strategy, 2.0)
    nest = strategy.local_results({"v": v, "x": parts(strategy, lambda i: i)})
    assert [{"v": float(n["v"]), "x": n["x"]} for n in nest] == [
        {"v": 1.0, "x": i} for i in replica_ids(strategy)
    ]


def test_local_results_refuse_components_that_do_not_fit_together(several):
    with pytest.raises(ValueError, match="component"):
        several.local_results([parts(several, float), nd.PerReplica(range(9))])


def test_a_value_is_made_for_each_replica(strategy):
    size = strategy.num_replicas_in_sync
    made = strategy.distribute_values_from_function(
        lambda c: {"x": 10 * c.replica_id_in_sync_group, "n": c.num_replicas_in_sync}
    )
    assert [type(leaf) for leaf in made.values()] == [nd.PerReplica] * 2
    assert made["n"].values == each(strategy, size)
    result = strategy.run(lambda nest: nest["x"], args=(made,))
    assert result.values == mine(strategy, lambda i: 10 * i)
    for value in (None, "text", np.zeros(2)):
        (leaf,) = {type(strategy.distribute_values_from_function(lambda _, v=value: v))}
        assert leaf is nd.PerReplica
