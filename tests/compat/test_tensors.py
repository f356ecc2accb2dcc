"""A tensor is a tensor, and a variable a variable, with what TensorFlow's programs ask of them."""

import copy
from pathlib import Path

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tf, tf1

f32 = np.float32


def tensors_of_a_program():
    """Return by name what a program gets in several ways."""
    v = tf.Variable([3.0, 4.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(v * v)
    with tf.distribute.MirroredStrategy(["CPU:0"]) as strategy:
        run = strategy.run(lambda: tf.constant(2.0) * 2)
        total = strategy.reduce("SUM", run, axis=None)
    mean = tf.keras.metrics.Mean()
    mean.update_state([1.0, 3.0])
    return {
        "gradient": tape.gradient(y, v),
        "target": y,
        "constant": tf.constant(1),
        "index": v[0],
        "row": next(iter(tf.constant([[1.0]]))),
        "shape": tf.shape(v),
        "read": v.read_value(),
        "value": v.value(),
        "steps": tf.keras.optimizers.SGD(0.1).iterations,
        "rate": tf.keras.optimizers.SGD(0.1).learning_rate,
        "run": run,
        "total": total,
        "metric": mean.result(),
        "element": next(iter(tf.data.Dataset.range(3))),
        "sum": v + 1,
        "numpy": np.square(tf.constant([2.0])),
    }


@pytest.mark.parametrize("name", tensors_of_a_program())
def test_what_a_program_gets_is_a_tensor(name: str) -> None:
    tensor = tensors_of_a_program()[name]
    assert tf.is_tensor(tensor)
    assert tensor.shape.as_list() == tensor.get_shape().as_list() == list(np.shape(tensor.numpy()))
    assert tensor.dtype in (tf.float32, tf.int32, tf.int64)
    assert (tensor + 1).numpy().dtype == tensor.dtype
    assert {tensor.ref(): 1}[tensor.ref()] == 1
    assert tensor.ref().deref() is tensor
    assert not isinstance(tensor.numpy(), tf.Tensor)


def test_a_tensor_never_changes() -> None:
    array = np.ones(3, f32)
    a, dataset = tf.constant(array), tf.data.Dataset.from_tensor_slices(array)
    array[:] = 7
    assert a.numpy().tolist() == [1, 1, 1] == [x.numpy() for x in dataset]
    b = a
    b += 1
    b /= 2
    b **= 2
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([1, 1, 1], [1, 1, 1])
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 2
    for x in tf.data.Dataset.from_tensor_slices(np.full((2, 2), 51, np.uint8)):
        x /= 255  # noqa: PLW2901
        assert x.numpy().tolist() == [f32(0.2)] * 2


def test_operators_keep_the_dtype_of_the_tensor() -> None:
    a, b = tf.constant([1.0, 2.0]), np.array([3.0, 4.0])
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        slope = tape.gradient(tf.reduce_sum(b * v), v)
        values = [
            a * b,
            b * a,
            tf.multiply(a, b),
            tf.matmul(a[None], b[None], transpose_b=True),
            v * b,
            b * v,
        ]
    assert {x.dtype.name for x in (*values, slope)} == {"float32"}
    for mix in (
        lambda x: a + x,
        lambda x: tf.add(a, x),
        lambda x: tf.matmul(a[None], x[:, None]),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"float.. and float..: tf\.cast"):
            mix(tf.constant(b))
    assert tf.stack([b]).dtype == tf.convert_to_tensor([b]).dtype == tf.float64
    assert (tf.constant([1, 2]) / 2).dtype == tf.float64
    assert (tf.constant([1, 2]) * 0.5).dtype == tf.float32
    assert repr(tf.constant([0.6])).startswith(
        "<tf.Tensor: shape=(1,), dtype=float32, numpy=array([0.6"
    )
    assert tf.constant("text").numpy() == b"text"


def test_a_tape_watches_a_tensor_in_place() -> None:
    x, layer = tf.constant([[1.0, 2.0]]), tf.keras.layers.Dense(1, kernel_initializer="ones")
    other = tf.constant(1.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        targets = [
            x * x,
            np.square(x),
            tf.nn.softmax(x),
            layer(x),
            tf.keras.Sequential([layer])(x),
            x[:, 0],
            tf.concat([x, x], 1),
            x.T,
        ]
        loss = tf.reduce_sum(x * x) * other
    twice = [[2.0, 4.0]]
    expected = [twice, twice, None, [[1, 1]], [[1, 1]], [[1, 0]], [[2, 2]], [[1, 1]]]
    for target, slope in zip(targets, expected, strict=True):
        gradient = tape.gradient(target, x)
        assert slope is None or gradient.numpy().tolist() == slope
    assert tape.gradient(loss, {"x": x, "other": other})["other"] is None
    assert tape.gradient(loss, [other], unconnected_gradients="zero")[0].numpy() == 0
    assert tape.jacobian(targets[0], x).shape == (1, 2, 1, 2)
    assert (x + 1).numpy().tolist() == [[2.0, 3.0]]
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.keras.losses.MeanSquaredError()([[0.0, 0.0]], x)
    assert tape.gradient(loss, x).numpy().tolist() == [[1.0, 2.0]]
    with tf.GradientTape() as tape:
        tape.watch(tf.constant(1))  # It has no gradient, and no error.


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_layers_give_tensors_the_bits_that_they_give_arrays(policy: str) -> None:
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(f32)
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(3, 3, padding="same", activation="relu"),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.GlobalAveragePooling2D(),
                tf.keras.layers.LayerNormalization(),
                tf.keras.layers.Dense(2, activation="gelu"),
            ]
        )
        expected = np.asarray(nd.Sequential.__call__(model, images))
        with tf.GradientTape() as tape:
            outputs = model(tf.constant(images))
        for result in (outputs, model(tf.constant(images)), model(images)):
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(result.numpy(), expected)
        gradients = tape.gradient(outputs, model.trainable_variables)
        assert all(gradient is not None for gradient in gradients)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def test_a_variable_has_the_methods_of_tensorflow(tmp_path: Path) -> None:
    v = tf.Variable([1.0, 2.0], name="v", shape=[None])
    for kind in (tf, tf.compat.v1, tf1):
        assert isinstance(v, kind.Variable)
    with tf1.Graph().as_default():
        assert isinstance(tf1.Variable(1.0), tf.Variable)
    assert not isinstance(tf.constant(1.0), tf.Variable)
    assert v.assign([3.0, 4.0], use_locking=True, name="a", read_value=False) is None
    assert v.assign_add(delta=[1.0, 1.0]) is v
    v.scatter_add(tf.IndexedSlices(f32([1.0]), np.array([1]), (2,)))
    v.scatter_update(tf.IndexedSlices(f32([9.0]), np.array([0]), (2,)), use_locking=False)
    assert v.numpy().tolist() == [9.0, 6.0]
    assert v[1].assign(5.0) is v
    assert v.value().numpy().tolist() == [9.0, 5.0]
    assert v.device == "/job:localhost/replica:0/task:0/device:CPU:0"
    copied = copy.deepcopy({"v": v})["v"]
    v.assign([0.0, 0.0])
    assert copied.numpy().tolist() == [9.0, 5.0]
    assert not tf.Variable(0.0, synchronization="on_read", aggregation="sum").trainable
    with pytest.raises(ValueError, match="shape"):
        tf.Variable([1.0], shape=[2])


def test_a_constraint_holds_after_each_step() -> None:
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        with tf.distribute.MirroredStrategy(devices) as strategy:
            v = tf.Variable([1.0, 5.0], constraint=lambda x: tf.clip_by_value(x, 2.0, 4.0))
            optimizer = tf.keras.optimizers.SGD(1.0)
            strategy.run(lambda: optimizer.apply_gradients([(tf.constant([0.0, 0.0]), v)]))  # noqa: B023
            assert v.numpy().tolist() == [2.0, 4.0]


def test_an_optimizer_takes_a_function_and_a_new_rate() -> None:
    v, optimizer = tf.Variable(1.0), tf.keras.optimizers.SGD(0.25)
    optimizer.minimize(lambda: v * v, [v])
    optimizer.learning_rate.assign(0.125)
    assert optimizer.lr.numpy() == 0.125
    tf.keras.backend.set_value(optimizer.learning_rate, 0.5)
    with tf.GradientTape() as tape:
        loss = v * v
    optimizer.minimize(loss, [v], tape=tape)
    assert (v.numpy(), optimizer.iterations.numpy()) == (0.0, 2)
    iterator = iter(tf.data.Dataset.range(1))
    assert iterator.get_next().numpy() == 0
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


def test_a_module_finds_its_variables_and_is_saved(tmp_path: Path) -> None:
    class Multiplier(tf.Module):
        def __init__(self, name=None):
            super().__init__(name=name)
            self.factor = tf.Variable(2.0)
            self.steps = tf.Variable(0, trainable=False)

        @tf.Module.with_name_scope
        def __call__(self, x):
            return self.factor * x

    class Both(tf.Module):
        def __init__(self):
            super().__init__()
            self.parts = [Multiplier("first"), Multiplier()]
            self.dense = tf.keras.layers.Dense(1, name="dense")

        def __call__(self, x):
            return self.parts[1](self.parts[0](x))

    module = Both()
    assert module(3.0).numpy() == 12.0
    assert [part.name for part in module.submodules] == ["first", "multiplier", "dense"]
    assert (len(module.variables), len(module.trainable_variables)) == (4, 2)
    path = tf.train.Checkpoint(module=module).save(tmp_path / "module")
    other = Both()
    other.parts[0].factor.assign(7.0)
    tf.train.Checkpoint(module=other).restore(path)
    assert other(3.0).numpy() == 12.0


FUNCTIONS = {
    "boolean_mask": (
        lambda: tf.boolean_mask([[1, 2], [3, 4]], [[True, False], [True, True]]),
        [1, 3, 4],
    ),
    "gather_nd": (lambda: tf.gather_nd([[1, 2], [3, 4]], [[0, 1], [1, 0]]), [2, 3]),
    "gather_nd by batch": (
        lambda: tf.gather_nd([[1, 2], [3, 4]], [[1], [0]], batch_dims=1),
        [2, 3],
    ),
    "scatter_nd": (lambda: tf.scatter_nd([[1], [1]], [5, 6], [3]), [0, 11, 0]),
    "pad": (lambda: tf.pad([[1, 2]], [[0, 0], [1, 0]], constant_values=7), [[7, 1, 2]]),
    "unique": (lambda: tf.unique([3, 1, 3])[0], [3, 1]),
    "counts": (lambda: tf.unique_with_counts([3, 1, 3])[2], [2, 1]),
    "meshgrid": (lambda: tf.meshgrid([1, 2], [3])[0], [[1, 2]]),
    "linspace": (lambda: tf.linspace(0.0, 1.0, 3), [0, 0.5, 1]),
    "repeat": (lambda: tf.repeat([1, 2], [1, 2]), [1, 2, 2]),
    "reverse": (lambda: tf.reverse([[1, 2]], axis=[1]), [[2, 1]]),
    "roll": (lambda: tf.roll([1, 2, 3], shift=1, axis=0), [3, 1, 2]),
    "mask": (lambda: tf.sequence_mask([1, 2], dtype=tf.int32), [[1, 0], [1, 1]]),
    "map_fn": (lambda: tf.map_fn(lambda x: 2 * x, tf.constant([1, 2])), [2, 4]),
    "moments": (lambda: tf.nn.moments(tf.constant([[1.0], [3.0]]), axes=[0])[1], [1]),
    "clip_by_norm": (lambda: tf.clip_by_norm([3.0, 4.0], 2.5), [1.5, 2]),
    "l2_normalize": (lambda: tf.math.l2_normalize([3.0, 4.0]), f32([0.6, 0.8])),
    "no nan": (lambda: tf.math.divide_no_nan([1.0, 2.0], [0.0, 2.0]), [0, 1]),
    "confusion": (lambda: tf.math.confusion_matrix([0, 1], [1, 1]), [[0, 1], [0, 1]]),
    "rsqrt": (lambda: tf.math.rsqrt(4.0), 0.5),
    "svd": (lambda: tf.linalg.svd([[3.0, 0.0], [0.0, 2.0]])[0], [3, 2]),
    "einsum": (
        lambda: tf.einsum("ij,j->i", tf.constant([[1.0, 2.0]]), tf.constant([3.0, 4.0])),
        [11],
    ),
    "in_top_k": (lambda: tf.nn.in_top_k([1, 0], [[0.1, 0.9], [0.2, 0.8]], 1), [True, False]),
    "band": (lambda: tf.linalg.band_part(tf.ones([2, 2]), -1, 0), [[1, 0], [1, 1]]),
    "segment": (lambda: tf.math.segment_sum([1, 2, 3], [0, 0, 1]), [3, 3]),
    "gamma": (lambda: tf.shape(tf.random.gamma([2], [1.0, 2.0])), [2, 2]),
    "fft": (lambda: tf.math.real(tf.signal.fft(tf.constant([1.0, 1.0]))), [2, 0]),
    "bits": (lambda: tf.bitwise.bitwise_and([6], [3]), [2]),
    "complex": (lambda: tf.complex(1.0, 2.0), 1 + 2j),
    "backend": (lambda: tf.keras.backend.mean([[1.0, 3.0]], axis=1), [2]),
    "dropout": (lambda: tf.nn.dropout(tf.ones([4]), rate=0.0), [1, 1, 1, 1]),
    "shuffle": (lambda: tf.sort(tf.random.shuffle([3, 1, 2])), [1, 2, 3]),
    "categorical": (lambda: tf.random.categorical([[0.0, 99.0]], 2), [[1, 1]]),
    "stateless": (lambda: tf.random.stateless_uniform([1], [1, 2], 3, 4, tf.int32), [3]),
    "batches": (lambda: tf.gather([[1, 2], [3, 4]], [[1], [0]], batch_dims=1), [[2], [3]]),
    "generator": (lambda: tf.random.Generator.from_seed(1).uniform([1], 3, 4, tf.int32), [3]),
    "integers": (lambda: tf.random.uniform([1], maxval=1, dtype=tf.int32), [0]),
    "truncated": (lambda: tf.reduce_max(abs(tf.random.truncated_normal([999]))) <= 2, True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_tensors(name: str) -> None:
    made, expected = FUNCTIONS[name]
    result = made()
    assert isinstance(result, tf.Tensor)
    assert result.dtype not in (np.float64, np.complex128)
    np.testing.assert_array_equal(result, np.asarray(expected))


def test_checks_raise_as_tensorflow_does() -> None:
    tf.debugging.assert_equal(tf.constant([1, 2]), [1, 2])
    tf.debugging.assert_near([1.0], [1.0])
    for check in (
        lambda: tf.debugging.assert_equal(1, 2, message="both"),
        lambda: tf.debugging.assert_less([3], [2]),
        lambda: tf.debugging.check_numerics(tf.constant([np.nan]), "loss"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"both|less|loss"):
            check()


def test_summaries_are_written_while_the_program_runs(tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))
    assert not tf.summary.scalar("loss", 1.0, step=1)  # There is no writer.
    with writer.as_default(), pytest.raises(ValueError, match="needs a step"):
        tf.summary.scalar("loss", 1.0)
    with writer.as_default(step=3):
        assert tf.summary.scalar("loss", tf.constant(0.5))
        assert tf.summary.histogram("weights", tf.constant([1.0, 2.0]), step=4)
        assert tf.summary.image("picture", np.full((4, 2, 2, 1), 0.5, f32))
        assert tf.summary.text("note", "hello")
        with tf.summary.record_if(lambda: False):
            assert not tf.summary.scalar("hidden", 1.0)
    writer.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for tag in (b"loss", b"weights", b"picture/image/2", b"note", b"hello"):
        assert tag in content
    for absent in (b"hidden", b"picture/image/3"):
        assert absent not in content


def test_steps_and_functions_of_datasets_get_tensors() -> None:
    images = np.full((4, 2), 51, np.uint8)

    def scaled(image, label):
        image /= 255
        return image, label

    def step(inputs):
        image, label = inputs
        image *= 2.0
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("sum", image).numpy() + context.num_replicas_in_sync
        return tf.reduce_sum(image), label.shape.as_list(), total

    dataset = tf.data.Dataset.from_tensor_slices((images, [1, 2, 3, 4])).map(scaled)
    dataset = dataset.filter(lambda image, label: label.numpy() > 2).batch(2)
    for devices, lengths in ((["cpu:0"], [2]), (["cpu:0", "cpu:1"], [1])):
        with tf.distribute.MirroredStrategy(devices) as strategy:
            (batch,) = strategy.experimental_distribute_dataset(dataset)
            loss, (shape,), total = strategy.run(step, args=(batch,))
            assert strategy.reduce("SUM", loss, axis=None).numpy() == np.float32(1.6)
            assert {int(x) for x in strategy.experimental_local_results(shape)} == set(lengths)
            gathered = strategy.gather(total, axis=0)
            assert gathered.shape.as_list() == [2, 2]


def test_the_one_replica_of_a_worker_gives_what_other_workers_do_not_know() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]) as strategy:
        result = strategy.run(lambda x: {"loss": x, "none": None}, args=(2.0,))
        assert isinstance(result["loss"], tf.Tensor)
        assert result["none"] is None
        assert strategy.reduce(tf.distribute.ReduceOp.SUM, result["loss"] + 1, axis=None) == 3.0
        assert strategy.experimental_local_results(result["loss"])[0].numpy() == 2.0
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) as strategy:
        both = strategy.run(lambda: tf.constant(1.0))
        assert isinstance(both, nd.PerReplica)
        assert all(isinstance(value, tf.Tensor) for value in both.values)


def test_a_signature_checks_the_arguments_of_a_function() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def collatz(x):
        return tf.where(x % 2 == 0, x // 2, 3 * x + 1)

    assert collatz([1, 2]).numpy().tolist() == [4, 1]
    for wrong in (tf.constant([[1, 2]]), tf.constant([1.0])):
        with pytest.raises(TypeError, match="collatz: argument 'x'"):
            collatz(wrong)

    @tf.function
    def double(a):
        return a + a

    concrete = double.get_concrete_function(tf.TensorSpec(None, tf.string))
    assert concrete(a=tf.constant("b")).numpy() == b"bb"
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected"):
        concrete(tf.constant(1))

    class Stepper(tf.Module):
        @tf.function(input_signature=(tf.TensorSpec([], tf.float32),))
        def __call__(self, size):
            return size / 2

    assert Stepper()(3).numpy() == 1.5
    with pytest.raises(NotImplementedError, match="call the method itself"):
        Stepper.__call__.get_concrete_function()


def test_functions_of_numpy_are_decorated_and_called_without_results() -> None:
    @tf.numpy_function(Tout=[tf.float32, tf.int32])
    def step(x):
        assert isinstance(x, np.ndarray)
        return x + 1, 2

    state, count = step(tf.constant([1.0]))
    assert state.numpy().tolist() == [2.0]
    assert count.dtype == np.int32
    seen: list = []
    assert tf.py_function(seen.append, [tf.constant(3)], Tout=[]) == []
    assert seen[0].numpy() == 3


def test_actions_are_drawn_while_a_tape_records() -> None:
    logits = tf.Variable([[0.0, 50.0]])
    with tf.GradientTape() as tape:
        action = tf.random.categorical(logits * 1.0, 1)[0, 0]
        loss = tf.nn.log_softmax(logits)[0, action]
    assert action.numpy() == 1
    assert tape.gradient(loss, logits).shape == (1, 2)


def test_numbers_in_tensors_are_numbers_of_python() -> None:
    assert float(tf.constant([0.25])) == 0.25
    assert {*tf.constant([1, 2, 1])} == {1, 2}
    with pytest.raises(TypeError, match="not hashable"):
        hash(tf.constant([1]))
