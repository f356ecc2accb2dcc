"""`keras.ops` and `keras.random` compute what Keras 3 says, and layers return tensors."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tf
from ndistribute.models import masks

keras = tf.keras
ops, layers = keras.ops, keras.layers


def test_results_are_as_wide_as_operands() -> None:
    assert ops.mean(np.int32([1, 2])).dtype == ops.sum([1.0, 2.0]).dtype == np.float32
    assert ops.argmax(tf.constant([1.0, 2.0])).dtype == ops.arange(3).dtype == np.int32
    assert ops.sum(np.float64([1.0])).dtype == ops.zeros(2, dtype="float64").dtype == np.float64
    assert isinstance(ops.split(tf.constant([1.0, 2.0]), 2)[0], tf.Tensor)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda: ops.one_hot([1.0, 0.0], 2), [[0, 1], [1, 0]]),
        (lambda: ops.where([True, False], 5, tf.constant([1, 2])), [5, 2]),
        (lambda: ops.shape(tf.zeros((2, 3))), (2, 3)),
    ],
)
def test_functions_that_numpy_lacks(result, expected) -> None:  # type: ignore[no-untyped-def]
    np.testing.assert_allclose(result(), expected, rtol=1e-6)


def test_operations_are_differentiated_and_recorded() -> None:
    variable = tf.Variable([1.0, -2.0])
    with tf.GradientTape() as tape:
        loss = ops.sum(ops.relu(variable) ** 2) + ops.mean(ops.concatenate([variable, variable]))
    np.testing.assert_allclose(tape.gradient(loss, variable), [2.5, 0.5])
    x = keras.Input((4,))
    model = keras.Model(x, ops.mean(ops.concatenate([x, ops.square(x)], axis=-1), axis=-1))
    np.testing.assert_allclose(model(np.full((2, 4), 3.0)), [6, 6])


def test_each_replica_draws_from_its_own_state_of_a_seed() -> None:
    def draw() -> list[list[float]]:
        seed = keras.random.SeedGenerator(7)
        with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            run = strategy.run(lambda: keras.random.normal((3,), seed=seed))
            again = strategy.run(lambda: keras.random.normal((3,), seed=seed))
            return [np.asarray(value).tolist() for value in (*run.values, *again.values)]

    first = draw()
    assert first == draw()
    assert len({tuple(values) for values in first}) == 4
    same = [keras.random.randint((5,), 0, 100, seed=3).numpy().tolist() for _ in range(2)]
    assert same[0] == same[1]


def test_layers_return_tensors_with_their_masks() -> None:
    rows = np.array([[1, 0]])
    embedded = layers.Embedding(3, 2, mask_zero=True)(rows)
    assert isinstance(embedded, tf.Tensor)
    assert embedded.numpy().shape == (1, 2, 2)
    np.testing.assert_array_equal(embedded._keras_mask, [[True, False]])
    np.testing.assert_array_equal(masks.mask_of(embedded), [[True, False]])
    assert isinstance(layers.Dense(1), layers.Layer)
    assert issubclass(keras.Model, layers.Layer)
    assert type(nd.layers.Embedding(3, 2)(rows)) is np.ndarray


@pytest.mark.parametrize("args", [("scale", (2,), "ones"), ((2,), "ones")])
def test_the_name_or_the_shape_of_a_weight_comes_first(args: tuple) -> None:
    class Weighed(layers.Layer):
        def build(self, input_shape: object) -> None:
            self.scale = self.add_weight(*args)
            self.bias = self.add_weight(initializer="zeros", name="bias")

        def call(self, inputs: object) -> object:
            return inputs * self.scale + self.bias

    layer = Weighed()
    np.testing.assert_array_equal(layer(np.float32([[2, 3]])), [[2, 3]])
    assert layer.bias.shape == ()


def test_a_loaded_model_has_layers_of_keras(tmp_path: object) -> None:
    keras.Sequential([layers.Dense(1, input_shape=(2,))]).save(f"{tmp_path}/model.keras")
    loaded = keras.models.load_model(f"{tmp_path}/model.keras")
    assert isinstance(loaded.layers[0], layers.Dense)
    assert type(nd.models.load(f"{tmp_path}/model.keras").layers[0]) is nd.layers.Dense


def test_layers_take_the_arguments_of_keras_that_change_nothing() -> None:
    x = keras.Input((4, 2))
    pooled = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    slope = layers.LeakyReLU(alpha=0.5)
    model = keras.Model(x, slope(layers.Lambda(lambda x: -x, output_shape=(2,))(pooled)))
    np.testing.assert_allclose(model(np.ones((1, 4, 2))), [[-0.5, -0.5]])
    assert slope.get_config()["negative_slope"] == 0.5
    again = type(slope).from_config(slope.get_config())
    np.testing.assert_allclose(again(np.float32([-1])), -0.5)
    with pytest.raises(TypeError, match="data_format"):
        layers.GlobalAveragePooling1D(data_format="channels_first")
    table = np.arange(6.0).reshape(3, 2)
    rows = keras.Sequential([layers.Embedding(3, 2, weights=[table], input_length=2)])
    np.testing.assert_array_equal(rows(np.array([[2, 0]])), [[[4, 5], [0, 1]]])
    assert rows.output_shape == (None, 2, 2)


def test_symbolic_losses_and_metrics_belong_to_their_model() -> None:
    x = keras.Input((2,))
    hidden = layers.Dense(2, kernel_initializer="ones", use_bias=False)(x)
    model = keras.Model(x, hidden)
    model.add_loss(tf.reduce_mean(hidden) * 10.0)
    model.add_metric(tf.reduce_max(hidden), name="greatest", aggregation="mean")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    ones = np.ones((4, 2), np.float32)
    history = model.fit(ones, 2 * ones, verbose=0).history
    assert (history["loss"], history["greatest"]) == ([20.0], [2.0])
    np.testing.assert_allclose(model.get_weights()[0], 0.5)
    model(ones)
    assert float(sum(model.losses)) == 10.0


def test_a_model_without_variables_is_fitted() -> None:
    class Penalty(layers.Layer):
        def call(self, inputs: object) -> object:
            self.add_loss(tf.reduce_sum(inputs))
            return inputs

    x = keras.Input((3,))
    model = keras.Model(x, Penalty()(x))
    model.compile("sgd")
    assert model.fit(np.ones((2, 3)), np.ones((2, 3)), verbose=0).history["loss"] == [6.0]


def test_layers_tell_their_metrics() -> None:
    class Endpoint(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = keras.metrics.BinaryAccuracy()

        def call(self, labels: object, predicted: object) -> object:
            self.add_metric(self.accuracy(labels, predicted), name="accuracy")
            return predicted

    layer = Endpoint()
    layer(tf.ones((2, 2)), tf.ones((2, 2)))
    assert layer.metrics[0] is layer.accuracy
    assert [float(metric.result()) for metric in layer.metrics] == [1.0, 1.0]


def test_objects_of_all_kinds_return_from_dicts() -> None:
    for made in (
        layers.Dense(3, activation="relu", kernel_regularizer="l2"),
        keras.losses.Huber(2.0),
        keras.metrics.Precision(),
        keras.optimizers.SGD(0.5),
        keras.regularizers.L1(0.25),
        keras.initializers.Constant(2.0),
    ):
        config = keras.saving.serialize_keras_object([made, "mse"])
        again, text = keras.saving.deserialize_keras_object(config)
        assert type(again) is type(made)
        assert keras.saving.serialize_keras_object([again, text]) == config


@keras.saving.register_keras_serializable("tests")
class Around(layers.Layer):
    """A layer around another one, as guides define it."""

    def __init__(self, inner: object, **options: object) -> None:
        super().__init__(**options)
        self.inner = inner

    def call(self, inputs: object) -> object:
        return self.inner(inputs)

    def get_config(self) -> dict:
        inner = keras.saving.serialize_keras_object(self.inner)
        return {**super().get_config(), "inner": inner}

    @classmethod
    def from_config(cls, config: dict) -> "Around":
        return cls(keras.saving.deserialize_keras_object(config.pop("inner")), **config)


def test_a_registered_layer_around_another_is_loaded(tmp_path: object) -> None:
    model = keras.Sequential([keras.Input((4,)), Around(layers.Dense(2))])
    model.save(f"{tmp_path}/model.keras")
    loaded = keras.models.load_model(f"{tmp_path}/model.keras")
    np.testing.assert_array_equal(loaded(np.ones((1, 4))), model(np.ones((1, 4))))
    assert isinstance(loaded.layers[0].inner, layers.Dense)


class Compiled(keras.Model):
    """A model whose `compile` takes other arguments than Keras's."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs: object) -> object:
        return self.dense(inputs)

    def compile(self, optimizer: object, loss_fn: object) -> None:
        super().compile(optimizer, loss_fn)
        self.loss_fn = loss_fn


class Recompiled(Compiled):
    """One that says how it is compiled when it is loaded."""

    def get_compile_config(self) -> dict:
        return {"how": self.optimizer, "loss_fn": self.loss_fn}

    def compile_from_config(self, config: dict) -> None:
        how = keras.utils.deserialize_keras_object(config["how"])
        self.compile(how, loss_fn=config["loss_fn"])


def test_a_model_of_its_own_compile_is_loaded(tmp_path: object) -> None:
    for kind, path in ((Compiled, f"{tmp_path}/a.keras"), (Recompiled, f"{tmp_path}/b.keras")):
        model = kind()
        model.compile(keras.optimizers.SGD(0.25), "mse")
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
        model.save(path)
        if kind is Compiled:
            with pytest.warns(UserWarning, match="defines compile, but not compile_from_config"):
                loaded = keras.models.load_model(path)
            assert loaded.optimizer is None
        else:
            loaded = keras.models.load_model(path)
            assert float(loaded.optimizer.learning_rate) == 0.25
            assert loaded.optimizer.iterations == 1
        np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_a_loop_scales_its_loss_itself() -> None:
    precision = keras.mixed_precision
    policy = precision.Policy("mixed_float16")
    assert (policy.name, policy.compute_dtype, policy.variable_dtype) == (
        "mixed_float16",
        "float16",
        "float32",
    )
    precision.set_global_policy(policy)
    try:
        layer = layers.Dense(1)
        assert layer.dtype_policy == precision.global_policy() == policy
    finally:
        precision.set_global_policy("float32")
    variable = tf.Variable([1.0])
    optimizer = precision.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024)
    for unscale in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 3.0)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, [variable])
        np.testing.assert_array_equal(gradients[0], [3072])
        if unscale:
            gradients = optimizer.get_unscaled_gradients(gradients)
            np.testing.assert_array_equal(gradients[0], [3])
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    np.testing.assert_array_equal(variable, [-2])


def test_numbered_batches_are_fitted() -> None:
    class Batches(keras.utils.PyDataset):
        ends = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple:
            return np.full((2, 1), index), np.zeros((2, 1))

        def on_epoch_end(self) -> None:
            self.ends += 1

    batches = Batches(workers=2)
    model = keras.Sequential([layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = model.fit(batches, batch_size=64, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["loss"], 5 / 3)
    assert batches.ends == 2
    assert keras.utils.Sequence is keras.utils.PyDataset


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32"])
def test_labels_of_any_dtype_are_counted_under_a_strategy(dtype: str) -> None:
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        model = keras.Sequential([layers.Dense(3, kernel_initializer="zeros")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        names = ["accuracy", "sparse_top_k_categorical_accuracy"]
        model.compile(keras.optimizers.SGD(0.0), loss, metrics=names)
        labels = np.array([0, 1, 0, 2], dtype)
        logs = model.evaluate(np.ones((4, 2)), labels, verbose=0, return_dict=True)
    assert logs["accuracy"] == 0.5
    assert logs["sparse_top_k_categorical_accuracy"] == 1.0


def test_a_penalty_of_gradients_is_differentiated_through_conditions() -> None:
    """The rule of `where` multiplies a gradient by booleans, which operators of tensors refuse."""
    variable, x = tf.Variable([[1.0, -2.0], [0.5, 3.0]]), tf.constant([[1.0, 2.0]])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.nn.leaky_relu(tf.matmul(x, variable), alpha=0.2) ** 2)
        penalty = tf.reduce_sum(inner.gradient(y, x) ** 2)
    np.testing.assert_allclose(outer.gradient(penalty, variable), [[-92, 216], [216, 1232]])


def test_numpy_gets_values_while_a_tape_records() -> None:
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = variable * 2.0
        loss = tf.reduce_sum(y * np.asarray(y))
    np.testing.assert_array_equal(tape.gradient(loss, variable), [4, 8])


def test_functions_of_the_backend_of_keras() -> None:
    backend, x = keras.backend, keras.Input((2,))
    outputs = backend.function([x], [x * 2.0, backend.concatenate([x, x])])([np.ones((1, 2))])
    assert [type(each) for each in outputs] == [np.ndarray] * 2
    np.testing.assert_array_equal(outputs[0], [[2, 2]])
    assert outputs[1].shape == (1, 4)
    model = keras.Model(x, layers.Dense(1)(x))
    assert model.layers[0].input is x
    assert backend.int_shape(backend.flatten(tf.zeros((2, 3)))) == (6,)
    patches = keras.ops.image.extract_patches(np.arange(16.0).reshape(1, 4, 4, 1), size=2)
    np.testing.assert_array_equal(patches[0, 1, 0], [8, 9, 12, 13])


def test_optimizers_take_the_first_keywords_of_keras() -> None:
    optimizer = keras.optimizers.SGD(lr=0.5, decay=1.0)
    variable = tf.Variable([1.0])
    for expected in (0.5, 0.25):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        np.testing.assert_allclose(variable, expected)
    assert float(keras.optimizers.Adam(lr=0.5).learning_rate) == 0.5


def test_a_layer_that_needs_a_mask_gets_it_in_a_functional_model() -> None:
    class Masked(layers.Layer):
        def call(self, inputs: object, mask: object = None) -> object:
            assert mask is not None
            return tf.reduce_sum(inputs * tf.cast(mask, tf.float32)[..., None], axis=1)

        def compute_mask(self, inputs: object, mask: object = None) -> None:
            return None

    x = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(3, 2, embeddings_initializer="ones", mask_zero=True)(x)
    model = keras.Model(x, Masked()(layers.Dense(1, kernel_initializer="ones")(embedded)))
    np.testing.assert_array_equal(model(np.array([[1, 2, 0]])), [[4]])


def test_the_first_names_of_initializers_and_modes() -> None:
    for name in ("uniform", "normal", "zero", "one", "lecun_normal", "lecun_uniform"):
        assert keras.initializers.get(name)((3, 2)).shape == (3, 2)
    lookup = layers.StringLookup(vocabulary=["a"], output_mode="binary")
    np.testing.assert_array_equal(lookup([["a"]]), [[0, 1]])


def test_the_call_of_a_program_gets_tensors_while_it_trains_too() -> None:
    class Pairs(layers.Layer):
        def call(self, inputs: object) -> object:
            length = inputs.shape.as_list()[-1]
            assert inputs.get_shape()[-1] == length
            return tf.reshape(inputs, [tf.shape(inputs)[0], length // 2, 2])

    x = keras.Input((4,))
    model = keras.Model(x, Pairs()(layers.Dense(4)(x)))
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 4)), np.ones((2, 2, 2)), verbose=0)
    assert model.predict(np.ones((3, 4))).shape == (3, 2, 2)


@pytest.mark.parametrize("kind", ["SimpleRNN", "GRU", "LSTM"])
def test_states_begin_with_zeros(kind: str) -> None:
    layer, x = getattr(layers, kind)(3, return_state=True), np.ones((2, 4, 5), np.float32)
    states = layer.get_initial_state(x)
    assert [each.shape for each in states] == [(2, 3)] * len(states)
    first, *_ = layer(x, initial_state=states)
    np.testing.assert_array_equal(first, layer(x)[0])
    np.testing.assert_array_equal(layer.get_initial_state(2), states)
