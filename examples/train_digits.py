"""Train a two-layer network on handwritten digits, with the strategy of your choice.

    python examples/train_digits.py --strategy mirrored --replicas 2
    ndistribute run -n 2 examples/train_digits.py --strategy multi_worker
    mpiexec -n 2 python examples/train_digits.py --strategy multi_worker
    ndistribute run --workers 2 --ps 1 examples/train_digits.py --strategy parameter_server

The network and its training step are plain NumPy code, which is the same for every ``--strategy``.
All strategies give the same result up to rounding, except several workers of parameter servers:
they do not wait for each other, so their result differs slightly each time.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

import ndistribute as nd

BATCH = 128
HIDDEN = 128
CLASSES = 10
STRATEGIES = (
    "none",
    "one_device",
    "mirrored",
    "central_storage",
    "multi_worker",
    "parameter_server",
)


def make_strategy(name: str, replicas: int) -> nd.Strategy:
    """Return the strategy of this name."""
    devices = [f"cpu:{i}" for i in range(replicas)]
    if name == "mirrored":
        return nd.MirroredStrategy(devices)
    if name == "central_storage":
        return nd.CentralStorageStrategy(devices)
    if name == "multi_worker":  # All started workers, each with these replicas.
        return nd.MultiWorkerMirroredStrategy(devices=devices)
    if name == "parameter_server":
        return nd.ParameterServerStrategy(devices=devices)
    if replicas != 1:
        raise SystemExit(f"--strategy {name} has one replica, got --replicas {replicas}")
    return nd.OneDeviceStrategy("cpu:0") if name == "one_device" else nd.get_strategy()


def load_data(seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return training and test data: 1,437 and 360 images of 8 x 8 pixels, with their labels."""
    from sklearn.datasets import load_digits  # Not at the top: servers load no data.

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = (digits.data / 16.0).astype(np.float32)[order]
    labels = digits.target[order]
    return (images[360:], labels[360:]), (images[:360], labels[:360])


class Network:
    """Two dense layers with a ReLU between them."""

    def __init__(self, inputs: int, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def weights(rows: int, columns: int) -> nd.Variable:
            scale = np.sqrt(2.0 / rows)
            return nd.Variable(rng.normal(0.0, scale, (rows, columns)).astype(np.float32))

        self.hidden_weights = weights(inputs, HIDDEN)
        self.hidden_bias = nd.Variable(np.zeros(HIDDEN, np.float32))
        self.output_weights = weights(HIDDEN, CLASSES)
        self.output_bias = nd.Variable(np.zeros(CLASSES, np.float32))

    @property
    def variables(self) -> list[nd.Variable]:
        """The trainable variables."""
        return [self.hidden_weights, self.hidden_bias, self.output_weights, self.output_bias]

    def __call__(self, images: Any) -> Any:
        """Return the logits, shape ``(len(images), 10)``."""
        hidden = np.maximum(images @ self.hidden_weights + self.hidden_bias, 0)
        return hidden @ self.output_weights + self.output_bias


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the loss of each image, shape ``(len(labels),)``."""
    shifted = logits - np.max(logits, axis=1, keepdims=True)
    likelihood = shifted[np.arange(len(labels)), labels]
    return np.log(np.sum(np.exp(shifted), axis=1)) - likelihood


def serves() -> bool:
    """Return True after serving until the end of the job, if this process has no loop of its own.

    That is a parameter server, or a worker whose steps a chief schedules.
    """
    resolver = nd.TFConfigClusterResolver()
    cluster, job = resolver.cluster_spec(), resolver.task_type
    if job != "ps" and not (job == "worker" and {"ps", "chief"} <= set(cluster.jobs)):
        return False
    nd.Server(cluster, job, resolver.task_id).join()
    return True


def make_parser(
    text: str | None, epochs: int, replicas: int = 1, several: bool = False
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that the examples share.

    Args:
        text: the docstring of the example, whose first line is shown by ``--help``.
        epochs: how many epochs it trains by default.
        replicas: how many replicas it has by default.
        several: whether it takes several strategies, by default all.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0] if text else None)
    known: dict[str, Any] = {"choices": STRATEGIES, "metavar": "NAME"}
    names = ", ".join(STRATEGIES)
    if several:
        about = f"by default all of {names}"
        parser.add_argument("--strategy", nargs="+", default=STRATEGIES, help=about, **known)
    else:
        about = f"one of {names}; by default mirrored"
        parser.add_argument("--strategy", default="mirrored", help=about, **known)
    parser.add_argument("--replicas", type=int, default=replicas, help="by default %(default)s")
    parser.add_argument("--epochs", type=int, default=epochs, help="by default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the weights")
    return parser


def report(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def train(strategy: nd.Strategy, epochs: int, seed: int) -> tuple[float, float]:
    """Train; return the loss of the last epoch and the accuracy on the test images."""
    (images, labels), (test_images, test_labels) = load_data(seed)
    with strategy.scope():
        quiet = None if strategy.is_chief else True  # None: quiet without a terminal.
        network = Network(images.shape[1], seed)
        optimizer = nd.optimizers.Adam(0.003)

    def step(images: Any, labels: Any) -> Any:
        with nd.GradientTape() as tape:
            loss = np.sum(cross_entropy(network(images), labels)) / BATCH
        gradients = tape.gradient(loss, network.variables)
        optimizer.apply_gradients(zip(gradients, network.variables, strict=True))
        return loss

    dataset = nd.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=seed)
    batches = strategy.distribute_dataset(dataset.batch(BATCH))
    with tqdm(total=epochs * batches.cardinality(), unit="step", disable=quiet) as progress:
        for epoch in range(1, epochs + 1):
            total = 0.0
            for batch in batches:
                total += float(strategy.reduce("sum", strategy.run(step, args=batch)))
                progress.update()
            loss = total / batches.cardinality()
            progress.set_description(f"epoch {epoch}/{epochs}, loss {loss:.4f}")
    guesses = np.argmax(network(test_images), axis=1)
    return loss, float(np.mean(guesses == test_labels))


def main() -> None:
    """Parse the command line, train, and print the result."""
    options = make_parser(__doc__, epochs=25).parse_args()
    if options.strategy == "parameter_server" and serves():
        return
    strategy = make_strategy(options.strategy, options.replicas)
    with strategy:
        loss, accuracy = train(strategy, options.epochs, options.seed)
        if strategy.is_chief:
            replicas = strategy.num_replicas_in_sync
            report(
                f"{options.strategy}, {replicas} replica(s): "
                f"loss {loss:.6f}, test accuracy {accuracy:.4f}"
            )


if __name__ == "__main__":
    main()
