"""A model of Keras with steps of its own logs the same under several replicas."""

from typing import Any

import numpy as np
import pytest

from ndistribute.compat import tf

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(25, 3)).astype("float32"), RNG.normal(size=(25, 1)).astype("float32")


class Renaming(tf.keras.Sequential):
    """A model whose step has names of its own for a metric and a loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.compiled_metrics.update_state(y, predicted)
        return {"error": self.metrics[1].result(), "objective": loss}


def fitted() -> Any:
    tf.keras.utils.set_random_seed(1)
    model = Renaming([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=False, steps_per_execution=1)
    return model.fit(X, Y, batch_size=10, epochs=2, verbose=0).history


def test_a_step_of_a_model_logs_the_same_with_uneven_parts():
    expected = fitted()
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy, strategy.scope():
        history = fitted()
    assert history.keys() == expected.keys() == {"error", "objective"}
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-5)


def test_a_model_of_words_takes_a_batch_alone_or_by_name():
    words = tf.keras.Input(shape=(2,), dtype=tf.string, name="words")
    lookup = tf.keras.layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0)
    model = tf.keras.Model({"features": words}, lookup(words))
    batch = tf.constant([["yes", "no"]])
    assert model(batch).numpy().tolist() == model({"features": batch}).numpy().tolist() == [[1, 0]]
    with pytest.raises(ValueError, match="'maybe' is not in the vocabulary"):
        model(tf.constant([["yes", "maybe"]]))
    with pytest.raises(ValueError, match=r"'words' .* one example: pass a batch"):
        model(tf.constant(["yes", "no"]))


class Pair(tf.keras.Model):
    """A model with two outputs."""

    def call(self, inputs: Any) -> Any:
        return inputs, 2 * inputs


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: tf.keras.Sequential([tf.keras.layers.Dense(1, name="last")]), ["last"]),
        (
            lambda: tf.keras.Model(
                x := tf.keras.Input((3,), name="x"), tf.keras.layers.Dense(1, name="y")(x)
            ),
            ["y"],
        ),
        (Pair, ["output_1", "output_2"]),
    ],
)
def test_a_saved_model_serves_its_outputs_by_name(make, names, tmp_path):
    model = make()
    model(X)
    tf.saved_model.save(model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    serve = loaded.signatures["serving_default"]
    for outputs in (serve(X), serve(x=X)):
        assert list(outputs) == names
        np.testing.assert_array_equal(outputs[names[0]], tf.nest.flatten(model(X))[0])


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (tf.keras.layers.Dense(2), tf.ones((1, 3))),
        (tf.keras.layers.LSTM(2, return_state=True), tf.ones((1, 3, 2))),
        (tf.keras.layers.Concatenate(), [tf.ones((1, 3)), tf.ones((1, 3))]),
        (tf.keras.layers.StringLookup(vocabulary=["a"]), tf.constant(["a"])),
    ],
)
def test_what_a_layer_returns_for_tensors_is_tensors(layer, inputs):
    for output in tf.nest.flatten(layer(inputs)):
        assert tf.is_tensor(output)
        assert output.numpy().shape == tuple(output.shape.as_list())
