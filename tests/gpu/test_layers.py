"""Layers on GPU arrays give what they give on the host, and leave no array there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.devices import is_gpu_array, to_host
from ndistribute.models import layers
from tests.kinds import here

IMAGES = np.random.default_rng(0).standard_normal((4, 6, 6, 2)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 9, (4, 5))


class Reading(layers.Layer):
    """Embed, attend and normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(9, 6)
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.1)
        self.norm = layers.LayerNormalization()

    def call(self, tokens: Any) -> Any:
        x = self.table(tokens)
        return self.norm(x + self.attention(x, x, use_causal_mask=True))


MADE: dict[str, tuple[Callable[[], layers.Layer], Any]] = {
    "images": (
        lambda: nd.models.Sequential(
            [
                layers.Conv2D(4, 3, padding="same", activation="relu", kernel_regularizer="l2"),
                layers.BatchNormalization(synchronized=True),
                layers.MaxPool2D(),
                layers.Conv2D(4, 2, strides=2, groups=2, activation="gelu"),
                layers.AveragePool2D(1),
                layers.BatchNormalization(),
                layers.Dropout(0.2),
                layers.GlobalAveragePool2D(),
                layers.Dense(3, activation="tanh"),
            ]
        ),
        IMAGES,
    ),
    "words": (Reading, TOKENS),
}


@pytest.mark.parametrize("made", MADE)
def test_a_step_of_layers_computes_where_the_replica_is(strategy: nd.Strategy, made: str) -> None:
    make, x = MADE[made]
    with strategy.scope():
        layer, optimizer = make(), nd.optimizers.SGD(0.1)

        def step() -> Any:
            rows = here(x)
            with nd.GradientTape() as tape:
                y = layer(rows, training=True)
                loss = np.sum(y * y) + sum(layer.losses)
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return is_gpu_array(y.value) == is_gpu_array(rows)

        for _ in range(2):
            assert all(strategy.local_results(strategy.run(step)))
        evaluated = strategy.run(lambda: layer(here(x)))
        for one in strategy.local_results(evaluated):
            assert np.isfinite(to_host(one)).all()
