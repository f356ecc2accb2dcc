"""Shuffle and batch an array of images, alone and cut over two replicas.

A step is one epoch over 60,000 x 784 float32, shuffled whole, in batches of 256, taken from a
Python loop that does nothing with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from benchmarks import peer
from benchmarks.case import OURS, PEER, Benchmark, Contender, Group, Prepared
from benchmarks.harness import main

__all__ = ["BENCHMARK", "ours", "tensorflow"]

FEATURES = 784
BATCH = 256


@contextmanager
def ours(rows: int, replicas: int) -> Iterator[Prepared]:
    """Set up an epoch on ndistribute; no replicas stands for the dataset alone."""
    import ndistribute as nd

    dataset = nd.Dataset.from_tensor_slices(_images(rows)).shuffle(rows).batch(BATCH)
    if not replicas:
        yield _epoch(dataset, lambda batch: [batch])
        return
    with closing(nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])) as strategy:
        yield _epoch(strategy.distribute_dataset(dataset), strategy.local_results)


@contextmanager
def tensorflow(rows: int, replicas: int) -> Iterator[Prepared]:
    """Set up the same epoch on TensorFlow."""
    tf = peer.tensorflow()
    dataset = tf.data.Dataset.from_tensor_slices(_images(rows)).shuffle(rows).batch(BATCH)
    if not replicas:
        yield _epoch(dataset, lambda batch: [batch])
        return
    strategy = peer.mirrored(replicas)
    distributed = strategy.experimental_distribute_dataset(dataset)
    yield _epoch(distributed, strategy.experimental_local_results)


def _images(rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).random((rows, FEATURES), np.float32)


def _epoch(batches: Iterable[Any], parts: Callable[[Any], Iterable[Any]]) -> Prepared:
    """Return the epoch as a step; its check is the sum of all elements, which no order changes."""

    def step() -> None:
        for _ in batches:
            pass

    total = sum(float(np.sum(part, dtype=np.float64)) for batch in batches for part in parts(batch))
    return Prepared(step, total)


def _groups(quick: bool, cores: int) -> list[Group]:
    rows = 6_000 if quick else 60_000
    titles = {"shuffle + batch": 0, "through distribute_dataset": 2}
    return [Group(title, tuple(_contenders(rows, n))) for title, n in titles.items()]


def _contenders(rows: int, replicas: int) -> Iterator[Contender]:
    name = f"{replicas} replicas" if replicas else "Dataset"
    params = {"rows": rows, "replicas": replicas}
    facts = {"beside": [name], "bound": 1e6 if replicas else 1.5e6}
    yield Contender(name, OURS, "ours", params, units=rows, facts=facts)
    yield Contender(name, PEER, "tensorflow", params, units=rows)


BENCHMARK = Benchmark(
    name="input_pipeline",
    title="Shuffle and batch 256 of 60,000 x 784 float32",
    unit="examples/s",
    groups=_groups,
    rate=True,
    same_check=1e-6,
)

if __name__ == "__main__":
    main(BENCHMARK)
