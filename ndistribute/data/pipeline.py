"""The inner face of a dataset: a chain of nodes, and one epoch over it.

A node is a value that says how to make elements; what belongs to one iteration is in its `Epoch`.
Every node can begin at any element, which is at once how `skip` works and how an interrupted epoch
is resumed: an epoch is the seeds of its shuffles and a position, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from ndistribute.data.elements import Chunk, Element
from ndistribute.data.options import InputOptions
from ndistribute.data.prefetch import Threads

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


class ShuffleSeed(NamedTuple):
    """What decides the order of a shuffle in one epoch."""

    entropy: int
    iteration: int


class SeedCounter:
    """Give each epoch over a shuffle its seed.

    Args:
        entropy: decides the whole sequence of orders.
        iteration: the number of the next epoch.
    """

    def __init__(self, entropy: int, iteration: int = 0) -> None:
        self._next = ShuffleSeed(entropy, iteration)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[SeedCounter], ShuffleSeed]:
        """Send a dataset to another process without the lock."""
        return SeedCounter, self._next

    def draw(self) -> ShuffleSeed:
        """Return the seed of the next epoch."""
        with self._lock:
            drawn = self._next
            self._next = drawn._replace(iteration=drawn.iteration + 1)
            return drawn

    def resume(self, seed: ShuffleSeed) -> None:
        """Go on as if this seed had been the last."""
        with self._lock:
            self._next = seed._replace(iteration=seed.iteration + 1)


@dataclass(frozen=True)
class Epoch:
    """One iteration over a pipeline.

    Args:
        seeds: the seed of each shuffle in it.
        path: which repetition of which `repeat` a node is in, outermost first.
        shard: number and count of the parts that the files are dealt into; this epoch reads one.
        threads: those that end when the epoch ends.
        loaded: of a loader that has loaded a state, how many batches are before that.
    """

    seeds: Mapping[SeedCounter, ShuffleSeed]
    path: tuple[int, ...] = ()
    shard: tuple[int, int] = (0, 1)
    threads: Threads = field(default_factory=Threads)
    loaded: int = 0

    @classmethod
    def begin(cls, node: Node) -> Epoch:
        """Begin the next epoch over a pipeline."""
        return cls({counter: counter.draw() for counter in seeds_of(node)})

    @classmethod
    def resume(cls, node: Node, seeds: Sequence[ShuffleSeed]) -> Epoch:
        """Begin an epoch whose seeds are known; later ones follow on it."""
        known = dict(zip(seeds_of(node), seeds, strict=True))
        for counter, seed in known.items():
            counter.resume(seed)
        return cls(known)

    def branch(self, number: int) -> Epoch:
        """Return this epoch as a node sees it that is iterated several times."""
        return replace(self, path=(*self.path, number))

    def frozen(self) -> Epoch:
        """Return this epoch as a node sees it that is the same in every epoch."""
        first = {counter: seed._replace(iteration=0) for counter, seed in self.seeds.items()}
        return replace(self, seeds=first, path=())


class ArraySpec:
    """The dtype and the shape of a leaf; a length of None varies, and so does a shape of None."""

    def __init__(self, dtype: Any, shape: Sequence[int | None] | None) -> None:
        self.dtype = dtype
        self.shape = shape

    def led_by(self, length: int | None) -> ArraySpec:
        """Return the spec of a batch of such leaves."""
        return ArraySpec(self.dtype, None if self.shape is None else (length, *self.shape))

    def row(self) -> ArraySpec:
        """Return the spec of an element of such a batch."""
        return ArraySpec(self.dtype, None if self.shape is None else self.shape[1:])

    def __repr__(self) -> str:
        return f"{self.dtype}{'' if self.shape is None else list(self.shape)}"


@dataclass(frozen=True)
class ElementSpec:
    """What is known of a node's elements before they are made.

    Args:
        cardinality: how many there are, or one of the two constants.
        batched: whether they are batches; None where only the user knows.
        batch_size: elements of every batch but a short one; None where that is not known.
        like: a nest of `ArraySpec`; None where that is not known.
    """

    cardinality: int = UNKNOWN_CARDINALITY
    batched: bool | None = None
    batch_size: int | None = None
    like: Any = None

    def __str__(self) -> str:
        words = {INFINITE_CARDINALITY: "endless ", UNKNOWN_CARDINALITY: ""}
        many = words.get(self.cardinality, f"{self.cardinality} ")
        size = "" if self.batch_size is None else f" of {self.batch_size}"
        kind = f"batches{size}" if self.batched else "elements"
        return f"{many}{kind}, {'type unknown' if self.like is None else self.like}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One step of a pipeline, and those before it.

    Args:
        name: the call that made it.
        chunks: yields the elements of an epoch from a given number on, in chunks.
        inputs: the steps before this one.
        spec: what its elements are.
        seeds: of a shuffle, where its seeds come from.
        options: what `with_options` set.
        files: of a source that reads files, their paths.
        loader: of a source that iterates over an object of the user's, that object.
        runs_user_code: whether making an element calls a function of the user's.
        positional: whether which elements it yields depends on how many come before them, so that
            parts of the input can not be read apart from each other.
    """

    name: str
    chunks: Callable[[Epoch, int], Iterator[Chunk]]
    inputs: tuple[Node, ...] = ()
    spec: ElementSpec = ElementSpec()
    seeds: SeedCounter | None = None
    options: InputOptions | None = None
    files: tuple[str, ...] | None = None
    loader: Any = None
    runs_user_code: bool = False
    positional: bool = False

    def then(self, name: str, chunks: Callable[[Epoch, int], Iterator[Chunk]], **own: Any) -> Node:
        """Return the next step, whose elements are as these where it does not say otherwise."""
        return Node(**{"name": name, "chunks": chunks, "inputs": (self,), "spec": self.spec, **own})

    def iterate(self, epoch: Epoch, start: int = 0) -> Iterator[Element]:
        """Yield the elements from number `start` on, one at a time."""
        return chain.from_iterable(self.chunks(epoch, start))


def run(node: Node, epoch: Epoch) -> Iterator[Element]:
    """Yield the elements of one epoch, and end its threads however it ends."""
    try:
        yield from node.iterate(epoch)
    finally:
        epoch.threads.close()


def upstream(node: Node) -> list[Node]:
    """Return a node after all the nodes before it, each once, in a fixed order."""
    found: dict[Node, None] = {}
    for before in node.inputs:
        found.update(dict.fromkeys(upstream(before)))
    return [*found, node]


def seeds_of(node: Node) -> list[SeedCounter]:
    """Return where the seeds of the shuffles of a pipeline come from, in a fixed order."""
    return [step.seeds for step in upstream(node) if step.seeds is not None]


def name_of(fn: Callable[..., Any]) -> str:
    """Return what `describe` calls a function of the user's."""
    return getattr(fn, "__name__", type(fn).__name__)


def describe(node: Node) -> str:
    """Return the calls that made a pipeline."""
    inputs = [describe(before) for before in node.inputs]
    if node.name == "zip":
        return f"zip({', '.join(inputs)})"
    if len(inputs) == 2:
        return f"{inputs[0]}.{node.name}({inputs[1]})"
    return ".".join([*inputs, node.name])
