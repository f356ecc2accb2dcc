"""What is special about `TPUStrategy`: devices, traces that fail, seeds, TensorFlow's names."""

from __future__ import annotations

import functools
import os
import signal
import threading

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.variables.mirrored import sharded_variable
from tests.contract_rows import TPUS, tpus
from tests.kinds import context, in_thread, parts, struck_inside, works
from tests.strategies.test_reduce import OPS

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
    with pytest.raises(RuntimeError, match="made it"):
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


@pytest.mark.parametrize("kind", ["tpu-1", "tpu-2"])
def test_an_interrupt_in_a_step_leaves_it_made_as_a_whole_or_not_at_all(kind):
    def step():
        count, x = nd.while_loop(
            lambda k, x: k < 3_000_000,
            lambda k, x: (k + 1, np.sin(x + k)),
            (np.float64(0), np.float64(0)),
        )
        optimizer.apply_gradients([(-np.ones(2) * (x <= 1) / size, v)])
        return count

    strategy = TPUS[kind]()
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        v, optimizer = nd.Variable(np.zeros(2)), nd.optimizers.SGD(1.0)
    strategy.run(step)
    interrupt = functools.partial(os.kill, os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), struck_inside(interrupt, is_running):
        strategy.run(step)
    assert v.numpy().tolist() in ([1, 1], [2, 2])
    assert int(optimizer.iterations) == v.numpy()[0]
    strategy.run(step)
    assert int(optimizer.iterations) == v.numpy()[0]
    strategy.close()


def test_a_value_that_a_failed_step_has_taken_can_be_restored(two):
    with two.scope():
        v, each = nd.Variable(np.ones(2)), nd.Variable(0.0, synchronization="on_read")
    two.run(lambda: (nd.optimizers.SGD(1.0).apply_gradients([(np.ones(2), v)]), each.assign(2.0)))
    for variable in (v, each):
        variable._cells[0].group.array.delete()  # As a program does that breaks off.
        with pytest.raises(nd.errors.DistributeError, match="restore the last checkpoint"):
            variable.values  # noqa: B018
        with pytest.raises(nd.errors.DistributeError, match="restore the last checkpoint"):
            two.run(lambda: variable + 0)  # noqa: B023
        variable.assign(np.full(variable.shape, 5.0))
        assert np.all(variable.values == np.full(variable.shape, 5.0))
    assert np.all(two.run(lambda: v + each).values[0] == 10)


def test_another_thread_reads_a_variable_as_it_is_between_steps(two):
    with two.scope():
        v = nd.Variable(np.zeros((300, 300)), aggregation="mean")
    reads, over = [], threading.Event()

    def read():
        while not over.is_set():
            value = v.numpy()
            reads.append((value.min(), value.max()))

    with in_thread(read) as reader:
        while len(reads) < 20 and not reader.done():
            two.run(lambda: v.assign_add(np.ones((300, 300))))
        over.set()
    reader.result()
    assert all(low == high for low, high in reads)


def is_running(code):
    """Say whether code is that which runs a program."""
    return code.co_name == "run" and code.co_filename.endswith("program.py")


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


@pytest.mark.parametrize("kind", TPUS)
def test_every_kind_of_variable_and_collective_gives_what_numpy_gives(kind):
    strategy = TPUS[kind]()
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        kinds = ("sum", "mean", "only_first_replica")
        mirrored = {how: nd.Variable(np.zeros(2), aggregation=how) for how in kinds}
        on_read = {
            how: nd.Variable(np.zeros(2), synchronization="on_read", aggregation=how)
            for how in kinds
        }
        cut = sharded_variable(np.arange(16.0).reshape(8, 2), axis=0)
    optimizer = nd.optimizers.SGD(1.0)

    def step(x):
        for how in kinds:
            mirrored[how].assign_add(x)
            on_read[how].assign_add(x)
        with nd.GradientTape() as tape:
            loss = np.sum(cut * cut) / 2
        optimizer.apply_gradients([(0.5 * tape.gradient(loss, cut), cut)])
        replica = context()
        reduced = {op: replica.all_reduce(op, x) for op in OPS}
        return reduced, replica.all_gather(x, 0), replica.all_gather(x[None], 1)

    table = np.random.default_rng(0).normal(size=(size, 2)) + 2
    for _ in range(2):
        results = strategy.run(step, args=(parts(strategy, table),))
    for reduced, joined, beside in strategy.local_results(results):
        for op, combine in OPS.items():
            np.testing.assert_allclose(reduced[op], combine(table, axis=0), rtol=1e-12)
        np.testing.assert_array_equal(joined, table.ravel())
        np.testing.assert_array_equal(beside, table.reshape(1, -1))
    wanted = {"sum": table.sum(0), "mean": table.mean(0), "only_first_replica": table[0]}
    for how in kinds:
        np.testing.assert_allclose(mirrored[how], 2 * wanted[how], rtol=1e-12)
        np.testing.assert_allclose(on_read[how], 2 * wanted[how], rtol=1e-12)
    np.testing.assert_allclose(cut, np.arange(16.0).reshape(8, 2) / 4, rtol=1e-12)
    assert strategy.reduce("sum", results[0]["SUM"]).tolist() == pytest.approx(size * table.sum(0))
    strategy.close()


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((4, 6, 6, 3), np.s_[:, 0::2, 1::2]),
        ((7, 5), np.s_[1:6:3]),
        ((9,), np.s_[::4]),
        ((9,), np.s_[8::-2]),
        ((4, 4), np.s_[0:3:2, 1:2:2]),
        ((4, 4), np.s_[3:3:2]),
    ],
)
def test_writes_to_elements_with_a_step_between_them_are_those_of_numpy(shape, index):
    def written(x, values):
        y = x * 1
        y[index] = values
        part = y[index]
        part *= 2
        return y

    x = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    for values in (-x[index], np.float64(0.5)):
        assert np.array_equal(written(x, values), nd.function(written)(x, values))


def test_a_step_that_closes_over_other_arrays_each_time_is_warned_of_once(two, caplog):
    for k in range(9):
        array = np.full(2, float(k))
        assert two.run(lambda: array.sum() * np.float32(1)).values[0] == 2 * k  # noqa: B023
    assert caplog.text.count("compilation 8: each new shape of an array") == 1
