"""Where elements come from: arrays, numbers, a user's function, or any re-iterable of batches.

Arrays are neither copied nor written: what a source hands out of them is a read-only view, so that
a step which works in place fails at once instead of changing the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.data.elements import (
    Element,
    as_batch,
    as_element,
    is_frame,
    leading_length,
    read_only,
)
from ndistribute.data.pipeline import UNKNOWN_CARDINALITY, Node, Pass
from ndistribute.data.rows import ArrayRows, RangeRows, Rows, elements_of

__all__ = ["foreign", "generated", "numbers", "single", "slices"]


def single(tensors: Any) -> Node:
    """Return one element: a nest of arrays as they are."""
    element = read_only(as_element(tensors))
    return Node(
        elements=lambda current, start: islice(iter((element,)), start, None), cardinality=1
    )


def slices(tensors: Any) -> Node:
    """Return the rows of a nest of arrays."""
    columns = read_only(as_element(tensors))
    length = leading_length(
        tree.flatten(columns),
        "from_tensor_slices",
        "Check the arrays, or use from_tensors for one element.",
    )
    template = tree.map_leaves(lambda column: column[:0], columns)
    return _of_rows(ArrayRows(columns, length), template)


def numbers(values: range) -> Node:
    """Return the numbers of a range."""
    return _of_rows(RangeRows(values), np.empty(0, np.int64))


def generated(make: Callable[[], Iterable[Any]], signature: Any = None) -> Node:
    """Return what a user's function yields, which is called anew for each pass."""
    if not callable(make):
        raise ValueError(
            f"from_generator needs a function that returns an iterable, got {make!r}. Pass the "
            "generator function itself, not what it returns: each epoch calls it again."
        )

    def elements(current: Pass, start: int) -> Iterator[Element]:
        values = map(as_element, islice(make(), start, None))
        if signature is None:
            return values
        return (_conform(value, signature) for value in values)

    return Node(elements=elements, runs_user_code=True)


def foreign(batches: Any) -> Node:
    """Return the batches of a re-iterable, such as a list or another library's loader.

    Raises:
        ValueError: it can be iterated once only, or is no collection of batches.
    """
    kind = type(batches).__name__
    if isinstance(batches, tuple):
        raise ValueError(
            f"a dataset is expected, got a tuple of {len(batches)}. For arrays whose rows belong "
            "together write Dataset.from_tensor_slices((x, y)).batch(global_batch_size); batches "
            "that are made already go in a list."
        )
    if is_frame(batches):
        raise ValueError(
            f"a dataset is expected, got a {kind}. For one array a column write "
            "Dataset.from_tensor_slices(dict(frame)).batch(global_batch_size)."
        )
    if isinstance(batches, np.ndarray | Mapping | str | bytes):
        raise ValueError(
            f"a dataset is expected, got {kind}. Make one of it with "
            "Dataset.from_tensor_slices(...).batch(global_batch_size)."
        )
    if not hasattr(batches, "__iter__"):
        raise ValueError(
            f"a dataset is expected, or something to iterate over again and again, got {kind}."
        )
    if hasattr(batches, "__next__"):
        raise ValueError(
            f"a dataset is expected, got {kind}, which can be iterated only once. Give the "
            "function that makes it to Dataset.from_generator."
        )
    return Node(
        elements=lambda current, start: map(as_batch, islice(batches, start, None)),
        cardinality=_length(batches),
        runs_user_code=not isinstance(batches, list),
    )


def _of_rows(rows: Rows, template: Element) -> Node:
    return Node(
        elements=lambda current, start: elements_of(rows, start),
        cardinality=rows.length,
        batched=False,
        template=template,
        rows=lambda current: rows,
    )


def _length(batches: Any) -> int:
    try:
        return len(batches) if isinstance(batches, Sized) else UNKNOWN_CARDINALITY
    except TypeError:  # A loader over a stream has __len__ and refuses to answer.
        return UNKNOWN_CARDINALITY


def _conform(element: Element, signature: Any) -> Element:
    """Cast an element to the dtypes of a signature, and check it against its shapes."""
    if not tree.same_structure(element, signature):
        raise ValueError(
            f"from_generator: the generator yielded {element!r}, which has another structure than "
            f"output_signature, {signature!r}."
        )
    return tree.map_leaves(_conform_leaf, element, signature)


def _conform_leaf(leaf: Any, spec: Any) -> Any:
    if isinstance(spec, type | np.dtype | str):
        return leaf.astype(spec, copy=False)
    shape = tuple(spec.shape)
    if len(shape) != leaf.ndim or any(
        want not in (None, have) for want, have in zip(shape, leaf.shape, strict=True)
    ):
        raise ValueError(
            f"from_generator: the generator yielded shape {leaf.shape} where output_signature says "
            f"{shape}. Yield arrays of that shape, or put None for a length that varies."
        )
    return leaf.astype(spec.dtype, copy=False)
