"""`gather`, `local_results`, `distribute_values_from_function`: values in and out of replicas."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import each, everyones, mine, one_process, parts, replica_ids


def test_rows_are_joined_in_replica_order(strategy):
    def two_rows(i):
        return np.full((2, 3), i, np.float32)

    given = parts(strategy, two_rows)
    result = strategy.gather(given, axis=0)
    assert result.dtype == np.float32
    assert np.array_equal(result, np.concatenate(everyones(strategy, two_rows)))
    result[:] = -1  # The caller owns it.
    assert given.values[0].sum() == 6 * replica_ids(strategy)[0]


def test_lengths_along_the_axis_may_differ(strategy):
    for axis in (0, 1, -1, -2):
        shape = [2, 2]
        shape[axis] = 0

        def make(i, axis=axis, shape=shape):
            own = list(shape)
            own[axis] = i
            return np.full(own, i)

        given = parts(strategy, make)
        result = strategy.gather(given, axis=axis)
        assert np.array_equal(result, np.concatenate(everyones(strategy, make), axis=axis))


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


def test_an_axis_that_is_not_there_is_refused(strategy):
    for value, axis in ((1.0, 0), (np.zeros(2), 1), (np.zeros(2), -2), (np.zeros((2, 2)), 2)):
        with pytest.raises(ValueError, match="axis"):
            strategy.gather(parts(strategy, lambda _, value=value: value), axis=axis)


def test_other_lengths_and_the_number_of_components_must_agree(several):
    for make in (lambda i: np.zeros((2, 2 + i)), lambda i: np.zeros((2,) * (1 + (i == 1)))):
        with pytest.raises(ValueError, match="dimension"):
            several.gather(parts(several, make), axis=0)
    with pytest.raises(ValueError, match="component"):
        several.gather(nd.PerReplica([np.zeros(1)] * (len(several.devices) + 1)), axis=0)


def test_gather_in_a_merge_call(strategy):
    def step():
        context = nd.get_replica_context()
        own = np.array([context.replica_id_in_sync_group])
        return context.merge_call(lambda s, x: s.gather(x, axis=0), args=(own,))

    everyone = list(range(strategy.num_replicas_in_sync))
    gathered = [result.tolist() for result in strategy.run(step).values]
    assert tuple(gathered) == each(strategy, everyone)


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


@one_process("values are compared within a process alone")
def test_made_structures_must_agree(several):
    with pytest.raises(ValueError, match="replica 1"):
        several.distribute_values_from_function(lambda c: [0] * c.replica_id_in_sync_group)
