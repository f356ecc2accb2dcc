"""Functions of NumPy and of this package with TensorFlow's keywords, whose results are tensors.

Lists and numbers become float32 and int32 tensors; tracked arrays and tensors of graphs stay.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph
from ndistribute.autodiff import Tracked
from ndistribute.compat.tensors import (
    Tensor,
    as_tensor,
    convert_to_tensor,
    matched,
    plain,
)
from ndistribute.graph.graph import Symbolic
from ndistribute.tree import map_leaves


def adapted(function: Any, *ignored: str, operands: int = 0, **renamed: str) -> Any:
    """Return a function with TensorFlow's keywords, whose operands and result are tensors.

    If the keyword ``name`` is among the ignored ones, it names the result in a graph.
    """

    @functools.wraps(function, ["__name__"])
    def call(*args: Any, **kwargs: Any) -> Any:
        options = {renamed.get(key, key): kwargs[key] for key in kwargs if key not in ignored}
        if operands and not args:
            args = (options.pop(next(iter(options))),)
        tensors = map(convert_to_tensor, args[:operands])
        result = function(*tensors, *args[operands:], **options)
        several = type(result) in (list, tuple)
        result = type(result)(map(as_tensor, result)) if several else tensor_if_array(result)
        if "name" in ignored and kwargs.get("name") and isinstance(result, Symbolic):
            return graph.identity(result, kwargs["name"])
        return result

    return call


def unary(operation: Any, operands: int = 1, **renamed: str) -> Any:
    """Return an operation on tensors, which may be given a name."""
    return adapted(operation, "name", operands=operands, **renamed)


def subclass(kind: Any, *ignored: str, **attributes: Any) -> Any:
    """Return a subclass with more attributes, whose constructor ignores some keywords."""
    init = {"__init__": adapted(kind.__init__, *ignored)} if ignored else {}
    return type(kind.__name__, (kind,), {**init, **attributes})


def tensor_if_array(value: Any) -> Any:
    """Return arrays, and numbers with a fraction, as tensors; others unchanged."""
    return as_tensor(np.float32(value) if type(value) is float else value)


def axis_of(axis: Any) -> Any:
    """Return an axis, or a tuple of several."""
    several = isinstance(axis, list | range) or (isinstance(axis, np.ndarray) and axis.ndim)
    return tuple(int(number) for number in axis) if several else axis


def reduction(operation: Any) -> Any:
    """Return a reduction that takes axes as a list, and keeps the dtype of integers."""

    def reduce(tensor: Any, axis: Any = None, keepdims: Any = False) -> Any:
        axes, more = axis_of(axis), {}
        whole = tensor.dtype is not None and np.dtype(tensor.dtype).kind in "iu"
        if operation in (np.max, np.min) and isinstance(tensor, np.ndarray) and not tensor.size:
            limit = np.iinfo(tensor.dtype) if whole else None
            least, largest = (limit.min, limit.max) if limit else (-np.inf, np.inf)
            more = {"initial": least if operation is np.max else largest}
        result = operation(tensor, axis=axes, keepdims=keepdims, **more)
        return result.astype(tensor.dtype) if whole and result.dtype != tensor.dtype else result

    return unary(reduce, reduction_indices="axis", keep_dims="keepdims")


def binary(operation: Any) -> Any:
    """Return an operation on two tensors, which may be given by name."""

    def call(*args: Any, **options: Any) -> Any:
        names = [name for name in ("x", "y", "a", "b", "matrix", "rhs") if name in options]
        x, y, *more = [*args, *(options.pop(name) for name in names)]
        return operation(like(x, y), like(y, x), *more, **options)

    return call


def like(value: Any, other: Any) -> Any:
    """Return a tensor; numbers and arrays beside a tensor of a graph get its dtype if they fit."""
    if isinstance(value, Symbolic | Tracked | nd.Variable):
        return convert_to_tensor(value)
    if type(value) is type(other) is Tensor and value.dtype == other.dtype:
        return value
    if not isinstance(other, Symbolic):
        is_tensor = isinstance(other, Tensor | Tracked | nd.Variable)
        return convert_to_tensor(matched(other, value) if is_tensor else value)
    kinds = np.asarray(value).dtype.kind, None if other.dtype is None else other.dtype.kind
    fits = kinds[0] in "fiu" and (kinds[1] == "f" or (kinds[0] != "f" and kinds[1] in ("i", "u")))
    return convert_to_tensor(value, other.dtype if fits else None)


def joining(operation: Any) -> Any:
    """Return a function that joins tensors; before TensorFlow 1.0 the axis came first."""

    def join(values: Any, axis: Any = 0) -> Any:
        values, axis = (axis, values) if isinstance(values, int) else (values, axis)
        return operation([*map(convert_to_tensor, values)], axis)

    return unary(join, 0, concat_dim="axis")


def plainly(function: Any) -> Any:
    """Return a function that gets arrays for tensors, and returns tensors."""

    @functools.wraps(function, ["__name__"])
    def call(*args: Any, **options: Any) -> Any:
        args, options = map_leaves(plain, (args, options))
        return tensor_if_array(function(*args, **options))

    return call


def is_symbolic(*values: Any) -> bool:
    """Return True if a tensor of a graph is among values, or in a list among them."""
    lists = [value if isinstance(value, list | tuple) else [value] for value in values]
    return any(isinstance(value, Symbolic) for several in lists for value in several)


_SETTINGS = "coord device enable enabled global_step run_eagerly run_metadata sess tag"
nothing: Any = adapted(lambda *args: None, *_SETTINGS.split())
