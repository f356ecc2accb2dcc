"""`Batching`: the methods of `Dataset` that make batches, windows and rows.

Methods that select elements compute indices only: rows of arrays stay indices until a batch gathers
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Any, Self

import numpy as np

from ndistribute import tree
from ndistribute.data import elements
from ndistribute.data.elements import Chunk, Element, Rows, drop
from ndistribute.data.options import integer
from ndistribute.data.pipeline import ElementSpec, Epoch, LeafSpec, Node, Pipeline, named

Combine = Callable[[Sequence[Chunk]], Element]


@named
class Batching(Pipeline):
    """The methods of a dataset that group elements, or split them.

    >>> from ndistribute.data import Dataset
    >>> isinstance(Dataset.range(2), Batching)
    True
    """

    __slots__ = ()

    def batch(self, n: int, drop_remainder: bool = False) -> Self:
        """Return a dataset of batches: `n` successive elements stacked along a new first axis.

        Args:
            n: the number of elements per batch.
            drop_remainder: whether to drop a last batch of fewer than `n` elements.

        >>> from ndistribute.data import Dataset
        >>> list(Dataset.range(3).batch(2))
        [array([0, 1]), array([2])]
        """
        return self._batched("batch", integer(n, "batch: n", 1), bool(drop_remainder))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Return a dataset of batches whose elements are padded to one shape.

        Args:
            batch_size: the number of elements per batch.
            padded_shapes: a nest of shapes; None instead of a shape or a length means the greatest
                length in the batch.
            padding_values: a nest of values to pad with, or one for all; None means zeros.
            drop_remainder: whether to drop a last batch of fewer than `batch_size` elements.

        >>> import numpy as np
        >>> from ndistribute.data import Dataset
        >>> next(iter(Dataset.range(1, 4).map(np.arange).padded_batch(3, padding_values=-1)))
        array([[ 0, -1, -1],
               [ 0,  1, -1],
               [ 0,  1,  2]])
        """

        def combine(pieces: Sequence[Chunk]) -> Element:
            rows = list(chain.from_iterable(pieces))
            return elements.pad(rows, padded_shapes, padding_values)

        size = integer(batch_size, "padded_batch: batch_size", 1)
        return self._batched("padded_batch", size, bool(drop_remainder), combine)

    def _batched(
        self, method: str, size: int, drop_remainder: bool, combine: Combine = elements.batch_of
    ) -> Self:
        child, known = self._node, self._node.spec.cardinality

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            source = child.chunks(epoch, start * size)
            return _cut(source, repeat(size), drop_remainder, combine)

        batches = known // size if drop_remainder else -(-known // size)
        length, like = size if drop_remainder else None, None
        if method == "batch":
            like = child.like(lambda leaf: leaf.led_by(length))
        spec = ElementSpec(known if known < 0 else batches, True, size, like)
        name = f"{method}({size}{', drop_remainder=True' if drop_remainder else ''})"
        return self._then(name, chunks, spec=spec)

    def unbatch(self) -> Self:
        """Return a dataset of the rows of all batches.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(3).batch(2).unbatch()]
        [0, 1, 2]
        """
        child = self._node

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            return drop(_rows_of(child, epoch, "unbatch"), start)

        spec = ElementSpec(batched=False, like=child.like(LeafSpec.row))
        return self._then("unbatch()", chunks, spec=spec)

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Self:
        """Return a dataset of batches of another size, with the rows of these batches.

        Args:
            batch_size: the number of rows per batch, or a list of numbers that are used in turn.
            drop_remainder: whether to drop a last batch that has fewer rows.

        >>> from ndistribute.data import Dataset
        >>> [batch.tolist() for batch in Dataset.range(6).batch(3).rebatch([1, 2])]
        [[0], [1, 2], [3], [4, 5]]
        """
        several = batch_size if isinstance(batch_size, Sequence) else [batch_size]
        sizes = [integer(size, "rebatch: batch_size", 0) for size in several]
        if not any(sizes):
            raise ValueError(
                f"rebatch: batch_size must contain a number above 0, got {batch_size!r}."
            )
        child, size = self._node, sizes[0] if len(set(sizes)) == 1 else None

        def combine(pieces: Sequence[Chunk]) -> Element:
            parts = [elements.batch_of([piece]) for piece in pieces]
            if len(parts) == 1:
                return parts[0]
            return tree.map_leaves(lambda *leaves: np.concatenate(leaves), *parts)

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            rows = _rows_of(child, epoch, "rebatch")
            return drop(_cut(rows, cycle(sizes), bool(drop_remainder), combine), start)

        def resized(leaf: LeafSpec) -> LeafSpec:
            whole = leaf.shape and leaf.shape[0] and not leaf.shape[0] % sum(sizes)
            return leaf.row().led_by(size if drop_remainder or whole else None)

        spec = ElementSpec(batched=True, batch_size=size, like=child.like(resized))
        name = f"rebatch({sizes[0] if len(sizes) == 1 else sizes})"
        return self._then(name, chunks, spec=spec)

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Self:
        """Return a dataset of windows: datasets of `size` elements.

        For elements that are nests, a window is a nest with one dataset for each leaf.

        Args:
            size: the number of elements of a window.
            shift: the distance between the first elements of windows; None means `size`.
            stride: the distance between the elements of a window.
            drop_remainder: whether to drop last windows of fewer than `size` elements.

        >>> from ndistribute.data import Dataset
        >>> [[int(x) for x in window] for window in Dataset.range(5).window(3, shift=2)]
        [[0, 1, 2], [2, 3, 4], [4]]
        """
        size = integer(size, "window: size", 1)
        shift = integer(size if shift is None else shift, "window: shift", 1)
        stride = integer(stride, "window: stride", 1)
        child, make, reach = self._node, type(self), (size - 1) * stride + 1

        def windows(epoch: Epoch, start: int) -> Iterator[Any]:
            source, held = child.iterate(epoch, start * shift), list[Element]()
            while True:
                held += islice(source, max(0, reach - len(held)))
                rows = held[:reach:stride]
                if len(rows) < (size if drop_remainder else 1):
                    return
                columns = zip(*map(tree.flatten, rows), strict=True)
                parts = [make(listed(column, child.spec.batched)) for column in columns]
                yield tree.unflatten(rows[0], parts)
                skipped = max(0, shift - len(held))
                next(islice(source, skipped, skipped), None)
                held = held[shift:]

        known = child.spec.cardinality
        if known >= 0:
            missed = max(0, known - reach + shift) // shift
            known = missed if drop_remainder else -(-known // shift)
        name = f"window({size}, {shift}, {stride}"
        name += ", drop_remainder=True)" if drop_remainder else ")"
        spec = ElementSpec(known, batched=False)
        return self._then(name, lambda *at: zip(windows(*at)), spec=spec)


def listed(values: Sequence[Element], batched: bool | None) -> Node:
    """Return a node of the elements of a list."""
    spec = ElementSpec(len(values), batched)
    return Node(name="window", chunks=lambda epoch, start: iter((values[start:],)), spec=spec)


def _rows_of(child: Node, epoch: Epoch, method: str) -> Iterator[Rows]:
    """Yield the rows of each batch."""
    remedy = f"Batch the dataset before {method}."
    for batch in child.iterate(epoch):
        yield Rows.of(batch, elements.leading_length(tree.flatten(batch), method, remedy))


def _cut(
    chunks: Iterator[Chunk],
    sizes: Iterator[int],
    drop_remainder: bool,
    combine: Combine,
) -> Iterator[Chunk]:
    """Yield batches with the lengths that `sizes` yields; the last batch may be shorter."""
    pieces: list[Chunk] = []
    missing = next(sizes)
    for chunk in chunks:
        at, length = 0, len(chunk)
        while length - at >= missing:
            pieces.append(chunk[at : at + missing])
            at += missing
            yield (combine(pieces),)
            pieces, missing = [], next(sizes)
        if at < length:
            pieces.append(chunk[at:] if at else chunk)
            missing -= length - at
    if pieces and not drop_remainder:
        yield (combine(pieces),)
