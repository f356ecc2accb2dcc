"""Training steps of a small network: 784-512-512-10, float32, SGD, from arrays in memory.

The step is plain NumPy under `GradientTape`, and the same operations in a `tf.function`. Batches
are global: two replicas take half each. Both sides start from the same weights, and their losses
after a few steps are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import peer
from benchmarks.case import OURS, PEER, Benchmark, Contender, Group, Prepared
from benchmarks.harness import main

__all__ = [
    "BENCHMARK",
    "batch_of",
    "initial_weights",
    "loss_of",
    "ours",
    "tensorflow",
    "tensorflow_step",
]

SIZES = (784, 512, 512, 10)
RATE = 0.05
CHECKED_STEPS = 5

Floats = npt.NDArray[np.float32]


def initial_weights() -> list[Floats]:
    """Return weights and biases in turn, the same for everyone."""
    rng = np.random.default_rng(0)
    made: list[Floats] = []
    for rows, columns in pairwise(SIZES):
        made.append(rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32))
        made.append(np.zeros(columns, np.float32))
    return made


def batch_of(size: int) -> tuple[Floats, Floats]:
    """Return images and labels, one-hot."""
    rng = np.random.default_rng(1)
    images = rng.random((size, SIZES[0]), np.float32)
    return images, np.eye(SIZES[-1], dtype=np.float32)[rng.integers(SIZES[-1], size=size)]


@contextmanager
def ours(batch: int, strategy: str, replicas: int) -> Iterator[Prepared]:
    """Set up a training step on ndistribute."""
    import ndistribute as nd

    devices = [f"cpu:{i}" for i in range(replicas)]
    chosen: Any = {
        "default": nd.get_strategy,
        "mirrored": lambda: nd.MirroredStrategy(devices),
        "central": lambda: nd.CentralStorageStrategy(devices),
    }[strategy]()
    with closing(chosen) as strategy_:
        with strategy_.scope():
            variables = [nd.Variable(array) for array in initial_weights()]
            optimizer = nd.optimizers.SGD(RATE)

        def train(x: Floats, y: Floats) -> Any:
            with nd.GradientTape() as tape:
                loss = loss_of(variables, x, y, batch)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        parts = [np.split(array, replicas) for array in batch_of(batch)]
        args = tuple(nd.PerReplica(part) for part in parts)

        def step() -> Any:
            return strategy_.run(train, args=args)

        for _ in range(CHECKED_STEPS):
            losses = step()
        yield Prepared(step, float(strategy_.reduce("sum", losses)))


def loss_of(variables: list[Any], x: Any, y: Floats, batch: int) -> Any:
    """Return this replica's share of the mean softmax cross-entropy."""
    w1, b1, w2, b2, w3, b3 = variables
    hidden = np.maximum(x @ w1 + b1, 0)
    hidden = np.maximum(hidden @ w2 + b2, 0)
    logits = hidden @ w3 + b3
    shifted = logits - np.max(logits, axis=1, keepdims=True)
    log_total = np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
    return -np.sum(y * (shifted - log_total)) / batch


@contextmanager
def tensorflow(batch: int, replicas: int) -> Iterator[Prepared]:
    """Set up the same training step on TensorFlow; without a strategy for one replica."""
    tf = peer.tensorflow()
    strategy = peer.mirrored(replicas) if replicas > 1 else None
    with strategy.scope() if strategy else nullcontext():
        variables = [tf.Variable(array) for array in initial_weights()]
        optimizer = tf.keras.optimizers.SGD(RATE)
        optimizer.build(variables)
    train = tensorflow_step(tf, variables, optimizer, batch)
    parts = [np.split(array, replicas) for array in batch_of(batch)]
    if strategy is None:
        alone = [tf.constant(part[0]) for part in parts]
        graph = tf.function(train)

        def step() -> float:
            return float(graph(*alone))
    else:
        shares = [
            strategy.experimental_distribute_values_from_function(
                lambda c, part=part: tf.constant(part[c.replica_id_in_sync_group])
            )
            for part in parts
        ]

        @tf.function
        def run(x: Any, y: Any) -> Any:
            return strategy.reduce("sum", strategy.run(train, args=(x, y)), axis=None)

        def step() -> float:
            return float(run(*shares))

    for _ in range(CHECKED_STEPS):
        loss = step()
    yield Prepared(step, loss)


def tensorflow_step(
    tf: Any, variables: list[Any], optimizer: Any, batch: int
) -> Callable[[Any, Any], Any]:
    """Return a replica's step, which returns its share of the mean loss."""

    def train(x: Any, y: Any) -> Any:
        w1, b1, w2, b2, w3, b3 = variables
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(x, w1) + b1)
            hidden = tf.nn.relu(tf.matmul(hidden, w2) + b2)
            logits = tf.matmul(hidden, w3) + b3
            losses = tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_sum(losses) / batch
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return train


def _groups(quick: bool, cores: int) -> list[Group]:
    sizes = (32, 256) if quick else (32, 256, 2048)
    return [Group(f"batch {size}", tuple(_contenders(size))) for size in sizes]


def _contenders(batch: int) -> Iterator[Contender]:
    peers = [("one process", 1), ("MirroredStrategy, 2 replicas", 2)]
    alone, mirrored = ({"beside": [name]} for name, _ in peers)
    times = {"reach": 2.0 if batch < 2048 else 1.0}
    ways: list[tuple[str, str, int, int | None, dict[str, Any]]] = [
        ("one replica, 1 BLAS thread", "default", 1, 1, {}),
        ("one replica, 2 BLAS threads", "default", 1, 2, alone | {"reach": 1.0}),
        ("MirroredStrategy, 2 replicas", "mirrored", 2, None, mirrored | times),
        ("CentralStorageStrategy, 2 replicas", "central", 2, None, mirrored),
    ]
    for name, strategy, replicas, threads, facts in ways:
        params = {"batch": batch, "strategy": strategy, "replicas": replicas}
        yield Contender(name, OURS, "ours", params, threads, units=batch, facts=facts)
    for name, replicas in peers:
        params = {"batch": batch, "replicas": replicas}
        yield Contender(name, PEER, "tensorflow", params, units=batch)


BENCHMARK = Benchmark(
    name="mlp",
    title="Training an MLP 784-512-512-10, float32, SGD",
    unit="examples/s",
    groups=_groups,
    rate=True,
    same_check=1e-3,
)

if __name__ == "__main__":
    main(BENCHMARK)
