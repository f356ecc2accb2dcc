"""Collectives in replicas: NumPy's values of all replicas, in this machine's byte order."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    LARGE,
    context,
    everyones,
    here,
    mine,
    parts,
    plain_step,
    rank,
)
from tests.strategies.test_reduce import OPS, reference

DTYPES = "bool uint8 int64 float16 float32 complex64".split()


def agrees(result, expected):
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_a_nest_of_all_dtypes_and_shapes_is_reduced(strategy, op):
    def numbers(i):
        return {
            f"{dtype} {shape}": np.full(shape, 1 + i % 3).astype(dtype)
            for dtype in DTYPES
            for shape in ((), (0,), (2, 3), (LARGE,))
            if dtype != "complex64" or op not in ("MIN", "MAX")
        }

    everyone = everyones(strategy, numbers)

    own = {name: parts(strategy, [numbers[name] for numbers in everyone]) for name in everyone[0]}
    results = strategy.run(lambda own: context().all_reduce(op, here(own)), (own,))
    for result in strategy.local_results(results):
        assert result.keys() == everyone[0].keys()
        for name, total in result.items():
            agrees(total, reference(op, [numbers[name] for numbers in everyone]))


def test_rows_are_gathered_along_any_axis(strategy):
    everyone = everyones(strategy, lambda i: i + np.arange(24.0).reshape(2, 3, 4))
    results = strategy.run(
        lambda own: [context().all_gather(here(own), axis=axis) for axis in (0, 1, -1)],
        (parts(strategy, everyone),),
    )
    for gathered in strategy.local_results(results):
        for axis, result in zip((0, 1, -1), gathered, strict=True):
            agrees(result, np.concatenate(everyone, axis))


@plain_step("in a program all parts have one shape")
def test_ragged_rows_are_gathered_along_any_axis(strategy):
    def rows(i):
        return i + np.arange(6.0 * ((i + 1) % 3)).reshape(-1, 2, 3)  # The third has none.

    def step():
        own = here(rows(rank()))
        first = context().all_gather(own, axis=0)
        return first, context().all_gather(own.reshape(2, 3, -1), axis=-1)

    everyone = everyones(strategy, rows)
    wanted = np.concatenate([part.reshape(2, 3, -1) for part in everyone], axis=-1)
    for first, last in strategy.local_results(strategy.run(step)):
        agrees(first, np.concatenate(everyone))
        agrees(last, wanted)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_rows_are_reduced_like_the_whole_array_and_named_once(strategy, op):
    rng = np.random.default_rng(0)
    size = strategy.num_replicas_in_sync
    # The first of several replicas passes no rows, where their numbers may differ.
    even = size == 1 or isinstance(strategy, nd.TPUStrategy)
    counts = [40 if i or even else 0 for i in range(size)]
    indices = [rng.integers(0, 5, count) for count in counts]
    rows = [rng.normal(size=(count, 3)) for count in counts]

    def step(*own):
        total = context().all_reduce(op, nd.IndexedSlices(*here(own), (9, 3)))
        return total, total.to_dense()

    expected = np.zeros((9, 3))
    np.add.at(expected, np.concatenate(indices), np.concatenate(rows))
    own = parts(strategy, rows), parts(strategy, indices)
    for total, dense in strategy.local_results(strategy.run(step, own)):
        np.testing.assert_array_equal(total.indices, np.unique(np.concatenate(indices)))
        wanted = expected / (1 if op == "sum" else size)
        np.testing.assert_allclose(dense, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_flow_through_collectives(strategy):
    size = strategy.num_replicas_in_sync
    table = np.arange(1.0, 4.0) + np.arange(size)[:, None]

    def step(own):
        with nd.GradientTape(persistent=True) as tape:
            x = tape.watch(here(own))
            total = context().all_reduce("sum", x * x)
            most = context().all_reduce("max", x)
            product = context().all_reduce("prod", x)
            joined = context().all_gather(x, 0)
            loss = np.sum(total) + np.sum(joined * joined)
        return tape.gradient(loss, x), tape.gradient(most, x), tape.gradient(product, x)

    everyone = strategy.local_results(strategy.run(step, (parts(strategy, table),)))
    for (sums, extremes, products), x in zip(everyone, mine(strategy, table), strict=True):
        np.testing.assert_allclose(sums, 4 * size * x, rtol=1e-12)
        np.testing.assert_allclose(extremes, size * (x == table.max(0)), rtol=1e-12)
        np.testing.assert_allclose(products, size * table.prod(0) / x, rtol=1e-12)


@plain_step("the arrays of a program are in the machine's order")
def test_replicas_may_pass_one_dtype_in_different_byte_orders(strategy):
    pair = np.dtype([("a", np.int16), ("b", np.float64)], align=True)
    with strategy.scope():
        v = nd.Variable(np.zeros(3, np.float32), aggregation="sum")

    def step():
        order = "<>"[rank() % 2]
        numbers = (np.arange(3) + rank()).astype(f"{order}f4")
        rows = np.array([(1, 2.5)] * 2, pair).astype(pair.newbyteorder(order))
        v.assign_add(numbers)
        return {
            "sum": context().all_reduce("sum", numbers),
            "mean": context().all_reduce("mean", numbers.astype(f"{order}i2")),
            "large": context().all_reduce("sum", np.full(LARGE, numbers[-1]))[-1],
            "gathered": context().all_gather(numbers, axis=0),
            "fields": context().all_gather(rows, axis=0),
            "copied": context().communicator.broadcast(numbers, root=size - 1),
        }

    size = strategy.num_replicas_in_sync
    table = np.arange(3) + np.arange(size)[:, None]
    for result in strategy.local_results(strategy.run(step)):
        assert all(array.dtype.isnative for array in result.values())
        assert result["sum"].tolist() == table.sum(0).tolist()
        assert np.allclose(result["mean"], table.mean(0))
        assert result["large"] == table.sum(0)[-1]
        assert result["gathered"].tolist() == table.ravel().tolist()
        assert result["fields"].tolist() == [(1, 2.5)] * 2 * size
        assert result["copied"].tolist() == table[-1].tolist()
    assert v.numpy().tolist() == table.sum(0).tolist()


COLLECTIVES = {
    "all_reduce": lambda x: context().all_reduce("sum", x),
    "all_reduce of a mean": lambda x: context().all_reduce("mean", x),
    "all_reduce in a nest": lambda x: context().all_reduce("max", {"x": [x, 1.0]})["x"][0],
    "all_gather": lambda x: context().all_gather(x, axis=0),
    "broadcast": lambda x: context().communicator.broadcast(x, root=0),
    "rows": lambda x: (
        context().all_reduce("sum", nd.IndexedSlices(x, np.arange(len(x)), x.shape)).values
    ),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
@plain_step("it is about memory")
def test_a_result_is_the_replicas_own_and_an_input_may_be_overwritten_at_once(strategy, collective):
    summed = collective in ("all_reduce", "rows")
    scale = strategy.num_replicas_in_sync if summed else 1

    def step(size):
        x = np.empty(size)
        for turn in range(1, 5):
            x[:] = turn
            result = COLLECTIVES[collective](x)
            x[:] = np.nan
            assert not np.shares_memory(result, x)
            assert (result == turn * scale).all()
            context().merge_call(lambda _: None)
            result[:] = -1 - rank()
            context().merge_call(lambda _: None)
            assert (result == -1 - rank()).all()

    for size in (3, LARGE):  # Reduced by the last to arrive, and by slice owners.
        strategy.run(step, (size,))
