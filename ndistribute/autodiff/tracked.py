"""Arrays whose computation is recorded.

A `Tracked` stands in for a raw array inside a tape. NumPy hands every function that meets one over
to it, and the dispatch records what was done; to the user it is an array that can not be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.diagnostics import refuse_conversion
from ndistribute.autodiff.dispatch import apply, binary, ufunc_method, unary
from ndistribute.autodiff.face import ArrayFace
from ndistribute.autodiff.rules.elementwise import cast
from ndistribute.autodiff.rules.indexing import index_rule
from ndistribute.context import current_frame
from ndistribute.device import as_array, is_gpu_array

__all__ = ["Tracked", "stop_gradient", "untrack"]


class Tracked(ArrayFace):
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

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            if len(inputs) == 1:
                return unary(ufunc, inputs[0])
            if len(inputs) == 2:
                return binary(ufunc, *inputs)
        return ufunc_method(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return apply(function, args, kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the raw value where no tape records; read-only unless it is a copy."""
        self._refuse_to_lose_gradient("np.asarray")
        if is_gpu_array(self.value):
            raise TypeError("a tracked GPU array does not turn into a NumPy array: use .numpy().")
        if copy or (dtype is not None and dtype != self.value.dtype):
            return np.array(self.value, dtype=dtype)
        return _read_only(self.value)

    def item(self, *args: Any) -> Any:
        """Return one element as a Python number, where no tape records."""
        self._refuse_to_lose_gradient(".item()")
        return self.value.item(*args)

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers, where no tape records."""
        self._refuse_to_lose_gradient(".tolist()")
        return self.value.tolist()

    def __float__(self) -> float:
        self._refuse_to_lose_gradient("float()")
        return float(self.value)

    def __int__(self) -> int:
        self._refuse_to_lose_gradient("int()")
        return int(self.value)

    def __complex__(self) -> complex:
        self._refuse_to_lose_gradient("complex()")
        return complex(self.value)

    def _refuse_to_lose_gradient(self, conversion: str) -> None:
        """Raise a `TypeError` if a tape would go on without this array's gradient."""
        if current_frame().recorder is self.graph:
            refuse_conversion(conversion)

    def raw_array(self) -> Any:
        """Return the raw array, as `ndistribute.device.as_array` asks for it."""
        return as_array(self.value)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        """Return the array cast to a dtype; to integers or booleans, without a gradient."""
        return apply(cast, (self, dtype), kwargs)

    def clip(self, min: Any = None, max: Any = None, **kwargs: Any) -> Any:  # noqa: A002
        """Return the array with its elements held between two bounds, None for no bound."""
        return apply(np.clip, (self, min, max), kwargs)

    def __getitem__(self, index: Any) -> Any:
        value = self.value
        if type(index) is tuple and any(isinstance(one, Tracked) for one in index):
            index = tuple(map(untrack, index))
        result = value[index]
        graph: Any = current_frame().recorder
        if graph is not self.graph:
            return result
        return graph.record(result, (self.index,), (index_rule(value, index),))

    # The operators of the inner loops call the dispatch directly; the detour through NumPy's
    # protocol costs 0.6 us a call. There are no in-place operators: `x += y` makes a new array.

    def __add__(self, other: Any) -> Any:
        return binary(np.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return binary(np.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return binary(np.subtract, self, other)

    def __rsub__(self, other: Any) -> Any:
        return binary(np.subtract, other, self)

    def __mul__(self, other: Any) -> Any:
        return binary(np.multiply, self, other)

    def __rmul__(self, other: Any) -> Any:
        return binary(np.multiply, other, self)

    def __truediv__(self, other: Any) -> Any:
        return binary(np.divide, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return binary(np.divide, other, self)

    def __matmul__(self, other: Any) -> Any:
        return binary(np.matmul, self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return binary(np.matmul, other, self)

    def __pow__(self, other: Any) -> Any:
        if type(other) in (int, float) and other in _QUICK_POWERS:
            return unary(_QUICK_POWERS[other], self)
        return binary(np.power, self, other)

    def __rpow__(self, other: Any) -> Any:
        return binary(np.power, other, self)

    def __neg__(self) -> Any:
        return unary(np.negative, self)

    def __repr__(self) -> str:
        return f"Tracked({self.value!r})"


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def method(self: Tracked, *args: Any, **kwargs: Any) -> Any:
        return apply(function, (self, *args), kwargs)

    method.__name__ = name
    method.__doc__ = f"Return ``np.{name}(self, ...)``."
    return method


for _name in (
    "all any argmax argmin argpartition argsort conj conjugate copy cumprod cumsum diagonal dot "
    "max mean min nonzero prod ravel repeat round searchsorted squeeze std sum swapaxes take trace "
    "var"
).split():
    setattr(Tracked, _name, _method(_name))
del _name

# The same as NumPy's own ** takes for a Python number.
_QUICK_POWERS = {-1: np.reciprocal, 0.5: np.sqrt, 1: np.positive, 2: np.square}


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
    return tree.unflatten(
        value, [leaf.value if isinstance(leaf, Tracked) else leaf for leaf in leaves]
    )


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
    return _read_only(leaf.value) if isinstance(leaf, Tracked) else leaf


def _read_only(value: Any) -> Any:
    """Return an array through which nobody can change a value that the tape has kept."""
    if is_gpu_array(value):
        return value.copy()
    view = np.asarray(value).view()
    view.flags.writeable = False
    return view
