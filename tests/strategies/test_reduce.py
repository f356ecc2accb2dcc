"""`reduce`: over replicas, and with an axis inside each, by the true number of elements."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import context, each, everyones, mirrored, parts, rank

OPS = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}


def reference(op, arrays):
    dtype = np.float64 if op == "MEAN" and arrays[0].dtype.kind in "iub" else arrays[0].dtype
    wide = np.stack(arrays)
    if dtype == np.bool_:
        return {"SUM": np.any, "MAX": np.any, "PROD": np.all, "MIN": np.all}[op](wide, axis=0)
    exact = wide.astype(np.complex128 if wide.dtype.kind == "c" else np.float64)
    return OPS[op](exact, axis=0).astype(dtype)


def values(dtype, i):
    return (np.arange(6).reshape(2, 3) % 3 + i % 2).astype(dtype)


def rows(i, dtype=np.float64):
    """Return i+1 rows of three."""
    return (np.arange(3 * (i + 1)).reshape(-1, 3) + 1 + i).astype(dtype)


def ragged(strategy, dtype=np.float64):
    return parts(strategy, lambda i: rows(i, dtype))


def joined(strategy):
    return np.concatenate(everyones(strategy, rows))


@pytest.mark.parametrize("op", OPS)
def test_every_op_and_dtype_agrees_with_numpy_and_leaves_its_input_alone(strategy, op):
    for dtype in ("bool", "int32", "float16", "complex64"):
        given = parts(strategy, lambda i, dtype=dtype: values(dtype, i))
        wanted = reference(op, everyones(strategy, lambda i, dtype=dtype: values(dtype, i)))
        before = [part.copy() for part in given.values]
        result = strategy.reduce(op, given)
        assert (result.dtype, result.shape) == (wanted.dtype, (2, 3))
        assert np.allclose(result, wanted)
        result[:] = 0  # The caller owns it.
        assert all(map(np.array_equal, given.values, before))


def test_an_op_is_named_in_any_case_and_an_unknown_one_is_refused(strategy):
    for name in ("max", "MAX", "Max", nd.ReduceOp.MAX):
        result = strategy.reduce(name, parts(strategy, float))
        assert result == strategy.num_replicas_in_sync - 1
    for unknown in ("", None, sum):
        with pytest.raises(ValueError, match="SUM, MEAN, MIN, MAX, PROD"):
            strategy.reduce(unknown, 1.0)


def test_half_precision_is_summed_in_single():
    # In float16, 2048 + 1 is 2048 again.
    numbers = [np.full((1, 1), number, np.float16) for number in (2048, 1, 1, 1)]
    indexed = nd.PerReplica([nd.IndexedSlices(one, np.array([0]), (1, 1)) for one in numbers])
    big = nd.PerReplica([np.full(20_000, 40000, np.float16)] * 4)
    with mirrored(4) as strategy:
        assert strategy.reduce("sum", nd.PerReplica(numbers)) == 2052  # The nearest to 2051.
        total = strategy.reduce("sum", indexed)
        assert (total.values, total.dtype) == (2052, np.float16)
        assert (strategy.reduce("mean", big) == 40000).all()
        mean = strategy.reduce("mean", big, axis=0)
        assert (mean, mean.dtype) == (40000, np.float16)


def test_dtypes_that_differ_are_promoted_and_nothing_is_cut_off(several):
    count = several.num_replicas_in_sync - 1
    assert several.reduce("sum", parts(several, lambda i: 0.5 if i else 1)) == 1 + 0.5 * count
    mixed = parts(several, lambda i: np.ones(2, "f4") * (i + 0.5) if i else np.zeros(2, "i2"))
    assert several.reduce("sum", mixed, axis=0) == 2 * sum(i + 0.5 for i in range(1, count + 1))


def test_nests_keep_their_structure(strategy):
    size = strategy.num_replicas_in_sync
    nest = {"b": [parts(strategy, float), 1.0], "a": (parts(strategy, lambda i: np.ones(i)[:0]),)}
    result = strategy.reduce("sum", nest)
    assert list(result) == ["b", "a"]
    assert result["b"] == [size * (size - 1) / 2, size]
    assert result["a"][0].shape == (0,)
    result = strategy.reduce("mean", {"x": ragged(strategy), "y": [np.array([1.0, 2.0])]}, axis=0)
    assert np.allclose(result["x"], joined(strategy).mean(axis=0))
    assert result["y"] == [1.5]


def test_a_plain_value_is_the_same_on_every_replica(strategy):
    for value in (np.float32(2.5), np.arange(3), True):
        for op in OPS:
            plain = strategy.reduce(op, value)
            explicit = strategy.reduce(op, parts(strategy, lambda _, value=value: value))
            assert np.array_equal(plain, explicit)
            assert plain.dtype == explicit.dtype
    size = strategy.num_replicas_in_sync
    assert strategy.reduce("sum", 2.5) == strategy.reduce("sum", nd.Mirrored(each(strategy, 2.5)))
    assert strategy.reduce("sum", 2.5) == 2.5 * size
    x = np.arange(1.0, 7).reshape(2, 3)
    for op in OPS:
        explicit = strategy.reduce(op, parts(strategy, lambda _: x), axis=0)
        assert np.allclose(strategy.reduce(op, x, axis=0), explicit)


def test_a_variable_is_reduced_like_its_value_on_every_replica(strategy):
    with strategy.scope():
        v = nd.Variable([1.0, 3.0])
        size = strategy.num_replicas_in_sync
        assert np.array_equal(strategy.reduce("sum", v), [size, 3 * size])
    result = strategy.reduce("mean", {"v": v})["v"]
    assert np.array_equal(result, [1, 3])
    result[:] = 9  # The caller owns it.
    assert v.numpy().tolist() == [1, 3]
    assert strategy.reduce("sum", v, axis=0) == 4 * size


def test_a_wrong_number_of_components_is_refused(several):
    for extra in (-1, 1):
        with pytest.raises(ValueError, match=r"component"):
            several.reduce("sum", nd.PerReplica(range(len(several.devices) + extra or 2)))


def test_what_is_no_number_is_refused(strategy):
    for value in (None, "text", object()):
        for given in (value, parts(strategy, lambda _, value=value: value)):
            with pytest.raises(TypeError, match=r"SUM of|cannot travel"):
                strategy.reduce("sum", given)


def test_rows_are_reduced_sparsely(strategy):
    size = strategy.num_replicas_in_sync
    given = parts(strategy, lambda i: nd.IndexedSlices(np.ones((2, 3)), np.array([i, 5]), (6, 3)))
    for op, last in (("sum", size), ("mean", 1)):
        result = strategy.reduce(op, [given])[0]
        assert isinstance(result, nd.IndexedSlices)
        assert result.shape == (6, 3)
        assert result.indices.tolist() == [*range(size), 5]
        assert np.allclose(result.to_dense()[5], last)
        assert np.allclose(result.to_dense()[0], last / size)


def test_reduce_and_gather_in_a_merge_call(strategy):
    size = strategy.num_replicas_in_sync

    def step():
        total = context().merge_call(lambda s, x: s.reduce("sum", x), args=(rank() + 1,))
        return total, context().merge_call(
            lambda s, x: s.gather(x, 0).sum(), args=(np.reshape(rank(), (1,)),)
        )

    total, joined = strategy.run(step)
    assert total.values == each(strategy, size * (size + 1) // 2)
    assert joined.values == each(strategy, size * (size - 1) // 2)


@pytest.mark.parametrize(
    ("first", "second", "mean"),
    [([0, 1, 2, 3], [4, 5], 2.5), ([1, 2, 6], [], 3.0), ([], [1, 2, 6], 3.0), ([7], [], 7.0)],
)
def test_mean_counts_a_short_last_batch(first, second, mean):
    with mirrored(2) as pair:
        for dtype in (np.float32, np.int64):
            given = nd.PerReplica([np.array(first, dtype), np.array(second, dtype)])
            assert pair.reduce("MEAN", given, axis=0) == mean
        lists = nd.PerReplica([list(map(float, first)), list(map(float, second))])
        assert pair.reduce(nd.ReduceOp.MEAN, lists, axis=0) == mean


@pytest.mark.parametrize("op", OPS)
def test_every_op_agrees_with_numpy_on_the_joined_rows(strategy, op):
    for dtype in ("int16", "float32"):
        given = ragged(strategy, dtype)
        wanted = OPS[op](joined(strategy), axis=0)
        result = strategy.reduce(op, given, axis=0)
        assert result.shape == (3,)
        assert result.dtype == ("float64" if op == "MEAN" and dtype[0] == "i" else dtype)
        assert np.allclose(result, wanted.astype(result.dtype))
    for axis in ((0, 1), [1, 0], (-1, -2)):
        whole = OPS[op](joined(strategy))
        assert np.isclose(strategy.reduce(op, ragged(strategy), axis=axis), whole)


def test_an_axis_is_a_number_a_tuple_or_a_list_and_there(strategy):
    total = joined(strategy).sum(axis=0)
    for axis in (-2, (0,), [0], np.int64(0)):
        assert np.allclose(strategy.reduce("sum", ragged(strategy), axis=axis), total)
    for axis in (2, -3, (0, 2), 1.5, "0"):
        with pytest.raises(ValueError, match="axis"):
            strategy.reduce("sum", ragged(strategy), axis=axis)
    with pytest.raises(ValueError, match="twice"):
        strategy.reduce("sum", ragged(strategy), axis=(0, -2))
    for value in (1.0, parts(strategy, float)):
        with pytest.raises(ValueError, match="axis"):
            strategy.reduce("mean", value, axis=0)


def test_an_empty_replica_has_no_say_but_other_axes_must_agree(several):
    given = parts(several, lambda i: np.array([[3.0, -4.0]])[: 1 - min(i, 1)])
    for op in OPS:
        assert np.array_equal(several.reduce(op, given, axis=0), [3, -4])
    for make in (lambda i: np.zeros((2, 3 if i else 4)), lambda i: np.zeros((2,) * (1 + bool(i)))):
        with pytest.raises(ValueError, match="replica 1"):
            several.reduce("MEAN", parts(several, make), axis=0)


def test_nothing_at_all_has_a_sum_but_no_maximum_and_small_integers_wrap(strategy):
    given = parts(strategy, lambda _: np.zeros((0, 2), np.float32))
    assert np.array_equal(strategy.reduce("sum", given, axis=0), [0, 0])
    assert np.array_equal(strategy.reduce("prod", given, axis=0), [1, 1])
    mean = strategy.reduce("mean", given, axis=0)
    assert np.isnan(mean).all()
    assert mean.dtype == np.float32
    for op in ("min", "max"):
        with pytest.raises(ValueError, match="empty"):
            strategy.reduce(op, given, axis=0)
    given = parts(strategy, lambda _: np.full(4, 100, np.int8))
    wrapped = np.full(4 * strategy.num_replicas_in_sync, 100, np.int8).sum(dtype=np.int8)
    result = strategy.reduce("sum", given, axis=0)
    assert (result, result.dtype) == (wrapped, np.int8)
