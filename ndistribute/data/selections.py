"""Transformations that choose and order elements without looking at them.

Each has two forms that must agree: arithmetic on positions (`rows`) for datasets over arrays, and a
generator (`elements`) for all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from ndistribute import tree
from ndistribute.data.elements import Element, read_only
from ndistribute.data.pipeline import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Node,
    Pass,
    seeds_of,
)
from ndistribute.data.rows import (
    ENDLESS,
    JoinedRows,
    RepeatedRows,
    Rows,
    SelectedRows,
    ZippedRows,
)

__all__ = ["cached", "concatenated", "repeated", "sliced", "zipped"]


def sliced(child: Node, start: int = 0, stop: int | None = None, step: int = 1) -> Node:
    """Return the elements at ``range(start, stop, step)``."""

    def chosen(length: int) -> range:
        return range(length)[start:stop:step]

    def rows(current: Pass) -> Rows:
        inner = child.rows(current)
        return SelectedRows(inner, chosen(inner.length))

    def elements(current: Pass, first: int) -> Iterator[Element]:
        begin = start + first * step
        source = child.iterate(current, begin)
        return islice(source, 0, None if stop is None else max(0, stop - begin), step)

    known = child.cardinality
    if known == INFINITE_CARDINALITY and stop is not None:
        known = len(chosen(ENDLESS))
    elif known >= 0 or stop == 0:
        known = len(chosen(max(0, known)))
    return Node(
        elements=elements,
        inputs=(child,),
        cardinality=known,
        batched=child.batched,
        template=child.template,
        rows=rows,
        positional=True,
    )


def repeated(child: Node, times: int | None) -> Node:
    """Return the elements a number of times; without end if that is None."""
    known = child.cardinality

    def rows(current: Pass) -> Rows:
        return RepeatedRows(
            lambda number: child.rows(current.branch(number)),
            ENDLESS if known == INFINITE_CARDINALITY else known,
            times,
            reshuffles=bool(seeds_of(child)),
        )

    def repetitions(current: Pass, first: int, start: int) -> Iterator[Element]:
        for number in count(first) if times is None else range(first, times):
            empty = True
            for element in child.iterate(current.branch(number), start):
                empty = False
                yield element
            if empty and start == 0:
                return  # An endless repetition of nothing would never return.
            start = 0

    def elements(current: Pass, start: int) -> Iterator[Element]:
        if known > 0:
            return repetitions(current, *divmod(start, known))
        return islice(repetitions(current, 0, 0), start, None)

    if 0 in (known, times):
        return sliced(child, stop=0)
    endless = INFINITE_CARDINALITY if times is None else known
    return Node(
        elements=elements,
        inputs=(child,),
        cardinality=endless if times is None or known < 0 else known * times,
        batched=child.batched,
        batch_size=child.batch_size,
        template=child.template,
        rows=rows,
    )


def zipped(like: Any, parts: tuple[Node, ...]) -> Node:
    """Return elements side by side, until the shortest dataset ends.

    Args:
        like: a nest whose leaves stand for the datasets.
        parts: the datasets, in the order of `tree.flatten`.
    """

    def join(items: Any) -> Element:
        return tree.unflatten(like, items)

    def rows(current: Pass) -> Rows:
        return ZippedRows(like, [part.rows(current) for part in parts])

    lengths = [part.cardinality for part in parts]
    shortest = min((length for length in lengths if length >= 0), default=INFINITE_CARDINALITY)
    templates = [part.template for part in parts]
    return Node(
        elements=lambda current, start: map(
            join, zip(*(part.iterate(current, start) for part in parts), strict=False)
        ),
        inputs=parts,
        cardinality=UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in lengths else shortest,
        batched=_common(parts),
        template=None if any(template is None for template in templates) else join(templates),
        rows=rows,
        positional=True,
    )


def concatenated(first: Node, second: Node) -> Node:
    """Return the elements of one dataset, then those of another."""
    known = first.cardinality

    def rows(current: Pass) -> Rows:
        return JoinedRows(first.rows(current.branch(0)), second.rows(current.branch(1)))

    def both(current: Pass, start: int) -> Iterator[Element]:
        yield from first.iterate(current.branch(0), start)
        yield from second.iterate(current.branch(1))

    def elements(current: Pass, start: int) -> Iterator[Element]:
        if 0 <= known <= start:
            return second.iterate(current.branch(1), start - known)
        if known == UNKNOWN_CARDINALITY:
            return islice(both(current, 0), start, None)
        return both(current, start)

    lengths = (known, second.cardinality)
    total = UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in lengths else sum(lengths)
    alike = _same_layout(first.template, second.template)
    return Node(
        elements=elements,
        inputs=(first, second),
        cardinality=INFINITE_CARDINALITY if INFINITE_CARDINALITY in lengths else total,
        batched=_common((first, second)),
        template=first.template if alike else None,
        rows=rows,
    )


def cached(child: Node) -> Node:
    """Return the elements of the first whole pass, in every pass.

    What is before it is passed with frozen draws, so its order does not depend on which pass filled
    the cache: an interrupted program goes on with the same one.
    """
    kept: dict[tuple[int, int], list[Element]] = {}

    def filling(current: Pass) -> Iterator[Element]:
        seen = []
        for element in child.iterate(current.frozen()):
            seen.append(read_only(element))
            yield seen[-1]
        kept[current.shard] = seen

    def elements(current: Pass, start: int) -> Iterator[Element]:
        known = kept.get(current.shard)
        return islice(filling(current) if known is None else known, start, None)

    return Node(
        elements=elements,
        inputs=(child,),
        cardinality=child.cardinality,
        batched=child.batched,
        batch_size=child.batch_size,
        template=child.template,
        rows=lambda current: child.rows(current.frozen()),
    )


def _common(parts: tuple[Node, ...]) -> bool | None:
    batched = [part.batched for part in parts]
    if False in batched:
        return False
    return True if all(batched) else None


def _same_layout(first: Element | None, second: Element | None) -> bool:
    if first is None or second is None:
        return False
    return tree.same_structure(first, second) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        for a, b in zip(tree.flatten(first), tree.flatten(second), strict=True)
    )
