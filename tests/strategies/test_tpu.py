"""What is special about `TPUStrategy`: devices, traces that fail, seeds, TensorFlow's names."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tf
from tests.contract_rows import tpus
from tests.kinds import context, parts, works

pytest.importorskip("jax")


@pytest.fixture
def two():
    strategy = tpus(2)
    yield strategy
    strategy.close()


def test_devices_are_those_of_jax_and_each_is_named_once():
    with nd.TPUStrategy() as strategy:
        assert list(strategy.devices) == nd.list_devices("tpu")
    with nd.TPUStrategy(["tpu:3", "tpu:1"]) as strategy:
        assert strategy.run(lambda: context().replica_id_in_sync_group).values == (0, 1)
    for names, message in (
        (["tpu:99"], "JAX has 8 device"),
        (["tpu:0", "tpu:0"], "twice"),
        (["cpu:0"], "such as 'tpu:0'"),
        ([], "empty"),
    ):
        with pytest.raises(ValueError, match=message):
            nd.TPUStrategy(names)


def test_uneven_parts_name_what_to_write(two):
    batches = iter(two.distribute_dataset(nd.Dataset.range(7).batch(4)))
    total = two.run(np.sum, args=(next(batches),))
    assert two.reduce("sum", total) == 6
    with pytest.raises(ValueError, match="drop_remainder=True"):
        two.run(np.sum, args=(next(batches),))
    assert works(two)


def test_a_strategy_works_after_a_trace_that_failed(two):
    with two.scope():
        v = nd.Variable(1.0, aggregation="sum")

    def refused():
        v.assign_add(1.0)
        return float(v)

    for step, kind, message in (
        (refused, nd.errors.TracingError, "float"),
        (lambda: two.run(lambda: 1), RuntimeError, "inside a replica"),
        (lambda: 1 / 0, ZeroDivisionError, "division"),
        (lambda: v.assign_add(np.ones(2)), ValueError, "Nothing has changed"),
        (two.close, RuntimeError, "inside a step"),
    ):
        for _ in range(2):
            with pytest.raises(kind, match=message):
                two.run(step)
        assert float(v) == 1
        assert nd.get_strategy().is_default
    two.run(lambda: v.assign_add(1.0))
    assert float(v) == 3


def test_what_is_written_outside_of_steps_is_read_in_them(two):
    with two.scope():
        v = nd.Variable(np.zeros(2), aggregation="sum")
        each = nd.Variable(0.0, synchronization="on_read", aggregation="mean")

    def step():
        v.assign_add(np.ones(2))
        each.assign_add(1.0)
        return v + each

    for number in range(3):
        before = v.numpy()
        v.assign(before * 10 + number)
        each.assign(float(number))
        (first, second) = two.run(step).values
        np.testing.assert_array_equal(first, before * 10 + 2 * number + 3)
        np.testing.assert_array_equal(first, second)
        assert float(each) == number + 1
    assert len(two.compilations) == 1


def test_two_strategies_take_turns_and_do_not_mix(two):
    with tpus(1) as one, one.scope():
        v = nd.Variable(1.0)
        with pytest.raises(RuntimeError, match="Mixing different strategies"):
            two.run(lambda: 1)
    with pytest.raises(RuntimeError, match="made by"):
        two.run(lambda: v + 1)
    with two.scope(), two.scope():
        assert nd.get_strategy() is two
    assert works(two)


def test_replicas_draw_their_own_numbers_the_same_in_every_run_and_after_a_checkpoint(
    two, tmp_path
):
    def draw():
        return context().rng.random()

    def draws(strategy):
        return [float(x) for x in strategy.run(draw).values]

    nd.set_seed(5)
    first = [draws(two) for _ in range(3)]
    assert len({number for step in first for number in step}) == 6
    nd.set_seed(5)
    with tpus(2) as again:
        assert draws(again) == first[0]
        checkpoint = nd.Checkpoint(v=nd.Variable(1.0))
        path = checkpoint.save(tmp_path / "checkpoint")
        for _ in range(2):
            assert [draws(again) for _ in range(2)] == first[1:]
            checkpoint.restore(path)


def test_indexed_rows_leave_a_step_each_once(two):
    def step(indices):
        rows = nd.IndexedSlices(np.ones((3, 2)), indices, (9, 2))
        return context().all_reduce("sum", rows)

    indices = parts(two, [np.array([4, 4, 1]), np.array([8, 4, 1])])
    for rows in two.local_results(two.run(step, args=(indices,))):
        assert rows.indices.tolist() == [1, 4, 8]
        assert rows.values[:, 0].tolist() == [2, 3, 1]
    with pytest.raises(IndexError, match=r"not in \[0, 9\)"):
        two.run(step, args=(np.array([9, 0, 0]),))


def test_a_script_for_tpus_runs_by_tensorflows_names():
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    tf.config.experimental_connect_to_cluster(resolver)
    assert len(tf.tpu.experimental.initialize_tpu_system(resolver)) == 8
    strategy = tf.distribute.TPUStrategy(resolver)
    assert strategy.num_replicas_in_sync == 8
    with strategy.scope():
        v = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def double(x):
        return 2 * x

    @tf.function
    def step():
        return strategy.run(lambda x: double(v * x), args=(np.float32(3),))

    assert strategy.reduce("sum", step()) == 48
    assert double(np.float32(2)) == 4
    assert len(double.compilations) == 1
    strategy.close()
    tf.distribute.experimental.TPUStrategy(resolver).close()
