"""Nodes of several datasets: those that a function returns, windows, and choices among datasets.

Each reads its inputs in an order that its arguments and seeds determine, whatever threads read
ahead. So an iteration that starts later produces the earlier elements again, and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.data import pipeline
from ndistribute.data.elements import Chunk, Element, drop
from ndistribute.data.pipeline import ElementSpec, Epoch, Node, SeedCounter, from_first
from ndistribute.data.prefetch import Ahead
from ndistribute.data.transformations import common_spec, explained, seeded

CYCLE_LENGTH = 16
"""The inputs of `interleave` that are open at once by default; the same on every machine."""


def interleaved(
    child: Node, fn: Callable[..., Any], cycle: int = 1, block: int = 1, reads_ahead: bool = False
) -> Node:
    """Return a node of blocks of elements of the datasets that a function returns, in turns."""
    method = "flat_map" if cycle == 1 else "interleave"
    seeds = seeded(method, None)

    def datasets(epoch: Epoch) -> Iterator[Iterator[Chunk]]:
        call = explained(f"{method}: map_func", fn)
        for number, element in enumerate(child.iterate(epoch)):
            node = getattr(dataset := call(element), "_node", None)
            if not isinstance(node, Node):
                raise TypeError(
                    f"{method}: map_func must return a Dataset, got {dataset!r}. Use map for a "
                    "function that returns an element."
                )
            yield node.chunks(epoch.inside(node, epoch.seeds[seeds], number), 0)

    def sources(epoch: Epoch) -> Iterator[Iterator[Element]]:
        for chunks in datasets(epoch):
            source = chain.from_iterable(chunks)
            yield Ahead(source, block, epoch.threads) if reads_ahead else source

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        if cycle == 1:  # Rows of arrays stay rows.
            return drop(chain.from_iterable(datasets(epoch)), start)
        return drop(zip(_in_turns(sources(epoch), cycle, block)), start)

    shape = "" if cycle == 1 else f", {cycle}, {block}"
    name = f"{method}({pipeline.name_of(fn)}{shape})"
    endless = child.spec.cardinality == pipeline.INFINITE_CARDINALITY
    spec = ElementSpec(child.spec.cardinality) if endless else ElementSpec()
    return child.then(name, chunks, spec=spec, seeds=seeds, runs_user_code=True)


def _in_turns(sources: Iterator[Iterator[Element]], cycle: int, block: int) -> Iterator[Element]:
    """Yield a block of each of `cycle` sources in turn; the next source takes an ended one's."""
    slots: list[Iterator[Element] | None] = [None] * cycle
    while True:
        for place in range(cycle):
            source = slots[place] = slots[place] or next(sources, None)
            if source is None and not any(slots):
                return
            left = block
            for element in islice(source or (), block):
                yield element
                left -= 1
            if left:
                slots[place] = None


def windowed(
    child: Node,
    size: int,
    shift: int,
    stride: int,
    drop_remainder: bool,
    make: Callable[[Node], Any],
) -> Node:
    """Return a node of windows: nests with one dataset, which `make` makes, for each leaf."""
    reach = (size - 1) * stride + 1

    def windows(epoch: Epoch, start: int) -> Iterator[Any]:
        source, held = child.iterate(epoch, start * shift), list[Element]()
        while True:
            held += islice(source, max(0, reach - len(held)))
            rows = held[:reach:stride]
            if len(rows) < (size if drop_remainder else 1):
                return
            columns = zip(*map(tree.flatten, rows), strict=True)
            yield tree.unflatten(rows[0], [make(_listed(child, column)) for column in columns])
            skipped = max(0, shift - len(held))
            next(islice(source, skipped, skipped), None)
            held = held[shift:]

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        return zip(windows(epoch, start))

    known = child.spec.cardinality
    if known >= 0:
        known = max(0, known - reach + shift) // shift if drop_remainder else -(-known // shift)
    name = f"window({size}, {shift}, {stride}{', drop_remainder=True' if drop_remainder else ''})"
    return child.then(name, chunks, spec=ElementSpec(known, batched=False))


def _listed(child: Node, values: tuple[Element, ...]) -> Node:
    spec = ElementSpec(len(values), child.spec.batched)
    return Node(name="window", chunks=lambda epoch, start: iter((values[start:],)), spec=spec)


def in_rounds(parts: tuple[Node, ...]) -> Node:
    """Return a node of one batch of each dataset in turn; an empty one of a dataset that ended."""

    def values(epoch: Epoch) -> Iterator[Element]:
        sources = [part.iterate(epoch.branch(at)) for at, part in enumerate(parts)]
        for batches in zip_longest(*sources):
            known = next(batch for batch in batches if batch is not None)
            empty = tree.map_leaves(lambda leaf: leaf[:0], known)
            yield from (empty if batch is None else batch for batch in batches)

    lengths = [part.spec.cardinality for part in parts]
    known = min(lengths) if min(lengths) < 0 else max(lengths) * len(parts)
    spec, chunks = common_spec(known, parts), from_first(values)
    return Node(name="in_rounds", chunks=chunks, inputs=parts, spec=spec, positional=True)


def chosen(parts: tuple[Node, ...], choices: Node, stops: bool) -> Node:
    """Return a node of the next element of the dataset that each of some numbers chooses."""
    return _directed("choose_from_datasets", parts, (choices,), stops, choices.iterate)


def check_weights(weights: Any, count: int) -> None:
    """Raise a ValueError unless there is a weight for each dataset."""
    if np.shape(weights) != (count,) or not np.all(weights >= 0):
        raise ValueError(
            f"sample_from_datasets: weights must be {count} number(s), one for each dataset, from "
            f"0 on; got {weights!r}."
        )


def sampled(
    parts: tuple[Node, ...], weights: Node, seed: int | None, stops: bool, differs: bool
) -> Node:
    """Return a node of the next element of datasets that are drawn at random."""
    seeds = seeded("sample_from_datasets", seed)

    def draw(epoch: Epoch) -> Iterator[int]:
        rng, bounds, known = epoch.generator(seeds, differs), np.zeros(0), None
        for shares in weights.iterate(epoch):
            if shares is not known:
                check_weights(shares, len(parts))
                bounds, known = np.cumsum(shares, dtype=float), shares
            if not bounds[-1]:
                return
            yield int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right"))

    return _directed("sample_from_datasets", parts, (weights,), stops, draw, seeds)


def _directed(
    name: str,
    parts: tuple[Node, ...],
    others: tuple[Node, ...],
    stops: bool,
    choose: Callable[[Epoch], Iterator[Any]],
    seeds: SeedCounter | None = None,
) -> Node:
    def values(epoch: Epoch) -> Iterator[Element]:
        sources = {at: part.iterate(epoch.branch(at)) for at, part in enumerate(parts)}
        for choice in choose(epoch):
            if np.ndim(choice) or not 0 <= choice < len(parts):
                raise ValueError(
                    f"{name}: the choice {choice!r} is not a number from 0 to {len(parts) - 1}."
                )
            element = next(sources.get(int(choice), iter(())), None)
            if element is not None:
                yield element
                continue
            sources.pop(int(choice), None)
            if stops or not sources:
                return

    inputs = (*parts, *others)
    endless = all(each.spec.cardinality == pipeline.INFINITE_CARDINALITY for each in inputs)
    known = pipeline.INFINITE_CARDINALITY if endless else pipeline.UNKNOWN_CARDINALITY
    spec, chunks = common_spec(known, parts), from_first(values)
    return Node(name=name, chunks=chunks, inputs=inputs, spec=spec, seeds=seeds, positional=True)
