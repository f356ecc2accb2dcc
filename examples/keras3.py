"""Train a model of Keras 3 on handwritten digits, with the strategy of your choice.

    python examples/keras3.py --strategy mirrored --replicas 2
    KERAS_BACKEND=torch python examples/keras3.py
    ndistribute run -n 2 examples/keras3.py --strategy multi_worker
    ndistribute run --workers 2 --ps 1 --chief examples/keras3.py --strategy parameter_server

Keras computes the outputs of the network, by JAX or PyTorch; everything around it is that of any
model here: the strategy, `fit`, the optimizer and callbacks. At the end the chief saves the trained
model by Keras, and tests what it loads from that file without a strategy.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from train_digits import load_data, make_parser, make_strategy, report, serves

import ndistribute as nd
from ndistribute import callbacks
from ndistribute.interop.keras import KerasModel, distribute

os.environ.setdefault("KERAS_BACKEND", "jax")  # Before the import of Keras, in every process.

BATCH = 64


def make_network(seed: int) -> Any:
    """Return a network of Keras."""
    import keras  # Not at the top: servers need none.

    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_model(seed: int) -> KerasModel:
    """Return the network, compiled, for the strategy of the scope."""
    nd.set_seed(seed)
    model = distribute(make_network(seed))
    loss = nd.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(nd.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def accuracy_of_file(network: Any, images: Any, labels: Any) -> float:
    """Save a network by Keras, and return the accuracy of what Keras loads from the file."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        network.save(f"{folder}/digits.keras")
        loaded = keras.saving.load_model(f"{folder}/digits.keras")
    return float((loaded.predict(images, verbose=0).argmax(axis=1) == labels).mean())


def train(strategy: nd.Strategy, epochs: int, seed: int) -> KerasModel:
    """Train, and return the model."""
    (images, labels), test = load_data(seed)
    with strategy.scope():
        model = make_model(seed)
    stopping = callbacks.EarlyStopping("val_loss", patience=3)
    model.fit(images, labels, BATCH, epochs, callbacks=[stopping], validation_data=test)
    return model


def main() -> None:
    """Parse the command line, train, and print the result."""
    options = make_parser(__doc__, epochs=6).parse_args()
    if options.strategy == "parameter_server" and serves():
        return
    with make_strategy(options.strategy, options.replicas) as strategy:
        model = train(strategy, options.epochs, options.seed)
        if strategy.is_chief:
            accuracy = accuracy_of_file(model.keras_model, *load_data(options.seed)[1])
            replicas = strategy.num_replicas_in_sync
            report(f"{options.strategy}, {replicas} replica(s): test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
