"""What TensorFlow's programs do with a strategy gives what it gives there."""

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
