"""ON_WRITE variables written in replicas: what all pass is aggregated, then applied once."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    LARGE,
    each,
    here,
    meet,
    mirrored,
    one_process,
    parts,
    plain_step,
    raised_in,
    rank,
    works,
)


def make(strategy, initial=10.0, **kwargs):
    with strategy.scope():
        return nd.Variable(initial, **kwargs)


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize(
    ("size", "dtype"), [(3, "f8"), (3, "f2"), (3, "i8"), (LARGE, "f8"), ((), "f8")]
)
def test_all_replicas_have_their_say_once(several, aggregation, size, dtype):
    dtype = "f4" if (dtype, aggregation) == ("i8", "mean") else dtype
    initial = np.full(size, 10, dtype)
    values = [np.full(size, i + 1, dtype) for i in range(several.num_replicas_in_sync)]
    one = {"sum": np.sum, "mean": np.mean, "only_first_replica": lambda x, axis: x[0]}
    combined = one[aggregation](np.stack(values), axis=0)
    for method, wanted in (
        ("assign", combined),
        ("assign_add", initial + combined),
        ("assign_sub", initial - combined),
    ):
        v = make(several, initial, aggregation=aggregation)
        write = getattr(v, method)
        assert several.run(lambda x, w=write: w(here(x)), args=(parts(several, values),)) is v
        for part in several.local_results(v):
            assert part.dtype == dtype
            assert np.allclose(part, wanted, rtol=1e-3 if dtype == "f2" else 1e-5)


def test_one_replica_needs_no_aggregation():
    for make_one in (nd.get_strategy, lambda: nd.OneDeviceStrategy("cpu:0"), lambda: mirrored(1)):
        strategy = make_one()
        v = make(strategy)
        strategy.run(lambda v=v: v.assign_add(1.0))
        assert float(v) == 11
        strategy.close()


def test_every_replica_reads_what_was_written(strategy):
    v = make(strategy, aggregation="sum")

    def step(passed):
        assert passed is v
        before = v.read_value()
        v.assign_add(1.0).assign_add(1.0)
        return before, v * meet()

    size = strategy.num_replicas_in_sync
    first, second = strategy.run(step, (v,))
    assert first.values == each(strategy, 10)
    assert second.values == each(strategy, (10 + 2 * size) * size)


def test_half_precision_is_summed_in_single():
    with mirrored(4) as strategy:
        v = make(strategy, np.float16(0), aggregation="sum")
        values = nd.PerReplica([np.float16(2048), np.float16(1), np.float16(1), np.float16(1)])
        strategy.run(v.assign, args=(values,))
        assert float(v) == 2052


@plain_step("one trace stands for all replicas")
def test_a_wrong_value_on_one_replica_changes_nothing(several):
    v = make(several, [10.0], aggregation="sum")
    for write, wrong, right in (
        (v.assign, (np.zeros(3),), ([1.0],)),
        (v.assign_add, (parts(several, float),), ([1.0],)),
        (v.scatter_add, ([7], [1.0]), ([0], [1.0])),
    ):
        with raised_in(several, 1, ValueError):
            several.run(lambda w=write, a=wrong, b=right: w(*(a if rank() == 1 else b)))
        assert all(part.tolist() == [10] for part in several.local_results(v))
        assert works(several)


@plain_step("one trace stands for all replicas")
@one_process("a worker alone with it hears of it in its next step")
def test_a_write_that_a_replica_skips_is_an_error_and_changes_nothing(several):
    v = make(several, aggregation="sum")
    with pytest.raises(nd.CollectiveMismatchError):
        several.run(lambda: v.assign_add(1.0) if rank() else None)
    assert float(v) == 10
    assert works(several)


@pytest.mark.parametrize("aggregation", ["sum", "only_first_replica"])
@plain_step("one trace stands for all replicas")
def test_writes_of_different_kinds_or_variables_do_not_pair(several, aggregation):
    v, w = (make(several, aggregation=aggregation, name=name) for name in "vw")
    with raised_in(several, None, nd.CollectiveMismatchError):
        several.run(lambda: v.assign(1.0) if rank() == 1 else v.assign_add(1.0))
    assert works(several)
    with raised_in(several, None, nd.CollectiveMismatchError, r"'w'.*'v'"):
        several.run(lambda: (w if rank() == 1 else v).assign(1.0))
    assert (float(v), float(w)) == (10, 10)
    assert works(several)


def test_variables_of_one_name_do_not_pair():
    with mirrored(2) as strategy:
        v, w = (make(strategy, aggregation="sum", name="v") for _ in range(2))
        with pytest.raises(nd.CollectiveMismatchError, match="replica 1 wrote to variable 'v'"):
            strategy.run(lambda: (w if rank() == 1 else v).assign(1.0))
        assert (float(v), float(w)) == (10, 10)
