"""What TensorFlow's programs do with a strategy gives what it gives there."""

import functools

import numpy as np
import pytest

from ndistribute.compat import tf

STRATEGIES = {
    "default": tf.distribute.get_strategy,
    "one": lambda: tf.distribute.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    made = STRATEGIES[request.param]()
    yield made
    made.close()


def rows(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([3]))


def replica_id():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def test_results_are_tensors(strategy):
    count = strategy.num_replicas_in_sync
    dataset = tf.data.Dataset.from_tensor_slices([5.0, 6.0]).batch(2)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    parts = strategy.experimental_local_results(batch)
    assert [x for part in parts for x in part.numpy().tolist()] == [5.0, 6.0]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return tape.gradient(y, x)

    slopes = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
    assert [x for slope in slopes for x in slope.numpy().tolist()] == [10.0, 12.0]
    assert strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), None).numpy() == count
    inputs = strategy.experimental_distribute_datasets_from_function(lambda _: dataset.unbatch())
    assert strategy.experimental_local_results(next(iter(inputs)))[0].numpy() == 5.0


def test_what_libraries_use_of_a_strategy(strategy):
    extended, count = strategy.extended, strategy.num_replicas_in_sync
    assert extended.worker_devices[0] == "/job:localhost/replica:0/task:0/device:CPU:0"
    with strategy.scope():
        v = tf.Variable(1.0)
    one_each = extended.call_for_each_replica(lambda x: x * v, args=(tf.constant(2.0),))
    total = extended.reduce_to("SUM", one_each, destinations=v)
    assert extended.batch_reduce_to("SUM", [(one_each, v), (one_each, v)]) == [total, total]
    assert extended.update(v, lambda v, x: v.assign_add(x), args=(total,), group=False) is v
    assert extended.read_var(v).numpy() == 1 + 2 * count


def test_a_sparse_mean_is_divided_by_the_number_of_replicas():
    with STRATEGIES["mirrored"]() as strategy:
        each = strategy.experimental_distribute_values_from_function(
            lambda context: rows([2.0, 4.0], [context.replica_id_in_sync_group, 2])
        )
        for ops in (tf.distribute.ReductionToOneDevice(), tf.distribute.NcclAllReduce()):
            mean = ops.reduce("MEAN", each, each).values[1]
            assert tf.convert_to_tensor(mean).numpy().tolist() == [1.0, 1.0, 4.0]


def test_rows_are_changed_once_for_all_replicas():
    with STRATEGIES["mirrored"]() as strategy, strategy.scope():
        mean = tf.Variable([2.0, 1.0, 1.0], aggregation=tf.VariableAggregation.MEAN)
        total = tf.Variable([1, 6, 1], aggregation=tf.VariableAggregation.SUM)
        first = tf.Variable([0.0, 2.0, 0.0], aggregation="only_first_replica")
        strategy.run(lambda: mean.scatter_mul(rows([replica_id() + 2.0], [replica_id()])))
        strategy.run(lambda: total.scatter_div(rows([replica_id() + 2], [replica_id()])))
        strategy.run(lambda: first.scatter_min(rows([replica_id() + 1.0], [1])))
        with pytest.raises(ValueError, match=r"index -1 is not in \[0, 3\)"):
            first.scatter_max(rows([5.0], [-1]))
        first.scatter_max(rows([5.0], [0]))
        with pytest.raises(NotImplementedError, match="'sum' does not combine"):
            strategy.run(lambda: total.scatter_max(rows([1], [0])))
    assert mean.numpy().tolist() == [2.0, 1.5, 1.0]
    assert total.numpy().tolist() == [0, 2, 1]
    assert first.numpy().tolist() == [5.0, 1.0, 0.0]


def test_assign_takes_its_arguments_in_tensorflows_order():
    v = tf.Variable(0.0, name="v")
    assert v.assign(1.0, True, "assign", False) is None
    assert v.assign_add(1.0, True, "add") is v
    assert (v.numpy(), v.name) == (2.0, "v:0")
    with pytest.raises(ValueError, match="longer"):
        v.assign(1.0, True, "assign", False, 5)


def test_replicas_that_make_a_variable_get_one_of_one_kind():
    with STRATEGIES["mirrored"]() as strategy:
        v = strategy.run(lambda: tf.Variable(1.0, name="v"))
        assert v.name == "v:0"
        averages = tf.train.ExponentialMovingAverage(0.5)
        with strategy.scope():
            w = tf.Variable([1.0], aggregation=tf.VariableAggregation.MEAN)

        def step():
            averages.apply([w])
            w.assign_sub([0.5])
            averages.apply([w])
            return averages.average(w)

        assert strategy.experimental_local_results(strategy.run(step))[1].numpy() == [0.75]


def test_checkpoints_of_plain_variables_work_in_a_scope(strategy, tmp_path):
    v = tf.Variable(3.0)
    with strategy.scope():
        path = tf.train.Checkpoint(v=v).save(tmp_path / "c")
        v.assign(0.0)
        w = tf.Variable(1.0)
        tf.train.Checkpoint(v=v).restore(path)
        later = tf.train.Checkpoint()
        later.restore(path)
        later.other, later.v = tf.Variable(2.0), w  # Only `v` is in the file.
    assert (v.numpy(), w.numpy(), later.other.numpy()) == (3.0, 3.0, 2.0)


def test_a_generator_is_part_of_a_checkpoint(tmp_path):
    first, second = map(tf.random.Generator.from_seed, (1, 2))
    path = tf.train.Checkpoint(g=first).write(tmp_path / "c")
    numbers = first.uniform_full_int([3], tf.int32).numpy()
    tf.train.Checkpoint(g=second).restore(path)
    np.testing.assert_array_equal(second.uniform_full_int([3], dtype=tf.int32), numbers)


def test_small_names_of_distribution():
    tf.debugging.Assert(tf.constant(True), [1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="seven"):
        tf.Assert(tf.constant([True, False]), ["seven"])
    with tf.Graph().as_default():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN, name="v")
        assert v.name == "v:0"
    with STRATEGIES["mirrored"]() as strategy, strategy.scope():
        v, optimizer = tf.Variable(1.0), tf.keras.optimizers.SGD(0.25)

        def step():
            pairs = [(tf.constant(1.0), v)]
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

        strategy.run(step)
        assert v.numpy() == 0.75


def test_iterators_begin_anew_and_give_a_step_its_input(strategy):
    count = strategy.num_replicas_in_sync
    calls = strategy.make_input_fn_iterator(lambda _: functools.partial(next, iter([1.0, 2.0])))
    results = strategy.experimental_local_results(strategy.experimental_run(lambda x: x, calls))
    assert [float(x) for x in results] == [1.0, 2.0][:count]
    iterator = strategy.make_dataset_iterator(tf.data.Dataset.range(2).batch(2))
    for _ in range(2):
        assert strategy.reduce("SUM", iterator.get_next(), axis=0).numpy() == 1
        with pytest.raises(tf.errors.OutOfRangeError):
            iterator.get_next()
        iterator.initialize()
    data = strategy.experimental_make_numpy_dataset(np.ones(3, np.float32))
    assert data.reduce(0.0, lambda total, x: total + x).numpy() == 3.0

    def step(context, x):
        loss = strategy.run(tf.reduce_sum, args=(x,))
        context.set_last_step_output("loss", loss, "SUM")
        context.set_non_tensor_output("name", "step")

    extended = strategy.extended
    context = extended.experimental_run_steps_on_iterator(step, iterator)
    assert context.last_step_outputs["loss"].numpy() == 1
    assert context.non_tensor_outputs == {"name": "step"}


def test_update_calls_a_function_for_each_value_and_else_once():
    with STRATEGIES["mirrored"]() as strategy:
        extended, v = strategy.extended, tf.Variable(1.0)
        own = tf.Variable(0.0, synchronization="on_read", aggregation="sum")
        parts = strategy.experimental_distribute_values_from_function(
            lambda context: 1.0 + context.replica_id_in_sync_group
        )
        extended.update(own, lambda v, x: v.assign(x), args=(parts,))
        assert [float(x) for x in own.values] == [1.0, 2.0]
        calls = []
        extended.update_non_slot(extended.non_slot_devices([v]), calls.append, args=(1,))
        extended.update(v, lambda v, x: v.assign_add(x), args=(extended.broadcast_to(2.0, v),))
        assert (calls, v.numpy()) == ([1], 3.0)
        with extended.colocate_vars_with(v):
            assert extended.variable_created_in_scope(tf.Variable(2.0))
        assert extended.value_container(v) is v
    outside = tf.Variable(1.0)
    with pytest.raises(ValueError, match="is not a variable of"):
        extended.colocate_vars_with(outside).__enter__()
    with pytest.raises(ValueError, match="pass the cluster to the constructor"):
        strategy.configure(task_type="worker")


def test_the_default_strategy_is_the_same_everywhere():
    context, default = tf.distribute.get_replica_context(), tf.distribute.get_strategy()
    assert context.strategy is default
    assert context.merge_call(lambda strategy, x: strategy is default and x, args=(2.0,)) == 2.0
    assert default.unwrap(tf.constant(1.0))[0] == 1.0
    elements = default.experimental_distribute_dataset(tf.data.Dataset.range(2))
    assert [int(x.numpy()) for x in elements] == [0, 1]
    with (
        STRATEGIES["mirrored"]() as strategy,
        pytest.raises(RuntimeError, match="inside a replica"),
    ):
        strategy.run(lambda: strategy.experimental_distribute_values_from_function(print))


def test_replicas_rows_are_refused_where_they_do_not_combine():
    with STRATEGIES["mirrored"]() as strategy:
        table = tf.Variable([[1.0], [2.0], [3.0]], aggregation="sum")
        own = tf.Variable([1.0, 1.0], synchronization="on_read", aggregation="sum")
        delta = tf.IndexedSlices([[5.0]], [1])
        with pytest.raises(NotImplementedError, match="scatter_update of variable"):
            strategy.run(table.scatter_update, args=(delta,))
        with pytest.raises(NotImplementedError, match="scatter_add of variable"):
            strategy.run(own.scatter_add, args=(tf.IndexedSlices([5.0], [1]),))
        with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
            strategy.gather(rows([1.0], [1]), axis=0)
        with pytest.raises(NotImplementedError, match="all_gather does not support"):
            strategy.run(
                lambda: tf.distribute.get_replica_context().all_gather(rows([1.0], [1]), 0)
            )
        table.scatter_update(delta)
    assert table.sparse_read([1]).numpy().tolist() == [[5.0]]
    assert table.gather_nd([[0, 0], [2, 0]]).numpy().tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match="pass dense_shape"):
        tf.convert_to_tensor(delta)


def test_an_empty_part_has_a_maximum_and_one_replica_writes_summaries(tmp_path):
    assert tf.reduce_max(tf.zeros([0])).numpy() == -np.inf
    assert tf.reduce_min(tf.zeros([0], tf.int32)).numpy() == np.iinfo(np.int32).max
    writer = tf.summary.create_file_writer(str(tmp_path))

    def step():
        with writer.as_default(step=0):
            return tf.summary.scalar("loss", 1.0)

    with STRATEGIES["mirrored"]() as strategy:
        assert strategy.run(step).values == (True, False)
    writer.close()
