"""A small network for digits, the step that trains it, and servers beside workers."""

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import ndistribute as nd
from ndistribute.models import Sequential, layers, losses


@functools.cache
def digits(count: int) -> tuple[Any, Any]:
    """Return images and labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images[:count, :, :, None] / 16, found.target[:count]


def network() -> Sequential:
    """Return a compiled network in float64, which has the same weights each time."""
    nd.set_seed(1)
    model = Sequential(
        [
            layers.Conv2D(4, 3, activation="relu", dtype="float64"),
            layers.BatchNormalization(momentum=0.9, synchronized=True, dtype="float64"),
            layers.MaxPool2D(2, dtype="float64"),
            layers.Flatten(dtype="float64"),
            layers.Dense(10, dtype="float64"),
        ]
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(nd.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    model(digits(250)[0][:1])
    return model


def step_of(model: Sequential) -> Callable[[Any], None]:
    """Return the step of a replica, as a user writes it."""

    def step(batch: Any) -> None:
        x, y = batch
        with nd.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return step


SERVERS: list[nd.Server] = []  # Of this process, until it ends.


def serve(rank: int, size: int) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    SERVERS.append(nd.Server(config["cluster"], "ps", config["task"]["index"]))
