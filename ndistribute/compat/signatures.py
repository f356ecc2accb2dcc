"""Functions of NumPy and this package with TensorFlow's keywords; their results are tensors.

Lists and numbers become float32 and int32 tensors; tracked arrays and graph tensors do not change.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph
from ndistribute.autodiff import Tracked
from ndistribute.compat import op_errors
from ndistribute.compat.tensors import Tensor, as_tensor, convert_to_tensor, matched, plain
from ndistribute.errors import InvalidArgumentError, NotFoundError, OperationError
from ndistribute.graph.graph import Symbolic
from ndistribute.models import nn
from ndistribute.tree import map_leaves


def adapted(function: Any, *ignored: str, operands: int = 0, **renamed: str) -> Any:
    """Return a function with TensorFlow's keywords; its operands and result are tensors.

    If the keyword ``name`` is among the ignored ones, it names the result in a graph.
    """
    try:
        later = [*inspect.signature(function).parameters][1:]
    except ValueError:  # This is so for a NumPy function whose only argument is the operand.
        later = []

    @functools.wraps(function, ["__name__"])
    def call(*args: Any, **kwargs: Any) -> Any:
        options = {renamed.get(key, key): kwargs[key] for key in kwargs if key not in ignored}
        first = [key for key in options if key not in later] if operands and not args else []
        if first:  # The operand, under any name that TensorFlow gives it.
            args = (options.pop(first[0]),)
        tensors = map(convert_to_tensor, args[:operands])
        result = function(*tensors, *args[operands:], **options)
        if type(result) is Tensor:
            return result
        make = getattr(result, "_make", type(result))
        several = make in (list, tuple) or make is not type(result)
        result = make(map(as_tensor, result)) if several else tensor_if_array(result)
        if "name" in ignored and kwargs.get("name") and isinstance(result, Symbolic):
            return graph.identity(result, kwargs["name"])
        return result

    return call


def unary(operation: Any, operands: int = 1, **renamed: str) -> Any:
    """Return an operation on a tensor that accepts a name."""
    return adapted(operation, "name", operands=operands, **renamed)


def subclass(kind: Any, *ignored: str, **attributes: Any) -> Any:
    """Return a subclass with more attributes, whose constructor ignores some keywords."""
    init = {"__init__": adapted(kind.__init__, *ignored)} if ignored else {}
    return type(kind.__name__, (kind,), {**init, **attributes})


def tensor_if_array(value: Any) -> Any:
    """Return arrays and floats as tensors; other values unchanged."""
    return as_tensor(np.float32(value) if type(value) is float else value)


def axis_of(axis: Any) -> Any:
    """Return an axis, or a tuple of several axes."""
    several = isinstance(axis, (list, range)) or (isinstance(axis, np.ndarray) and axis.ndim)
    return tuple(int(number) for number in axis) if several else axis


def counted(count: Any) -> Any:
    """Return a function of the shape of a tensor; its result has a chosen dtype."""

    def call(x: Any, out_type: Any = np.int32) -> Any:
        result = count(x)
        if isinstance(result, tuple) and None in result:
            raise TypeError(
                f"tf.shape cannot return the shape {result} of a symbolic tensor, in which lengths "
                "are unknown: use x.shape, -1 in tf.reshape, or tf.shape in the call of a layer."
            )
        return result if isinstance(x, Symbolic) else np.array(result, out_type)

    return unary(call)


def index(find: Any) -> Any:
    """Return a function that finds the index of an extreme, ignoring NaN."""

    def call(x: Any, axis: Any = 0, output_type: Any = np.int64) -> Any:
        if isinstance(x, Tensor) and x.dtype.kind == "f" and np.isnan(plain(x)).any():
            x = np.where(np.isnan(x), x.dtype.type(-np.inf if find is np.argmax else np.inf), x)
        return find(x, 0 if axis is None else axis).astype(output_type)

    return unary(call, dimension="axis")


def floating(operation: Any) -> Any:
    """Return an operation on a tensor that refuses integers and booleans, as TensorFlow does."""

    def call(x: Any, *args: Any, **options: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype.kind in "biu":
            name = getattr(operation, "__name__", "this function")
            raise InvalidArgumentError(
                f"{name.strip('_')} needs a tensor of floats, got {x.dtype}: tf.cast it."
            )
        return operation(x, *args, **options)

    return call


def reduction(operation: Any) -> Any:
    """Return a reduction that accepts axes as a list, and keeps the dtype of integers."""
    limit, refusing = _OF_NOTHING.get(operation, ""), floating(operation)

    def reduce(tensor: Any, axis: Any = None, keepdims: Any = False) -> Any:
        axes, kind = axis_of(axis), "" if tensor.dtype is None else np.dtype(tensor.dtype).kind
        if limit and isinstance(tensor, Tensor) and not tensor.size:
            shape = np.sum(tensor, axes, keepdims=keepdims).shape
            bounds = np.iinfo(tensor.dtype) if kind in ("i", "u") else _INFINITE
            return np.full(shape, getattr(bounds, limit), tensor.dtype)
        fits = operation in _OF_BOOLEANS or (operation in _OF_INTEGERS and kind != "b")
        result = (operation if fits else refusing)(tensor, axis=axes, keepdims=keepdims)
        widened = kind in ("i", "u") and result.dtype != tensor.dtype
        return result.astype(tensor.dtype) if widened else result

    return unary(reduce, reduction_indices="axis", keep_dims="keepdims")


_OF_BOOLEANS, _OF_INTEGERS = (np.all, np.any), (np.max, np.mean, np.min, np.prod, np.sum)
_OF_NOTHING = {np.max: "min", nn.logsumexp: "min", np.min: "max"}
"""Which limit of the dtype a reduction of no elements returns."""
_INFINITE = SimpleNamespace(min=-np.inf, max=np.inf)


_NAMES = "scalar x y a b matrix rhs".split()


def binary(operation: Any) -> Any:
    """Return an operation on two tensors, which may be passed by name."""

    def call(*args: Any, **options: Any) -> Any:
        order = _NAMES[::-1] if operation is np.arctan2 else _NAMES
        names = [name for name in order if name in options]
        x, y, *more = [*args, *(options.pop(name) for name in names)]
        return operation(like(x, y), like(y, x), *more, **options)

    return call


def like(value: Any, other: Any) -> Any:
    """Return a tensor; numbers and arrays next to a graph tensor get its dtype if they fit."""
    if type(value) is type(other) is Tensor and value.dtype == other.dtype:
        return value
    if isinstance(value, (Symbolic, Tracked, nd.Variable)):
        return convert_to_tensor(value)
    if not isinstance(other, Symbolic):
        if not isinstance(other, (Tensor, Tracked, nd.Variable)):
            return convert_to_tensor(value)
        value = matched(other, value)
        return convert_to_tensor(value, None if hasattr(value, "dtype") else other.dtype)
    kinds = np.asarray(value).dtype.kind, None if other.dtype is None else other.dtype.kind
    fits = kinds[0] in "fiu" and (kinds[1] == "f" or (kinds[0] != "f" and kinds[1] in ("i", "u")))
    return convert_to_tensor(value, other.dtype if fits else None)


def joining(operation: Any) -> Any:
    """Return a function that joins tensors; before TensorFlow 1.0 the axis came first."""

    def join(values: Any, axis: Any = 0) -> Any:
        values, axis = (axis, values) if isinstance(values, int) else (values, axis)
        typed = [value for value in values if hasattr(value, "dtype")]
        typed = typed or sorted(map(convert_to_tensor, values), key=lambda x: x.dtype.kind != "f")
        return operation([like(value, typed[0]) for value in values], axis)

    return unary(join, 0, concat_dim="axis")


def plainly(function: Any) -> Any:
    """Return a function that gets tensors as arrays, and returns tensors."""

    @functools.wraps(function, ["__name__"])
    def call(*args: Any, **options: Any) -> Any:
        args = tuple(convert_to_tensor(x) if isinstance(x, list) else x for x in args)
        args, options = map_leaves(plain, (args, options))
        return tensor_if_array(function(*args, **options))

    return call


def is_symbolic(*values: Any) -> bool:
    """Return True if a tensor of a graph is among values, or in a list among them."""
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    return any(isinstance(value, Symbolic) for several in lists for value in several)


_SETTINGS = "coord device enable enabled global_step run_eagerly run_metadata sess tag"
nothing: Any = adapted(lambda *args: None, *_SETTINGS.split())


_OF_FILES: tuple[tuple[type[OSError], type[OperationError]], ...] = (
    (FileNotFoundError, NotFoundError),
    (FileExistsError, op_errors.AlreadyExistsError),
    (PermissionError, op_errors.PermissionDeniedError),
)


def raising(function: Any) -> Any:
    """Return a function that raises TensorFlow's errors for failures of files."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except OSError as error:
            kind = next((kind for known, kind in _OF_FILES if isinstance(error, known)), None)
            if kind is None or isinstance(error, OperationError):
                raise
            raise kind(None, None, str(error)) from error

    return call
