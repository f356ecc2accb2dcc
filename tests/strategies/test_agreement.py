"""What one worker passes and the others do not: all go on with one value, or all hear of it."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import context, inside_worker, parts, rank, replica_ids

pytestmark = pytest.mark.skipif(not inside_worker(), reason="one process has no other workers")


def test_variables_start_from_the_chiefs_value(strategy):
    odd = int(0 not in replica_ids(strategy))
    nd.set_seed(odd)
    with strategy.scope():
        array = nd.Variable(np.full((2, 3), odd + 1.0))
        drawn = nd.Variable(lambda: np.random.default_rng(odd).normal(size=5))
        on_read = nd.Variable(odd + 1, synchronization="on_read", aggregation="sum")
        dtypes = ("bool", "uint8", "float16", "complex64")
        small = [nd.Variable(np.array([odd + 1, odd]).astype(dtype)) for dtype in dtypes]
        assert nd.Variable(np.zeros((0, 2))).shape == (0, 2)
    in_run = strategy.run(lambda: nd.Variable(lambda: rank() + context().rng.random()))
    assert array.numpy().tolist() == [[1.0] * 3] * 2
    assert drawn.numpy().tolist() == np.random.default_rng(0).normal(size=5).tolist()
    assert on_read.numpy() == strategy.num_replicas_in_sync
    assert [variable.numpy().tolist() for variable in small] == [[1, 0]] * len(dtypes)
    nd.set_seed(0)
    drawn_alone = nd.get_strategy().run(lambda: [context().rng.random()])[0]
    assert drawn_alone.values == (float(in_run.numpy()),)


def test_workers_that_create_different_variables_are_all_told(strategy):
    odd = strategy.num_replicas_in_sync - 1 in replica_ids(strategy)
    text = r"worker [1-9] created variable '{}' \({}\) of shape \({}\) and dtype {}, worker 0 "
    with strategy.scope():
        for make, told in (
            (
                lambda: nd.Variable(np.zeros(3 if odd else 2)),
                text.format("Variable", "ON_WRITE, NONE", "3,", "float64")
                + r"created variable 'Variable' \(ON_WRITE, NONE\) of shape \(2,\) and dtype f",
            ),
            (
                lambda: nd.Variable(np.zeros(2, "f4" if odd else "f8")),
                text.format("Variable", "ON_WRITE, NONE", "2,", "float32") + ".*float64",
            ),
            (lambda: nd.Variable(0.0, aggregation="sum" if odd else "mean"), "SUM.* 0 .*MEAN"),
            (
                lambda: nd.Variable(0.0, synchronization="on_read" if odd else "on_write"),
                "ON_READ.* 0 .*ON_WRITE",
            ),
            (lambda: nd.Variable(0.0, name="odd" if odd else "even"), "'odd'.* 0 .*'even'"),
        ):
            with pytest.raises(nd.CollectiveMismatchError, match=told):
                make()
        assert nd.Variable(0.0).name == "Variable"  # No name was taken.


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [([1.0] * 7, ValueError, "component"), ([object()], TypeError, "object")],
)
def test_what_one_worker_may_not_pass_is_an_error_on_all_and_they_go_on(
    strategy, wrong, error, text
):
    good = parts(strategy, float)
    if 0 in replica_ids(strategy):
        passed = nd.PerReplica(wrong * (1 if len(wrong) > 1 else len(good.values)))
    else:
        passed = good
    with pytest.raises(error, match=f"worker 0.*{text}"):
        strategy.reduce("sum", passed)
    size = strategy.num_replicas_in_sync
    assert float(strategy.reduce("sum", good)) == size * (size - 1) / 2
