"""Names of TensorFlow lead to this package, and what differs from it is what TensorFlow does."""

import functools
import importlib
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tables, tf, tf1
from ndistribute.compat.tf import keras
from ndistribute.compat.tf.keras import layers
from ndistribute.optimizers.algorithms import SGDRule
from tests.compat import name_stubs, names_table

rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("path", "name", "hint"),
    [
        ("", "reduce_men", "reduce_mean"),
        ("", "contant", "constant"),
        ("nn", "reduce_mean", "Use tf.reduce_mean."),
        ("nn", "sofmax", "softmax"),
        ("math", "redcue_std", "reduce_std"),
        ("", "Dense", "Use tf.keras.layers.Dense."),
        ("", "Session", "Use tf.compat.v1.Session."),
        ("keras.layers", "Conv9D", "lists the names"),
        ("keras", "Dense", "Use tf.keras.layers.Dense."),
        ("keras.layers", "maxpool2d", "MaxPool2D"),
        ("keras.optimizers", "Madam", "lists the names"),
        ("keras.optimizers", "Nadm", "Nadam"),
        ("keras.losses", "MeanSquareError", "MeanSquaredError"),
        ("keras.losses.Reduction", "SUM_OVER_BATCHSIZE", "SUM_OVER_BATCH_SIZE"),
        ("keras.callbacks", "ModelCheckpoints", "ModelCheckpoint"),
        ("distribute", "TPUStrategies", "TPUStrategy"),
        ("distribute.experimental", "MirorredStrategy", "MirroredStrategy"),
        ("data", "Datasets", "Dataset"),
        ("train", "CheckpointManger", "CheckpointManager"),
        ("", "QZX", r"dir\(tf\) lists the names"),
    ],
)
def test_a_missing_name_says_so_and_names_the_nearest(path: str, name: str, hint: str) -> None:
    namespace = tf
    for part in path.split(".") if path else ():
        namespace = getattr(namespace, part)
    with pytest.raises(AttributeError, match=rf"tf.*\.{name} does not exist .*{hint}"):
        getattr(namespace, name)


def test_every_name_that_a_namespace_lists_exists() -> None:
    modules = [one for path, one in sys.modules.items() if path.startswith(tf.__name__)]
    assert len(modules) > 30
    for module in modules:
        for name in dir(module):
            getattr(module, name)
    assert "np" not in dir(tf)
    assert not hasattr(tf, "np")


def test_names_of_the_page_for_users_of_tensorflow_exist() -> None:
    page = names_table.PAGE.with_name("from-tensorflow.md").read_text()
    paths = set(re.findall(r"\btf\.(\w+(?:\.\w+)*)", page)) - {"reduce_sums"}
    assert len(paths) > 35
    for path in paths:
        functools.reduce(getattr, path.split("."), tf1)


def test_the_table_of_names_is_that_of_today() -> None:
    """Write it by ``python -m tests.compat.names_table``."""
    page = names_table.PAGE.read_text()
    assert names_table.written(page) == page


def test_the_stubs_have_the_names_of_today() -> None:
    """Write them by ``python -m tests.compat.names_table``."""
    known = name_stubs.stubs()
    written = {*name_stubs.FOLDER.glob("tf*/**/*.pyi")}
    assert {name_stubs.FOLDER / file for file in known} == written
    for file, text in known.items():
        assert (name_stubs.FOLDER / file).read_text() == text


@pytest.mark.parametrize("path", sorted(tables.INSTEAD))
def test_a_missing_name_of_the_table_says_what_to_use_instead(path: str) -> None:
    name = ".".join(path.split(".")[: 2 if path.startswith("contrib") else None])
    root = tf.compat.v1 if path.startswith("contrib") else tf
    with pytest.raises(AttributeError, match=re.escape(f"Use {tables.INSTEAD[path]}.")):
        functools.reduce(getattr, name.split("."), root)
    for root, names in re.findall(r"\b(tf|nd|Dataset)\.([\w.]*\w)", tables.INSTEAD[path]):
        functools.reduce(getattr, names.split("."), {"tf": tf, "nd": nd}.get(root, nd.Dataset))


@pytest.mark.parametrize("path", sorted(names_table.DIFFERS))
def test_a_name_that_differs_exists(path: str) -> None:
    assert functools.reduce(getattr, path.split("."), tf) is not None


def test_adapted_names_are_pickled_by_their_path() -> None:
    adapted = tf.math.add, tf.reduce_sum, tf.distribute.MirroredStrategy, keras.optimizers.Adam
    for name in (*adapted, tf.constant, tf1.constant, tf.Variable, tf1.Variable, tf, tf1.keras):
        assert pickle.loads(pickle.dumps(name)) is name
    tensor = pickle.loads(pickle.dumps(tf.constant([1.0])))
    assert isinstance(tensor, tf.Tensor)


def test_namespaces_are_imported_like_modules() -> None:
    assert keras is tf.keras
    assert layers.MaxPooling2D is layers.MaxPool2D
    assert issubclass(layers.MaxPool2D, nd.layers.MaxPool2D)
    assert issubclass(layers.MaxPool2D, layers.Layer)
    assert issubclass(layers.AveragePooling2D, nd.layers.AveragePool2D)
    assert issubclass(layers.GlobalAveragePooling2D, nd.layers.GlobalAveragePool2D)
    assert importlib.import_module("ndistribute.compat.tf.keras.losses") is keras.losses
    assert tf.distribute.experimental.MirroredStrategy is tf.distribute.MirroredStrategy


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: tf.constant([1.0, 2.0]), np.float32([1, 2])),
        (lambda: tf.constant([1, 2]), np.int32([1, 2])),
        (lambda: tf.constant(3, shape=(2,)), np.int32([3, 3])),
        (lambda: tf.constant(np.float64(2)), np.float64(2)),
        (lambda: tf.cast([1.7, 2.2], tf.int32), np.int32([1, 2])),
        (lambda: tf.cast(True, "float32"), np.float32(1)),
        (lambda: tf.reduce_mean([[1.0, 3.0], [5.0, 7.0]], axis=1), np.float32([2, 6])),
        (lambda: tf.reduce_max([[1, 2]], axis=[0, 1], keepdims=True), np.int32([[2]])),
        (lambda: tf.math.reduce_std([1.0, 3.0], name="spread"), np.float32(1)),
        (lambda: tf.argmax([[1, 3, 2]], axis=1), np.int64([1])),
        (lambda: tf.math.argmax([[1, 3, 2]], 1, tf.int32), np.int32([1])),
        (lambda: tf.math.greater([1.0, 3.0], 2.0), np.array([False, True])),
        (lambda: tf.equal([1, 2], [1, 3]), np.array([True, False])),
        (lambda: tf.concat([[1.0], [2.0, 3.0]], 0), np.float32([1, 2, 3])),
        (lambda: tf.stack([[1, 2], [3, 4]], axis=1), np.int32([[1, 3], [2, 4]])),
        (lambda: tf.reshape([1, 2, 3, 4], [2, -1]), np.int32([[1, 2], [3, 4]])),
        (lambda: tf.transpose([[1, 2]], perm=[1, 0]), np.int32([[1], [2]])),
        (lambda: tf.expand_dims([1], axis=-1), np.int32([[1]])),
        (lambda: tf.squeeze([[1]]), np.int32(1)),
        (lambda: tf.one_hot([1], 2), np.float32([[0, 1]])),
        (lambda: tf.range(3), np.int32([0, 1, 2])),
        (lambda: tf.range(0.0, 1.0, 0.5), np.float32([0, 0.5])),
        (lambda: tf.zeros((2,)), np.float32([0, 0])),
        (lambda: tf.zeros([2, 1], tf.int64), np.int64([[0], [0]])),
        (lambda: tf.ones_like([1.0]), np.float32([1])),
        (lambda: tf.shape([[1, 2, 3]]), np.int32([1, 3])),
        (lambda: tf.gather([10, 20, 30], [2, 0]), np.int32([30, 10])),
        (
            lambda: tf.clip_by_value([0.0, 5.0], clip_value_min=1.0, clip_value_max=3.0),
            np.float32([1, 3]),
        ),
        (lambda: tf.where([True, False], [1, 2], [3, 4]), np.int32([1, 4])),
        (lambda: tf.nn.relu([-1.0, 2.0]), np.float32([0, 2])),
        (lambda: tf.nn.softmax([[0.0, 0.0]], axis=-1), np.float32([[0.5, 0.5]])),
        (lambda: tf.add_n([tf.constant(1.0), tf.constant(2.0)]), np.float32(3)),
        (lambda: tf.nn.leaky_relu([-1.0], alpha=0.5), np.float32([-0.5])),
        (lambda: tf.nn.l2_loss([1.0, 3.0]), np.float32(5)),
        (lambda: tf.fill([2], 7), np.int32([7, 7])),
    ],
)
def test_lists_and_numbers_are_float32_and_int32_tensors(found, expected) -> None:
    array = found()
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)
    assert isinstance(array, tf.Tensor)
    assert type(array.numpy()) is (np.ndarray if array.ndim else expected.dtype.type)


def test_datasets_of_lists_are_tensors() -> None:
    x, y = next(iter(tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [1, 0])).batch(2)))
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    named = next(iter(tf.data.Dataset.from_tensors({"x": [1.0], "y": 2})))
    assert (named["x"].dtype, named["y"].dtype) == (np.float32, np.int32)
    kept = next(iter(tf.data.Dataset.from_tensor_slices(np.zeros(3)).prefetch(buffer_size=1)))
    assert kept.dtype == np.float64
    assert isinstance(kept.numpy(), np.float64)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with tf.distribute.MirroredStrategy(["CPU:0"]) as strategy:
        dataset = tf.data.Dataset.range(4).batch(2).with_options(options)
        assert len(list(strategy.experimental_distribute_dataset(dataset))) == 2


def test_a_variable_is_synchronized_and_aggregated() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) as strategy:
        count = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def step(one):
            count.assign_add(one)
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, one)

        results = strategy.run(step, args=(tf.constant(2.0),))
        total = strategy.reduce("MEAN", results, axis=None)
        assert total.numpy() == 4.0
        assert count.numpy() == 4.0
        assert count.dtype == tf.float32


def test_an_optimizer_of_its_own_rule_needs_no_name_in_tensorflow() -> None:
    class Halving(nd.optimizers.Optimizer):
        def __init__(self) -> None:
            super().__init__(SGDRule(), lambda step: 0.5 ** (step + 1))

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        w, count = tf.Variable([4.0]), v1.train.get_or_create_global_step()
        step = Halving().minimize(w * w / 2, global_step=count)
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(step)
        assert session.run(w).tolist() == [4.0 * 0.5 * 0.75]
    model = keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(Halving(), "mse")
    model.fit(np.ones((4, 1)), np.zeros((4, 1)), epochs=2, verbose=0)
    assert model.get_weights()[0].tolist() == [[0.0]]


def test_the_rate_of_a_wrapper_is_that_of_its_optimizer() -> None:
    inner = keras.optimizers.SGD(0.1)
    wrapper = keras.optimizers.GradientAccumulation(inner, 2)
    wrapper.lr = 0.5
    assert wrapper.learning_rate.numpy() == inner.lr == 0.5
    assert isinstance(wrapper, keras.optimizers.Optimizer)


def test_strings_of_losses_and_optimizers_and_metrics_compile() -> None:
    for optimizer in ("sgd", "adam", "rmsprop", "adagrad"):
        model = keras.Sequential([layers.Dense(1, input_shape=(2,))])
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], run_eagerly=True)
        assert model.optimizer.learning_rate.numpy() == model.optimizer.lr > 0
        x = np.ones((4, 2), np.float32)
        model.fit(x, x[:, :1], verbose=0, callbacks=None)
        assert model.predict(x, verbose=0).shape == (4, 1)
        assert isinstance(model, keras.Model)
        assert [w.shape for w in model.weights] == [(2, 1), (1,)]


def test_outputs_of_models_and_losses_have_numpy() -> None:
    model = keras.Sequential([layers.Dense(1, input_shape=(2,))])
    output = model(np.ones((3, 2)))
    assert output.numpy().shape == (3, 1)
    loss = keras.losses.MeanSquaredError()
    assert loss(np.ones((3, 1)), np.zeros((3, 1))).numpy() == 1.0
    labels = tf.zeros((3, 1))
    np.testing.assert_allclose(loss(labels, output).numpy(), np.square(output).mean(), rtol=1e-6)
    with tf.GradientTape() as tape:
        value = loss(labels, model(np.ones((3, 2))))
    assert value.numpy() == loss(labels, output).numpy()
    assert len(tape.gradient(value, model.trainable_variables)) == 2


def test_a_model_of_symbolic_tensors_is_trained_and_saved(tmp_path: Path) -> None:
    x = keras.Input(shape=(4,), name="x")
    rows = keras.Input(batch_shape=(None, None, 4))
    hidden = layers.Dense(3, activation="relu")(tf.concat([x, tf.reduce_mean(rows, axis=1)], 1))
    scaled = layers.Lambda(tf.square)(keras.activations.tanh(hidden)) + tf.constant([1.0, 2.0, 3.0])
    model = keras.Model([x, rows], layers.Dense(1)(tf.cast(scaled, tf.float32)), name="both")
    model.compile("adam", "mse", metrics=["mae"])
    data = np.ones((6, 4), np.float32), np.ones((6, 2, 4), np.float32)
    model.fit(list(data), np.ones(6), batch_size=3, verbose=0)
    model.save(tmp_path / "best.keras")
    loaded = keras.models.load_model(tmp_path / "best.keras", {"square": tf.square})
    assert type(loaded) is keras.Model
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert np.array_equal(loaded.predict(list(data)), model.predict(list(data)))
    assert int(loaded.optimizer.iterations) == 2
    copy = keras.Model.from_config(model.get_config(), custom_objects={})
    assert [tuple(v.shape) for v in copy.weights] == [(8, 3), (3,), (3, 1), (1,)]


def test_the_package_itself_loads_what_it_saved_without_these_names(tmp_path) -> None:
    model = keras.Sequential([layers.Dense(1, input_shape=(2,), kernel_regularizer="l2")])
    model.save(tmp_path / "model")
    assert type(nd.models.load(tmp_path / "model")) is nd.Sequential
    assert type(keras.models.load_model(tmp_path / "model")) is keras.Sequential


def test_aliases_make_layers_and_labels() -> None:
    x = np.float32([[-1.0], [1.0]])
    assert layers.ReLU()(x).tolist() == [[0.0], [1.0]]
    assert layers.SyncBatchNormalization(momentum=0.5).synchronized
    norm = layers.BatchNormalization()
    norm(x)
    names = {variable.name.split("/")[1] for variable in norm.variables}
    assert names == {"gamma", "beta", "moving_mean", "moving_variance"}
    assert keras.utils.to_categorical([1, 0]).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert keras.regularizers.l2(0.5)(x) == 1.0
    assert keras.initializers.HeNormal(seed=1)((2, 3)).shape == (2, 3)
    loss = tf.nn.sigmoid_cross_entropy_with_logits(labels=x > 0, logits=tf.constant(x))
    np.testing.assert_allclose(loss, np.log1p(np.exp(-1)), rtol=1e-6)
    each = keras.losses.BinaryCrossentropy(from_logits=True, reduction=keras.losses.Reduction.NONE)
    np.testing.assert_allclose(each(x > 0, x), loss[:, 0], rtol=1e-6)


def test_a_strategy_of_workers_needs_no_tf_config(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with tf.distribute.experimental.MultiWorkerMirroredStrategy() as strategy:
        assert strategy.num_replicas_in_sync == 1
        assert strategy.cluster_resolver.task_type is None or strategy.is_chief


def test_devices_are_listed_as_tensorflow_does() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    assert (cpu.name, cpu.device_type) == ("/physical_device:CPU:0", "CPU")
    assert tf.config.experimental.list_physical_devices("CPU")


def test_a_handler_of_preemptions_takes_a_resolver(tmp_path: Path) -> None:
    count = tf.Variable(0)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(count=count), tmp_path, max_to_keep=1)
    with tf.distribute.experimental.PreemptionCheckpointHandler(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        checkpoint_or_checkpoint_manager=manager,
    ) as handler:
        handler.run(count.assign_add, 1)
    assert count.numpy() == 1


def test_what_does_nothing_is_accepted() -> None:
    with tf.device("/cpu:0"), tf.name_scope("x"):
        assert tf.executing_eagerly()
    tf.random.set_seed(1)
    assert tf.random.normal([2, 3], mean=100.0, stddev=0.1).numpy().min() > 90
    assert tf.random.uniform((2,), minval=3, maxval=4).dtype == tf.float32
    tf.random.set_seed(None)


def test_a_checkpoint_lists_its_variables(tmp_path: Path) -> None:
    v = tf.Variable([1.0, 2.0])
    checkpoint = tf.train.Checkpoint(v=v)
    assert checkpoint.write(tmp_path / "exact") == str(tmp_path / "exact")
    checkpoint.save(f"{tmp_path}/series/")
    for path in (tmp_path / "exact", tf.train.latest_checkpoint(tmp_path / "series")):
        assert tf.train.list_variables(path) == [("v", [2])]
        assert tf.train.load_variable(path, "v").tolist() == [1.0, 2.0]
    v.assign([0.0, 0.0])
    checkpoint.read(tmp_path / "exact").assert_consumed()
    assert v.numpy().tolist() == [1.0, 2.0]


def test_a_restored_checkpoint_is_consumed_if_the_objects_have_all_of_it(tmp_path: Path) -> None:
    """The checks of what was restored did nothing."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    step = tf.Variable(3)
    path = tf.train.Checkpoint(model=model, step=step).save(tmp_path / "all")
    whole = tf.train.Checkpoint(model=model, step=step).restore(path)
    assert whole.assert_consumed().expect_partial() is whole
    for parts, names in {
        "model": "step",
        "step": "model/layers/0/bias, model/.*iterations",
    }.items():
        objects = {"model": model, "step": step}
        part = tf.train.Checkpoint(**{parts: objects[parts]}).read(path)
        assert part.assert_existing_objects_matched() is part
        with pytest.raises(AssertionError, match=f"not restored: .*{names}"):
            part.assert_consumed()
    untrained = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    status = tf.train.Checkpoint(model=untrained, step=step).restore(path).expect_partial()
    with pytest.raises(AssertionError, match="model/optimizer/iterations"):
        status.assert_consumed()
    nothing = tf.train.Checkpoint(step=step).restore(None)
    for check in (nothing.assert_consumed, nothing.assert_existing_objects_matched):
        with pytest.raises(AssertionError, match="restored nothing"):
            check()
