"""Tensors and the operations on them, under TensorFlow's names, made of NumPy's functions.

Tables give them; lists and numbers become float32 and int32 tensors, tracked arrays stay tracked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute.autodiff import Tracked
from ndistribute.context import current_seed
from ndistribute.device import array_namespace, as_array
from ndistribute.models import activations

__all__ = [
    "ARRAYS",
    "DTYPES",
    "MATH",
    "RANDOM",
    "Scalar",
    "Tensor",
    "TensorSpec",
    "Variable",
    "constant",
    "convert_to_tensor",
    "function",
    "on_tensors",
    "plain",
    "tensor_if_array",
]

DTYPES: dict[str, Any] = {
    name: np.dtype(name)
    for name in (
        "bool complex64 complex128 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 "
        "uint32 uint64"
    ).split()
}
_float32: Any = DTYPES["float32"]


class Tensor(np.ndarray[Any, Any]):
    """A NumPy array with the method `numpy`."""

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the array."""
        return np.asarray(self)


class Scalar(float):
    """A number with the method `numpy`."""

    def numpy(self) -> Any:
        """Return the number."""
        return np.float64(self)


def convert_to_tensor(value: Any, dtype: Any = None, name: Any = None) -> Any:
    """Return a tensor; floats and integers of Python become float32 and int32."""
    if isinstance(value, Tracked | nd.Variable):
        value = value if isinstance(value, Tracked) else value.tracked_value()
        return value if dtype is None else value.astype(dtype)
    known = hasattr(value, "dtype")
    array = as_array(value)
    if dtype is None and not known:
        dtype = {"f": _float32, "i": np.dtype(np.int32)}.get(array.dtype.kind)
    array = array if dtype is None else array.astype(dtype)
    return array.view(Tensor) if type(array) is np.ndarray else array


def plain(tensor: Any) -> Any:
    """Return the array of a tensor."""
    return np.asarray(tensor) if isinstance(tensor, Tensor) else tensor


def tensor_if_array(value: Any) -> Any:
    """Return a tensor for an array or a number of NumPy; other values are returned unchanged."""
    return convert_to_tensor(value) if isinstance(value, np.generic | np.ndarray) else value


def constant(value: Any, dtype: Any = None, shape: Any = None, name: Any = None) -> Any:
    """Return a tensor, of one value if a shape is given for a number."""
    array = convert_to_tensor(value, dtype)
    if shape is None:
        return array
    return array.reshape(shape) if array.size > 1 else np.full(shape, array).view(Tensor)


def Variable(  # noqa: N802
    initial_value: Any = None,
    trainable: Any = True,
    validate_shape: Any = True,
    name: str | None = None,
    dtype: Any = None,
    synchronization: Any = nd.VariableSynchronization.AUTO,
    aggregation: Any = nd.VariableAggregation.NONE,
) -> nd.Variable:
    """Return a variable; see `nd.Variable`."""

    def made() -> Any:
        value = initial_value() if callable(initial_value) else initial_value
        return plain(convert_to_tensor(value, dtype))

    return nd.Variable(made, trainable is not False, name, dtype, synchronization, aggregation)


def function(func: Any = None, **options: Any) -> Any:
    """Return a function unchanged; also as a decorator with options, which are ignored."""
    return func if func is not None else lambda wrapped: wrapped


class TensorSpec:
    """The shape and the dtype of a tensor."""

    def __init__(self, shape: Any, dtype: Any = _float32, name: Any = None) -> None:
        self.shape, self.dtype, self.name = shape, np.dtype(dtype), name


def on_tensors(
    operation: Callable[..., Any], operands: int = 1, **keywords: str
) -> Callable[..., Any]:
    """Return an operation whose first arguments are made tensors.

    Args:
        operation: the operation; it does not get the argument `name`.
        operands: the number of tensors. The first may be a keyword, if it is given first.
        keywords: names of other arguments in TensorFlow, each with that of the operation.
    """

    def call(*args: Any, name: Any = None, **kwargs: Any) -> Any:
        if not args:
            args = (kwargs.pop(next(iter(kwargs))),)
        tensors = map(convert_to_tensor, args[:operands])
        named = {keywords.get(key, key): value for key, value in kwargs.items()}
        return tensor_if_array(operation(*tensors, *args[operands:], **named))

    return functools.update_wrapper(call, operation, ("__name__", "__doc__"))


def _reduction(operation: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(tensor: Any, axis: Any = None, keepdims: Any = False) -> Any:
        axes = tuple(axis) if isinstance(axis, list) else axis
        found = operation(tensor, axis=axes, keepdims=keepdims)
        # NumPy adds up and multiplies integers in 64 bits.
        return found.astype(tensor.dtype) if found.dtype.kind in "iu" else found

    return on_tensors(reduce)


def _index(operation: Callable[..., Any]) -> Callable[..., Any]:
    def index(tensor: Any, axis: Any = 0, output_type: Any = np.int64) -> Any:
        return operation(tensor, axis).astype(output_type)

    return on_tensors(index)


def _joining(operation: Callable[..., Any]) -> Callable[..., Any]:
    def join(values: Any, axis: int = 0, name: Any = None) -> Any:
        return tensor_if_array(operation(list(map(convert_to_tensor, values)), axis))

    return join


def _filled(value: int) -> Callable[..., Any]:
    return lambda shape, dtype=_float32, name=None: constant(value, dtype, _shape_of(shape))


def _shape_of(shape: Any) -> tuple[int, ...]:
    return tuple(map(int, shape)) if np.ndim(shape) else (int(shape),)


def _range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None) -> Any:
    numbers = (0, start, delta) if limit is None else (start, limit, delta)
    whole = all(isinstance(number, int | np.integer) for number in numbers)
    return convert_to_tensor(np.arange(*numbers), dtype or (np.int32 if whole else _float32))


def _split(value: Any, num_or_size_splits: Any, axis: int = 0) -> Any:
    sizes = num_or_size_splits
    return np.split(value, np.cumsum(sizes)[:-1] if np.ndim(sizes) else sizes, axis)


def _one_hot(indices: Any, depth: int, dtype: Any = _float32) -> Any:
    return (indices[..., None] == array_namespace(indices).arange(depth)).astype(dtype)


def _random(draw: str) -> Callable[..., Any]:
    def random(
        shape: Any, low: Any = 0.0, high: Any = 1.0, dtype: Any = _float32, **named: Any
    ) -> Any:
        low, high = named.get("mean", named.get("minval", low)), named.get("stddev", high)
        replica = nd.get_replica_context()
        own = np.random.default_rng(current_seed().spawn(1)[0]) if replica is None else replica.rng
        drawn = getattr(own, draw)(low, named.get("maxval", high), _shape_of(shape))
        return convert_to_tensor(drawn, dtype)

    return random


_UNARY = (
    "abs ceil cos cosh exp expm1 floor log log1p logical_not negative round sign sin sinh sqrt "
    "square tan"
)
_BINARY = (
    "add divide equal greater greater_equal less less_equal logical_and logical_or matmul maximum "
    "minimum multiply not_equal subtract"
)
MATH: dict[str, Any] = {
    **{name: on_tensors(getattr(np, name)) for name in _UNARY.split()},
    **{name: on_tensors(getattr(np, name), 2) for name in _BINARY.split()},
    **{
        f"reduce_{name}": _reduction(getattr(np, name))
        for name in "all any max mean min prod std sum".split()
    },
    "add_n": lambda inputs, name=None: functools.reduce(np.add, inputs),
    "argmax": _index(np.argmax),
    "argmin": _index(np.argmin),
    "is_finite": on_tensors(np.isfinite),
    "is_nan": on_tensors(np.isnan),
    "pow": on_tensors(np.power, 2),
    "reduce_logsumexp": on_tensors(nd.logsumexp),
    "reduce_variance": _reduction(np.var),
    "sigmoid": on_tensors(activations.sigmoid),
    "softplus": on_tensors(activations.softplus),
    "tanh": on_tensors(activations.tanh),
}
ARRAYS: dict[str, Any] = {
    "cast": on_tensors(lambda x, dtype: x.astype(np.dtype(dtype))),
    "clip_by_value": on_tensors(np.clip, clip_value_min="a_min", clip_value_max="a_max"),
    "concat": _joining(np.concatenate),
    "expand_dims": on_tensors(np.expand_dims),
    "eye": lambda num_rows, dtype=_float32: convert_to_tensor(np.eye(num_rows), dtype),
    "fill": lambda dims, value: constant(value, shape=_shape_of(dims)),
    "gather": on_tensors(lambda params, indices, axis=0: np.take(params, as_array(indices), axis)),
    "identity": convert_to_tensor,
    "one_hot": on_tensors(_one_hot),
    "ones": _filled(1),
    "ones_like": on_tensors(np.ones_like),
    "print": lambda *values: sys.stdout.write(" ".join(map(str, values)) + "\n"),
    "range": _range,
    "reshape": on_tensors(lambda tensor, shape: np.reshape(tensor, _shape_of(shape))),
    "shape": lambda tensor, out_type=np.int32: constant(np.array(np.shape(tensor), out_type)),
    "size": lambda tensor, out_type=np.int32: constant(np.size(tensor), out_type),
    "split": on_tensors(_split),
    "squeeze": on_tensors(np.squeeze),
    "stack": _joining(np.stack),
    "tile": on_tensors(np.tile, multiples="reps"),
    "transpose": on_tensors(np.transpose, perm="axes"),
    "where": on_tensors(np.where, 3),
    "zeros": _filled(0),
    "zeros_like": on_tensors(np.zeros_like),
}
RANDOM = {"normal": _random("normal"), "set_seed": nd.set_seed, "uniform": _random("uniform")}
