"""`CrossDeviceOps` reduce and broadcast values outside of strategies, and strategies take them."""

import numpy as np
import pytest

import ndistribute as nd

OPS = [
    nd.ReductionToOneDevice(),
    nd.ReductionToOneDevice(reduce_to_device="cpu:0", accumulation_fn=sum),
    nd.HierarchicalCopyAllReduce(num_packs=2),
    nd.NcclAllReduce(num_packs=0),
    nd.RingAllReduce(),
]
DEVICES = ["cpu:0", "cpu:1"]


@pytest.mark.parametrize("ops", OPS)
def test_a_reduction_is_on_every_destination(ops):
    value = nd.PerReplica([np.float32([1, 2]), np.float32([3, 6])])
    for op, expected in (("sum", [4, 8]), (nd.ReduceOp.MEAN, [2, 4]), ("max", [3, 6])):
        for destinations, count in ((DEVICES, 2), (value, 2), ("/cpu:1", 1)):
            reduced = ops.reduce(op, value, destinations)
            assert isinstance(reduced, nd.Mirrored)
            assert [part.tolist() for part in reduced.values] == [expected] * count
            assert {part.dtype for part in reduced.values} == {np.dtype(np.float32)}
    pairs = [(value, DEVICES), (nd.PerReplica([1.0, 2.0]), "cpu:0")]
    first, second = ops.batch_reduce(nd.ReduceOp.SUM, pairs)
    assert (len(first.values), float(second)) == (2, 3.0)
    with nd.MirroredStrategy(DEVICES) as strategy:
        variable = nd.Variable(0.0)
        assert [float(x) for x in ops.reduce("mean", variable, variable).values] == [0.0, 0.0]
        assert strategy.num_replicas_in_sync == 2


@pytest.mark.parametrize("ops", OPS)
def test_rows_are_added_and_copied_too(ops):
    parts = [nd.IndexedSlices(np.ones((1, 2)), np.array([row]), (4, 2)) for row in (1, 1)]
    for op, row in (("sum", [2, 2]), ("mean", [1, 1])):
        for part in ops.reduce(op, nd.PerReplica(parts), DEVICES).values:
            assert (part.indices.tolist(), part.values.tolist()) == ([1], [row])
    rows, same = ops.broadcast(parts[0], DEVICES).values
    assert rows.values.tolist() == same.values.tolist() == [[1, 1]]
    assert [part.tolist() for part in ops.broadcast([1, 2], DEVICES).values] == [[1, 2]] * 2


def test_a_strategy_refuses_what_its_replicas_would_not_call():
    with nd.MirroredStrategy(DEVICES, nd.ReductionToOneDevice("cpu:1")) as strategy:
        total = strategy.run(lambda: nd.get_replica_context().all_reduce("sum", 2.0))
        assert total.values == (4.0, 4.0)
    with pytest.raises(ValueError, match="has an accumulation_fn"):
        nd.MirroredStrategy(DEVICES, nd.ReductionToOneDevice(accumulation_fn=sum))
    with pytest.raises(ValueError, match="NcclAllReduce needs num_packs >= 0, got -1"):
        nd.NcclAllReduce(num_packs=-1)
