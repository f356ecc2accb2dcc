"""Training steps of an MLP 784-512-512-10, float32, SGD: one process, two replicas, two workers.

The step is NumPy code under `GradientTape`; TensorFlow and PyTorch do the same work. All start from
the same weights, and their losses after a few steps are compared before the measurement. Replicas
and workers divide the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import peer
from benchmarks.harness import OURS, TF, TORCH, Benchmark, Contender, Group, main
from benchmarks.worker import Prepared, strategy_of

SIZES = (784, 512, 512, 10)
GRADIENT_BYTES = sum(4 * (rows + 1) * columns for rows, columns in pairwise(SIZES))
RATE = 0.05
CHECKED_STEPS = 5


def initial_weights() -> list[Any]:
    """Return weights and biases in turn, the same for everyone."""
    rng = np.random.default_rng(0)
    made: list[Any] = []
    for rows, columns in pairwise(SIZES):
        made.append(rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32))
        made.append(np.zeros(columns, np.float32))
    return made


def batch_of(size: int) -> tuple[Any, Any]:
    """Return images and labels, one-hot."""
    rng = np.random.default_rng(1)
    images = rng.random((size, SIZES[0]), np.float32)
    return images, np.eye(SIZES[-1], dtype=np.float32)[rng.integers(SIZES[-1], size=size)]


def step_of(strategy: Any, batch: int) -> Callable[[Any, Any], Any]:
    """Return a replica's step of ours, which returns its share of the mean loss of a batch."""
    import ndistribute as nd

    with strategy.scope():
        variables = [nd.Variable(array) for array in initial_weights()]
        optimizer = nd.optimizers.SGD(RATE)

    def train(x: Any, y: Any) -> Any:
        w1, b1, w2, b2, w3, b3 = variables
        with nd.GradientTape() as tape:
            hidden = np.maximum(x @ w1 + b1, 0)
            hidden = np.maximum(hidden @ w2 + b2, 0)
            logits = hidden @ w3 + b3
            shifted = logits - np.max(logits, axis=1, keepdims=True)
            log_total = np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
            loss = -np.sum(y * (shifted - log_total)) / batch
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return train


def tf_step_of(tf: Any, strategy: Any, batch: int) -> Callable[[Any, Any], Any]:
    """Return the same step of TensorFlow; the strategy may be None."""
    with nullcontext() if strategy is None else strategy.scope():
        variables = [tf.Variable(array) for array in initial_weights()]
        optimizer = tf.keras.optimizers.SGD(RATE)
        optimizer.build(variables)

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


def _part(batch: int, parts: int, index: int) -> list[Any]:
    arrays = batch_of(batch)
    return [np.split(array, parts)[index] for array in arrays]


@contextmanager
def ours(batch: int, strategy: str) -> Iterator[Prepared]:
    """Set up a training step on ndistribute."""
    import ndistribute as nd

    devices = ["cpu:0", "cpu:1"]
    made: dict[str, Callable[[], Any]] = {
        "one": nd.get_strategy,
        "mirrored": lambda: nd.MirroredStrategy(devices),
        "central": lambda: nd.CentralStorageStrategy(devices),
        "workers": lambda: strategy_of("MultiWorkerMirroredStrategy"),
    }
    chosen = made[strategy]()
    count = chosen.num_replicas_in_sync
    train = step_of(chosen, batch)
    if strategy == "workers":
        args = _part(batch, count, chosen.cluster_resolver.worker_index or 0)
    else:
        parts = [_part(batch, count, index) for index in range(count)]
        args = [nd.PerReplica(part) for part in zip(*parts, strict=True)]

    def step() -> Any:
        return chosen.run(train, args=tuple(args))

    for _ in range(CHECKED_STEPS):
        losses = step()
    yield Prepared(step, float(chosen.reduce("sum", losses)))
    if strategy != "workers":
        chosen.close()


@contextmanager
def tensorflow(batch: int, strategy: str) -> Iterator[Prepared]:
    """Set up the same training step on TensorFlow; without a strategy for one replica."""
    made: dict[str, Callable[[], Any]] = {
        "one": lambda: None,
        "mirrored": lambda: peer.mirrored(2),
        "workers": peer.multi_worker,
    }
    chosen, tf = made[strategy](), peer.tensorflow()
    count = 1 if chosen is None else chosen.num_replicas_in_sync
    train = tf_step_of(tf, chosen, batch)
    if chosen is None:
        alone = [tf.constant(array) for array in batch_of(batch)]
        graph = tf.function(train)

        def step() -> float:
            return float(graph(*alone))
    else:
        shares = [
            chosen.experimental_distribute_values_from_function(
                lambda c, k=k: tf.constant(_part(batch, count, c.replica_id_in_sync_group)[k])
            )
            for k in range(2)
        ]

        @tf.function
        def run(x: Any, y: Any) -> Any:
            return chosen.reduce("sum", chosen.run(train, args=(x, y)), axis=None)

        def step() -> float:
            return float(run(*shares))

    for _ in range(CHECKED_STEPS):
        loss = step()
    yield Prepared(step, loss)


@contextmanager
def ddp(batch: int, strategy: str) -> Iterator[Prepared]:
    """Set up the same step on PyTorch's DistributedDataParallel over gloo."""
    torch, rank = peer.torch_group()
    workers = torch.distributed.get_world_size()
    layers: list[Any] = []
    for weights, biases in zip(initial_weights()[::2], initial_weights()[1::2], strict=True):
        dense = torch.nn.Linear(*weights.shape)
        with torch.no_grad():
            dense.weight.copy_(torch.from_numpy(weights.T.copy()))
            dense.bias.copy_(torch.from_numpy(biases))
        layers += [dense, torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers[:-1]), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    x, y = (torch.from_numpy(array) for array in _part(batch, workers, rank))

    def train() -> Any:
        optimizer.zero_grad()
        # The mean over this worker's part; DDP takes the mean of the workers' gradients.
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(CHECKED_STEPS - 1):
        train()
    loss = train() / workers
    torch.distributed.all_reduce(loss)
    yield Prepared(lambda: float(train()), float(loss))


# Name, side, maker, strategy, processes and threads of each.
_WAYS: dict[str, list[tuple[str, str, str, str, int, int]]] = {
    "one replica": [
        ("1 BLAS thread", OURS, "ours", "one", 1, 1),
        ("2 BLAS threads", OURS, "ours", "one", 1, 2),
        ("chosen BLAS threads", OURS, "ours", "one", 1, 0),
        ("2 threads", TF, "tensorflow", "one", 1, 2),
    ],
    "2 replicas": [
        ("MirroredStrategy", OURS, "ours", "mirrored", 1, 2),
        ("CentralStorageStrategy", OURS, "ours", "central", 1, 2),
        ("MirroredStrategy", TF, "tensorflow", "mirrored", 1, 2),
    ],
    "2 workers": [
        ("1 worker", OURS, "ours", "one", 1, 1),
        ("2 workers", OURS, "ours", "workers", 2, 1),
        ("RING", TF, "tensorflow", "workers", 2, 1),
        ("DDP, gloo", TORCH, "ddp", "workers", 2, 1),
    ],
}


def _groups(quick: bool) -> list[Group]:
    groups = []
    for title, ways in _WAYS.items():
        for batch in (32,) if quick else (32, 256, 2048):
            found = []
            for name, side, maker, strategy, processes, threads in ways:
                params = {"batch": batch, "strategy": strategy}
                told = {"batch": batch, "workers": processes, "threads": threads}
                jobs, made = ("worker",) * processes, f"training:{maker}"
                common: dict[str, Any] = {"jobs": jobs, "threads": threads, "facts": told}
                found.append(Contender(name, side, made, params, units=batch, **common))
            groups.append(Group(f"{title}, batch {batch}", found))
    return groups


BENCHMARK = Benchmark(
    "training", "Training an MLP 784-512-512-10, float32, SGD", "examples/s", _groups
)

if __name__ == "__main__":
    main(BENCHMARK)
