"""The program of elastic workers that train a model of Keras; see `elastic_fit.py`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

import ndistribute as nd
from ndistribute.interop.keras import distribute
from tests.jobs import elastic_fit


def made(kind: str) -> Any:
    """Return a compiled model with generators of random numbers, which `kind` lets draw or not."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(3, activation="tanh", kernel_regularizer="l2")]
    layers += [keras.layers.Dropout(0.5 if kind == "draws" else 0.0), keras.layers.Dense(1)]
    model = distribute(keras.Sequential(layers))
    model.compile(nd.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


def run(**plan: Any) -> dict[str, Any]:
    """Train, evaluate and predict; return what is compared."""
    elastic_fit.made = made
    return elastic_fit.run(**plan)


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    output = Path(plan.pop("output"))
    output.write_text(json.dumps(run(**plan)))
