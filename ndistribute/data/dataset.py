"""`Dataset`: the public interface of the input pipeline, with the names of `tf.data`.

A dataset is an immutable description, and every iteration over it is independent. Its methods
check their arguments and add a node to the pipeline. The nodes produce the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ndistribute import tree
from ndistribute.data import sources, transformations
from ndistribute.data.elements import Element
from ndistribute.data.options import InputOptions, function, integer
from ndistribute.data.pipeline import INFINITE_CARDINALITY, Epoch, Node, describe, run


class Dataset:
    """A sequence of elements, each a nest of NumPy arrays.

    Create one with a ``from_...`` method or `range`; the other methods return new datasets. Over
    arrays, methods such as `shuffle` compute row indices only, and `batch` gathers each batch at
    once. A batch of rows that are contiguous in their array is a read-only view.

    >>> import numpy as np
    >>> images, labels = np.zeros((5, 28, 28), np.float32), np.arange(5)
    >>> dataset = Dataset.from_tensor_slices((images, labels)).shuffle(5, seed=1).batch(2)
    >>> [batch_images.shape for batch_images, batch_labels in dataset]
    [(2, 28, 28), (2, 28, 28), (1, 28, 28)]
    """

    __slots__ = ("__weakref__", "_node")

    def __init__(self, node: Node) -> None:
        self._node = node

    @classmethod
    def from_tensors(cls, tensors: Any) -> Dataset:
        """Return a dataset of one element: a nest of arrays, which are not copied.

        >>> import numpy as np
        >>> list(Dataset.from_tensors(np.arange(3)))
        [array([0, 1, 2])]
        """
        return cls(sources.single(tensors))

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Dataset:
        """Return a dataset of the rows of arrays, which are not copied.

        Args:
            tensors: a nest of arrays whose first axes have the same length; a list is one array.

        Raises:
            ValueError: a leaf is a scalar, or the lengths of the first axes differ.

        >>> [(int(x), int(y)) for x, y in Dataset.from_tensor_slices(([1, 2], [3, 4]))]
        [(1, 3), (2, 4)]
        """
        return cls(sources.slices(tensors))

    @classmethod
    def from_generator(
        cls, fn: Callable[[], Iterable[Any]], output_signature: Any = None
    ) -> Dataset:
        """Return a dataset of the elements that an iterable yields.

        Args:
            fn: returns the iterable; called without arguments at the start of each iteration.
            output_signature: a nest of dtypes, or of objects with `shape` and `dtype`. Elements are
                cast to these dtypes and must have these shapes, where None matches any length.

        Raises:
            ValueError: `fn` is not callable.

        >>> import numpy as np
        >>> [int(x) for x in Dataset.from_generator(lambda: iter([1, 2]), np.int32)]
        [1, 2]
        """
        return cls(sources.generated(fn, output_signature))

    @classmethod
    def from_files(cls, paths: Any, reader: Callable[[str], Any] | None = None) -> Dataset:
        """Return a dataset of the elements in files, one file after another.

        Args:
            paths: one or several; a pattern such as ``"train-*.npy"`` means all matches, sorted.
            reader: called with a path; returns a nest of arrays or a DataFrame, whose rows are the
                elements, or an iterable of elements. None reads .npy, .npz and .csv files.

        Raises:
            ValueError: no file matches a pattern, or a file's extension is unknown.

        >>> Dataset.from_files("day.log", reader=lambda path: iter([1, 2])).batch(2).cardinality()
        -2
        """
        return cls(sources.files(paths, reader))

    @classmethod
    def range(cls, *args: int) -> Dataset:
        """Return a dataset of int64 numbers; the arguments are those of the built-in ``range``.

        >>> [batch.tolist() for batch in Dataset.range(9).batch(4)]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        """
        bounds = (integer(each, "range: each argument") for each in args)
        return cls(sources.numbers(range(*bounds)))

    @classmethod
    def zip(cls, datasets: Any) -> Dataset:
        """Return a dataset of nests with one element of each dataset, until the shortest ends.

        >>> [(int(x), int(y)) for x, y in Dataset.zip((Dataset.range(2), Dataset.range(5, 9)))]
        [(0, 5), (1, 6)]
        """
        parts = tree.flatten(datasets)
        if not parts:
            raise ValueError("zip needs at least one dataset, for example zip((images, labels)).")
        like = tree.unflatten(datasets, range(len(parts)))
        return cls(transformations.zipped(like, tuple(as_dataset(part)._node for part in parts)))

    def map(self, fn: Callable[..., Any], num_parallel_calls: int | None = None) -> Dataset:
        """Return a dataset of ``fn(element)``, or of ``fn(*element)`` for tuples.

        Args:
            fn: returns a nest of arrays or numbers.
            num_parallel_calls: the number of threads that call `fn`; `AUTOTUNE` means one per core,
                None no thread. The order of the elements stays the same.

        >>> [int(y) for y in Dataset.range(3).map(lambda x: 2 * x)]
        [0, 2, 4]
        """
        if num_parallel_calls is not None and num_parallel_calls != transformations.AUTOTUNE:
            num_parallel_calls = integer(num_parallel_calls, "map: num_parallel_calls", 1)
        call = function(fn, "map: fn")
        return type(self)(transformations.mapped(self._node, call, num_parallel_calls))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return a dataset of the elements for which ``predicate(element)`` is true.

        >>> [int(x) for x in Dataset.range(5).filter(lambda x: x % 2)]
        [1, 3]
        """
        keep = function(predicate, "filter: predicate")
        return type(self)(transformations.filtered(self._node, keep))

    def batch(self, n: int, drop_remainder: bool = False) -> Dataset:
        """Return a dataset of batches: `n` successive elements stacked along a new first axis.

        Args:
            n: the number of elements per batch.
            drop_remainder: whether to drop a last batch of fewer than `n` elements.

        >>> list(Dataset.range(3).batch(2))
        [array([0, 1]), array([2])]
        """
        size = integer(n, "batch: n", 1)
        return type(self)(transformations.batched(self._node, size, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """Return a dataset of the rows of all batches.

        >>> [int(x) for x in Dataset.range(3).batch(2).unbatch()]
        [0, 1, 2]
        """
        return type(self)(transformations.unbatched(self._node))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Return a dataset of the elements in random order.

        Args:
            buffer_size: the number of buffered elements, from which each next one is drawn. A full
                permutation needs at least the size of the dataset.
            seed: the same seed gives the same sequence of orders in every run. None derives a seed
                from `set_seed`, or uses a random one if `set_seed` was not called.
            reshuffle_each_iteration: whether each iteration and repetition uses another order.

        >>> dataset = Dataset.range(4).shuffle(4, seed=0)
        >>> sorted(int(x) for x in dataset)
        [0, 1, 2, 3]
        """
        size = integer(buffer_size, "shuffle: buffer_size", 1)
        reshuffles = bool(reshuffle_each_iteration)
        return type(self)(transformations.shuffled(self._node, size, seed, reshuffles))

    def repeat(self, count: int | None = None) -> Dataset:
        """Return a dataset of the elements repeated `count` times; forever if it is None or -1.

        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        times = -1 if count is None else integer(count, "repeat: count", -1)
        return type(self)(transformations.repeated(self._node, None if times == -1 else times))

    def take(self, count: int) -> Dataset:
        """Return a dataset of the first `count` elements; of all elements if `count` is -1.

        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        times = integer(count, "take: count", -1)
        if times == -1:
            return self
        return type(self)(transformations.sliced(self._node, f"take({times})", stop=times))

    def skip(self, count: int) -> Dataset:
        """Return a dataset without the first `count` elements; an empty one if `count` is -1.

        >>> [int(x) for x in Dataset.range(5).skip(3)]
        [3, 4]
        """
        start = integer(count, "skip: count", -1)
        if start == -1:
            return self.take(0)
        return type(self)(transformations.sliced(self._node, f"skip({start})", start))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return a dataset of every `num_shards`-th element, starting at element `index`.

        >>> [int(x) for x in Dataset.range(5).shard(2, 1)]
        [1, 3]
        """
        shards = integer(num_shards, "shard: num_shards", 1)
        first = integer(index, "shard: index", below=shards)
        name = f"shard({shards}, {first})"
        return type(self)(transformations.sliced(self._node, name, first, step=shards))

    def concatenate(self, dataset: Any) -> Dataset:
        """Return a dataset of these elements, followed by those of another dataset.

        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(5, 7))]
        [0, 1, 5, 6]
        """
        return type(self)(transformations.concatenated(self._node, as_dataset(dataset)._node))

    def cache(self) -> Dataset:
        """Return a dataset that keeps the elements of its first complete iteration in memory.

        >>> calls = []
        >>> dataset = Dataset.range(2).map(lambda x: calls.append(x) or x).cache()
        >>> _ = list(dataset), list(dataset)
        >>> len(calls)
        2
        """
        return type(self)(transformations.cached(self._node))

    def prefetch(self, n: int) -> Dataset:
        """Return a dataset of which a thread prepares `n` elements ahead; 2 for `AUTOTUNE`.

        >>> [int(x) for x in Dataset.range(3).map(lambda x: x * x).prefetch(2)]
        [0, 1, 4]
        """
        return type(self)(transformations.prefetched(self._node, integer(n, "prefetch: n", -1)))

    def with_options(self, options: InputOptions) -> Dataset:
        """Return this dataset with defaults for the `options` of `distribute_dataset`."""
        if not isinstance(options, InputOptions):
            raise ValueError(f"with_options needs an InputOptions, got {options!r}.")
        return type(self)(self._node.then("with_options(...)", self._node.chunks, options=options))

    def cardinality(self) -> int:
        """Return the number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

        >>> Dataset.range(9).batch(4).cardinality(), Dataset.range(9).repeat().cardinality()
        (3, -1)
        """
        return self._node.spec.cardinality

    def __repr__(self) -> str:
        """Return the calls that created the dataset, and the known properties of its elements.

        >>> Dataset.range(9).shuffle(9, seed=1).batch(4)
        <Dataset range(0, 9).shuffle(9, seed=1).batch(4): 3 batches of 4, int64[None]>
        """
        return f"<Dataset {describe(self._node)}: {self._node.spec}>"

    def __iter__(self) -> Iterator[Element]:
        return run(self._node, Epoch.begin(self._node))

    def __len__(self) -> int:
        known = self.cardinality()
        if known < 0:
            what = "infinite" if known == INFINITE_CARDINALITY else "unknown"
            raise TypeError(f"the length of this dataset is {what}: use cardinality().")
        return known

    def __bool__(self) -> bool:
        return True


def as_dataset(source: Any) -> Dataset:
    """Return a dataset unchanged, and any re-iterable collection of batches as a dataset.

    Raises:
        ValueError: the object can be iterated only once, or is not a collection of batches.

    >>> import numpy as np
    >>> as_dataset([np.arange(2), np.arange(1)]).cardinality()
    2
    """
    return source if isinstance(source, Dataset) else Dataset(sources.iterable(source))
