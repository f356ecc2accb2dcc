"""`DatasetIterator`: the batches of a dataset as tensors of a graph."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.errors import OutOfRangeError
from ndistribute.graph.graph import Operation
from ndistribute.graph.operations import py_function
from ndistribute.graph.shapes import Known, Shape


class DatasetIterator:
    """Give the batches of a dataset to the steps of a session, one after another.

    Args:
        dataset: a re-iterable of nests of arrays, which begin with an axis of any length.

    Raises:
        ValueError: the dataset is empty.

    >>> from ndistribute.graph.session import Session
    >>> x = DatasetIterator([np.arange(2), np.arange(3)]).get_next()
    >>> session, doubled = Session(), 2 * x
    >>> [session.run(doubled).tolist() for _ in range(2)]
    [[0, 2], [0, 2, 4]]
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self._lock = threading.Lock()
        batches = iter(dataset)
        self._like = next(batches, None)
        if self._like is None:
            raise ValueError("the dataset of an iterator is empty.")
        self._batches: Iterator[Any] = itertools.chain([self._like], batches)

    def get_next(self, name: str = "get_next") -> Any:
        """Return a nest of tensors like a batch; a step that needs any of them takes the next one.

        At the end of the dataset the step fails with `OutOfRangeError`. Like a `py_function`, they
        are computed in the client's process alone.
        """
        leaves = [np.asarray(leaf) for leaf in tree.flatten(self._like)]
        found = py_function(self._take, [], len(leaves), name)
        tensors = found if len(leaves) > 1 else [found]
        for tensor, leaf in zip(tensors, leaves, strict=True):
            tensor.known = Known(leaf.dtype, Shape([None, *leaf.shape[1:]] if leaf.ndim else []))
        return tree.unflatten(self._like, tensors)

    @property
    def initializer(self) -> Operation:
        """A new operation after which the first batch comes again."""
        return py_function(self._begin, [], 0, "initializer")  # type: ignore[no-any-return]

    def _begin(self) -> None:
        with self._lock:
            self._batches = iter(self.dataset)

    def _take(self) -> Any:
        with self._lock:
            batch = next(self._batches, None)
        if batch is None:
            raise OutOfRangeError("the dataset has no more batches.")
        leaves = tree.flatten(batch)
        return leaves if len(leaves) > 1 else leaves[0]


def iterator_of(tensor: Any) -> DatasetIterator | None:
    """Return the iterator that gives a tensor; None if something else does."""
    take = tensor.graph.functions.get(tensor.op.name)
    iterator = getattr(take, "__self__", None)
    return iterator if isinstance(iterator, DatasetIterator) else None
