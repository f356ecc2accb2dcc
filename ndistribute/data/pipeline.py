"""The inner face of a dataset: a chain of nodes, and one pass over it.

A node is a value that says how to make elements; what belongs to one iteration is in its `Pass`.
Every node can begin at any element, which is at once how `skip` works and how an interrupted epoch
is resumed: a pass is what its shuffles drew and a position, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ndistribute.data.elements import Element
from ndistribute.data.options import InputOptions
from ndistribute.data.prefetch import OpenThreads
from ndistribute.data.rows import Rows, elements_of

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Draw",
    "Node",
    "Pass",
    "Seeds",
    "run",
    "seeds_of",
    "upstream",
]

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


class Draw(NamedTuple):
    """What a shuffle drew for one pass: its order is a function of these numbers."""

    entropy: int
    iteration: int


class Seeds:
    """Give each pass over a shuffle its draw.

    Args:
        entropy: decides the whole sequence of orders.
    """

    def __init__(self, entropy: int) -> None:
        self._next = Draw(entropy, 0)
        self._lock = threading.Lock()

    def draw(self) -> Draw:
        """Return the draw of the next pass."""
        with self._lock:
            drawn, self._next = self._next, Draw(self._next.entropy, self._next.iteration + 1)
            return drawn

    def resume(self, draw: Draw) -> None:
        """Go on as if this draw had been the last."""
        with self._lock:
            self._next = Draw(draw.entropy, draw.iteration + 1)


@dataclass(frozen=True)
class Pass:
    """One iteration over a pipeline.

    Args:
        draws: the draw of each shuffle in it.
        path: which repetition of which `repeat` a node is in, outermost first.
        shard: number and count of the parts that the files are dealt into; this pass reads one.
        threads: those that end when the pass ends.
    """

    draws: Mapping[Seeds, Draw]
    path: tuple[int, ...] = ()
    shard: tuple[int, int] = (0, 1)
    threads: OpenThreads = field(default_factory=OpenThreads)

    @classmethod
    def begin(cls, node: Node) -> Pass:
        """Begin the next pass over a pipeline."""
        return cls({seeds: seeds.draw() for seeds in seeds_of(node)})

    @classmethod
    def resume(cls, node: Node, draws: Sequence[Draw]) -> Pass:
        """Begin a pass whose draws are known; later ones follow on it."""
        known = dict(zip(seeds_of(node), draws, strict=True))
        for seeds, draw in known.items():
            seeds.resume(draw)
        return cls(known)

    def branch(self, number: int) -> Pass:
        """Return this pass as a node sees it that is passed several times."""
        return replace(self, path=(*self.path, number))

    def part(self, number: int, count: int) -> Pass:
        """Return this pass as one that reads only every `count`-th file."""
        return replace(self, shard=(number, count))

    def frozen(self) -> Pass:
        """Return this pass as a node sees it that is the same in every pass."""
        first = {seeds: Draw(draw.entropy, 0) for seeds, draw in self.draws.items()}
        return replace(self, draws=first, path=())


def _no_rows(current: Pass) -> Rows:
    raise NotImplementedError("the dataset is not vectorised: its elements have no positions.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One step of a pipeline, and those before it.

    Args:
        elements: yields the elements of a pass from a given number on, one at a time.
        inputs: the steps before this one.
        cardinality: the number of elements, or one of the two constants.
        batched: whether elements are batches; None where only the user knows.
        batch_size: elements of every batch but a short one; None where that is not known.
        template: a batch of no rows, which marks a dataset as vectorised; None for all others.
        rows: of a vectorised dataset, returns the elements of a pass by position.
        seeds: of a shuffle, where its draws come from.
        streamed: whether `rows` must be taken in order.
        runs_user_code: whether making an element calls a function of the user's.
        options: what `with_options` set.
        files: of a source that reads files, their paths; None for all others.
        positional: whether which elements it yields depends on how many come before them, so that
            parts of the input can not be passed apart from each other.
    """

    elements: Callable[[Pass, int], Iterator[Element]]
    inputs: tuple[Node, ...] = ()
    cardinality: int = UNKNOWN_CARDINALITY
    batched: bool | None = None
    batch_size: int | None = None
    template: Element | None = None
    rows: Callable[[Pass], Rows] = _no_rows
    seeds: Seeds | None = None
    streamed: bool = False
    runs_user_code: bool = False
    options: InputOptions | None = None
    files: tuple[str, ...] | None = None
    positional: bool = False

    def iterate(self, current: Pass, start: int = 0) -> Iterator[Element]:
        """Yield the elements from number `start` on, by the fastest way there is."""
        if self.template is not None:
            return elements_of(self.rows(current), start)
        return self.elements(current, start)


def run(node: Node, current: Pass) -> Iterator[Element]:
    """Yield the elements of one pass, and end its threads however it ends."""
    try:
        yield from node.iterate(current)
    finally:
        current.threads.close()


def upstream(node: Node) -> list[Node]:
    """Return a node after all the nodes before it, each once, in a fixed order."""
    found: dict[Node, None] = {}
    for before in node.inputs:
        found.update(dict.fromkeys(upstream(before)))
    return [*found, node]


def seeds_of(node: Node) -> list[Seeds]:
    """Return the seeds of the shuffles of a pipeline, in a fixed order."""
    return [step.seeds for step in upstream(node) if step.seeds is not None]
