"""`DatasetIterator`: the batches of a dataset as tensors of a graph."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.errors import OutOfRangeError
from ndistribute.graph.graph import Operation, get_default_graph
from ndistribute.graph.shapes import Known, Shape

_numbers = itertools.count()


class DatasetIterator:
    """An iterator that gives the batches of a dataset to the steps of a session, in turn.

    Each session without a target begins with the first batch. On a server of this process, a
    session continues where the last session ended, so training continues there after a recovery.

    Args:
        dataset: an iterable that can be repeated, of nests of arrays; their first axis may have any
            length.

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
        self.number = f"iterator {next(_numbers)}"
        """Its name in this process."""
        self._lock = threading.Lock()
        batches = iter(dataset)
        self._like = next(batches, None)
        if self._like is None:
            raise ValueError("the dataset of an iterator is empty.")
        self._first: Iterator[Any] | None = itertools.chain([self._like], batches)
        self.initializer: Operation = self._operation("first_batch", 0, "initializer")
        """The operation after which the first batch comes again."""

    def get_next(self, name: str = "get_next") -> Any:
        """Return a nest of tensors like a batch; a step that uses any of them takes a batch.

        At the end of the dataset the step fails with `OutOfRangeError`. Like a `py_function`, the
        tensors are computed only in the client's process.
        """
        leaves = [np.asarray(leaf) for leaf in tree.flatten(self._like)]
        tensors = self._operation("next_batch", len(leaves), name).outputs
        for tensor, leaf in zip(tensors, leaves, strict=True):
            tensor.known = Known(leaf.dtype, Shape([None, *leaf.shape[1:]] if leaf.ndim else []))
        return tree.unflatten(self._like, tensors)

    def begin(self) -> list[Iterator[Any]]:
        """Return the position for a new session: a list with an iterator."""
        with self._lock:
            first, self._first = self._first, None
        return [iter(self.dataset) if first is None else first]

    def restart(self, position: list[Iterator[Any]]) -> None:
        """Let the first batch come next."""
        with self._lock:
            position[0] = iter(self.dataset)

    def take(self, position: list[Iterator[Any]]) -> list[Any]:
        """Return the arrays of the next batch, which the dataset may change later.

        Raises:
            OutOfRangeError: there is no next batch.
        """
        with self._lock:
            batch = next(position[0], None)
        if batch is None:
            raise OutOfRangeError("the dataset has no more batches.")
        return [np.array(leaf) for leaf in tree.flatten(batch)]

    def _operation(self, kernel: str, outputs: int, name: str) -> Operation:
        op = get_default_graph().add(kernel, name=name, outputs=outputs)
        op.definition.attributes["function"] = op.name
        op.graph.functions[op.name] = self
        return op


def iterator_of(tensor: Any) -> DatasetIterator | None:
    """Return the iterator that computes a tensor; None if another operation does."""
    iterator = tensor.graph.functions.get(tensor.op.name)
    return iterator if isinstance(iterator, DatasetIterator) else None
