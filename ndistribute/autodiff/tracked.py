"""Arrays whose computation is recorded.

A `Tracked` stands in for a raw array inside a tape, and offers what ``numpy.ndarray`` offers, so
that model code need not know which it has. NumPy hands every function that meets one over to it,
and the dispatch records what was done. It can not be written, and while its tape records it turns
into no plain array: the gradient would be lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.diagnostics import refuse_conversion
from ndistribute.autodiff.dispatch import (
    Recorded,
    apply,
    binary,
    read_only,
    refuse_detached,
    ufunc_method,
    unary,
)
from ndistribute.autodiff.rules.elementwise import cast
from ndistribute.autodiff.rules.indexing import index_rule
from ndistribute.context import current_frame
from ndistribute.device import as_array, is_gpu_array, to_host

__all__ = ["Tracked", "refuse_tracked", "stop_gradient", "untrack"]


class Tracked(Recorded):
    """Hold a raw array and its place in the graph of a gradient tape.

    Made by `GradientTape.watch`, by reading a variable inside a tape, and by every operation on
    another; `untrack` gives the raw array back.

    >>> from ndistribute.autodiff import GradientTape
    >>> with GradientTape() as tape:
    ...     x = tape.watch(np.array([1.0, 2.0]))
    ...     y = np.sum(x * x)
    >>> tape.gradient(y, x)
    array([2., 4.])
    """

    __slots__ = ()
    __array_priority__ = 1000.0

    shape = property(attrgetter("value.shape"), doc="Return the lengths of the axes.")
    dtype = property(attrgetter("value.dtype"), doc="Return the dtype of the elements.")
    ndim = property(attrgetter("value.ndim"), doc="Return the number of axes.")
    size = property(attrgetter("value.size"), doc="Return the number of elements.")
    nbytes = property(attrgetter("value.nbytes"), doc="Return the memory of all elements.")
    itemsize = property(attrgetter("value.itemsize"), doc="Return the memory of one element.")
    device = property(attrgetter("value.device"), doc="Return where the raw array lives.")
    T = property(np.transpose, doc="Return the array with its axes reversed.")
    mT = property(lambda self: np.swapaxes(self, -1, -2), doc="Return the matrices transposed.")
    real = property(np.real, doc="Return the real part.")
    imag = property(np.imag, doc="Return the imaginary part.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            if len(inputs) == 1:
                return unary(ufunc)(inputs[0])
            if len(inputs) == 2:
                return binary(ufunc)(*inputs)
        return ufunc_method(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (function is np.shape or function is np.ndim) and args and args[0] is self:
            return getattr(self.value, function.__name__)
        return apply(function, args, kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the raw value where no tape records; read-only unless it is a copy."""
        value = self._plain("np.asarray")
        if is_gpu_array(value):
            raise TypeError("a tracked GPU array does not turn into a NumPy array: use .numpy().")
        if copy or (dtype is not None and dtype != value.dtype):
            return np.array(value, dtype=dtype)
        return read_only(value)

    def item(self, *args: Any) -> Any:
        """Return one element as a Python number, where no tape records."""
        return self._plain(".item()").item(*args)

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers, where no tape records."""
        return self._plain(".tolist()").tolist()

    def numpy(self) -> Any:
        """Return a copy of the raw array, without a gradient."""
        return np.array(to_host(self.value))

    def raw_array(self) -> Any:
        """Return the raw array, as `ndistribute.device.as_array` asks for it."""
        return as_array(self.value)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        """Return the array cast to a dtype; to integers or booleans, without a gradient."""
        return apply(cast, (self, dtype), kwargs)

    def clip(self, min: Any = None, max: Any = None, **kwargs: Any) -> Any:  # noqa: A002
        """Return the array with its elements held between two bounds, None for no bound."""
        return apply(np.clip, (self, min, max), kwargs)

    def reshape(self, *shape: Any, order: str = "C", **kwargs: Any) -> Any:
        """Return the array with another shape, given as one tuple or as several integers."""
        return apply(np.reshape, (self, shape[0] if len(shape) == 1 else shape, order), kwargs)

    def compress(self, condition: Any, axis: Any = None) -> Any:
        """Return the elements, or slices along an axis, where a condition holds."""
        return np.compress(condition, self, axis)

    def transpose(self, *axes: Any) -> Any:
        """Return the array with its axes reordered, given as one tuple or as several integers."""
        return apply(np.transpose, (self, axes[0] if len(axes) == 1 else axes or None), {})

    def flatten(self, order: str = "C") -> Any:
        """Return the elements along one axis."""
        return apply(np.ravel, (self, order), {})

    def __getitem__(self, index: Any) -> Any:
        value = self.value
        if type(index) is tuple and any(isinstance(one, Tracked) for one in index):
            index = tuple(map(untrack, index))
        result = value[index]
        graph: Any = current_frame().recorder
        if graph is not self.graph:
            refuse_detached("x[...]", self)
            return result if getattr(result, "base", None) is None else read_only(result)
        return graph.record(result, (self.index,), (index_rule(value, index),))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            "x[i] = v on a tracked array: the tape could not take it back. Make a new array, with "
            "np.where(mask, v, x), np.concatenate or np.stack."
        )

    def __pow__(self, other: Any) -> Any:
        if type(other) in (int, float) and other in _QUICK_POWERS:
            return unary(_QUICK_POWERS[other])(self)
        return binary(np.power)(self, other)

    def __neg__(self) -> Any:
        return unary(np.negative)(self)

    def __pos__(self) -> Any:
        return unary(np.positive)(self)

    def __abs__(self) -> Any:
        return unary(np.absolute)(self)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        if not self.value.ndim:
            raise TypeError("iteration over a 0-d tracked array.")
        return (self[i] for i in range(len(self.value)))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __contains__(self, item: Any) -> bool:
        return item in self.value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self._plain("float()"))

    def __int__(self) -> int:
        return int(self._plain("int()"))

    def __complex__(self) -> complex:
        return complex(self._plain("complex()"))

    def __format__(self, spec: str) -> str:
        return format(self.value[()] if self.value.ndim == 0 else self.value, spec)

    def __copy__(self) -> Tracked:
        return self  # Which can not be written.

    def __deepcopy__(self, memo: Any) -> Any:
        return np.copy(self)

    def __reduce__(self) -> Any:
        return np.copy, (self._plain("pickle"),)

    def __repr__(self) -> str:
        return f"Tracked({self.value!r})"

    def _plain(self, conversion: str) -> Any:
        """Return the raw value, having refused where a tape would go on without its gradient."""
        if current_frame().recorder is self.graph:
            refuse_conversion(conversion)
        return self.value


def untrack(value: Any) -> Any:
    """Replace the tracked arrays of a nest by their raw arrays.

    Args:
        value: any nest; leaves that are not tracked stay as they are.

    Returns:
        The same structure.

    >>> untrack({"loss": 1.0})
    {'loss': 1.0}
    """
    if isinstance(value, Tracked):
        return value.value
    if not isinstance(value, list | tuple | dict) and not hasattr(value, "__dataclass_fields__"):
        return value
    leaves = tree.flatten(value)
    if not any(isinstance(leaf, Tracked) for leaf in leaves):
        return value
    return tree.unflatten(value, map(untrack, leaves))


def refuse_tracked(value: Any, call: str) -> None:
    """Raise `TypeError` if a value is tracked by a tape that records; `call` takes it as plain."""
    if isinstance(value, Tracked):
        value._plain(call)


def stop_gradient(value: Any) -> Any:
    """Return values as constants, through which no gradient flows.

    Args:
        value: a nest of tracked arrays, variables and plain values.

    Returns:
        The same structure with plain arrays in place of tracked ones and of variables. They are not
        copied: on the host they are read-only.

    >>> from ndistribute.autodiff import GradientTape
    >>> with GradientTape() as tape:
    ...     x = tape.watch(3.0)
    ...     y = x * stop_gradient(x)
    >>> tape.gradient(y, x)
    array(3.)
    """
    return tree.map_leaves(_constant, value)


def _constant(leaf: Any) -> Any:
    if getattr(leaf, "is_distributed_variable", False):
        leaf = leaf.read_value()
    return read_only(leaf.value) if isinstance(leaf, Tracked) else leaf


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def method(self: Tracked, *args: Any, **kwargs: Any) -> Any:
        return apply(function, (self, *args), kwargs)

    method.__name__ = name
    method.__doc__ = f"Return ``np.{name}(self, ...)``."
    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(other, self)


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.value, untrack(other))


# The same as NumPy's own ** takes for a Python number.
_QUICK_POWERS = {-1: np.reciprocal, 0.5: np.sqrt, 1: np.positive, 2: np.square}

# There are no in-place operators: `x += y` makes a new array.
_ARITHMETIC: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "matmul": np.matmul,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "divmod": np.divmod,
}
# The detour through NumPy's protocol would cost 0.6 us more.
for _name, _ufunc in _ARITHMETIC.items():
    setattr(Tracked, f"__{_name}__", binary(_ufunc))
for _name, _ufunc in (_ARITHMETIC | {"pow": np.power}).items():
    setattr(Tracked, f"__r{_name}__", _reflected(binary(_ufunc)))
for _name in (
    "all any argmax argmin argpartition argsort conj conjugate copy cumprod cumsum diagonal dot "
    "max mean min nonzero prod ravel repeat round searchsorted squeeze std sum swapaxes take trace "
    "var"
).split():
    setattr(Tracked, _name, _method(_name))
for _name in "lt le eq ne gt ge".split():
    setattr(Tracked, f"__{_name}__", _comparison(getattr(operator, _name)))
del _name, _ufunc
