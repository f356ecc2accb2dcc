"""`reduce` with an axis: inside each replica and over replicas, by the true number of elements."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import everyones, mirrored, parts

OPS = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}


@pytest.fixture
def pair():
    with mirrored(2) as strategy:
        yield strategy


def rows(i, dtype=np.float64):
    """Return i+1 rows of three."""
    return (np.arange(3 * (i + 1)).reshape(-1, 3) + 1 + i).astype(dtype)


def ragged(strategy, dtype=np.float64):
    return parts(strategy, lambda i: rows(i, dtype))


def joined(strategy):
    """Return the rows of all replicas."""
    return np.concatenate(everyones(strategy, rows))


@pytest.mark.parametrize(
    ("first", "second", "mean"),
    [([0, 1, 2, 3], [4, 5], 2.5), ([1, 2, 6], [], 3.0), ([], [1, 2, 6], 3.0), ([7], [], 7.0)],
)
def test_mean_counts_a_short_last_batch(pair, first, second, mean):
    for dtype in (np.float64, np.float32, np.int64):
        given = nd.PerReplica([np.array(first, dtype), np.array(second, dtype)])
        assert pair.reduce("MEAN", given, axis=0) == mean
    lists = nd.PerReplica([list(map(float, first)), list(map(float, second))])
    assert pair.reduce(nd.ReduceOp.MEAN, lists, axis=0) == mean


@pytest.mark.parametrize("op", OPS)
def test_every_op_agrees_with_numpy_on_the_joined_rows(strategy, op):
    for dtype in ("int16", "int64", "float32", "float64"):
        given = ragged(strategy, dtype)
        wanted = OPS[op](joined(strategy), axis=0)
        result = strategy.reduce(op, given, axis=0)
        assert result.shape == (3,)
        assert result.dtype == ("float64" if op == "MEAN" and dtype[0] == "i" else dtype)
        assert np.allclose(result, wanted.astype(result.dtype))


def test_an_axis_is_a_number_a_tuple_or_a_list(strategy):
    total = joined(strategy).sum(axis=0)
    for axis in (0, -2, (0,), [0], np.int64(0), [-2]):
        assert np.allclose(strategy.reduce("sum", ragged(strategy), axis=axis), total)


def test_several_axes_at_once(strategy):
    whole = joined(strategy)
    for axis in ((0, 1), [1, 0], (-1, -2), (0, -1)):
        for op, function in OPS.items():
            assert np.isclose(strategy.reduce(op, ragged(strategy), axis=axis), function(whole))


def test_a_later_axis_keeps_the_first(strategy):
    def two_rows(i):
        return np.arange(6.0).reshape(2, 3) + i

    given = parts(strategy, two_rows)
    stacked = np.stack(everyones(strategy, two_rows))
    assert np.allclose(strategy.reduce("mean", given, axis=1), stacked.mean(axis=(0, 2)))
    assert np.allclose(strategy.reduce("max", given, axis=-1), stacked.max(axis=(0, 2)))


def test_an_axis_out_of_range_is_refused(strategy):
    for axis in (2, -3, (0, 2), [5], 1.5, "0"):
        with pytest.raises(ValueError, match="axis"):
            strategy.reduce("sum", ragged(strategy), axis=axis)


def test_an_axis_named_twice_is_refused(strategy):
    with pytest.raises(ValueError, match="twice"):
        strategy.reduce("sum", ragged(strategy), axis=(0, -2))


def test_a_number_has_no_axis(strategy):
    for value in (1.0, parts(strategy, float)):
        with pytest.raises(ValueError, match="axis"):
            strategy.reduce("mean", value, axis=0)


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_other_axes_must_agree(several, op):
    given = parts(several, lambda i: np.zeros((2, 3 if i else 4)))
    with pytest.raises(ValueError, match="replica 1"):
        several.reduce(op, given, axis=0)
    with pytest.raises(ValueError, match="replica 1"):
        several.reduce(op, parts(several, lambda i: np.zeros((2,) * (1 + bool(i)))), axis=0)


@pytest.mark.parametrize("op", OPS)
def test_an_empty_replica_has_no_say(several, op):
    given = parts(several, lambda i: np.array([[3.0, -4.0]])[: 1 - min(i, 1)])
    assert np.array_equal(several.reduce(op, given, axis=0), [3, -4])


def test_nothing_at_all_has_a_sum_but_no_maximum(strategy):
    given = parts(strategy, lambda _: np.zeros((0, 2), np.float32))
    assert np.array_equal(strategy.reduce("sum", given, axis=0), [0, 0])
    assert np.array_equal(strategy.reduce("prod", given, axis=0), [1, 1])
    mean = strategy.reduce("mean", given, axis=0)
    assert np.isnan(mean).all()
    assert mean.dtype == np.float32
    for op in ("min", "max"):
        with pytest.raises(ValueError, match="empty"):
            strategy.reduce(op, given, axis=0)


@pytest.mark.parametrize("op", OPS)
def test_a_plain_value_is_reduced_like_equal_components(strategy, op):
    x = np.arange(1.0, 7).reshape(2, 3)
    plain = strategy.reduce(op, x, axis=0)
    assert np.allclose(plain, strategy.reduce(op, parts(strategy, lambda _: x), axis=0))


def test_a_variable_is_reduced_along_its_axis(strategy):
    with strategy.scope():
        v = nd.Variable([1.0, 3.0])
    assert strategy.reduce("mean", v, axis=0) == 2
    assert strategy.reduce("sum", v, axis=0) == 4 * strategy.num_replicas_in_sync


def test_nests_are_reduced_leaf_by_leaf(strategy):
    result = strategy.reduce("mean", {"x": ragged(strategy), "y": [np.array([1.0, 2.0])]}, axis=0)
    assert np.allclose(result["x"], joined(strategy).mean(axis=0))
    assert result["y"] == [1.5]


def test_small_integers_wrap_as_their_sum_does(strategy):
    given = parts(strategy, lambda _: np.full(4, 100, np.int8))
    wrapped = np.full(4 * strategy.num_replicas_in_sync, 100, np.int8).sum(dtype=np.int8)
    result = strategy.reduce("sum", given, axis=0)
    assert (result, result.dtype) == (wrapped, np.int8)


def test_half_precision_is_summed_in_single(strategy):
    given = parts(strategy, lambda _: np.ones(70_000, np.float16))
    mean = strategy.reduce("mean", given, axis=0)
    assert (mean, mean.dtype) == (1, np.float16)
