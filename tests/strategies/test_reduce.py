"""`reduce` without an axis: element by element over replicas."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import context, each, everyones, mirrored, parts, rank

OPS = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64"]


@pytest.fixture(params=OPS)
def op(request):
    return request.param


def reference(op, arrays):
    dtype = np.float64 if op == "MEAN" and arrays[0].dtype.kind in "iub" else arrays[0].dtype
    wide = np.stack(arrays)
    if dtype == np.bool_:
        return {"SUM": np.any, "MAX": np.any, "PROD": np.all, "MIN": np.all}[op](wide, axis=0)
    exact = wide.astype(np.complex128 if wide.dtype.kind == "c" else np.float64)
    return OPS[op](exact, axis=0).astype(dtype)


def values(dtype, i):
    return (np.arange(6).reshape(2, 3) % 3 + i % 2).astype(dtype)


def test_every_op_and_dtype_agrees_with_numpy(strategy, op):
    for dtype in DTYPES:
        given = parts(strategy, lambda i, dtype=dtype: values(dtype, i))
        wanted = reference(op, everyones(strategy, lambda i, dtype=dtype: values(dtype, i)))
        result = strategy.reduce(op, given)
        assert result.dtype == wanted.dtype
        assert result.shape == (2, 3)
        assert np.allclose(result, wanted)


def test_an_op_is_named_in_any_case(strategy, op):
    given = parts(strategy, lambda i: i + 1.0)
    wanted = OPS[op](everyones(strategy, lambda i: i + 1.0))
    for name in (op.lower(), op.upper(), op.title(), nd.ReduceOp[op]):
        assert strategy.reduce(name, given) == wanted


def test_an_unknown_op_is_refused(strategy):
    for unknown in ("median", "", None, 3, sum):
        with pytest.raises(ValueError, match="SUM, MEAN, MIN, MAX, PROD"):
            strategy.reduce(unknown, 1.0)


def test_sum_keeps_the_dtype_and_mean_of_integers_is_float64(strategy):
    for dtype in DTYPES:
        given = parts(strategy, lambda _, dtype=dtype: np.ones(2, dtype))
        assert strategy.reduce("sum", given).dtype == dtype
        kept = np.float64 if np.dtype(dtype).kind in "iub" else dtype
        assert strategy.reduce("mean", given).dtype == kept


def test_the_input_is_not_changed_and_not_shared(strategy, op):
    given = parts(strategy, lambda _: np.full(2, 3.0))
    result = strategy.reduce(op, given)
    assert not any(np.shares_memory(result, part) for part in given.values)
    assert all((part == 3).all() for part in given.values)
    result[:] = 0  # The caller owns it.


def test_numbers_are_reduced_to_numbers(strategy):
    size = strategy.num_replicas_in_sync
    assert strategy.reduce("sum", parts(strategy, lambda i: i)) == size * (size - 1) // 2
    assert strategy.reduce("mean", parts(strategy, lambda _: np.float32(1.5))) == 1.5
    assert strategy.reduce("mean", parts(strategy, lambda _: np.float32(1.5))).dtype == np.float32
    assert float(strategy.reduce("max", parts(strategy, float))) == size - 1


def test_half_precision_is_summed_in_single():
    # In float16, 2048 + 1 is 2048 again.
    with mirrored(4) as strategy:
        given = nd.PerReplica([np.float16(2048), np.float16(1), np.float16(1), np.float16(1)])
        assert strategy.reduce("sum", given) == 2052  # 2051, to the nearest float16.
        big = nd.PerReplica([np.float16(40000)] * 4)
        assert strategy.reduce("mean", big) == 40000
        assert strategy.reduce("mean", nd.PerReplica([np.full(1, 40000, "f2")] * 4), axis=0) == 4e4


def test_shapes_that_differ_are_refused_with_the_replicas(several):
    given = parts(several, lambda i: np.zeros(2 if i else 3))
    with pytest.raises(ValueError, match=r"replica 1 .*\(2,\), replica 0 .*\(3,\)"):
        several.reduce("sum", given)


def test_dtypes_that_differ_are_promoted_and_nothing_is_cut_off(several):
    given = parts(several, lambda i: 0.5 if i else 1)
    count = several.num_replicas_in_sync - 1
    assert several.reduce("sum", given) == 1 + 0.5 * count
    assert several.reduce("max", given).dtype == np.float64
    mixed = parts(several, lambda i: np.ones(2, "f4") * (i + 0.5) if i else np.zeros(2, "i2"))
    assert several.reduce("sum", mixed, axis=0) == 2 * sum(i + 0.5 for i in range(1, count + 1))


def test_nests_keep_their_structure(strategy):
    size = strategy.num_replicas_in_sync
    nest = {"b": [parts(strategy, float), 1.0], "a": (parts(strategy, lambda i: np.ones(i)[:0]),)}
    result = strategy.reduce("sum", nest)
    assert list(result) == ["b", "a"]
    assert result["b"] == [size * (size - 1) / 2, size]
    assert result["a"][0].shape == (0,)


@pytest.mark.parametrize("value", [3, 2.5, np.float32(2.5), np.arange(3), True])
def test_a_plain_value_is_the_same_on_every_replica(strategy, value):
    size = strategy.num_replicas_in_sync
    same = parts(strategy, lambda _: value)
    for op in OPS:
        plain, explicit = strategy.reduce(op, value), strategy.reduce(op, same)
        assert np.allclose(plain, explicit)
        assert plain.dtype == explicit.dtype
    for op in ("mean", "min", "max"):
        assert np.array_equal(strategy.reduce(op, value), value)
    if value is not True:
        assert np.array_equal(strategy.reduce("sum", value), np.multiply(value, size))


def test_a_plain_value_counts_by_value_not_by_identity(strategy):
    x = np.ones(2)
    same_object = parts(strategy, lambda _: x)
    equal_objects = parts(strategy, lambda _: x.copy())
    for op in OPS:
        first, second, third = (
            strategy.reduce(op, value) for value in (x, same_object, equal_objects)
        )
        assert np.array_equal(first, second)
        assert np.array_equal(second, third)


def test_a_mirrored_value_is_reduced_by_its_components(strategy):
    size = strategy.num_replicas_in_sync
    assert strategy.reduce("sum", nd.Mirrored(each(strategy, 2.0))) == 2 * size


def test_a_mirrored_variable_is_reduced_like_its_value_on_every_replica(strategy):
    with strategy.scope():
        v = nd.Variable([1.0, 2.0])
    size = strategy.num_replicas_in_sync
    assert np.array_equal(strategy.reduce("sum", v), [size, 2 * size])
    for op in ("mean", "min", "max"):
        result = strategy.reduce(op, {"v": v})["v"]
        assert np.array_equal(result, [1, 2])
        result[:] = 9  # The caller owns it.
    assert np.array_equal(v, [1, 2])


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_number_of_components_is_refused(several, extra):
    count = len(several.devices) + extra or 2
    with pytest.raises(ValueError, match=r"component"):
        several.reduce("sum", nd.PerReplica(range(count)))


@pytest.mark.parametrize("value", [None, "text", object()])
def test_what_is_no_number_is_refused(strategy, value):
    for given in (value, parts(strategy, lambda _: value)):
        with pytest.raises(TypeError, match=r"SUM of|can not travel"):
            strategy.reduce("sum", given)


def test_rows_are_reduced_sparsely(strategy):
    size = strategy.num_replicas_in_sync
    rows = parts(strategy, lambda i: nd.IndexedSlices(np.ones((2, 3)), np.array([i, 5]), (6, 3)))
    for op, last in (("sum", size), ("mean", 1)):
        result = strategy.reduce(op, [rows])[0]
        assert isinstance(result, nd.IndexedSlices)
        assert result.shape == (6, 3)
        assert result.indices.tolist() == [*range(size), 5]
        assert np.allclose(result.to_dense()[5], last)
        assert np.allclose(result.to_dense()[0], last / size)


def test_reduce_in_a_replica_is_refused_and_names_what_to_call(strategy):
    with pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(lambda: strategy.reduce("sum", 1.0))


def test_reduce_in_a_scope_and_in_a_merge_call(strategy):
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        assert strategy.reduce("sum", parts(strategy, float)) == size * (size - 1) / 2

    def step():
        return context().merge_call(lambda s, x: s.reduce("sum", x), args=(rank() + 1,))

    assert strategy.run(step).values == each(strategy, size * (size + 1) // 2)


def test_rows_of_16_bit_floats_are_added_in_32_bits():
    numbers = [np.full((1, 1), number, np.float16) for number in (2048, 1, 1, 1)]
    rows = nd.PerReplica([nd.IndexedSlices(one, np.array([0]), (1, 1)) for one in numbers])
    with mirrored(4) as strategy:
        total = strategy.reduce("sum", rows)
        assert (total.values, total.dtype) == (2052, np.float16)
