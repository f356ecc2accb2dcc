"""`Dataset`: the public interface of the input pipeline, with the names of `tf.data`.

A dataset is an immutable description, and every iteration over it is independent. Its methods
check their arguments and add a node to the pipeline. The nodes produce the elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute import tree
from ndistribute.data import nesting, sources, transformations
from ndistribute.data.elements import as_element, read_only
from ndistribute.data.iterator import ElementIterator
from ndistribute.data.options import InputOptions, function, integer
from ndistribute.data.pipeline import INFINITE_CARDINALITY, Node, describe
from ndistribute.mistakes import accepting


class Dataset:
    """A sequence of elements, each a nest of NumPy arrays.

    Create one with a ``from_...`` method or `range`; the other methods return new datasets. Over
    arrays, methods such as `shuffle` compute row indices only, and `batch` gathers each batch at
    once. A batch of rows that are contiguous in their array is a read-only view.

    Each method also takes the keyword `name` of TensorFlow, which changes nothing.

    >>> import numpy as np
    >>> images, labels = np.zeros((5, 28, 28), np.float32), np.arange(5)
    >>> dataset = Dataset.from_tensor_slices((images, labels)).shuffle(5, seed=1).batch(2)
    >>> [batch_images.shape for batch_images, batch_labels in dataset]
    [(2, 28, 28), (2, 28, 28), (1, 28, 28)]
    """

    __slots__ = ("__weakref__", "_node")
    #: Applied to each element of an iteration; None leaves it unchanged.
    _convert: ClassVar[Any] = None

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
        cls,
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] = (),
        output_signature: Any = None,
    ) -> Dataset:
        """Return a dataset of the elements that an iterable yields.

        Args:
            generator: returns the iterable; called with `args` at the start of each iteration.
            output_types: a nest of dtypes, to which the elements are cast.
            output_shapes: a nest of shapes, which the elements must have; None matches any length.
            args: the arguments of `generator`.
            output_signature: instead of types and shapes, a nest of objects with `shape` and
                `dtype`, or of dtypes.

        Raises:
            ValueError: `generator` is not callable, or both types and a signature are passed.

        >>> import numpy as np
        >>> [int(x) for x in Dataset.from_generator(range, np.int32, args=(2,))]
        [0, 1]
        """
        if output_signature is None:
            output_signature = sources.typed(output_types, output_shapes)
        elif output_types is not None or output_shapes is not None:
            raise ValueError("from_generator: pass output_types, or output_signature, not both.")
        return cls(sources.generated(generator, output_signature, tuple(args or ())))

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
    def list_files(
        cls, file_pattern: Any, shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset:
        """Return a dataset of the paths of files, in another order in each iteration.

        Workers that divide the input by files divide these paths.

        Args:
            file_pattern: one or several paths or patterns.
            shuffle: False gives the paths in order: those of each pattern are sorted.
            seed: of the order; see `shuffle`.

        Raises:
            ValueError: no file matches.

        >>> names = Dataset.list_files("ndistribute/data/s*.py", shuffle=False)
        >>> [str(path) for path in names]
        ['ndistribute/data/sources.py', 'ndistribute/data/steps.py']
        """
        files = cls(sources.listed(file_pattern))
        return files if shuffle is False else files.shuffle(len(files), seed)

    @classmethod
    def range(cls, *args: int, output_type: Any = np.int64) -> Dataset:
        """Return a dataset of numbers; the arguments are those of the built-in ``range``.

        >>> [batch.tolist() for batch in Dataset.range(9).batch(4)]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        """
        bounds = (integer(each, "range: each argument") for each in args)
        return cls(sources.numbers(range(*bounds), output_type))

    @classmethod
    def zip(cls, *args: Any, datasets: Any = None) -> Dataset:
        """Return a dataset of nests with one element of each dataset, until the shortest ends.

        Args:
            *args: the datasets, or a nest of them.
            datasets: the nest, if it is passed by name.

        >>> [(int(x), int(y)) for x, y in Dataset.zip(Dataset.range(2), Dataset.range(5, 9))]
        [(0, 5), (1, 6)]
        """
        nest = (args if len(args) > 1 else args[0]) if args else datasets
        if nest is None or not (parts := tree.flatten(nest)):
            raise ValueError("zip needs at least one dataset, for example zip(images, labels).")
        like = tree.unflatten(nest, range(len(parts)))
        return cls(transformations.zipped(like, tuple(as_dataset(part)._node for part in parts)))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Any],
        weights: Sequence[float] | Dataset | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Return a dataset that takes each element from a dataset drawn at random.

        Args:
            datasets: of elements of one structure.
            weights: the probability of each dataset, up to a factor, or a dataset of these, one
                for each draw; None means equal ones.
            seed: of the draws; see `shuffle`.
            stop_on_empty_dataset: whether to end where a drawn dataset has ended, instead of
                drawing again.
            rerandomize_each_iteration: whether each iteration draws anew.

        >>> both = Dataset.sample_from_datasets([Dataset.range(2), Dataset.range(5, 7)], seed=1)
        >>> sorted(int(x) for x in both)
        [0, 1, 5, 6]
        """
        parts = tuple(as_dataset(each)._node for each in datasets)
        if not parts:
            raise ValueError("sample_from_datasets: datasets should not be empty.")
        if not isinstance(weights, Dataset):
            shares = np.ones(len(parts)) if weights is None else np.asarray(weights, float)
            nesting.check_weights(shares, len(parts))
            parts = tuple(itertools.compress(parts, shares)) or (cls.range(0)._node,)
            weights = cls.from_tensors(shares[shares > 0] if any(shares) else [1.0]).repeat()
        again = bool(rerandomize_each_iteration)
        return cls(nesting.sampled(parts, weights._node, seed, stop_on_empty_dataset, again))

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Any], choice_dataset: Any, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """Return a dataset that takes each element from the dataset with the next number.

        Args:
            datasets: of elements of one structure.
            choice_dataset: a dataset of numbers of these datasets.
            stop_on_empty_dataset: whether to end where a chosen dataset has ended, instead of
                taking the next number.

        >>> parts = [Dataset.range(2), Dataset.range(5, 7)]
        >>> [int(x) for x in Dataset.choose_from_datasets(parts, Dataset.range(2).repeat())]
        [0, 5, 1, 6]
        """
        parts = tuple(as_dataset(each)._node for each in datasets)
        return cls(nesting.chosen(parts, as_dataset(choice_dataset)._node, stop_on_empty_dataset))

    def map(self, fn: Callable[..., Any], num_parallel_calls: int | None = None) -> Dataset:
        """Return a dataset of ``fn(element)``, or of ``fn(*element)`` for tuples.

        Args:
            fn: returns a nest of arrays or numbers; a list means the tuple of its items.
            num_parallel_calls: the number of threads that call `fn`; `AUTOTUNE` means one per core,
                None no thread. The order of the elements stays the same.

        >>> [int(y) for y in Dataset.range(3).map(lambda x: 2 * x)]
        [0, 2, 4]
        """
        if num_parallel_calls is not None and num_parallel_calls != transformations.AUTOTUNE:
            num_parallel_calls = integer(num_parallel_calls, "map: num_parallel_calls", 1)
        call = function(fn, "map: fn")
        return type(self)(transformations.mapped(self._node, call, num_parallel_calls))

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Return a dataset of the elements of the datasets that a function returns.

        A shuffle in those datasets without a seed gets one from the seeds of this dataset, so an
        iteration can be resumed.

        >>> [int(x) for x in Dataset.range(4).flat_map(Dataset.range)]
        [0, 0, 1, 0, 1, 2]
        """
        call = function(map_func, "flat_map: map_func")
        return type(self)(nesting.interleaved(self._node, call))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return a dataset of elements that the datasets of a function take turns to give.

        Args:
            map_func: returns a dataset for an element; see `flat_map`.
            cycle_length: the number of datasets that are open at once; None means 16.
            block_length: the number of successive elements of each; None means 1.
            num_parallel_calls: anything but None lets a thread read each open dataset ahead.
            deterministic: the order is always the same, so this changes nothing.

        >>> [int(x) for x in Dataset.range(2, 5).interleave(Dataset.range, 2)]
        [0, 0, 1, 1, 2, 0, 1, 2, 3]
        """
        default = nesting.CYCLE_LENGTH
        cycle = default if cycle_length in (None, -1) else cycle_length
        return type(self)(
            nesting.interleaved(
                self._node,
                function(map_func, "interleave: map_func"),
                integer(cycle, "interleave: cycle_length", 1),
                integer(1 if block_length is None else block_length, "interleave: block_length", 1),
                num_parallel_calls is not None,
            )
        )

    def scan(self, initial_state: Any, scan_func: Callable[..., Any]) -> Dataset:
        """Return a dataset of the outputs of ``state, output = scan_func(state, element)``.

        >>> [int(x) for x in Dataset.range(4).scan(0, lambda total, x: (total + x, total + x))]
        [0, 1, 3, 6]
        """
        call = function(scan_func, "scan: scan_func")
        return type(self)(transformations.scanned(self._node, as_element(initial_state), call))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return the last state of ``state = reduce_func(state, element)`` for all elements.

        >>> int(Dataset.range(4).reduce(0, lambda total, x: total + x))
        6
        """
        what = "reduce: reduce_func"
        call = transformations.explained(what, function(reduce_func, what), produces=True)
        initial = state = read_only(as_element(initial_state))
        for element in self:
            state = call((state, element))
            transformations.check_state(what, initial, state)
        return state

    def take_while(self, predicate: Callable[..., Any]) -> Dataset:
        """Return a dataset of the elements before the first whose ``predicate(element)`` is false.

        >>> [int(x) for x in Dataset.range(5).take_while(lambda x: x < 2)]
        [0, 1]
        """
        keep = function(predicate, "take_while: predicate")
        return type(self)(transformations.selected(self._node, "take_while", keep))

    def enumerate(self, start: int = 0) -> Dataset:
        """Return a dataset of pairs: a number, which counts from `start` on, and an element.

        >>> [(int(i), int(x)) for i, x in Dataset.range(5, 7).enumerate()]
        [(0, 5), (1, 6)]
        """
        first = integer(start, "enumerate: start")
        return type(self)(transformations.numbered(self._node, first))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return the dataset that a function returns for this one.

        >>> [int(x) for x in Dataset.range(5).apply(lambda dataset: dataset.skip(3))]
        [3, 4]
        """
        result = function(transformation_func, "apply: transformation_func")(self)
        if not isinstance(result, Dataset):
            raise TypeError(f"apply: transformation_func must return a Dataset, got {result!r}.")
        return result

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Dataset:
        """Return a dataset of windows: datasets of `size` elements.

        For elements that are nests, a window is a nest with one dataset for each leaf.

        Args:
            size: the number of elements of a window.
            shift: the distance between the first elements of windows; None means `size`.
            stride: the distance between the elements of a window.
            drop_remainder: whether to drop last windows of fewer than `size` elements.

        >>> [[int(x) for x in window] for window in Dataset.range(5).window(3, shift=2)]
        [[0, 1, 2], [2, 3, 4], [4]]
        """
        length = integer(size, "window: size", 1)
        steps = integer(length if shift is None else shift, "window: shift", 1)
        stride = integer(stride, "window: stride", 1)
        make = type(self)
        return make(nesting.windowed(self._node, length, steps, stride, bool(drop_remainder), make))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return a dataset of the elements for which ``predicate(element)`` is true.

        >>> [int(x) for x in Dataset.range(5).filter(lambda x: x % 2)]
        [1, 3]
        """
        keep = function(predicate, "filter: predicate")
        return type(self)(transformations.selected(self._node, "filter", keep))

    def ignore_errors(self, log_warning: bool = False) -> Dataset:
        """Return a dataset without the elements for which a function has raised an error.

        Without it, such an error is raised, and the iterator goes on with the next element if it is
        asked for one. Errors of sources, such as files, are not ignored.

        Args:
            log_warning: whether to log each error.

        Raises:
            ValueError: the last method was not `map`, `filter` or one that elements pass singly.

        >>> [float(x) for x in Dataset.range(3).map(lambda x: 2 / int(x)).ignore_errors()]
        [2.0, 1.0]
        """
        return type(self)(transformations.without_errors(self._node, bool(log_warning)))

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

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Return a dataset of batches whose elements are padded to one shape.

        Args:
            batch_size: the number of elements per batch.
            padded_shapes: a nest of shapes; None, also as a length, means the longest of the batch.
            padding_values: a nest of values to pad with, or one for all; None means zeros.
            drop_remainder: whether to drop a last batch of fewer than `batch_size` elements.

        >>> import numpy as np
        >>> next(iter(Dataset.range(1, 4).map(np.arange).padded_batch(3, padding_values=-1)))
        array([[ 0, -1, -1],
               [ 0,  1, -1],
               [ 0,  1,  2]])
        """
        size = integer(batch_size, "padded_batch: batch_size", 1)
        dropped = bool(drop_remainder)
        return type(self)(
            transformations.padded(self._node, size, padded_shapes, padding_values, dropped)
        )

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Dataset:
        """Return a dataset of the rows of these batches in batches of another size.

        Args:
            batch_size: the number of rows per batch, or several that take turns.
            drop_remainder: whether to drop a last batch of fewer rows.

        >>> [batch.tolist() for batch in Dataset.range(6).batch(3).rebatch([1, 2])]
        [[0], [1, 2], [3], [4, 5]]
        """
        sizes = batch_size if isinstance(batch_size, Sequence) else [batch_size]
        checked = tuple(integer(size, "rebatch: batch_size", 0) for size in sizes)
        if not any(checked):
            raise ValueError(f"rebatch: batch_size must have a number above 0, got {batch_size!r}.")
        return type(self)(transformations.rebatched(self._node, checked, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """Return a dataset of the rows of all batches.

        >>> [int(x) for x in Dataset.range(3).batch(2).unbatch()]
        [0, 1, 2]
        """
        return type(self)(transformations.unbatched(self._node))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """Return a dataset of the elements in random order.

        Args:
            buffer_size: the number of buffered elements, from which each next one is drawn. A full
                permutation needs at least the size of the dataset.
            seed: the same seed gives the same sequence of orders in every run. None derives a seed
                from `set_seed`, or uses a random one if `set_seed` was not called.
            reshuffle_each_iteration: whether each iteration and repetition uses another order; None
                means True.

        >>> dataset = Dataset.range(4).shuffle(4, seed=0)
        >>> sorted(int(x) for x in dataset)
        [0, 1, 2, 3]
        """
        size = integer(buffer_size, "shuffle: buffer_size", 1)
        reshuffles = reshuffle_each_iteration is None or bool(reshuffle_each_iteration)
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

    def cache(self, filename: str = "") -> Dataset:
        """Return a dataset that keeps the elements of its first complete iteration in memory.

        Args:
            filename: must be empty: elements are kept in memory only.

        >>> calls = []
        >>> dataset = Dataset.range(2).map(lambda x: calls.append(x) or x).cache()
        >>> _ = list(dataset), list(dataset)
        >>> len(calls)
        2
        """
        if filename:
            raise ValueError(
                f"cache: elements are kept in memory, not in the file {filename!r}. Leave filename "
                "out, or write arrays with np.save and read them with from_files."
            )
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

    @property
    def element_spec(self) -> Any:
        """The dtypes and shapes of the elements: a nest of objects with `dtype` and `shape`.

        What functions return is known from a first element, for which they are called once; the
        first length of a batch counts as unknown then.

        >>> Dataset.range(4).map(lambda x: {"x": x / 2}).batch(2).element_spec
        {'x': float64[None]}
        """
        return self._node.element_like

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

    def __iter__(self) -> ElementIterator:
        return ElementIterator(self._node, self._convert)

    def __len__(self) -> int:
        known = self.cardinality()
        if known < 0:
            what = "infinite" if known == INFINITE_CARDINALITY else "unknown"
            raise TypeError(f"the length of this dataset is {what}: use cardinality().")
        return known

    def __bool__(self) -> bool:
        return True


for _name, _method in list(vars(Dataset).items()):
    _function = getattr(_method, "__func__", _method)  # Of a class method.
    if callable(_function) and not _name.startswith("_"):
        _named: Any = accepting("name")(_function)
        setattr(Dataset, _name, _named if _function is _method else classmethod(_named))


def as_dataset(source: Any) -> Dataset:
    """Return a dataset unchanged, and any re-iterable collection of batches as a dataset.

    Raises:
        ValueError: the object can be iterated only once, or is not a collection of batches.

    >>> import numpy as np
    >>> as_dataset([np.arange(2), np.arange(1)]).cardinality()
    2
    """
    return source if isinstance(source, Dataset) else Dataset(sources.iterable(source))
