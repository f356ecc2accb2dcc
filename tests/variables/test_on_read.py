"""ON_READ variables: each replica its own component; reading across replicas combines them."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import each, host_memory, meet, mine, rank

AGGREGATIONS = ["none", "sum", "mean", "only_first_replica"]


def make(strategy, initial=0.0, aggregation="sum", **kwargs):
    with strategy.scope():
        return nd.Variable(initial, synchronization="on_read", aggregation=aggregation, **kwargs)


def components(strategy, v):
    return [np.asarray(part).tolist() for part in strategy.local_results(v)]


def test_a_replica_reads_and_writes_its_own_component(strategy):
    def step(v):
        v.assign_add(rank() + 1.0)
        first = v + 0
        v.assign_sub(1.0)
        v.assign(v * 2)
        return first, v + 0

    for aggregation in AGGREGATIONS:
        v = make(strategy, 10.0, aggregation)
        assert components(strategy, v) == [*each(strategy, 10.0)]
        first, second = strategy.run(step, (v,))
        assert first.values == mine(strategy, lambda i: 11.0 + i)
        assert second.values == mine(strategy, lambda i: 2 * (10.0 + i))
        assert components(strategy, v) == [*second.values]


@pytest.mark.parametrize(
    ("aggregation", "combine"), [("sum", np.sum), ("mean", np.mean), ("only_first_replica", min)]
)
@host_memory("no array of a GPU is read-only")
def test_a_cross_replica_read_combines(strategy, aggregation, combine):
    for dtype in ("float64", "float16", "int32")[: 2 if aggregation == "mean" else 3]:
        v = make(strategy, np.zeros(2, dtype), aggregation)
        strategy.run(lambda v=v, dtype=dtype: v.assign((np.ones(2) * (rank() + 1)).astype(dtype)))
        wanted = combine(range(1, strategy.num_replicas_in_sync + 1))
        for read in (v.numpy, v.read_value, lambda v=v: v + 0, lambda v=v: np.asarray(v)):
            assert read().dtype == dtype
            with strategy.scope():
                assert read().tolist() == [wanted, wanted]
        assert not v.read_value().flags.writeable


def test_without_an_aggregation_a_cross_replica_read_is_refused(several):
    v = make(several, 1.0, "none")
    for read in (v.numpy, v.read_value, lambda: v + 1, lambda: float(v)):
        with pytest.raises(ValueError, match="aggregation"):
            read()
    assert "Variable" in repr(v)
    assert components(several, v) == [*each(several, 1.0)]


def test_with_sum_an_integer_goes_to_the_first_and_an_assigned_float_is_shared_out(strategy):
    v = make(strategy, np.array(5, "uint8"))
    v.assign(7)
    assert components(strategy, v) == [*mine(strategy, lambda i: 0 if i else 7)]
    assert int(v) == 7
    for dtype in ("float64", "complex64"):
        v = make(strategy, np.array(5, dtype))
        v.assign(12.0)
        assert components(strategy, v) == [*each(strategy, 12.0 / strategy.num_replicas_in_sync)]
        assert v.numpy() == 12
        assert v.dtype == v.numpy().dtype == dtype
    for dtype in ("float64", "int64"):
        v = make(strategy, np.array(1, dtype))
        v.assign_add(5).assign_sub(2)
        assert components(strategy, v) == [*mine(strategy, lambda i: 1 if i else 4)]
        total = v.numpy()
        assert v.assign(total).numpy() == total == strategy.num_replicas_in_sync + 3


def test_otherwise_values_go_to_each(strategy):
    for aggregation in ("none", "mean", "only_first_replica"):
        v = make(strategy, 5.0, aggregation)
        v.assign(12.0)
        assert components(strategy, v) == [*each(strategy, 12.0)]
        v.assign_add(5.0).assign_sub(2.0)
        assert components(strategy, v) == [*each(strategy, 15.0)]


def test_reduce_and_gather_see_the_components(strategy):
    v = make(strategy, np.zeros(1), "none")
    strategy.run(lambda: v.assign(np.reshape(rank() + 1.0, (1,))))
    size = strategy.num_replicas_in_sync
    assert strategy.reduce("max", v).tolist() == [size]
    assert strategy.reduce("mean", v, axis=0) == (size + 1) / 2
    assert strategy.gather(v, axis=0).tolist() == list(range(1, size + 1))


def test_replicas_need_not_write_alike_and_what_was_read_stays(several):
    v = make(several, np.ones(2))
    before = v.read_value()

    def step():
        for i in range(several.num_replicas_in_sync):
            v.assign_add(np.where(i < rank(), np.ones(2), 0))
        return meet()

    size = several.num_replicas_in_sync
    assert several.run(step).values[0] == size
    assert components(several, v) == [*mine(several, lambda i: [1.0 + i] * 2)]
    assert before.tolist() == [size] * 2


def test_it_is_trained_only_if_that_is_said(strategy):
    with strategy.scope():
        variables = [
            nd.Variable(1.0, trainable, synchronization="on_read", aggregation="sum")
            for trainable in (None, True, False)
        ]
        assert nd.Variable(1.0).trainable
    assert [variable.trainable for variable in variables] == [False, True, False]
