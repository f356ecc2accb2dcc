"""Names of Keras in TensorFlow's module do what its guides use them for."""

import numpy as np
import pytest

from ndistribute.compat import tf
from ndistribute.models.masks import attach_mask

keras = tf.keras
layers = keras.layers


def test_labels_in_a_column_become_rows_with_a_one() -> None:
    rows = keras.utils.to_categorical([[0], [2]])
    np.testing.assert_array_equal(rows, [[1, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(keras.utils.to_categorical([0, 2]), rows)
    assert keras.utils.to_categorical(np.uint8([[1]]), num_classes=4).shape == (1, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 1, 2], [3, 4, 5]]),
        ({"padding": "post", "value": 9}, [[1, 2, 9], [3, 4, 5]]),
        ({"maxlen": 1}, [[2], [5]]),
        ({"maxlen": 2, "truncating": "post"}, [[1, 2], [3, 4]]),
    ],
)
def test_sequences_are_padded_to_one_length(options: dict, expected: list) -> None:
    padded = keras.preprocessing.sequence.pad_sequences([[1, 2], [3, 4, 5]], **options)
    assert padded.dtype == np.int32
    np.testing.assert_array_equal(padded, expected)
    with pytest.raises(ValueError, match="padding must be 'pre' or 'post'"):
        keras.utils.pad_sequences([[1]], padding="left")


def test_freezing_a_model_freezes_what_is_in_it() -> None:
    """Batch normalization in a frozen model changed its averages, and used those of the batch."""
    base = keras.Sequential([layers.Dense(3), layers.BatchNormalization()])
    model = keras.Sequential([base, layers.Dense(1)])
    x = np.random.default_rng(0).normal(5.0, 1.0, (8, 2)).astype(np.float32)
    model(x)
    base.trainable = False
    assert not any(layer.trainable for layer in base.layers)
    before = [value.copy() for value in base.get_weights()]
    model.compile("sgd", "mse")
    model.fit(x, np.ones((8, 1)), verbose=0)
    np.testing.assert_equal(base.get_weights(), before)
    base.layers[0].trainable = False
    base.trainable = True
    assert len(model.trainable_weights) == 6
    base.layers[0].trainable = False
    assert [layer.trainable for layer in keras.models.clone_model(base).layers] == [False, True]


def test_an_optimizer_applies_gradients_to_variables() -> None:
    variable = tf.Variable([1.0, 2.0])
    keras.optimizers.SGD(0.5).apply([tf.constant([1.0, 1.0])], [variable])
    np.testing.assert_array_equal(variable, [0.5, 1.5])
    with pytest.raises(ValueError, match="longer"):
        keras.optimizers.SGD(0.5).apply([], [variable])


def test_small_names() -> None:
    model = keras.Sequential([layers.Dense(1, input_dim=4)])
    assert model.output_shape == (None, 1)
    metric = keras.metrics.MeanAbsolutePercentageError()
    metric.update_state([[2.0], [4.0]], [[1.0], [4.0]])
    assert float(metric.result()) == 25.0
    assert keras.backend.random_normal((2, 3)).shape == (2, 3)
    dataset = tf.data.Dataset.range(7).batch(2)
    assert int(tf.data.experimental.cardinality(dataset)) == 4


class Stack(keras.Model):
    """Dense layers, as guides define a model that can be saved."""

    def __init__(self, units: list[int]) -> None:
        super().__init__()
        self.units = units
        self.stack = [layers.Dense(each) for each in units]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        for layer in self.stack:
            inputs = layer(inputs)
        return inputs

    def get_config(self) -> dict:
        return {"widths": self.units}

    @classmethod
    def from_config(cls, config: dict) -> "Stack":
        return cls(config["widths"])


def test_loading_calls_from_config_of_the_model(tmp_path) -> None:
    model, x = Stack([3, 2]), tf.ones((1, 4))
    model(x)
    model.save(tmp_path / "model")
    loaded = keras.models.load_model(tmp_path / "model", custom_objects={"Stack": Stack})
    np.testing.assert_array_equal(loaded(x), model(x))
    model.save_weights(tmp_path / "weights")
    assert loaded.load_weights(tmp_path / "weights").expect_partial().assert_consumed()


def test_a_column_of_inputs_may_be_one_axis() -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    x = np.linspace(0, 1, 32)
    model.fit(x, 2 * x, epochs=40, verbose=0)
    assert model.predict(x).shape == (32, 1)
    assert model.evaluate(x, 2 * x, verbose=0) < 1e-2


def test_a_subclass_may_pass_itself_to_its_base() -> None:
    class Doubling(tf.keras.Model):
        def __init__(self):
            super().__init__(self)

        def call(self, x):
            return 2 * x

    assert Doubling()(tf.ones([2])).numpy().tolist() == [2, 2]


def test_data_to_download_can_be_imported_and_says_what_to_use() -> None:
    from ndistribute.compat.tf.keras import datasets

    with pytest.raises(AttributeError, match="nothing is downloaded"):
        datasets.mnist  # noqa: B018


def test_a_mask_can_be_read_and_taken_away() -> None:
    embedded = tf.constant(layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]])))
    with pytest.raises(AttributeError, match="no mask"):
        embedded._keras_mask  # noqa: B018
    attach_mask(embedded, np.array([[True, False]]))
    assert embedded._keras_mask.tolist() == [[True, False]]
    del embedded._keras_mask
    assert not hasattr(embedded, "_keras_mask")


def test_no_initializer_is_the_usual_one_of_weights() -> None:
    dense = layers.Dense(2, kernel_initializer=None, bias_initializer=None)
    dense(np.ones((1, 3), np.float32))
    assert all(np.ptp(weight) > 0 for weight in dense.get_weights())


def test_parts_of_weights_are_tensors() -> None:
    dense = layers.Dense(2)
    dense(tf.ones([1, 3]))
    assert dense.kernel[:, 0].numpy().tolist() == dense.kernel.numpy()[:, 0].tolist()


def test_only_models_are_saved_with_what_they_compute(tmp_path) -> None:
    with pytest.raises(TypeError, match="save the variables"):
        tf.saved_model.save(tf.Module(), export_dir=str(tmp_path / "module"))


def test_skipgrams_are_pairs_of_words_that_are_near() -> None:
    sequence = keras.preprocessing.sequence
    pairs, labels = sequence.skipgrams([1, 2, 0, 3], 4, window_size=2, negative_samples=0)
    assert sorted(pairs) == [[1, 2], [2, 1], [2, 3], [3, 2]]
    assert labels == [1] * 4
    pairs, labels = sequence.skipgrams([1, 2, 3], 4, 1, negative_samples=0.5)
    assert sorted(labels) == [0] * 2 + [1] * 4
    assert all(0 < word < 4 for pair in pairs for word in pair)
    assert sequence.skipgrams([1, 1], 2, sampling_table=[0, 0]) == ([], [])
    table = sequence.make_sampling_table(1000)
    assert table[0] == table[1]
    assert (np.diff(table[1:]) > 0).all()
    assert table.max() <= 1


def test_candidates_are_drawn_by_their_rank() -> None:
    drawn, true, expected = tf.random.log_uniform_candidate_sampler([[3]], 1, 5, True, 5, seed=1)
    assert sorted(drawn.numpy()) == [0, 1, 2, 3, 4]
    assert (true.shape, expected.shape) == ((1, 1), (5,))
    many, _, counts = tf.random.log_uniform_candidate_sampler([[0]], 1, 4000, False, 9, seed=2)
    found = np.bincount(many.numpy(), minlength=9)
    wanted = 4000 * np.log((np.arange(9) + 2) / (np.arange(9) + 1)) / np.log(10)
    assert np.allclose(found, wanted, rtol=0.2)
    assert np.allclose(counts.numpy()[:20], wanted[many.numpy()[:20]], rtol=1e-5)
    with pytest.raises(ValueError, match="range_max=4"):
        tf.random.log_uniform_candidate_sampler([[0]], 1, 5, True, 4)


def test_a_metric_that_a_program_defines_has_tensors():
    class Rate(tf.keras.metrics.Metric):
        def __init__(self, name="rate", **options):
            super().__init__(name=name, **options)
            self.hits = self.add_weight(name="hits", initializer="zeros")
            self.count = self.add_weight("count", initializer=tf.zeros_initializer())
            self.inner = tf.keras.metrics.TruePositives()

        def update_state(self, y_true, y_pred, sample_weight=None):
            hits = tf.cast(tf.equal(y_true, tf.round(y_pred)), self.dtype)
            self.hits.assign_add(tf.reduce_sum(hits))
            self.count.assign_add(tf.cast(tf.size(y_true), self.dtype))
            self.inner.update_state(y_true, y_pred)

        def result(self):
            return tf.math.divide_no_nan(self.hits, self.count)

        def reset_states(self):
            self.hits.assign(0.0)
            self.inner.reset_states()

    x = np.linspace(-2, 2, 10, dtype="f")[:, None]
    y = (x > 0.5).astype("f")
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]):
        metric, inputs = Rate(), tf.keras.Input((1,))
        model = tf.keras.Model(inputs, tf.keras.layers.Activation("sigmoid")(inputs))
        model.compile("sgd", "mse", metrics=[metric])
        assert model.evaluate(x, y, 4, verbose=0)[1] == np.float32(np.mean((x > 0) == (x > 0.5)))
        assert isinstance(metric.result(), tf.Tensor)
        assert metric.hits.value().numpy() == 9.0
        assert metric.inner.result().numpy() == 4.0
    assert isinstance(tf.keras.metrics.Mean(), tf.keras.metrics.Metric)
    assert not isinstance(tf.keras.metrics.Mean(), Rate)
