"""Input, devices, resolvers and checkpoints by TensorFlow's names, with TensorFlow's arguments."""

import collections

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tf


def test_datasets_keep_their_class_and_elements_are_tensors(tmp_path):
    (tmp_path / "a.txt").write_text("1\n2\n")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    numbers = tf.data.Dataset.range(4, name="numbers")
    datasets = [
        numbers.window(2).flat_map(lambda window: window.batch(2)),
        numbers.interleave(tf.data.Dataset.range, cycle_length=2, name="turns"),
        numbers.enumerate().map(map_func=lambda i, x: x + i, deterministic=False),
        numbers.padded_batch(batch_size=2, padded_shapes=[]),
        tf.data.Dataset.sample_from_datasets([numbers, numbers], weights=[0.5, 0.5]),
        tf.data.Dataset.zip(numbers, numbers).map(lambda x, y: x + y),
        tf.data.Dataset.from_generator(lambda: iter([1]), output_types=tf.int32, output_shapes=()),
        tf.data.Dataset.list_files(str(tmp_path / "*.txt")),
        tf.data.TextLineDataset(str(tmp_path / "a.txt")),
    ]
    for dataset in datasets:
        assert isinstance(dataset, tf.data.Dataset)
        assert next(iter(dataset)).numpy() is not None
    features = next(iter(tf.data.experimental.make_csv_dataset(str(tmp_path / "a.csv"), 1)))
    assert features["x"].numpy().tolist() == [1]
    assert numbers.cardinality().numpy() == len(numbers) == 4
    assert numbers.reduce(np.int64(0), lambda state, x: state + x).numpy() == 6
    assert numbers.batch(2).element_spec == tf.TensorSpec(shape=(None,), dtype=tf.int64)
    assert [type(x) for x in numbers.as_numpy_iterator()] == [np.int64] * 4


def test_an_iterator_of_a_dataset_is_part_of_a_checkpoint(tmp_path):
    dataset = tf.data.Dataset.range(9).shuffle(9)
    iterator = iter(dataset)
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    next(iterator)
    path = checkpoint.save(tmp_path / "run")
    left = [int(x) for x in iterator]
    checkpoint.restore(path).assert_consumed()
    assert [int(x.numpy()) for x in iterator] == left
    assert tf.train.list_variables(path) == []


def test_logical_cpus_are_the_devices_of_a_strategy():
    (cpu,) = tf.config.list_physical_devices("CPU")
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=1)
    with pytest.raises(ValueError, match="limits have no effect"):
        tf.config.set_logical_device_configuration(cpu, [limit])
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        logical = tf.config.list_logical_devices("CPU")
        assert [device.name for device in logical] == ["/device:CPU:0", "/device:CPU:1"]
        with tf.distribute.MirroredStrategy(logical) as strategy:
            assert strategy.num_replicas_in_sync == 2
        with tf.distribute.CentralStorageStrategy(["cpu:0"]) as strategy:
            assert strategy.num_replicas_in_sync == 1
    finally:
        nd.set_logical_cpus(1)
    with pytest.raises(ValueError, match="number of logical CPUs must be 1 or more, got 0"):
        nd.set_logical_cpus(0)


def test_names_of_distribution_have_tensorflows_arguments(tmp_path):
    cluster = tf.train.ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
    resolvers = tf.distribute.cluster_resolver
    simple = resolvers.SimpleClusterResolver(cluster, rpc_layer="grpc")
    union = resolvers.UnionResolver(simple)
    assert union.master("worker", 0) == "grpc://a:1"
    assert union.task_type is None
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_WORKER,
    )
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        dataset = tf.data.Dataset.range(4).batch(2, drop_remainder=True)
        dataset = strategy.experimental_distribute_dataset(dataset, options)
        iterator = iter(dataset)
        assert isinstance(iterator, tf.distribute.DistributedIterator)
        assert iterator.element_spec == dataset.element_spec
        run = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)
        assert strategy.run(lambda x: x, (next(iterator),), options=run).values[1] == 1
    config = tf.distribute.experimental.TerminationConfig(grace_period=1)
    handler = tf.distribute.experimental.PreemptionCheckpointHandler(
        simple, tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path, config
    )
    assert handler.manager.directory == tmp_path
    with pytest.raises(NotImplementedError, match="is told of its preemption by SIGTERM"):
        tf.distribute.experimental.PreemptionWatcher()


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_a_dataset_creator_makes_the_data_of_fit_and_evaluate(devices):
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat()
    create = tf.keras.utils.experimental.DatasetCreator(
        lambda context: dataset.batch(context.get_per_replica_batch_size(8))
    )
    results = []
    for names, data in ((None, dataset.batch(8)), (devices, create)):
        with tf.distribute.MirroredStrategy(names) as strategy, strategy.scope():
            model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
            model.compile("sgd", "mse")
            history = model.fit(data, epochs=2, steps_per_epoch=2, verbose=0)
            results += [history.history["loss"], [model.evaluate(data, steps=2, verbose=0)]]
    assert results[2:] == [pytest.approx(values, rel=1e-5) for values in results[:2]]
    with pytest.raises(TypeError, match="dataset_fn must be a function"):
        tf.keras.utils.experimental.DatasetCreator(dataset)


def test_the_first_argument_of_an_experimental_strategy_is_the_communication():
    kind = tf.distribute.experimental.MultiWorkerMirroredStrategy
    with kind(tf.distribute.experimental.CollectiveCommunication.RING) as strategy:
        assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    with kind(cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver()) as other:
        assert other.num_replicas_in_sync == 1
    with pytest.raises(ValueError, match="implementation"):
        kind("telegraph")


@pytest.mark.parametrize("name", ["make_dataset_iterator", "make_input_fn_iterator"])
def test_what_makes_operations_for_each_replica_says_what_to_write(name):
    with tf.Graph().as_default(), tf.distribute.MirroredStrategy() as strategy:
        refused = pytest.raises(NotImplementedError, match="experimental_distribute_dataset")
        with refused:
            data = tf.data.Dataset.range(2).batch(2)
            getattr(strategy, name)(data if "dataset" in name else lambda _: data)
        with refused:
            strategy.experimental_run(lambda: tf.constant(1.0))


def test_functions_for_apply_do_what_methods_do():
    experimental = tf.data.experimental
    numbers = tf.data.Dataset.range(6)
    assert [x.numpy() for x in experimental.Counter(3).take(2)] == [3, 4]
    scanned = numbers.scan(tf.constant(0), lambda state, x: (state + tf.cast(x, tf.int32), x))
    assert scanned.take_while(lambda x: x.numpy() < 3).as_numpy_iterator().get_next() == 0
    assert list(numbers.flat_map(lambda x: tf.data.Dataset.range(x.numpy() % 2))) == [0, 0, 0]
    options = tf.data.Options()
    options.autotune.enabled = options.experimental_slack = True
    assert len(numbers.with_options(options)) == 6
    words = tf.data.Dataset.from_tensor_slices(["a", "bc"])
    assert list(words.as_numpy_iterator()) == [b"a", b"bc"]
    Pair = collections.namedtuple("Pair", "x y")
    (pair,) = tf.data.Dataset.from_tensor_slices(Pair([1], [2]))
    assert (pair.x.numpy(), pair.y.numpy()) == (1, 2)
