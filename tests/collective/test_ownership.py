"""Who owns what in a collective: a replica may do with its result, and its input, what it likes."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.collective.threads import SMALL_BYTES
from tests.kinds import context, mirrored, rank

SIZES = [3, SMALL_BYTES // 8 + 1]  # Reduced by the last to arrive, and by slice owners.


@pytest.fixture(params=[1, 3])
def strategy(request):
    with mirrored(request.param) as made:
        yield made


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
def test_a_result_is_the_replicas_own(strategy, collective):
    def step(size):
        x = np.ones(size)
        result = COLLECTIVES[collective](x)
        assert not np.shares_memory(result, x)
        assert result.flags.writeable
        value = result[0]
        context().merge_call(lambda _: None)
        result[:] = -1 - rank()
        context().merge_call(lambda _: None)
        return bool((result == -1 - rank()).all() and (x == 1).all()), value

    for size in SIZES:
        fine, values = strategy.run(step, (size,))
        assert all(fine.values)
        assert len(set(values.values)) == 1


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_input_may_be_overwritten_as_soon_as_the_call_returns(strategy, collective):
    summed = collective in ("all_reduce", "rows")
    scale = strategy.num_replicas_in_sync if summed else 1

    def step(size):
        x = np.empty(size)
        for turn in range(1, 6):
            x[:] = turn
            result = COLLECTIVES[collective](x)
            x[:] = np.nan
            assert (result == turn * scale).all()

    for size in SIZES:
        strategy.run(step, (size,))


@pytest.mark.parametrize("sizes", [(1,), (5, 0, 17), (SMALL_BYTES // 8, 3, SMALL_BYTES // 4)])
def test_reduce_update_touches_every_element_once(strategy, sizes):
    targets = [np.zeros(size) for size in sizes]
    touched = [np.zeros(size, int) for size in sizes]

    def update(prepared, leaf, start, stop, total):
        assert prepared == "ready"
        assert len(total) == stop - start
        targets[leaf][start:stop] += total
        touched[leaf][start:stop] += 1
        total[:] = np.nan  # It may be changed.

    def step():
        arrays = [np.arange(size) + float(rank()) for size in sizes]
        return context().communicator.reduce_update("sum", arrays, lambda: "ready", update)

    count = strategy.num_replicas_in_sync
    assert strategy.run(step).values == ("ready",) * count
    for target, size in zip(targets, sizes, strict=True):
        assert np.array_equal(target, count * np.arange(size) + count * (count - 1) / 2)
    assert all((one == 1).all() for one in touched)


def test_parts_of_rows_cover_them_once(strategy):
    for count in (0, 1, 2, 7, 100):
        parts = strategy.run(lambda count=count: context().communicator.owned_part(count)).values
        covered = [row for part in parts for row in range(part.start, part.stop)]
        assert covered == list(range(count))


def test_what_is_no_number_is_refused(strategy):
    for value in (None, "text", object(), np.array(["a"])):
        with pytest.raises(TypeError, match="SUM of"):
            strategy.run(lambda value=value: context().all_reduce("sum", value))


def test_rows_have_no_maximum(strategy):
    rows = nd.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
    with pytest.raises(ValueError, match="only SUM and MEAN"):
        strategy.run(lambda: context().all_reduce("max", [rows]))


def test_rows_of_different_tables_are_refused():
    def step():
        height = 5 + rank()
        rows = nd.IndexedSlices(np.ones((1, 2)), np.array([0]), (height, 2))
        context().all_reduce("sum", rows)

    with mirrored(2) as strategy, pytest.raises(nd.CollectiveMismatchError):
        strategy.run(step)


def test_a_nest_without_leaves_is_reduced_to_itself(strategy):
    assert strategy.run(lambda: context().all_reduce("sum", {"a": []})) == {"a": []}
    assert strategy.run(lambda: context().all_gather((), axis=0)) == ()


def test_python_numbers_become_numbers_of_numpy(strategy):
    size = strategy.num_replicas_in_sync
    total, mean = strategy.run(
        lambda: (context().all_reduce("sum", 2), context().all_reduce("mean", 2))
    )
    assert total.values == (2 * size,) * size
    assert total.values[0].dtype == np.int64
    assert (mean.values[0], mean.values[0].dtype) == (2, np.float64)


def test_an_op_is_named_in_any_case(strategy):
    for name in ("sum", "Sum", "SUM", "ReduceOp.SUM", nd.ReduceOp.SUM):
        (total, *_) = strategy.run(lambda name=name: context().all_reduce(name, 1)).values
        assert total == strategy.num_replicas_in_sync
