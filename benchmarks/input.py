"""The time to shuffle and batch an array of images, alone and divided between two replicas.

A step is one epoch over 60,000 x 784 float32 with a full shuffle, in batches of 256, in a Python
loop that does nothing with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import peer
from benchmarks.harness import OURS, TF, Benchmark, Group, contenders, main
from benchmarks.worker import Prepared

FEATURES, BATCH = 784, 256


@contextmanager
def ours(rows: int, distributed: bool) -> Iterator[Prepared]:
    """Set up an epoch on ndistribute."""
    import ndistribute as nd

    dataset = nd.Dataset.from_tensor_slices(_images(rows)).shuffle(rows).batch(BATCH)
    if not distributed:
        yield _epoch(dataset, lambda batch: [batch])
        return
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield _epoch(strategy.distribute_dataset(dataset), strategy.local_results)


@contextmanager
def tensorflow(rows: int, distributed: bool) -> Iterator[Prepared]:
    """Set up the same epoch on TensorFlow."""
    strategy, tf = peer.mirrored(2), peer.tensorflow()
    dataset = tf.data.Dataset.from_tensor_slices(_images(rows)).shuffle(rows).batch(BATCH)
    if not distributed:
        yield _epoch(dataset, lambda batch: [batch])
        return
    made = strategy.experimental_distribute_dataset(dataset)
    yield _epoch(made, strategy.experimental_local_results)


def _images(rows: int) -> Any:
    return np.random.default_rng(3).random((rows, FEATURES), np.float32)


def _epoch(batches: Iterable[Any], parts: Callable[[Any], Iterable[Any]]) -> Prepared:
    """Return the epoch as a step; its check is the sum of all elements, which no order changes."""

    def step() -> None:
        for _ in batches:
            pass

    total = sum(float(np.sum(part, dtype=np.float64)) for batch in batches for part in parts(batch))
    return Prepared(step, total)


def _groups(quick: bool) -> list[Group]:
    rows = 6_000 if quick else 60_000
    groups = []
    for title, distributed in (("shuffle + batch", False), ("distribute_dataset", True)):
        params = {"rows": rows, "distributed": distributed}
        ways = [("Dataset", OURS, "ours", params), ("Dataset", TF, "tensorflow", params)]
        groups.append(Group(title, contenders("input", ways, threads=2, units=rows)))
    return groups


BENCHMARK = Benchmark(
    "input", "Shuffle and batch 256 of 60,000 x 784 float32", "examples/s", _groups
)

if __name__ == "__main__":
    main(BENCHMARK)
