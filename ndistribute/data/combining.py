"""`Combining`: the methods of `Dataset` that combine datasets, also those that a function returns.

The arguments and seeds of a method alone determine the order in which it reads its inputs; threads
that read ahead do not change it. So an iteration that starts at a later element produces the
earlier elements again, and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, islice, zip_longest
from typing import Any, Self, cast

import numpy as np

from ndistribute import tree
from ndistribute.data import pipeline, sources
from ndistribute.data.elements import Chunk, Element, Rows, drop
from ndistribute.data.options import integer
from ndistribute.data.pipeline import ElementSpec, Epoch, Node, Pipeline
from ndistribute.data.prefetch import Ahead
from ndistribute.data.shuffling import seeded
from ndistribute.data.transformations import explained
from ndistribute.mistakes import count_of

CYCLE_LENGTH = 16
"""The inputs of `interleave` that are open at once by default; the same on every machine."""


@pipeline.named
class Combining(Pipeline):
    """The methods of a dataset that read several datasets.

    >>> from ndistribute.data import Dataset
    >>> isinstance(Dataset.range(2), Combining)
    True
    """

    __slots__ = ()

    @classmethod
    def zip(cls, *args: Any, datasets: Any = None) -> Self:
        """Return a dataset of nests with one element of each dataset, until the shortest ends.

        Args:
            *args: the datasets, or a nest of them.
            datasets: the nest, if it is passed by name.

        >>> from ndistribute.data import Dataset
        >>> [(int(x), int(y)) for x, y in Dataset.zip(Dataset.range(2), Dataset.range(5, 9))]
        [(0, 5), (1, 6)]
        """
        nest = (args if len(args) > 1 else args[0]) if args else datasets
        if nest is None or not (parts := tree.flatten(nest)):
            raise ValueError("zip needs at least one dataset, for example zip(images, labels).")
        like = tree.unflatten(nest, range(len(parts)))
        return cls(_zipped(like, tuple(map(node_of, parts))))

    def enumerate(self, start: int = 0) -> Self:
        """Return a dataset of pairs: a number, counted from `start`, and an element.

        >>> from ndistribute.data import Dataset
        >>> [(int(i), int(x)) for i, x in Dataset.range(5, 7).enumerate()]
        [(0, 5), (1, 6)]
        """
        first = integer(start, "enumerate: start")
        pairs = _zipped((0, 1), (sources.counted(first), self._node))
        name = f"enumerate({first or ''})"
        return self._then(name, pairs.chunks, spec=pairs.spec, positional=True)

    def concatenate(self, dataset: Any) -> Self:
        """Return a dataset of these elements, followed by those of another dataset.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(5, 7))]
        [0, 1, 5, 6]
        """
        first, second = inputs = (self._node, node_of(dataset))
        known, unknown = pipeline.exact_length(first), pipeline.UNKNOWN_CARDINALITY

        def both(epoch: Epoch, start: int) -> Iterator[Chunk]:
            if not 0 <= known <= start:
                yield from first.chunks(epoch.branch(0), start)
            yield from second.chunks(epoch.branch(1), max(0, start - known) if known >= 0 else 0)

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            return both(epoch, start) if known != unknown else drop(both(epoch, 0), start)

        lengths = [each.spec.cardinality for each in inputs]
        total = unknown if unknown in lengths else sum(lengths)
        if pipeline.INFINITE_CARDINALITY in lengths:
            total = pipeline.INFINITE_CARDINALITY
        return self._then("concatenate", chunks, inputs=inputs, spec=common_spec(total, inputs))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Any],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Self:
        """Return a dataset that takes each element from a dataset drawn at random.

        Args:
            datasets: the datasets; their elements have the same structure.
            weights: the probability of each dataset, up to a common factor; None means equal
                probabilities.
            seed: the seed of the draws; see `shuffle`.
            stop_on_empty_dataset: whether to end when a dataset is drawn that has ended; otherwise
                another dataset is drawn.
            rerandomize_each_iteration: whether each iteration makes other draws.

        >>> from ndistribute.data import Dataset
        >>> both = Dataset.sample_from_datasets([Dataset.range(2), Dataset.range(5, 7)], seed=1)
        >>> sorted(int(x) for x in both)
        [0, 1, 5, 6]
        """
        name = "sample_from_datasets"
        parts = _parts(datasets, name)
        shares = [1.0] * len(parts) if weights is None else weights
        if np.shape(shares) != (len(parts),) or not np.all(np.greater_equal(shares, 0)):
            raise ValueError(
                f"{name}: weights must have one number, 0 or more, for each dataset; got "
                f"{weights!r} for {count_of(len(parts), 'dataset')}."
            )
        parts = tuple(compress(parts, shares)) or (sources.numbers(range(0)),)
        bounds = np.cumsum([share for share in shares if share] or [1.0])
        seeds = seeded(name, seed)

        def draw(epoch: Epoch) -> Iterator[int]:
            rng = epoch.generator(seeds, bool(rerandomize_each_iteration))
            while True:
                yield int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right"))

        return cls(_directed(name, parts, draw, stop_on_empty_dataset, seeds=seeds))

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Any], choice_dataset: Any, stop_on_empty_dataset: bool = True
    ) -> Self:
        """Return a dataset that takes each element from the dataset that the next number selects.

        Args:
            datasets: the datasets; their elements have the same structure.
            choice_dataset: a dataset of indices into `datasets`.
            stop_on_empty_dataset: whether to end when a dataset is chosen that has ended; otherwise
                the next number is taken.

        >>> from ndistribute.data import Dataset
        >>> parts = [Dataset.range(2), Dataset.range(5, 7)]
        >>> [int(x) for x in Dataset.choose_from_datasets(parts, Dataset.range(2).repeat())]
        [0, 5, 1, 6]
        """
        name, choose = "choose_from_datasets", node_of(choice_dataset)
        parts = _parts(datasets, name)
        return cls(_directed(name, parts, choose.iterate, stop_on_empty_dataset, (choose,)))

    def flat_map(self, map_func: Callable[..., Any]) -> Self:
        """Return a dataset of the elements of the datasets that a function returns.

        A shuffle without a seed in the returned datasets gets a seed that is derived from the seeds
        of this dataset, so an iteration can be resumed.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(4).flat_map(Dataset.range)]
        [0, 0, 1, 0, 1, 2]
        """
        return self._interleaved("flat_map", map_func, 1, 1, False)

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Return a dataset of the elements of the datasets that a function returns, taken in turn.

        Args:
            map_func: returns a dataset for an element; see `flat_map`.
            cycle_length: the number of datasets that are open at once; None means 16.
            block_length: the number of successive elements taken from each; None means 1.
            num_parallel_calls: if it is not None, a thread reads ahead in each open dataset.
            deterministic: has no effect, because the order is always the same.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(2, 5).interleave(Dataset.range, 2)]
        [0, 0, 1, 1, 2, 0, 1, 2, 3]
        """
        cycle = CYCLE_LENGTH if cycle_length in (None, -1) else cycle_length
        cycle = integer(cycle, "interleave: cycle_length", 1)
        block = integer(1 if block_length is None else block_length, "interleave: block_length", 1)
        ahead = num_parallel_calls is not None
        return self._interleaved("interleave", map_func, cycle, block, ahead)

    def _interleaved(
        self, method: str, fn: Callable[..., Any], cycle: int, block: int, reads_ahead: bool
    ) -> Self:
        what = f"{method}: map_func"
        child, fn, seeds = self._node, self._function(fn, what), seeded(method, None)

        def datasets(epoch: Epoch) -> Iterator[Iterator[Chunk]]:
            call = explained(what, fn, epoch)
            for number, element in enumerate(child.iterate(epoch)):
                dataset = call(element)
                if not isinstance(dataset, Pipeline):
                    raise TypeError(
                        f"{what} must return a Dataset, got {dataset!r}. Use map for a function "
                        "that returns an element."
                    )
                node = dataset._node
                yield node.chunks(epoch.inside(node, epoch.seeds[seeds], number), 0)

        def sources(epoch: Epoch) -> Iterator[Iterator[Element]]:
            for chunks in datasets(epoch.ahead()):
                source = chain.from_iterable(chunks)
                yield Ahead(source, block, epoch.threads) if reads_ahead else source

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            if cycle == 1:  # Rows of arrays stay rows.
                return drop(chain.from_iterable(datasets(epoch)), start)
            return drop(zip(_in_turns(sources(epoch), cycle, block)), start)

        name = f"{method}({pipeline.name_of(fn)}{'' if cycle == 1 else f', {cycle}, {block}'})"
        endless = child.spec.cardinality == pipeline.INFINITE_CARDINALITY
        spec = ElementSpec(child.spec.cardinality) if endless else ElementSpec()
        return self._then(name, chunks, spec=spec, seeds=seeds, runs_user_code=True)


def node_of(source: Any) -> Node:
    """Return the node of a dataset, or of a re-iterable collection of batches."""
    return source._node if isinstance(source, Pipeline) else sources.iterable(source)


def _parts(datasets: Sequence[Any], method: str) -> tuple[Node, ...]:
    parts = tuple(map(node_of, datasets))
    if not parts:
        raise ValueError(f"{method}: datasets must contain at least one dataset.")
    return parts


def _in_turns(sources: Iterator[Iterator[Element]], cycle: int, block: int) -> Iterator[Element]:
    """Yield a block of each of `cycle` sources in turn; the next source replaces an ended one."""
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


def in_rounds(parts: tuple[Node, ...]) -> Node:
    """Return a node of one batch of each dataset in turn; an empty batch if it has ended."""

    def values(epoch: Epoch) -> Iterator[Element]:
        sources = [part.iterate(epoch.branch(at)) for at, part in enumerate(parts)]
        for batches in zip_longest(*sources):
            known = next(batch for batch in batches if batch is not None)
            empty = tree.map_leaves(lambda leaf: leaf[:0], known)
            yield from (empty if batch is None else batch for batch in batches)

    lengths = [part.spec.cardinality for part in parts]
    known = min(lengths) if min(lengths) < 0 else max(lengths) * len(parts)
    spec, chunks = common_spec(known, parts), pipeline.from_first(values)
    return Node(
        name="in_rounds",
        chunks=chunks,
        inputs=parts,
        spec=spec,
        positional=True,
        tensors=parts[0].tensors,
    )


def _zipped(like: Any, parts: tuple[Node, ...]) -> Node:
    """Return a node of nests with one element of each dataset, until one dataset ends."""

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        sources = [part.chunks(epoch, start) for part in parts]
        held: list[Chunk] = [[] for _ in parts]
        while True:
            for number, source in enumerate(sources):
                while not len(held[number]):
                    chunk = next(source, None)
                    if chunk is None:
                        return
                    held[number] = chunk
            if not all(isinstance(chunk, Rows) for chunk in held):
                break
            size = min(map(len, held))
            rows = [chunk[:size] for chunk in held]
            yield Rows.zipped(like, cast("Sequence[Rows]", rows))
            held = [chunk[size:] for chunk in held]
        pairs = zip(held, sources, strict=True)
        columns = [chain(head, chain.from_iterable(source)) for head, source in pairs]
        yield from zip(tree.unflatten(like, items) for items in zip(*columns, strict=False))

    lengths = [part.spec.cardinality for part in parts]
    known = [length for length in lengths if length >= 0]
    shortest = min(known, default=pipeline.INFINITE_CARDINALITY)
    specs = [part.spec.like for part in parts]
    spec = ElementSpec(
        pipeline.UNKNOWN_CARDINALITY if pipeline.UNKNOWN_CARDINALITY in lengths else shortest,
        batched=_common_rank(parts),
        like=None if any(each is None for each in specs) else tree.unflatten(like, specs),
    )
    return Node(name="zip", chunks=chunks, inputs=parts, spec=spec, positional=True)


def _directed(
    name: str,
    parts: tuple[Node, ...],
    choose: Callable[[Epoch], Iterator[Any]],
    stops: bool,
    directions: tuple[Node, ...] = (),
    seeds: pipeline.SeedCounter | None = None,
) -> Node:
    def values(epoch: Epoch) -> Iterator[Element]:
        sources = {at: part.iterate(epoch.branch(at)) for at, part in enumerate(parts)}
        for choice in choose(epoch):
            if np.ndim(choice) or not 0 <= choice < len(parts):
                raise ValueError(
                    f"{name}: the choice {choice!r} is not the number of a dataset, from 0 to "
                    f"{len(parts) - 1}."
                )
            element = next(sources.get(int(choice), iter(())), None)
            if element is not None:
                yield element
                continue
            sources.pop(int(choice), None)
            if stops or not sources:
                return

    inputs = (*parts, *directions)
    endless = all(each.spec.cardinality == pipeline.INFINITE_CARDINALITY for each in inputs)
    known = pipeline.INFINITE_CARDINALITY if endless else pipeline.UNKNOWN_CARDINALITY
    spec, chunks = common_spec(known, parts), pipeline.from_first(values)
    return Node(name=name, chunks=chunks, inputs=inputs, spec=spec, seeds=seeds, positional=True)


def common_spec(cardinality: int, parts: Sequence[Node]) -> ElementSpec:
    """Return the spec of a node that produces the elements of several nodes."""
    first = parts[0].spec.like
    alike = all(repr(part.spec.like) == repr(first) for part in parts)
    return ElementSpec(cardinality, _common_rank(parts), like=first if alike else None)


def _common_rank(parts: Sequence[Node]) -> bool | None:
    """Return whether the elements of several nodes are batches; None if unknown."""
    batched = [part.spec.batched for part in parts]
    if False in batched:
        return False
    return True if all(batched) else None
