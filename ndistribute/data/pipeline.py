"""The pipeline of a dataset: a graph of nodes, and the state of one epoch over it.

A node describes how to produce elements; the state of an iteration is in its `Epoch`. Every node
can start at any element. `skip` uses this. So does a resumed epoch: it needs only the seeds of its
shuffles and a position.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from ndistribute import tree
from ndistribute.data.elements import Chunk, Element, as_shape, checksum, drop
from ndistribute.data.loaders import obstacle
from ndistribute.data.options import InputOptions
from ndistribute.data.prefetch import Threads
from ndistribute.devices import as_array
from ndistribute.mistakes import accepting

T = TypeVar("T")
Chunks: TypeAlias = "Callable[[Epoch, int], Iterator[Chunk]]"
Singly: TypeAlias = "Callable[[Epoch, int], Iterator[Element]]"

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

ENDLESS = "repeat()"  # The name of the node that repeats its input endlessly.


class ShuffleSeed(NamedTuple):
    """The seed that determines the order of a shuffle in one epoch."""

    entropy: int
    iteration: int


class SeedCounter:
    """A generator of the seeds of a shuffle, one for each epoch.

    Args:
        entropy: the number that determines all seeds.
        iteration: the number of the next epoch.
        chosen: whether the user chose the seed.
    """

    def __init__(self, entropy: int, iteration: int = 0, chosen: bool = False) -> None:
        self._next = ShuffleSeed(entropy, iteration)
        self._chosen = chosen
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[SeedCounter], tuple[int, int, bool]]:
        """Return what `pickle` needs, without the lock, which cannot be pickled."""
        return SeedCounter, (*self._next, self._chosen)

    def under(self, seed: ShuffleSeed, place: int) -> ShuffleSeed:
        """Return the seed in a dataset that a function returns, derived from the outer `seed`."""
        if self._chosen:
            return self._next._replace(iteration=0)
        return ShuffleSeed(_folded(seed.entropy, place), 0)

    def draw(self, least: int = 0) -> ShuffleSeed:
        """Return the seed of the next epoch, or of epoch `least` if that is later."""
        with self._lock:
            drawn = self._next._replace(iteration=max(least, self._next.iteration))
            self._next = drawn._replace(iteration=drawn.iteration + 1)
            return drawn

    def fold(self, number: int) -> None:
        """From now on draw the seeds that belong to a number; 0 changes nothing."""
        if number:
            self._next = self._next._replace(entropy=_folded(self._next.entropy, number))

    def resume(self, seed: ShuffleSeed) -> None:
        """Continue after this seed, as if it had been drawn last."""
        with self._lock:
            self._next = seed._replace(iteration=seed.iteration + 1)


def _folded(entropy: int, number: int) -> int:
    """Return the entropy that belongs to a number."""
    sequence = np.random.SeedSequence(entropy, spawn_key=(number,))
    return int(sequence.generate_state(1, np.uint64)[0])


@dataclass(frozen=True)
class Epoch:
    """One iteration over a pipeline."""

    seeds: Mapping[SeedCounter, ShuffleSeed]  # The seed of each shuffle of the pipeline.
    path: tuple[int, ...] = ()  # The current repetitions, of the outermost `repeat` first.
    # The index of the shard of the files that is read, and the number of shards.
    shard: tuple[int, int] = (0, 1)
    threads: Threads = field(default_factory=Threads)  # The threads to stop at the end.
    loaded: int = 0  # The number of batches before the state that a loader has loaded.
    # Set once an error has ended the epoch.
    failed: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def begin(cls, node: Node, least: int = 0) -> Epoch:
        """Return the next epoch over a pipeline, or epoch `least` if that is later."""
        return cls({counter: counter.draw(least) for counter in seeds_of(node)})

    @classmethod
    def resume(cls, node: Node, seeds: Sequence[ShuffleSeed]) -> Epoch:
        """Return an epoch with known seeds; later epochs continue after it."""
        known = dict(zip(seeds_of(node), seeds, strict=True))
        for counter, seed in known.items():
            counter.resume(seed)
        return cls(known)

    def give_back(self) -> None:
        """Let the next epoch use the seeds of this one, which did not begin."""
        for counter, seed in self.seeds.items():
            counter.resume(seed._replace(iteration=seed.iteration - 1))

    def generator(self, counter: SeedCounter, differs: bool = True) -> np.random.Generator:
        """Return the generator of a random node; the same in every epoch unless it `differs`."""
        seed = self.seeds[counter]
        key = (seed.iteration, *self.path) if differs else ()
        return np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=key))

    def branch(self, number: int) -> Epoch:
        """Return this epoch for one repetition of a node that is iterated several times."""
        return replace(self, path=(*self.path, number))

    def inside(self, node: Node, seed: ShuffleSeed, number: int) -> Epoch:
        """Return the epoch of a dataset that a function returned for element `number`."""
        seeds = {each: each.under(seed, place) for place, each in enumerate(seeds_of(node))}
        return replace(
            self, seeds=seeds, path=(seed.iteration, *self.path, number), shard=(0, 1), loaded=0
        )

    def watching(self, source: Iterator[T]) -> Iterator[T]:
        """Yield the elements of a source, and note an error, after which there are none."""
        try:
            yield from source
        except (Exception, KeyboardInterrupt):
            self.failed.set()
            raise

    def ahead(self) -> Epoch:
        """Return this epoch for a thread that reads ahead; the consumer may not get its errors."""
        return replace(self, failed=threading.Event())

    def frozen(self) -> Epoch:
        """Return this epoch for a node that produces the same elements in every epoch."""
        first = {counter: seed._replace(iteration=0) for counter, seed in self.seeds.items()}
        return replace(self, seeds=first, path=())


class LeafSpec:
    """The dtype and the shape of a leaf; None means that the shape or a length varies."""

    def __init__(self, dtype: Any, shape: Iterable[int | None] | None) -> None:
        self.dtype = dtype
        self.shape = None if shape is None else as_shape(shape)

    def led_by(self, length: int | None) -> LeafSpec:
        """Return the spec of a batch of these leaves."""
        return LeafSpec(self.dtype, None if self.shape is None else (length, *self.shape))

    def row(self) -> LeafSpec:
        """Return the spec of an element of this batch."""
        return LeafSpec(self.dtype, None if self.shape is None else self.shape[1:])

    def __repr__(self) -> str:
        return f"{self.dtype}{'' if self.shape is None else list(self.shape)}"

    def __eq__(self, other: object) -> bool:
        if not hasattr(other, "dtype") or not hasattr(other, "shape"):
            return NotImplemented
        return bool(self.dtype == other.dtype) and self.shape == LeafSpec(None, other.shape).shape

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))


@dataclass(frozen=True)
class ElementSpec:
    """The properties of a node's elements that are known in advance; None where unknown."""

    cardinality: int = UNKNOWN_CARDINALITY
    batched: bool | None = None  # Whether the elements are batches.
    batch_size: int | None = None  # The number of elements of each batch, except short batches.
    like: Any = None  # A nest of `LeafSpec`.

    def __str__(self) -> str:
        words = {INFINITE_CARDINALITY: "endless ", UNKNOWN_CARDINALITY: ""}
        many = words.get(self.cardinality, f"{self.cardinality} ")
        size = "" if self.batch_size is None else f" of {self.batch_size}"
        kind = f"batches{size}" if self.batched else "elements"
        return f"{many}{kind}, {'type unknown' if self.like is None else self.like}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """A node of a pipeline, and its inputs."""

    name: str  # The call that created the node.
    chunks: Chunks  # Yields chunks of the elements, starting at a number.
    singly: Singly | None = None  # Yields single elements, faster: without a Python frame for each.
    inputs: tuple[Node, ...] = ()
    spec: ElementSpec = ElementSpec()
    seeds: SeedCounter | None = None  # The seeds of a shuffle.
    options: InputOptions | None = None  # The options of `with_options`.
    arrays: tuple[Any, ...] = ()  # The arrays of a source.
    files: tuple[str, ...] | None = None  # The paths of a source that reads files.
    loader: Any = None  # The user's object that a source iterates over.
    tensors: list[bool] | None = None  # Which leaves of its last batch were tensors, if any may be.
    runs_user_code: bool = False  # Whether it runs user code or reads files to produce an element.
    # Selects elements by their number, so the parts of its input cannot be read independently.
    positional: bool = False

    @property
    def calls_user(self) -> bool:
        """Whether a step runs code of the user, or reads files, to produce an element."""
        return any(step.runs_user_code for step in upstream(self))

    def like(self, change: Callable[[LeafSpec], Any]) -> Any:
        """Return the spec of the elements with changed leaves; None if the spec is unknown."""
        return None if self.spec.like is None else tree.map_leaves(change, self.spec.like)

    @functools.cached_property
    def contents(self) -> list[str]:
        """The dtype, the shape and the checksum of each array of a source."""
        arrays = map(as_array, self.arrays)
        return [f"{x.dtype}{list(x.shape)} with the checksum {checksum(x):08x}" for x in arrays]

    @functools.cached_property
    def element_like(self) -> Any:
        """The nest of `LeafSpec` of the elements; if unknown, a first element determines it."""
        if self.spec.like is not None:
            return self.spec.like
        if any(step.loader is not None for step in upstream(self)):
            raise ValueError(
                "element_spec: a loader does not say what it yields before it is read. Write "
                "Dataset.from_generator(lambda: iter(loader), output_signature=...)."
            )
        epoch = Epoch({}).inside(self, ShuffleSeed(0, 0), 0)
        try:
            return tree.map_leaves(self._leaf_spec, next(self.iterate(epoch)))
        except StopIteration:
            raise ValueError(
                "element_spec: the dataset is empty, so it has no element that shows the spec. "
                "Pass output_signature to from_generator."
            ) from None
        finally:
            epoch.threads.close()

    def _leaf_spec(self, leaf: Any) -> Any:
        if hasattr(leaf, "element_spec"):
            return leaf.element_spec
        return LeafSpec(leaf.dtype, (None, *leaf.shape[1:]) if self.spec.batched else leaf.shape)

    def iterate(self, epoch: Epoch, start: int = 0) -> Iterator[Element]:
        """Yield the elements one at a time, starting at number `start`."""
        if self.singly is not None:
            return self.singly(epoch, start)
        return chain.from_iterable(epoch.watching(self.chunks(epoch, start)))


class Pipeline:
    """An object with the node of a dataset; the base of the classes whose methods add a node."""

    __slots__ = ("__weakref__", "_node")

    def __init__(self, node: Node) -> None:
        self._node = node

    def _then(self, name: str, chunks: Chunks, **new: Any) -> Self:
        """Return a dataset with another node, with the same spec unless `new` has another."""
        tensors = None if "spec" in new else self._node.tensors
        facts = {"inputs": (self._node,), "spec": self._node.spec, "tensors": tensors, **new}
        return type(self)(Node(name=name, chunks=chunks, **facts))

    @staticmethod
    def _function(fn: Any, what: str) -> Callable[..., Any]:
        """Return a user's function of elements, after checking that it is callable."""
        if not callable(fn):
            raise TypeError(f"{what} must be a function, got {fn!r}.")
        return fn  # type: ignore[no-any-return]

    def _singly(self, name: str, singly: Singly, **new: Any) -> Self:
        """Return a dataset whose elements come singly."""
        return self._then(name, lambda *at: zip(singly(*at)), singly=singly, **new)


def named(cls: type[T]) -> type[T]:
    """Let the methods of a class accept TensorFlow's keyword `name`, which has no effect."""
    for name, method in list(vars(cls).items()):
        function = getattr(method, "__func__", method)  # For a class method.
        if callable(function) and not name.startswith("_"):
            taking: Any = accepting("name")(function)
            setattr(cls, name, taking if function is method else classmethod(taking))
    return cls


def from_first(values: Callable[[Epoch], Iterator[Element]]) -> Chunks:
    """Return the `chunks` of a node that always produces its elements from the first one on."""
    return lambda epoch, start: drop(zip(values(epoch)), start)


def ended_with_error() -> RuntimeError:
    """Return the error to raise when an iteration is continued that an error has ended."""
    return RuntimeError(
        "an error has ended this iteration, and the elements after it were not read. Iterate again "
        "from the beginning; or load the state of this iterator into a new one to continue."
    )


def run(node: Node, epoch: Epoch, start: int = 0) -> Iterator[Element]:
    """Return the elements of one epoch; its threads stop at the end."""

    def parts() -> Iterator[Iterator[Element]]:
        yield node.iterate(epoch, start)
        epoch.threads.close()
        if epoch.failed.is_set():
            raise ended_with_error()

    return chain.from_iterable(parts())


def upstream(node: Node) -> list[Node]:
    """Return a node and all nodes before it, each once, inputs first, in a fixed order."""
    nodes: dict[Node, None] = {}
    for before in node.inputs:
        nodes.update(dict.fromkeys(upstream(before)))
    return [*nodes, node]


def exact_length(node: Node) -> int:
    """Return the number of elements in an epoch, or that it is unknown.

    An endless repetition may repeat nothing, and a worker may read only a part of the files.
    """
    for step in upstream(node):
        if step.files is not None:  # A worker may read only a part of the files.
            return UNKNOWN_CARDINALITY
        if step.name == ENDLESS and step.inputs[0].spec.cardinality == UNKNOWN_CARDINALITY:
            return UNKNOWN_CARDINALITY
    return node.spec.cardinality


def seeds_of(node: Node) -> list[SeedCounter]:
    """Return the seed counters of the shuffles of a pipeline, in a fixed order."""
    return [step.seeds for step in upstream(node) if step.seeds is not None]


def number_of_files(node: Node) -> int:
    """Return the number of files that a pipeline reads."""
    return sum(len(step.files or ()) for step in upstream(node))


def check_resumable(nodes: Iterable[Node], loader: Any, what: str) -> None:
    """Raise an error if the position of a loader in the pipelines cannot be restored."""
    for step in chain.from_iterable(map(upstream, nodes)):
        if step.loader is loader or isinstance(step.loader, Sequence | None):
            continue
        kind = type(step.loader).__name__
        raise ValueError(
            f"{what}: the input contains a {kind}, whose position cannot be saved and restored: "
            f"{obstacle(step.loader)}. Distribute a loader that can do this directly, without a "
            "Dataset around it; or, if this one yields the same batches each time, write "
            "Dataset.from_generator(lambda: iter(loader))."
        )


def facts(node: Node) -> dict[str, Any]:
    """Return facts that are equal for pipelines of the same elements, with checksums of arrays."""
    sources = [step for step in upstream(node) if not step.inputs]
    lengths = [step.spec.cardinality for step in sources]
    arrays = [f"{array} of {step.name}" for step in sources for array in step.contents]
    return {
        "number of files": number_of_files(node),
        "number of batches": node.spec.cardinality,
        "length of its sources": lengths[0] if len(lengths) == 1 else lengths,
        "batch size": node.spec.batch_size,
        "number of shuffles": len(seeds_of(node)),
        **{f"array {number}": array for number, array in enumerate(arrays)},
    }


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a user's function for `describe`."""
    return getattr(fn, "__name__", type(fn).__name__)


def describe(node: Node) -> str:
    """Return the calls that created a pipeline."""
    inputs = [describe(before) for before in node.inputs]
    if node.name == "concatenate":
        return f"{inputs[0]}.concatenate({inputs[1]})"
    if node.name == "zip" or len(inputs) > 1:
        return f"{node.name}({', '.join(inputs)})"
    return ".".join([*inputs, node.name])
