"""Train a convolutional network on handwritten digits with `fit`, with the strategy of your choice.

    python examples/fit_digits.py --strategy mirrored --replicas 2
    ndistribute run -n 2 examples/fit_digits.py --strategy multi_worker
    mpiexec -n 2 python examples/fit_digits.py --strategy multi_worker
    ndistribute run --workers 2 --ps 1 examples/fit_digits.py --strategy parameter_server
    ndistribute run --workers 2 --ps 1 --chief examples/fit_digits.py --strategy parameter_server

It shows that a model which is created and compiled in a scope needs no line for the strategy:
batches are normalised over all replicas, and metrics count the examples of all replicas. So the
result is the same under all strategies, except for several workers of parameter servers: they do
not wait for each other, and without a chief, each trains and tests on its own share of the images.
"""

from __future__ import annotations

from train_digits import load_data, make_parser, make_strategy, report, serves

import ndistribute as nd
from ndistribute import callbacks, layers

BATCH = 64


def make_model(seed: int) -> nd.models.Sequential:
    """Return the compiled network; its result does not depend on the number of replicas."""
    nd.set_seed(seed)
    model = nd.models.Sequential(
        [
            layers.Reshape((8, 8, 1), input_shape=(64,)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9, synchronized=True),
            layers.Activation("relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = nd.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(nd.optimizers.Adam(0.005), loss, metrics=["accuracy"])
    return model


def halving(epoch: int, rate: float) -> float:
    """Return the learning rate of an epoch: halved after every third one."""
    return rate / 2 if epoch and epoch % 3 == 0 else rate


def train(strategy: nd.Strategy, epochs: int, seed: int) -> float:
    """Train; return the accuracy on the test images."""
    (images, labels), test = load_data(seed)
    with strategy.scope():
        model = make_model(seed)
    if strategy.is_chief:
        report(model.summary())
    model.fit(
        images,
        labels,
        batch_size=BATCH,
        epochs=epochs,
        validation_split=0.1,
        callbacks=[
            callbacks.LearningRateScheduler(halving),
            callbacks.EarlyStopping("val_loss", patience=4),
            callbacks.TerminateOnNaN(),
        ],
    )
    return float(model.evaluate(*test, verbose=0)[1])


def main() -> None:
    """Parse the command line, train, and print the result."""
    options = make_parser(__doc__, epochs=10).parse_args()
    if options.strategy == "parameter_server" and serves():
        return
    with make_strategy(options.strategy, options.replicas) as strategy:
        accuracy = train(strategy, options.epochs, options.seed)
        if strategy.is_chief:
            replicas = strategy.num_replicas_in_sync
            report(f"{options.strategy}, {replicas} replica(s): test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
