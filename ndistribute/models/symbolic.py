"""Symbolic arrays: pass them to layers and NumPy's functions to make a functional model.

A symbolic array stands for the batches that a model will get. It has a dtype, and a shape in which
None is an unknown length. A call with it is recorded instead of made. Two calls on zeros find the
shapes of the results. They use different lengths for the unknown axes: a length of the result that
differs between them is unknown, too.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ndistribute import tree
from ndistribute.context import get_replica_context, get_strategy
from ndistribute.devices import copy_to
from ndistribute.models.masks import attach_mask, mask_of, with_mask_of
from ndistribute.numpy_functions import ArrayMethods, function_named, written_to

# In the two calls: the length of a batch, and of other axes, which convolutions may divide by 32.
_LENGTHS = ((1, 32), (2, 64))
_NESTS = list, tuple, dict


class SymbolicArray(ArrayMethods, NDArrayOperatorsMixin):
    """A placeholder for an array that a model will compute; `Input` and recorded calls return it.

    Attributes:
        call: the recorded call that computes it.
        shape: the lengths of the axes, with None for unknown ones, such as that of the batch.
        dtype: the dtype of the elements.

    >>> from ndistribute.models.layers import Dense, Input
    >>> x = Input((4,))
    >>> np.concatenate([x, Dense(3)(x)], axis=1) * 2
    <SymbolicArray of shape (None, 7), dtype float32, from 'multiply'>
    """

    __array_priority__ = 3000.0

    def __init__(self, call: Any, shape: tuple[int | None, ...], dtype: np.dtype[Any]) -> None:
        self.call, self.shape, self.dtype = call, shape, dtype
        self.masked = 0  # The number of the first axes that its mask has, if any.

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def name(self) -> str:
        """The name of the layer or function that computes it."""
        return str(self.call.name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._call(ufunc if method == "__call__" else getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (function is np.shape or function is np.ndim) and args[:1] == (self,):
            return self.shape if function is np.shape else self.ndim
        return self._call(function, args, kwargs)

    def __apply_named__(self, name: str, args: Any, kwargs: Any) -> Any:
        return self._call(function_named(name), args, kwargs)

    @staticmethod
    def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if written_to(function, args, kwargs):
            raise TypeError(
                f"{_name_of(function)} would write to an array, but a symbolic array has no "
                "elements yet: compute a new one."
            )
        return record(function, args, kwargs).outputs

    def __getitem__(self, index: Any) -> Any:
        return self._call(operator.getitem, (self, index), {})

    def __eq__(self, other: object) -> bool:
        """Return True for the same object, so that symbolic arrays can be keys; see `np.equal`."""
        return self is other

    __hash__ = object.__hash__

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise self._refusal("x[i] = v", "compute a new one, such as np.where(mask, v, x)")

    def __len__(self) -> int:
        raise self._refusal(
            "len(x)", "read x.shape, or compute in the call of a Layer or in a Lambda"
        )

    def __iter__(self) -> NoReturn:
        raise self._refusal("a loop over x", "index it, as x[:, 0], or use np.split(x, n, axis=1)")

    def __bool__(self) -> bool:
        raise self._refusal("if x", "use np.where(), or decide in the call of a Layer")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._refusal(
            "np.asarray(x) or a number of x",
            "use NumPy's functions on it, or write a Layer or a Lambda that computes with its "
            "values; Model(inputs, x).predict(...) computes them",
        )

    __float__ = __int__ = __complex__ = __index__ = __array__

    def _refusal(self, what: str, instead: str) -> TypeError:
        return TypeError(f"{what}: {self!r} is symbolic and has no values. Instead, {instead}.")

    def __reduce__(self) -> Any:  # A worker makes the calls, and does not need earlier calls.
        return SymbolicArray, (None, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"<SymbolicArray of shape {self.shape}, dtype {self.dtype}, from {self.name!r}>"


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):  # x += y is another array.
    setattr(SymbolicArray, f"__i{_name}__", getattr(NDArrayOperatorsMixin, f"__{_name}__"))
del _name


class RecordedCall:
    """A recorded call of a layer or function, with symbolic arrays in its arguments."""

    def __init__(self, function: Any, args: Sequence[Any] = (), kwargs: Any = None) -> None:
        self.function, self.args, self.kwargs = function, tuple(args), dict(kwargs or {})
        self.inputs = symbolic_leaves((self.args, self.kwargs))
        self.outputs: Any = None
        self.level: int = 1 + max((value.call.level for value in self.inputs), default=-1)
        """The number of calls on the longest way to it."""
        alone = not self.kwargs and self.args == tuple(self.inputs) and len(self.args) == 1
        self.only: SymbolicArray | None = self.inputs[0] if alone else None
        """The one argument, if there are no others."""
        arguments = (*self.args, *self.kwargs.values())
        self._is_flat = not any(isinstance(x, _NESTS) and is_symbolic(x) for x in arguments)

    @property
    def name(self) -> str:
        """The name of the layer or function."""
        return _name_of(self.function)

    def make(self, value_of: Callable[[SymbolicArray], Any]) -> Any:
        """Return the result, with arrays in place of the symbolic arrays."""

        def filled(leaf: Any) -> Any:
            return value_of(leaf) if type(leaf) is SymbolicArray else leaf

        if self._is_flat:
            kwargs = {name: filled(value) for name, value in self.kwargs.items()}
            return self.function(*map(filled, self.args), **kwargs)
        args, kwargs = tree.map_leaves(filled, (self.args, self.kwargs))
        return self.function(*args, **kwargs)


def record(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedCall:
    """Record a call, and return the record, whose outputs are symbolic.

    A layer creates its variables now, under the current strategy.

    Raises:
        ValueError: the number of axes of the result depends on the length of the batch.
    """
    strategy, results = get_strategy(), {}
    # A layer computes as outside of training, because some layers update statistics in training.
    sampled = RecordedCall(function, args, {n: v for n, v in kwargs.items() if n != "training"})

    def compute() -> None:
        for lengths in _LENGTHS:
            results[lengths] = _described(sampled, lengths, strategy)

    if get_replica_context() is None and strategy.devices[0].kind != "tpu":
        strategy.run(compute)
    else:  # A TPU would compile each call.
        compute()
    call = RecordedCall(function, args, kwargs)
    call.outputs = tree.map_leaves(functools.partial(_output, call), *results.values())
    return call


def recordable(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function whose calls with a symbolic array are recorded."""

    @functools.wraps(function)
    def call(x: Any) -> Any:
        return record(call, (x,), {}).outputs if type(x) is SymbolicArray else function(x)

    return call


def is_symbolic(value: Any) -> bool:
    """Return True for a symbolic array, or for a list, tuple or dict with one in it."""
    if isinstance(value, _NESTS):
        return any(map(is_symbolic, value.values() if isinstance(value, dict) else value))
    return type(value) is SymbolicArray


@functools.cache
def is_plain(kind: Any) -> bool:
    """Return True for a type that is not a nest, a symbolic array or a tensor of a graph."""
    return not hasattr(kind, "__call_model__") and not issubclass(kind, (SymbolicArray, *_NESTS))


def symbolic_leaves(nest: Any) -> list[SymbolicArray]:
    """Return the symbolic arrays in a nest."""
    return [leaf for leaf in tree.flatten(nest) if type(leaf) is SymbolicArray]


def _name_of(function: Any) -> str:
    return str(getattr(function, "name", None) or getattr(function, "__name__", repr(function)))


def _described(call: RecordedCall, lengths: tuple[int, int], strategy: Any) -> Any:
    """Return the result of a call on zeros, with arrays of its shapes and dtypes, and no memory."""
    replica = get_replica_context()
    device = strategy.devices[0] if replica is None else replica.device

    def zeros(value: SymbolicArray) -> Any:
        array = copy_to(np.zeros(sample_shape(value, lengths), value.dtype), device)
        if value.masked:
            attach_mask(array, np.ones(array.shape[: value.masked], bool))
        return array

    def described(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        return with_mask_of(np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), leaf)

    _thread.describes = True
    try:
        with np.errstate(all="ignore"):  # Zeros may give 0 / 0.
            return tree.map_leaves(described, call.make(zeros))
    finally:
        _thread.describes = False


_thread = threading.local()


def describes() -> bool:
    """Return True in a call on zeros, which only finds the shapes of its results."""
    return getattr(_thread, "describes", False)


def sample_shape(value: SymbolicArray, lengths: tuple[int, int] = _LENGTHS[0]) -> tuple[int, ...]:
    """Return a shape with known lengths that arrays at this place may have."""
    batch, other = lengths
    known = [other if length is None else length for length in value.shape]
    return tuple([batch, *known[1:]] if value.shape[:1] == (None,) else known)


def _output(call: RecordedCall, short: Any, long: Any) -> Any:
    """Return a symbolic array for a result, from the results for two lengths of a batch."""
    if not hasattr(short, "dtype"):
        if short != long:
            raise ValueError(
                f"{call.name} returns {short!r} for a batch of 1 and {long!r} for one of 2, but "
                "the length of the batch is not known yet: compute with it in the call of a Layer "
                "or in a Lambda."
            )
        return short
    if short.ndim != long.ndim:
        raise ValueError(
            f"{call.name}: its result has {short.ndim} axes for a batch of 1, and {long.ndim} for "
            "one of 2: name the axis, as in np.squeeze(x, axis=1)."
        )
    pairs = zip(short.shape, long.shape, strict=True)
    value = SymbolicArray(call, tuple(a if a == b else None for a, b in pairs), short.dtype)
    mask = mask_of(short)
    value.masked = 0 if mask is None else mask.ndim
    return value
