"""`Dataset`: the public interface of the input pipeline, with the names of `tf.data`.

A dataset is an immutable description, and every iteration over it is independent. Its methods
check their arguments and add a node to the pipeline. The nodes produce the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.data import sources
from ndistribute.data.batching import Batching
from ndistribute.data.combining import Combining, node_of
from ndistribute.data.elements import as_element, read_only
from ndistribute.data.iterator import ElementIterator
from ndistribute.data.options import integer
from ndistribute.data.pipeline import INFINITE_CARDINALITY, describe, named
from ndistribute.data.transformations import Transforming, check_state, explained

_INSTEAD = {
    "assert_cardinality": "cardinality",
    "bucket_by_sequence_length": "padded_batch, of elements in the order of their lengths",
    "get_single_element": "next(iter(dataset))",
    "group_by_window": "filter for each key, and choose_from_datasets",
    "ignore_errors": "a function that catches its errors, and filter",
    "options": "InputOptions where the dataset is distributed, or with_options",
    "ragged_batch": "padded_batch",
    "random": "from_generator, with NumPy's generator of random numbers",
    "save": "numpy.save of its elements, and from_files",
    "snapshot": "cache, or numpy.save of its elements, and from_files",
    "sparse_batch": "padded_batch",
    "unique": "numpy.unique before from_tensor_slices",
}
"""What to use instead of methods that only TensorFlow has."""


@named
class Dataset(Transforming, Batching, Combining):
    """A sequence of elements, each a nest of NumPy arrays.

    Create a dataset with a ``from_...`` method or `range`; the other methods return new datasets.
    Over arrays, methods such as `shuffle` compute row indices only, and `batch` gathers the rows of
    a batch at once. If these rows are contiguous in their array, the batch is a read-only view.

    Each method also accepts TensorFlow's keyword `name`, which has no effect.

    >>> import numpy as np
    >>> images, labels = np.zeros((5, 28, 28), np.float32), np.arange(5)
    >>> dataset = Dataset.from_tensor_slices((images, labels)).shuffle(5, seed=1).batch(2)
    >>> [batch_images.shape for batch_images, batch_labels in dataset]
    [(2, 28, 28), (2, 28, 28), (1, 28, 28)]
    """

    __slots__ = ()
    # : A function that is applied to each element of an iteration; None leaves elements unchanged.
    _convert: ClassVar[Any] = None

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
            tensors: a nest of arrays whose first axes have the same length; a list counts as one
                array.

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
            generator: a function that returns the iterable; it is called with `args` at the start
                of each iteration.
            output_types: a nest of dtypes; the elements are cast to them.
            output_shapes: a nest of shapes that the elements must have; None matches any length.
            args: the arguments of `generator`.
            output_signature: a nest of dtypes, or of objects with `shape` and `dtype`; it replaces
                `output_types` and `output_shapes`.

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
            paths: one or several paths; a pattern such as ``"train-*.npy"`` means all matches,
                sorted.
            reader: a function of a path. It returns a nest of arrays or a DataFrame, whose rows are
                the elements, or an iterable of elements. None reads .npy, .npz and .csv files.

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
        """Return a dataset of the paths of files, in a different random order in each iteration.

        Workers that divide the input by files divide these paths.

        Args:
            file_pattern: one or several paths or patterns.
            shuffle: False keeps the order of the patterns, and sorts the paths of each pattern.
            seed: the seed of the order; see `shuffle`.

        Raises:
            ValueError: no file matches.

        >>> names = Dataset.list_files("ndistribute/data/s[ot]*.py", shuffle=False)
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
    def counter(cls, start: int = 0, step: int = 1, dtype: Any = np.int64) -> Dataset:
        """Return an endless dataset of numbers: `start`, ``start + step``, and so on.

        >>> [int(x) for x in Dataset.counter(5, step=2).take(2)]
        [5, 7]
        """
        node = sources.counted(integer(start, "counter: start"), integer(step, "counter: step"))
        return cls(node) if np.dtype(dtype) == np.int64 else cls(node).map(np.dtype(dtype).type)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return the last state of ``state = reduce_func(state, element)`` for all elements.

        >>> int(Dataset.range(4).reduce(0, lambda total, x: total + x))
        6
        """
        what = "reduce: reduce_func"
        call = explained(what, self._function(reduce_func, what), None, produces=True)
        initial = state = read_only(as_element(initial_state))
        for element in self:
            state = call((state, element))
            check_state(what, initial, state)
        return state

    @property
    def element_spec(self) -> Any:
        """The dtypes and shapes of the elements: a nest of objects with `dtype` and `shape`.

        To find out what users' functions return, they are called once, for a first element. The
        first length of a batch then counts as unknown.

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

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise AttributeError(f"Dataset has no {name}: use {_INSTEAD[name]}.")
        return object.__getattribute__(self, name)  # This raises Python's AttributeError.

    def __bool__(self) -> bool:
        return True


def as_dataset(source: Any) -> Dataset:
    """Return a dataset unchanged, and any re-iterable collection of batches as a dataset.

    Raises:
        ValueError: the object can be iterated over only once, or is not a collection of batches.

    >>> import numpy as np
    >>> as_dataset([np.arange(2), np.arange(1)]).cardinality()
    2
    """
    return source if isinstance(source, Dataset) else Dataset(node_of(source))
