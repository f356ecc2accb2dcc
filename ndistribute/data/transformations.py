"""`Transforming`: the methods of `Dataset` that select, order, repeat, change or keep elements.

Methods that select or reorder elements compute indices only: rows of arrays stay indices until
`batch` gathers them. Users' functions are called with one element at a time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Self

import numpy as np

from ndistribute import tree
from ndistribute.data import pipeline
from ndistribute.data.elements import Chunk, Element, Rows, as_element, drop, read_only
from ndistribute.data.options import InputOptions, integer
from ndistribute.data.pipeline import ElementSpec, Epoch, Pipeline
from ndistribute.data.prefetch import Ahead
from ndistribute.data.shuffling import seeded, through_buffer
from ndistribute.mistakes import explain_read_only

AUTOTUNE = -1

# The depth of prefetch(AUTOTUNE): one element in use, one ready.
_AUTOTUNED_DEPTH = 2


@pipeline.named
class Transforming(Pipeline):
    """The methods of a dataset that select, order, repeat, change or keep its elements.

    >>> from ndistribute.data import Dataset
    >>> isinstance(Dataset.range(2), Transforming)
    True
    """

    __slots__ = ()

    def map(self, fn: Callable[..., Any], num_parallel_calls: int | None = None) -> Self:
        """Return a dataset of ``fn(element)``, or of ``fn(*element)`` for tuples.

        Args:
            fn: a function that returns a nest of arrays or numbers; a list counts as a tuple.
            num_parallel_calls: the number of threads that call `fn`; `AUTOTUNE` means one per core,
                None means no thread. The order of the elements stays the same.

        >>> from ndistribute.data import Dataset
        >>> [int(y) for y in Dataset.range(3).map(lambda x: 2 * x)]
        [0, 2, 4]
        """
        calls, child, fn = num_parallel_calls, self._node, self._function(fn, "map: fn")
        if calls is not None and calls != AUTOTUNE:
            calls = integer(calls, "map: num_parallel_calls", 1)

        def values(epoch: Epoch, start: int) -> Iterator[Element]:
            if calls is None:
                call = explained("map: fn", fn, epoch, produces=True)
                return map(call, child.iterate(epoch, start))
            threads = calls if calls != AUTOTUNE else os.cpu_count() or 1
            source = child.iterate(epoch.ahead(), start)
            if child.calls_user:
                # User code upstream may have opened resources that only one thread can use.
                source = Ahead(source, threads, epoch.threads)
            call = explained("map: fn", fn, None, produces=True)
            return epoch.watching(Ahead(source, threads, epoch.threads, call, threads))

        # A function may return a batch for an element that is not one, such as a number.
        spec = ElementSpec(child.spec.cardinality, batched=child.spec.batched or None)
        name = f"map({pipeline.name_of(fn)})"
        return self._singly(name, values, spec=spec, runs_user_code=True)

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Return a dataset of the elements for which ``predicate(element)`` is true.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(5).filter(lambda x: x % 2)]
        [1, 3]
        """
        return self._selected("filter", predicate, filter)

    def take_while(self, predicate: Callable[..., Any]) -> Self:
        """Return a dataset of the elements before the first whose ``predicate(element)`` is false.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(5).take_while(lambda x: x < 2)]
        [0, 1]
        """
        return self._selected("take_while", predicate, takewhile)

    def _selected(self, method: str, predicate: Callable[..., Any], select: Any) -> Self:
        what, child = f"{method}: predicate", self._node
        predicate = self._function(predicate, what)

        def values(epoch: Epoch, start: int) -> Iterator[Element]:
            keep = explained(what, predicate, epoch)
            return itertools.islice(select(keep, child.iterate(epoch)), start, None)

        return self._singly(
            f"{method}({pipeline.name_of(predicate)})",
            values,
            spec=replace(child.spec, cardinality=pipeline.UNKNOWN_CARDINALITY),
            runs_user_code=True,
            positional=select is takewhile,
        )

    def scan(self, initial_state: Any, scan_func: Callable[..., Any]) -> Self:
        """Return a dataset of the outputs of ``state, output = scan_func(state, element)``.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(4).scan(0, lambda total, x: (total + x, total + x))]
        [0, 1, 3, 6]
        """
        what, child, initial = "scan: scan_func", self._node, as_element(initial_state)
        scan_func = self._function(scan_func, what)

        def values(epoch: Epoch, start: int) -> Iterator[Element]:
            # The state is not saved: an iteration that starts at a later element computes the state
            # from the first element on. A function may change a nest, but no array in it.
            call, state = explained(what, scan_func, epoch), read_only(initial)

            def step(element: Element) -> Element:
                nonlocal state
                result = call((state, element))
                if not isinstance(result, tuple | list) or len(result) != 2:
                    raise TypeError(f"{what} must return (state, output), got {result!r}.")
                following, output = map(as_element, result)
                check_state(what, initial, following)
                state = following
                return output

            return itertools.islice(map(step, child.iterate(epoch)), start, None)

        spec, name = ElementSpec(child.spec.cardinality), f"scan({pipeline.name_of(scan_func)})"
        return self._singly(name, values, spec=spec, runs_user_code=True, positional=True)

    def apply(self, transformation_func: Callable[[Any], Any]) -> Self:
        """Return the dataset that a function returns for this one.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(5).apply(lambda dataset: dataset.skip(3))]
        [3, 4]
        """
        result = Pipeline._function(transformation_func, "apply: transformation_func")(self)
        if not isinstance(result, Pipeline):
            raise TypeError(f"apply: transformation_func must return a Dataset, got {result!r}.")
        return result  # type: ignore[return-value]

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Self:
        """Return a dataset of the elements in random order.

        Args:
            buffer_size: the number of buffered elements; each next element is drawn from them. A
                full permutation needs at least the size of the dataset.
            seed: the same seed gives the same sequence of orders in every run. None derives a seed
                from `set_seed`, or uses a random one if `set_seed` was not called.
            reshuffle_each_iteration: whether each iteration and each repetition uses another order;
                None means True.

        >>> from ndistribute.data import Dataset
        >>> dataset = Dataset.range(4).shuffle(4, seed=0)
        >>> sorted(int(x) for x in dataset)
        [0, 1, 2, 3]
        """
        child, size = self._node, integer(buffer_size, "shuffle: buffer_size", 1)
        reshuffles = reshuffle_each_iteration is None or bool(reshuffle_each_iteration)
        # No random state survives an epoch, so a few numbers describe a position within it.
        seeds = seeded("shuffle", seed)

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            rng = epoch.generator(seeds, reshuffles)
            return drop(through_buffer(child.chunks(epoch, 0), rng, size), start)

        name = f"shuffle({size})" if seed is None else f"shuffle({size}, seed={seed})"
        return self._then(name, chunks, seeds=seeds)

    def repeat(self, count: int | None = None) -> Self:
        """Return a dataset of the elements repeated `count` times; forever if it is None or -1.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        known, child = self._node.spec.cardinality, self._node
        times = -1 if count is None else integer(count, "repeat: count", -1)
        name = pipeline.ENDLESS if times == -1 else f"repeat({times})"
        if 0 in (known, times):
            return self._sliced(name, stop=0)
        exact = pipeline.exact_length(child)
        differ = bool(pipeline.seeds_of(child))

        def repetitions(epoch: Epoch, first: int, start: int) -> Iterator[Chunk]:
            for number in itertools.count(first) if times == -1 else range(first, times):
                empty = True
                for chunk in child.chunks(epoch.branch(number) if differ else epoch, start):
                    empty = empty and not len(chunk)
                    yield chunk
                if empty and start == 0:
                    return  # Repeating an empty dataset forever would never return.
                start = 0

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            if exact > 0:
                return repetitions(epoch, *divmod(start, exact))
            return drop(repetitions(epoch, 0, 0), start)

        total = known if known < 0 else known * times
        total = pipeline.INFINITE_CARDINALITY if times == -1 else total
        spec = replace(child.spec, cardinality=total)
        return self._then(name, chunks, spec=spec)

    def take(self, count: int) -> Self:
        """Return a dataset of the first `count` elements; of all elements if `count` is -1.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        stop = integer(count, "take: count", -1)
        return self if stop == -1 else self._sliced(f"take({stop})", stop=stop)

    def skip(self, count: int) -> Self:
        """Return a dataset without the first `count` elements; an empty one if `count` is -1.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(5).skip(3)]
        [3, 4]
        """
        start = integer(count, "skip: count", -1)
        return self.take(0) if start == -1 else self._sliced(f"skip({start})", start)

    def shard(self, num_shards: int, index: int) -> Self:
        """Return a dataset of every `num_shards`-th element, starting at element `index`.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(5).shard(2, 1)]
        [1, 3]
        """
        shards = integer(num_shards, "shard: num_shards", 1)
        first = integer(index, "shard: index", below=shards)
        return self._sliced(f"shard({shards}, {first})", first, step=shards)

    def _sliced(self, name: str, start: int = 0, stop: int | None = None, step: int = 1) -> Self:
        """Return a dataset of the elements at ``range(start, stop, step)``."""
        child, known = self._node, self._node.spec.cardinality

        def chunks(epoch: Epoch, first: int) -> Iterator[Chunk]:
            begin = start + first * step
            left = None if stop is None else max(0, stop - begin)
            return _every(child.chunks(epoch, begin), left, step)

        if known == pipeline.INFINITE_CARDINALITY and stop is not None:
            known = len(range(start, stop, step))
        elif known >= 0 or stop == 0:
            known = len(range(max(0, known))[start:stop:step])
        spec = replace(child.spec, cardinality=known)
        more = {"positional": True, "tensors": self._node.tensors}
        return self._then(name, chunks, spec=spec, **more)

    def cache(self, filename: str = "") -> Self:
        """Return a dataset that keeps the elements of its first complete iteration in memory.

        Args:
            filename: must be empty: elements are kept in memory only.

        >>> from ndistribute.data import Dataset
        >>> calls = []
        >>> dataset = Dataset.range(2).map(lambda x: calls.append(x) or x).cache()
        >>> _ = list(dataset), list(dataset)
        >>> len(calls)
        2
        """
        if filename:
            raise ValueError(
                f"cache keeps elements in memory, not in the file {filename!r}. Leave filename "
                "out, or write arrays once with numpy.save, and read them with Dataset.from_files."
            )
        # The nodes before it use frozen seeds, so the order does not depend on the epoch that
        # filled the cache: a resumed program gets the same order.
        # A worker may read parts of other workers, whose shuffles have other seeds.
        child, kept = self._node, dict[Any, list[Chunk]]()
        counters = pipeline.seeds_of(child)

        def key(epoch: Epoch) -> Any:
            return epoch.shard, *(epoch.seeds[counter].entropy for counter in counters)

        def filling(epoch: Epoch) -> Iterator[Chunk]:
            seen: list[Chunk] = []
            for chunk in child.chunks(epoch.frozen(), 0):
                seen.append(chunk if isinstance(chunk, Rows) else [*map(read_only, chunk)])
                yield seen[-1]
            kept[key(epoch)] = seen

        def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
            known = kept.get(key(epoch))
            return drop(filling(epoch) if known is None else iter(known), start)

        return self._then("cache()", chunks)

    def prefetch(self, n: int) -> Self:
        """Return a dataset whose elements a thread prepares ahead: `n` of them; `AUTOTUNE` means 2.

        >>> from ndistribute.data import Dataset
        >>> [int(x) for x in Dataset.range(3).map(lambda x: x * x).prefetch(2)]
        [0, 1, 4]
        """
        child, depth = self._node, integer(n, "prefetch: n", -1)
        name = f"prefetch({depth})"
        # Rows of arrays need no thread, because only a later `batch` gathers their data.
        waits = child.spec.batched is not False or any(
            at.runs_user_code for at in pipeline.upstream(child)
        )
        if depth == 0 or not waits:
            return self._then(name, child.chunks, singly=child.singly)
        most = _AUTOTUNED_DEPTH if depth == AUTOTUNE else depth

        def values(epoch: Epoch, start: int) -> Iterator[Element]:
            source = child.iterate(epoch.ahead(), start)
            return epoch.watching(Ahead(source, most, epoch.threads))

        return self._singly(name, values)

    def with_options(self, options: InputOptions) -> Self:
        """Return this dataset with defaults for the `options` of `distribute_dataset`."""
        if not isinstance(options, InputOptions):
            raise ValueError(f"with_options needs an InputOptions, got {options!r}.")
        return self._then("with_options(...)", self._node.chunks, options=options)

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float],
        initial_dist: Sequence[float] | None = None,
        seed: int | None = None,
    ) -> Self:
        """Return a dataset of pairs: the class of an element, and an element, resampled by class.

        Elements are left out at random, so that the classes of the rest follow `target_dist`.

        Args:
            class_func: a function that returns the class of an element, counted from 0.
            target_dist: the relative frequency of each class in the result.
            initial_dist: the relative frequency of each class in this dataset; None counts the
                elements as they come, starting with 10 for each class.
            seed: the seed of the draws; see `shuffle`.

        >>> from ndistribute.data import Dataset
        >>> kept = Dataset.range(9).rejection_resample(lambda x: x % 3, [0.0, 0.0, 1.0])
        >>> [(int(kind), int(x)) for kind, x in kept]
        [(2, 2), (2, 5), (2, 8)]
        """
        what, child = "rejection_resample: class_func", self._node
        class_func, seeds = self._function(class_func, what), seeded("rejection_resample", seed)
        target = np.asarray(target_dist, float)
        known = np.full(target.shape, 10.0) if initial_dist is None else np.array(initial_dist)
        if target.ndim != 1 or known.shape != target.shape or not target.any():
            raise ValueError(
                "rejection_resample: target_dist needs a frequency for each class, and so does "
                f"initial_dist; got {target_dist} and {initial_dist}."
            )

        def values(epoch: Epoch) -> Iterator[Element]:
            call, rng = explained(what, class_func, epoch), epoch.generator(seeds)
            counts = known.copy()
            for element in child.iterate(epoch):
                kind = integer(call(element), what, below=len(target))
                counts[kind] += initial_dist is None
                share = target * (counts.sum() / np.maximum(counts, np.finfo(float).tiny))
                if rng.random() * share.max() < share[kind]:
                    yield np.int64(kind), element

        name = f"rejection_resample({pipeline.name_of(class_func)})"
        options = {"spec": ElementSpec(), "seeds": seeds, "runs_user_code": True}
        return self._then(name, pipeline.from_first(values), **options)


def explained(
    what: str, fn: Callable[..., Any], epoch: Epoch | None, produces: bool = False
) -> Callable[..., Any]:
    """Return the function that calls `fn` with an element, or with the items of a tuple.

    It explains mistakes of `fn` that Python and NumPy cannot explain. It notes a failure in the
    epoch; after that, it must not be called again. Without an epoch, other threads may continue to
    call it for earlier elements. If it `produces` elements, the value that `fn` returns becomes an
    element; a list counts as a tuple.
    """

    def call(element: Element) -> Any:
        nonlocal fn
        try:
            value = fn(*element) if type(element) is tuple else fn(element)
            if not produces or isinstance(value, np.generic):
                return value
            return as_element(tuple(value) if type(value) is list else value)
        except BaseException as error:
            if epoch is not None:
                epoch.failed.set()
                fn = _ended  # Another call would skip this element.
            if isinstance(error, StopIteration):
                message = f"{what} raised StopIteration, which ends an iteration."
                raise RuntimeError(message) from error
            explain_read_only(error)
            raise

    return call


def _ended(*_: Any) -> Any:
    raise pipeline.ended_with_error()


def check_state(what: str, initial: Element, state: Element) -> None:
    """Raise a TypeError if a function returned a state of another structure."""
    if not tree.same_structure(initial, state):
        raise TypeError(
            f"{what} returned the state {state!r}, whose structure differs from that of "
            f"initial_state, {initial!r}."
        )


def _every(chunks: Iterator[Chunk], stop: int | None, step: int) -> Iterator[Chunk]:
    """Yield the elements at ``range(0, stop, step)``, and read none after `stop`."""
    at = 0
    while stop is None or at < stop:
        chunk = next(chunks, None)
        if chunk is None:
            return
        size = len(chunk) if stop is None else min(len(chunk), stop - at)
        first = -at % step
        if first < size:
            yield chunk[first:size:step]
        at += size
