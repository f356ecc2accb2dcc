"""One and two workers train the MLP of `benchmarks.mlp`: strong and weak scaling.

Strong: the batch is divided among the workers. Weak: each worker has the whole batch; all have the
same one, so that the loss is that of one worker. Every worker is a process with one thread.
TensorFlow's MultiWorkerMirroredStrategy and PyTorch's DistributedDataParallel take part where they
are installed. A step ends when the worker knows its own loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import mlp, peer
from benchmarks.case import OURS, PEER, TORCH, Benchmark, Contender, Group, Prepared
from benchmarks.harness import main

__all__ = ["BENCHMARK", "conclude", "ddp", "ours", "tensorflow"]

WORKERS = 2
ALONE, TOGETHER = "1 worker, 1 thread", "2 workers"
GRADIENT_BYTES = sum(array.nbytes for array in mlp.initial_weights())

# How many times the examples a second of whom our two workers are to reach, by batch.
REACH = {
    (PEER, 32): 3.0,
    (PEER, 256): 3.0,
    (PEER, 2048): 1.5,
    (TORCH, 32): 2.0,
    (TORCH, 256): 2.0,
    (TORCH, 2048): 1.5,
    (OURS, 2048): 1.7,
}


def part_of(batch: int, workers: int, index: int, weak: bool) -> tuple[mlp.Floats, mlp.Floats]:
    """Return a worker's images and labels."""
    images, labels = mlp.batch_of(batch)
    if weak:
        return images, labels
    return np.split(images, workers)[index], np.split(labels, workers)[index]


@contextmanager
def ours(batch: int, workers: int, weak: bool) -> Iterator[Prepared]:
    """Set up a training step on ndistribute."""
    import ndistribute as nd
    from benchmarks.ours import multi_worker

    strategy, index = multi_worker()
    if strategy.num_replicas_in_sync != workers:
        raise RuntimeError(f"{strategy.num_replicas_in_sync} replicas, not {workers}")
    with strategy.scope():
        variables = [nd.Variable(array) for array in mlp.initial_weights()]
        optimizer = nd.optimizers.SGD(mlp.RATE)
    x, y = part_of(batch, workers, index, weak)
    total = batch * workers if weak else batch

    def train() -> Any:
        with nd.GradientTape() as tape:
            loss = mlp.loss_of(variables, x, y, total)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def step() -> float:
        return float(strategy.run(train))

    for _ in range(mlp.CHECKED_STEPS - 1):
        step()
    yield Prepared(step, float(strategy.reduce("sum", strategy.run(train))))


@contextmanager
def tensorflow(batch: int, workers: int, weak: bool) -> Iterator[Prepared]:
    """Set up the same step on TensorFlow's MultiWorkerMirroredStrategy."""
    tf, strategy = peer.multi_worker()
    with strategy.scope():
        variables = [tf.Variable(array) for array in mlp.initial_weights()]
        optimizer = tf.keras.optimizers.SGD(mlp.RATE)
        optimizer.build(variables)
    part = part_of(batch, workers, strategy.cluster_resolver.task_id, weak)
    x, y = (tf.constant(array) for array in part)
    total = batch * workers if weak else batch
    train = mlp.tensorflow_step(tf, variables, optimizer, total)

    @tf.function
    def run(x: Any, y: Any) -> Any:
        return strategy.run(train, args=(x, y))

    @tf.function
    def run_and_reduce(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(train, args=(x, y)), axis=None)

    def step() -> float:
        return float(strategy.experimental_local_results(run(x, y))[0])

    for _ in range(mlp.CHECKED_STEPS - 1):
        step()
    yield Prepared(step, float(run_and_reduce(x, y)))


@contextmanager
def ddp(batch: int, workers: int, weak: bool) -> Iterator[Prepared]:
    """Set up the same step on PyTorch's DistributedDataParallel over gloo."""
    torch, _ = peer.torch_group()
    index = torch.distributed.get_rank()
    layers: list[Any] = []
    arrays = mlp.initial_weights()
    for weights, biases in zip(arrays[::2], arrays[1::2], strict=True):
        dense = torch.nn.Linear(*weights.shape)
        with torch.no_grad():
            dense.weight.copy_(torch.from_numpy(weights.T.copy()))
            dense.bias.copy_(torch.from_numpy(biases))
        layers += [dense, torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers[:-1]), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), mlp.RATE)
    x, y = (torch.from_numpy(array) for array in part_of(batch, workers, index, weak))

    def train() -> Any:
        optimizer.zero_grad()
        # The mean over this worker's part; DDP takes the mean of the workers' gradients.
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(mlp.CHECKED_STEPS - 1):
        train()
    loss = train() / workers
    torch.distributed.all_reduce(loss)
    yield Prepared(lambda: float(train()), float(loss))


def _groups(quick: bool, cores: int) -> list[Group]:
    batches = (32,) if quick else (32, 256, 2048)
    return [
        Group(f"batch {batch}, {'weak' if weak else 'strong'}", tuple(_contenders(batch, weak)))
        for weak in (False, True)
        for batch in batches
    ]


def _contenders(batch: int, weak: bool) -> Iterator[Contender]:
    ways = [
        (OURS, ALONE, "ours", 1),
        (OURS, TOGETHER, "ours", WORKERS),
        (PEER, f"MultiWorkerMirrored RING, {TOGETHER}", "tensorflow", WORKERS),
        (TORCH, f"DDP gloo, {TOGETHER}", "ddp", WORKERS),
    ]
    for side, name, maker, workers in ways:
        total = batch * workers if weak else batch
        yield Contender(
            name,
            side,
            maker,
            {"batch": batch, "workers": workers, "weak": weak},
            blas_threads=1,
            process=f"{workers} workers",
            team=workers,
            wire=_wire(side) if workers > 1 else "",
            units=total,
            facts={
                "workers": workers,
                "single_threaded": True,
                "batch": batch,
                "weak": weak,
                "global_batch": total,
                "gradient_bytes": GRADIENT_BYTES,
            },
        )


def _wire(side: str) -> str:
    return "inherited" if side == OURS else "tcp"


def conclude(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare our workers with one of ours and with the peers, group by group.

    Args:
        entries: of the JSON.
    """
    rows = []
    for together in entries:
        if (together["side"], together["workers"]) != (OURS, WORKERS):
            continue
        for other in entries:
            if other is together or other["group"] != together["group"]:
                continue
            times = together["figure"]["median"] / other["figure"]["median"]
            reach = None if together["weak"] else REACH.get((other["side"], together["batch"]))
            rows.append(
                {
                    "": together["group"],
                    "ours, 2 workers, beside": f"{other['side']}: {other['name']}",
                    "times": times,
                    "reach": "-" if reach is None else reach,
                    "met": "-" if reach is None else "yes" if times >= reach else "no",
                }
            )
    return rows


BENCHMARK = Benchmark(
    name="scaling",
    title="One and two workers, MLP 784-512-512-10, float32, SGD",
    unit="examples/s",
    groups=_groups,
    rate=True,
    same_check=1e-3,
    conclude=conclude,
)

if __name__ == "__main__":
    main(BENCHMARK)
