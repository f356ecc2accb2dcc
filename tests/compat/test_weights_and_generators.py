"""Weights of layers are variables of TensorFlow, and generators have a state."""

import copy

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tf
from ndistribute.compat.tf.keras import layers

f32 = np.float32


class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight("factor", (shape[-1],), "ones")

    def call(self, inputs):
        return inputs * self.factor


@pytest.mark.parametrize(
    "make", [lambda: layers.Dense(2), Scale, lambda: tf.keras.Sequential([Scale()])]
)
def test_a_layer_has_weights_with_methods_and_returns_tensors(make) -> None:
    layer = make()
    result = layer(np.ones((1, 2), f32))
    assert isinstance(result, tf.Tensor)
    assert result.numpy().shape == (1, 2)
    for weight in (*layer.weights, *layer.trainable_variables):
        assert isinstance(weight, tf.Variable)
        assert isinstance(weight.value(), tf.Tensor)
        assert weight.shape.as_list() == weight.value().shape.as_list()
        assert weight.assign(np.zeros(weight.shape), read_value=True) is weight
        assert not weight.numpy().any()
        assert weight.ref() == weight.ref()
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"tf\.cast"):
            weight.assign(tf.zeros(weight.shape, tf.float64))
        assert not copy.deepcopy(weight).numpy().any()


def test_all_layers_are_layers_and_the_native_ones_stay_as_they_are() -> None:
    for layer in (layers.Dense(1), Scale(), tf.keras.Sequential([]), nd.layers.Dense(1)):
        assert isinstance(layer, layers.Layer)
    assert issubclass(layers.LSTM, layers.Layer)
    assert not isinstance(tf.constant(1.0), layers.Layer)
    assert not isinstance(layers.Dense(1), Scale)
    assert nd.models.layers.Layer.known["Dense"] is nd.layers.Dense
    native = nd.layers.Dense(1)
    assert type(native(np.ones((1, 1), f32))) is np.ndarray
    assert native.kernel.value.shape == (1, 1)


def test_weights_of_layers_are_trained_and_saved(tmp_path) -> None:
    data = np.ones((4, 3), f32), np.zeros((4, 1), f32)
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = tf.keras.Sequential([layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(*data, batch_size=2, epochs=2, verbose=0)
        model.save(tmp_path / "model")
        trained = model.layers[0].kernel.value().numpy()
    again = tf.keras.models.load_model(tmp_path / "model")
    assert type(again.layers[0]) is layers.Dense
    np.testing.assert_array_equal(again.layers[0].kernel.value(), trained)
    random = layers.Dense(9, kernel_initializer=tf.random.normal)
    assert random(np.ones((1, 9), f32)).numpy().std() > 0.5


def test_a_seed_of_an_operation_begins_a_sequence() -> None:
    def drawn() -> list[float]:
        tf.random.set_seed(5)
        return [float(tf.random.uniform([], seed=seed)) for seed in (1, 1, 2)]

    first = drawn()
    assert len(set(first)) == 3
    assert first == drawn()


def test_a_stateless_function_draws_the_same_for_its_seed() -> None:
    for draw in (
        tf.random.stateless_normal,
        tf.random.stateless_uniform,
        tf.random.stateless_truncated_normal,
    ):
        first = draw([3], seed=[1, 2]).numpy().tolist()
        assert first == draw(shape=[3], seed=tf.constant([1, 2])).numpy().tolist()
        assert first != draw([3], (2, 1)).numpy().tolist()
        with pytest.raises(ValueError, match="two numbers"):
            draw([3], seed=1)


def test_a_generator_continues_from_its_state(tmp_path) -> None:
    generator = tf.random.Generator.from_seed(1)
    first = float(generator.normal([]))
    state = generator.state
    path = tf.train.Checkpoint(generator=generator).save(str(tmp_path / "c"))
    following = generator.normal([4]).numpy().tolist()
    other = tf.random.Generator.from_state(state, alg="philox")
    assert other.normal([4]).numpy().tolist() == following
    assert tf.random.Generator(copy_from=generator).uniform([]) == generator.uniform([])
    tf.train.Checkpoint(generator=generator).restore(path)
    assert generator.normal([4]).numpy().tolist() == following
    generator.reset_from_seed(1)
    assert float(generator.normal([])) == first
    generator.reset(state)
    generator.skip(1)
    assert generator.normal([4]).numpy().tolist() != following
    with pytest.raises(ValueError, match="6 integers"):
        generator.reset([1, 2])


def test_generators_that_are_split_are_independent() -> None:
    generator = tf.random.Generator.from_seed(1)
    parts = [*generator.split(3), generator, tf.random.Generator.from_non_deterministic_state()]
    assert len({float(part.normal([])) for part in parts}) == 5
    assert generator.make_seeds(2).shape.as_list() == [2, 2]
    bounded = generator.uniform([99], 3, 5, dtype=tf.int32)
    assert set(bounded.numpy()) == {3, 4}
    assert generator.uniform_full_int([2], dtype=tf.int32).dtype == tf.int32
    assert abs(generator.truncated_normal([99])).numpy().max() <= 2
    first, second = (tf.random.get_global_generator().normal([]) for _ in range(2))
    assert first != second


def test_replicas_share_a_generator() -> None:
    generator = tf.random.Generator.from_seed(1)
    alone = tf.random.Generator.from_seed(1)
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        drawn = strategy.run(lambda: generator.normal([]))
        values = {float(value) for value in strategy.experimental_local_results(drawn)}
    assert values == {float(alone.normal([])) for _ in range(2)}
