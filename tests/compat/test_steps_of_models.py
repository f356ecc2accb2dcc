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
