"""Train a convolutional network on handwritten digits with steps that XLA compiles.

    python examples/tpu_strategy.py
    python examples/tpu_strategy.py --devices 4 --epochs 3

`TPUStrategy` has a replica on each of JAX's devices. Where there is neither a TPU nor a GPU, these
are emulated ones, which share the cores of the CPU: enough to see that the program works. Beside
the epochs, the example prints how long the compilations took, one for each shape of a batch.
"""

from __future__ import annotations

import argparse
import os

from train_digits import load_data, report

import ndistribute as nd
from ndistribute import callbacks, layers

BATCH = 64


def make_strategy(devices: int) -> nd.TPUStrategy:
    """Return a strategy on so many devices of JAX; emulated ones, if it has only the CPU."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ.setdefault("XLA_FLAGS", flag)  # It concerns the CPU alone, when JAX starts.
    return nd.TPUStrategy(nd.list_devices("tpu")[:devices])


def make_model() -> nd.Sequential:
    """Return the compiled network."""
    model = nd.Sequential(
        [
            layers.Reshape((8, 8, 1), input_shape=(64,)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPool2D(2),
            layers.Dropout(0.2),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = nd.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(nd.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def train(strategy: nd.TPUStrategy, epochs: int, seed: int) -> float:
    """Train; return the accuracy on the test images."""
    (images, labels), test = load_data(seed)
    nd.set_seed(seed)
    with strategy.scope():
        model = make_model()
    # Parts of the same shape for all devices, in every batch: one compilation.
    shuffled = nd.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=seed)
    train_set = shuffled.batch(BATCH, drop_remainder=True)
    test_set = nd.Dataset.from_tensor_slices(test).batch(len(test[1]))
    rates = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)
    model.fit(train_set, epochs=epochs, callbacks=[rates])
    return float(model.evaluate(test_set, verbose=0)[1])


def main() -> None:
    """Parse the command line, train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="at most so many; 2")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the data; 8")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order; 0")
    options = parser.parse_args()
    with make_strategy(options.devices) as strategy:
        accuracy = train(strategy, options.epochs, options.seed)
        for arguments, seconds in strategy.compilations:
            report(f"compiled for {arguments} in {seconds:.1f} s")
        devices = strategy.num_replicas_in_sync
        report(f"TPUStrategy, {devices} device(s): test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
