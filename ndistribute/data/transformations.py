"""Transformations that compute: on single elements, or between elements and batches.

A batch is where positions become data: over arrays it is gathered at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from ndistribute import tree
from ndistribute.data.elements import (
    Element,
    as_element,
    call_with,
    leading_length,
    stack,
    unstack,
)
from ndistribute.data.options import InputOptions
from ndistribute.data.pipeline import Node, Pass
from ndistribute.data.prefetch import Prefetched, Workers, map_ahead
from ndistribute.data.rows import blocks_of

__all__ = [
    "AUTOTUNE",
    "batched",
    "filtered",
    "mapped",
    "prefetched",
    "unbatched",
    "with_options",
]

AUTOTUNE = -1

# What AUTOTUNE stands for in prefetch: one element in use, one ready.
_AUTOTUNED_DEPTH = 2


def mapped(child: Node, fn: Callable[..., Any], num_parallel_calls: int | None = None) -> Node:
    """Return what a user's function makes of each element."""

    def call(element: Element) -> Element:
        return as_element(call_with(fn, element))

    def elements(current: Pass, start: int) -> Iterator[Element]:
        source = child.iterate(current, start)
        if num_parallel_calls is None:
            return map(call, source)
        threads = num_parallel_calls if num_parallel_calls != AUTOTUNE else os.cpu_count() or 1
        workers = Workers(threads)
        current.threads.add(workers)
        return map_ahead(call, source, workers, threads)

    return Node(
        elements=elements,
        inputs=(child,),
        cardinality=child.cardinality,
        # A function may well load a batch for a number.
        batched=child.batched or None,
        runs_user_code=True,
    )


def filtered(child: Node, predicate: Callable[..., Any]) -> Node:
    """Return the elements for which a user's function is true."""

    def elements(current: Pass, start: int) -> Iterator[Element]:
        wanted = filter(lambda element: call_with(predicate, element), child.iterate(current))
        return islice(wanted, start, None)

    return Node(elements=elements, inputs=(child,), batched=child.batched, runs_user_code=True)


def batched(child: Node, size: int, drop_remainder: bool) -> Node:
    """Return batches of `size` successive elements, the last one perhaps shorter."""

    def elements(current: Pass, start: int) -> Iterator[Element]:
        if child.template is not None:
            return blocks_of(child.rows(current), size, start * size, drop_remainder)
        return _stacked(child.iterate(current, start * size), size, drop_remainder)

    known = child.cardinality
    if known >= 0:
        known = known // size if drop_remainder else -(-known // size)
    return Node(
        elements=elements, inputs=(child,), cardinality=known, batched=True, batch_size=size
    )


def unbatched(child: Node) -> Node:
    """Return the elements of each batch."""

    def rows(batch: Element) -> Iterator[Element]:
        leaves = tree.flatten(batch)
        length = leading_length(leaves, "unbatch", "Batch the dataset before unbatch.")
        return unstack(batch, length)

    def elements(current: Pass, start: int) -> Iterator[Element]:
        return islice(chain.from_iterable(map(rows, child.iterate(current))), start, None)

    return Node(elements=elements, inputs=(child,), batched=False)


def prefetched(child: Node, depth: int) -> Node:
    """Return the elements, made ahead by a background thread.

    Rows of arrays pass without one: they become data only in the batch that gathers them.
    """

    def elements(current: Pass, start: int) -> Iterator[Element]:
        source = child.iterate(current, start)
        if depth == 0:
            return source
        ahead = Prefetched(source, _AUTOTUNED_DEPTH if depth == AUTOTUNE else depth)
        current.threads.add(ahead.queue)
        return ahead

    return replace(child, elements=elements, inputs=(child,), seeds=None, files=None)


def with_options(child: Node, options: InputOptions) -> Node:
    """Return the elements, having said how they are distributed."""
    said = replace(child, elements=child.iterate, inputs=(child,), options=options)
    return replace(said, seeds=None, files=None)


def _stacked(source: Iterator[Element], size: int, drop_remainder: bool) -> Iterator[Element]:
    while elements := list(islice(source, size)):
        if len(elements) < size and drop_remainder:
            return
        yield stack(elements)
