"""The dtypes and shapes of tensors that are known before a run.

The function of an operation is called twice, on zeros with the shapes of its inputs and on ones.
The two calls use different lengths where a length is unknown. What both results share is known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.graph.definition import OperationDef, arguments, filler
from ndistribute.graph.ops import op_named
from ndistribute.numpy_functions import Function, Results

_UNKNOWN_LENGTHS = (1, 12), (4, 12)
"""Of two calls, for axes whose length is not known; not all functions take one of length 1."""
_SMALL = 1024  # The most elements of values that are kept, such as computed shapes.
_MOST = 1 << 25  # Elements of inputs on which functions are called.


def narrowed(value: Any) -> Any:
    """Return Python numbers as float32, or int32 if they fit; others keep their dtype."""
    if hasattr(value, "dtype"):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype.kind != "i":
        return array
    small = array.astype(np.int32)
    return small if np.array_equal(small, array) else array


class Dimension(int):
    """The length of an axis, which TensorFlow 1 calls its value."""

    value = property(int)


class Shape(tuple[Any, ...]):
    """A shape with the methods of `tf.TensorShape`.

    >>> shape = Shape([None, 3])
    >>> shape.as_list(), shape.ndims, shape[1].value, shape[1:].num_elements()
    ([None, 3], 2, 3, 3)
    """

    __slots__ = ()

    def __new__(cls, lengths: Iterable[int | None]) -> Shape:
        return super().__new__(cls, [None if n is None else Dimension(n) for n in lengths])

    def __getitem__(self, index: Any) -> Any:
        """Return the length of an axis, or the shape of several."""
        lengths = super().__getitem__(index)
        return Shape(lengths) if isinstance(index, slice) else lengths

    @property
    def ndims(self) -> int:
        """The number of axes."""
        return len(self)

    rank = ndims

    def as_list(self) -> list[int | None]:
        """Return the lengths."""
        return [None if n is None else int(n) for n in self]

    def merged(self, other: Shape | None) -> Shape:
        """Return the lengths that either shape knows; where both know one, they must agree."""
        if other is None:
            return self
        if not self.is_compatible_with(other):
            raise ValueError(f"the shape is {other}, expected {self}.")
        return Shape(b if a is None else a for a, b in zip(self, other, strict=True))

    merge_with = assert_is_compatible_with = merged

    def is_compatible_with(self, other: Any) -> bool:
        """Return whether all lengths that both shapes know are equal."""
        pairs = list(zip(self, other, strict=False))
        return len(self) == len(other) and all(None in two or two[0] == two[1] for two in pairs)

    def concatenate(self, other: Any) -> Shape:
        """Return the lengths of both."""
        return Shape([*self, *other])

    def is_fully_defined(self) -> bool:
        """Return whether all lengths are known."""
        return None not in self

    def num_elements(self) -> int | None:
        """Return the number of elements; None if it is unknown."""
        return math.prod(self) if self.is_fully_defined() else None


class Known(NamedTuple):
    """The facts of a tensor that are known before a run; None stands for unknown facts."""

    dtype: np.dtype[Any] | None = None
    shape: Shape | None = None
    values: tuple[Any, Any] | None = None
    """Its value for each of the two unknown lengths, if nothing else decides it."""

    @staticmethod
    def value(array: np.ndarray[Any, Any]) -> Known:
        """Return what is known of a constant."""
        values = (array, array) if array.size <= _SMALL else None
        return Known(array.dtype, Shape(array.shape), values)

    def samples(self, unknown: tuple[int, int]) -> tuple[Any, Any]:
        """Return two arrays with this dtype and shape, and these lengths for unknown ones."""
        if self.values is not None:
            return self.values
        zeros, ones = (
            np.broadcast_to(fill((), self.dtype), [n or length for n in self.shape or ()])
            for fill, length in zip((np.zeros, np.ones), unknown, strict=True)
        )
        return zeros, ones


def known_of(tensor: Any) -> Known:
    """Return what is known of a tensor; record it for the tensors from which it is computed."""
    if type(tensor.known) is Known:
        return tensor.known
    stack = [tensor]
    while stack:
        last = stack[-1]
        if isinstance(last.known, Known):
            stack.pop()
            continue
        sources = last.op.inputs if last.known is None else last.known
        missing = [source for source in sources if not isinstance(source.known, Known)]
        if missing:
            stack += missing
        elif last.known is not None:
            last.known = shared_by([source.known for source in sources])
        else:
            results = _results(last.op.definition, [source.known for source in sources])
            for output, known in zip(last.op.outputs, results, strict=True):
                output.known = known if output.known is None else output.known
    return tensor.known  # type: ignore[no-any-return]


def shared_by(several: Sequence[Known]) -> Known:
    """Return what is the same for several tensors."""
    first, *others = several
    dtype = first.dtype if all(known.dtype == first.dtype for known in others) else None
    if any(known.shape is None or len(known.shape) != len(first.shape or ()) for known in several):
        return Known(dtype)
    lengths = zip(*(known.shape or () for known in several), strict=True)
    shape = Shape(each[0] if len(set(each)) == 1 else None for each in lengths)
    return Known(dtype, shape, first.values if not others else None)


def _results(definition: OperationDef, inputs: Sequence[Known]) -> list[Known]:
    """Return what is known of the results of an operation."""
    op, unknown = op_named(definition.kind), [Known()] * definition.outputs
    if op.shape is not None:
        return op.shape(definition, inputs)
    if op.function is None or not inputs or op.results is Results.OF_VALUES:
        return unknown
    unknown = [_reshaped(definition, inputs[0])] if op.function is np.reshape else unknown
    if any(known.dtype is None or known.shape is None for known in inputs):
        return unknown
    is_value = op.results is Results.OF_SHAPES or all(known.values is not None for known in inputs)
    blind = [k for k, known in enumerate(inputs) if known.values is None]
    for lengths in _UNKNOWN_LENGTHS:
        zeros, ones = zip(*(known.samples(lengths) for known in inputs), strict=True)
        try:
            size = sum(sample.size for sample in ones)
            call = _caller(definition, op.function, op.results, size, blind)
            with np.errstate(all="ignore"):
                calls = call(zeros, slice(0, 0)), call(ones, slice(None))
        except Exception:  # It does not take such values.
            continue
        results = zip(*calls, strict=True) if definition.outputs > 1 else [calls]
        return [_common(*pair, is_value) for pair in results]
    return unknown


def _reshaped(definition: OperationDef, tensor: Known) -> Known:
    """Return what the new shape alone tells of a reshaped tensor."""
    args, kwargs = arguments(definition.call)
    shape: Any = args[1] if len(args) > 1 else kwargs.get("shape")
    if type(shape) in (list, tuple) and all(type(n) is int for n in shape):
        return Known(tensor.dtype, Shape(None if n == -1 else n for n in shape))
    return Known()


def _caller(
    definition: OperationDef, function: Function, results: Results, size: int, blind: Sequence[int]
) -> Callable[[Sequence[Any], slice], Any]:
    """Return a function that computes an operation's results, or others of the same shapes.

    It takes the inputs, and what to use for slices whose bounds only a run can tell.

    Args:
        definition: the operation.
        function: its function.
        results: how the function's results depend on its arguments.
        size: the number of elements of the inputs.
        blind: the inputs whose values only a run can tell.

    Raises:
        ValueError: its results are too expensive.
    """
    fill = filler(definition.call, len(definition.inputs))

    def call(arrays: Sequence[Any], cut: slice) -> Any:
        args, kwargs = fill(arrays)
        if function is operator.getitem:
            args = [args[0], _with_cuts(args[1], [arrays[k] for k in blind], cut)]
        return function(*args, **kwargs)

    def call_one(arrays: Sequence[Any], cut: slice) -> Any:
        element = call([array[(slice(1),) * array.ndim] for array in arrays], cut)
        return np.broadcast_to(element, np.broadcast_shapes(*(array.shape for array in arrays)))

    def call_image(arrays: Sequence[Any], cut: slice) -> Any:
        images, *others = arrays
        element = call([images[:1], *others], cut)
        return np.broadcast_to(element, (len(images), *element.shape[1:]))

    is_ufunc = isinstance(function, np.ufunc) and function.signature is None
    if size > _SMALL and (is_ufunc or results is Results.ELEMENTWISE):
        return call_one
    if size > _SMALL and results is Results.BY_IMAGE:
        return call_image
    if size > _MOST and function is not operator.getitem:  # Indexing copies nothing.
        raise ValueError
    return call


def _with_cuts(index: Any, blind: Sequence[Any], cut: slice) -> Any:
    """Return an index with another slice for those with a bound among some arrays."""
    if isinstance(index, tuple | list):
        return type(index)(_with_cuts(part, blind, cut) for part in index)
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        if any(bound is array for bound in bounds for array in blind):
            return cut
    return index


def _common(first: Any, second: Any, is_value: bool) -> Known:
    """Return what is known of a result that is one of two arrays."""
    try:
        arrays = np.asarray(first), np.asarray(second)
    except ValueError:  # Lists of arrays of different shapes.
        return Known()
    shared = shared_by([Known(array.dtype, Shape(array.shape)) for array in arrays])
    if shared.dtype is None or shared.dtype == object:  # An object, such as rows, is not an array.
        return Known()
    return shared._replace(values=arrays if is_value and arrays[1].size <= _SMALL else None)
