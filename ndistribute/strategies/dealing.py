"""Which batches of a dataset are which worker's, where each works at its own pace."""

from __future__ import annotations

from typing import Any

from ndistribute import tree
from ndistribute.data import Dataset, as_dataset

__all__ = ["dealt"]


def dealt(dataset: Any, workers: int, index: int, *, evenly: bool) -> Any:
    """Return a worker's batches: every `workers`-th, from number `index` on.

    Args:
        dataset: of batches, the same on every worker.
        workers: how many there are.
        index: which one this is.
        evenly: whether all get as many, so that nobody waits for one that has none left: to those
            that have one less a batch without examples is added.

    >>> batches = Dataset.range(5).batch(2)
    >>> [batch.tolist() for batch in dealt(batches, 2, 1, evenly=True)]
    [[2, 3], []]
    """
    if workers == 1:
        return dataset
    batches = as_dataset(dataset)
    known = batches.cardinality()
    if evenly and known > 0 and known % workers:
        # A batch in a tuple of its own comes as it is; alone its parts would come one by one.
        empty = Dataset.zip((batches.take(1), Dataset.range(1))).map(_without_examples)
        batches = batches.concatenate(empty.repeat(workers - known % workers))
    return batches.shard(workers, index)


def _without_examples(batch: Any, _: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf[:0], batch)
