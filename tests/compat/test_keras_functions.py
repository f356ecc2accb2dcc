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
        (lambda: ops.where(x1=5, x2=tf.constant([1, 2]), condition=[True, False]), [5, 2]),
        (lambda: ops.normalize(tf.constant([[3.0, 4.0]])), [[0.6, 0.8]]),
        (lambda: ops.slice_update(np.zeros(3), [1], [7, 8]), [0, 7, 8]),
        (lambda: ops.fori_loop(0, 4, lambda n, total: total + n, 1), 7),
        (lambda: ops.while_loop(lambda n, m: n < 3, lambda n, m: (n + 1, m * 2), (0, 1)), (3, 8)),
        (lambda: ops.while_loop(lambda n: True, lambda n: n + 1, 0, maximum_iterations=5), 5),
        (lambda: ops.in_top_k([0, 1], [[1.0, 2.0], [1.0, 2.0]], 1), [False, True]),
        (
            lambda: ops.binary_crossentropy(tf.constant([1.0, 0.0]), tf.constant([0.5, 0.5])),
            np.log([2, 2]),
        ),
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
    class Scale(layers.Layer):
        def build(self, input_shape: object) -> None:
            self.scale = self.add_weight(*args)
            self.bias = self.add_weight(initializer="zeros", name="bias")

        def call(self, inputs: object) -> object:
            return inputs * self.scale + self.bias

    layer = Scale()
    np.testing.assert_array_equal(layer(np.float32([[2, 3]])), [[2, 3]])
    assert layer.bias.shape == ()


def test_a_loaded_model_has_layers_of_keras(tmp_path: object) -> None:
    keras.Sequential([layers.Dense(1, input_shape=(2,))]).save(f"{tmp_path}/model.keras")
    loaded = keras.models.load_model(f"{tmp_path}/model.keras")
    assert isinstance(loaded.layers[0], layers.Dense)
    assert type(nd.models.load(f"{tmp_path}/model.keras").layers[0]) is nd.layers.Dense
