"""Arrays whose computation a gradient tape records.

A `Tracked` replaces a raw array inside a tape, and has the methods of ``numpy.ndarray``, so that
model code works with both. NumPy calls its ``__array_function__`` and ``__array_ufunc__``, which
record the operation. A tracked array is read-only. While its tape records, it cannot be converted
to a plain array, because the gradient would be lost.
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
from ndistribute.autodiff.rules.shape import index_rule
from ndistribute.context import current_frame
from ndistribute.device import as_array, is_gpu_array, to_host


class Tracked(Recorded):
    """An array whose operations a gradient tape records.

    `GradientTape.watch`, reading a variable inside a tape, and operations on tracked arrays return
    it; `untrack` returns its raw array.

    >>> from ndistribute.autodiff import GradientTape
    >>> with GradientTape() as tape:
    ...     x = tape.watch(np.array([1.0, 2.0]))
    ...     y = np.sum(x * x)
    >>> tape.gradient(y, x)
    array([2., 4.])
    """

    __slots__ = ()
    __array_priority__ = 1000.0

    shape = property(attrgetter("value.shape"), doc="The lengths of the axes.")
    dtype = property(attrgetter("value.dtype"), doc="The dtype of the elements.")
    ndim = property(attrgetter("value.ndim"), doc="The number of axes.")
    size = property(attrgetter("value.size"), doc="The number of elements.")
    nbytes = property(attrgetter("value.nbytes"), doc="The size of all elements in bytes.")
    itemsize = property(attrgetter("value.itemsize"), doc="The size of one element in bytes.")
    device = property(attrgetter("value.device"), doc="The device of the raw array.")
    T = property(np.transpose, doc="The array with its axes reversed.")
    mT = property(lambda self: np.swapaxes(self, -1, -2), doc="The transposed matrices.")
    real = property(np.real, doc="The real part.")
    imag = property(np.imag, doc="The imaginary part.")

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
        """Return the raw value if no tape records; read-only unless it is a copy."""
        value = self._plain("np.asarray")
        if is_gpu_array(value):
            raise TypeError("a tracked GPU array is not converted to a NumPy array: use .numpy().")
        if copy or (dtype is not None and dtype != value.dtype):
            return np.array(value, dtype=dtype)
        return read_only(value)

    def item(self, *args: Any) -> Any:
        """Return one element as a Python number, if no tape records."""
        return self._plain(".item()").item(*args)

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers, if no tape records."""
        return self._plain(".tolist()").tolist()

    def numpy(self) -> Any:
        """Return a copy of the raw array, without a gradient."""
        return np.array(to_host(self.value))

    def raw_array(self) -> Any:
        """Return the raw array, for `ndistribute.device.as_array`."""
        return as_array(self.value)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        """Return the array cast to a dtype; integers and booleans have no gradient."""
        return apply(cast, (self, dtype), kwargs)

    def clip(self, min: Any = None, max: Any = None, **kwargs: Any) -> Any:  # noqa: A002
        """Return the array with its elements limited to two bounds; None means no bound."""
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
            "x[i] = v on a tracked array, which is read-only. Compute a new array with "
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
            raise TypeError("a 0-d tracked array cannot be iterated over.")
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
        return self  # It is read-only.

    def __deepcopy__(self, memo: Any) -> Any:
        return np.copy(self)

    def __reduce__(self) -> Any:
        return np.copy, (self._plain("pickle"),)

    def __repr__(self) -> str:
        return f"Tracked({self.value!r})"

    def _plain(self, conversion: str) -> Any:
        """Return the raw value; raise a TypeError while the tape records."""
        if current_frame().recorder is self.graph:
            refuse_conversion(conversion)
        return self.value


def untrack(value: Any) -> Any:
    """Return a nest with raw arrays instead of tracked arrays.

    Args:
        value: any nest; leaves that are not tracked stay unchanged.

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
    """Raise a `TypeError` that names `call` if a recording tape tracks a value."""
    if isinstance(value, Tracked):
        value._plain(call)


def stop_gradient(value: Any) -> Any:
    """Return values as constants, which have no gradient.

    Args:
        value: a nest of tracked arrays, variables and plain values.

    Returns:
        The same structure with plain arrays instead of tracked arrays and variables. On the host
        they are read-only views, not copies.

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
        return read_only(leaf.raw_array())
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


# The functions that NumPy's ``**`` uses for these Python numbers.
_QUICK_POWERS = {-1: np.reciprocal, 0.5: np.sqrt, 1: np.positive, 2: np.square}

# In-place operators are not defined, so `x += y` creates a new array.
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
# Calls through NumPy's protocol would take 0.6 us longer.
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
