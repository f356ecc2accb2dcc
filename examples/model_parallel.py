"""Train a network whose large dense layers are divided among the replicas.

    python examples/model_parallel.py --strategy mirrored --replicas 2
    ndistribute run -n 2 examples/model_parallel.py --strategy multi_worker

It shows the hybrid of Krizhevsky (2014): convolutions have few weights and many activations, so
each replica computes them for its part of the batch; dense layers have many weights and few
activations, so each replica stores and computes a part of them for the whole batch. The result is
that of data parallelism alone. A replica keeps only its part of the weights and of the optimizer's
slots, and exchanges activations where data parallelism exchanges the gradients of those weights.
"""

from __future__ import annotations

import time

from train_digits import load_data, make_parser, make_strategy, report

import ndistribute as nd
from ndistribute import layers

BATCH, WIDTH = 64, 1024


def make_model(seed: int, divided: bool) -> nd.models.Sequential:
    """Return the compiled network, with its dense layers divided among the replicas or not."""
    wide = layers.ColumnParallelDense if divided else layers.Dense
    narrow = layers.RowParallelDense if divided else layers.Dense
    nd.set_seed(seed)
    model = nd.models.Sequential(
        [
            layers.Reshape((8, 8, 1), input_shape=(64,)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            wide(WIDTH, activation="relu"),
            narrow(WIDTH, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = nd.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(nd.optimizers.Adam(0.001), loss, metrics=["accuracy"])
    return model


def train(strategy: nd.Strategy, divided: bool, epochs: int, seed: int) -> tuple[float, str]:
    """Train; return the test accuracy, and a line with what a replica stores and the time."""
    (images, labels), test = load_data(seed)
    with strategy.scope():
        model = make_model(seed, divided)
    kept = sum(variable.values[0].nbytes for variable in model.variables)
    start = time.perf_counter()
    model.fit(images, labels, batch_size=BATCH, epochs=epochs, verbose=0)
    seconds = time.perf_counter() - start
    accuracy = float(model.evaluate(*test, verbose=0)[1])
    steps = epochs * -(-len(images) // BATCH)
    line = f"{kept / 1e6:.2f} MB of weights on a replica, {1e3 * seconds / steps:.1f} ms a step"
    return accuracy, line


def main() -> None:
    """Parse the command line, train with and without divided layers, and print the results."""
    parser = make_parser(__doc__, epochs=4)
    options = parser.parse_args()
    if options.strategy == "parameter_server":
        parser.error("parameter servers divide variables by a variable_partitioner instead.")
    with make_strategy(options.strategy, options.replicas) as strategy:
        for divided in (False, True):
            accuracy, line = train(strategy, divided, options.epochs, options.seed)
            if strategy.is_chief:
                what = "divided dense layers" if divided else "data parallelism"
                report(f"{what}: test accuracy {accuracy:.4f}, {line}")


if __name__ == "__main__":
    main()
