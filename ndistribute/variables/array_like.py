"""The base class of variables, which makes them usable as arrays.

NumPy's functions and operators use its array protocols. Each use reads a snapshot, which a gradient
tape records. In-place changes raise an error: `assign` and its relatives change variables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ndistribute import tree
from ndistribute.context import current_frame
from ndistribute.device import Array, device_of, is_gpu_array, to_host
from ndistribute.stream import working_on

__all__ = ["ArrayLike", "detached"]


def _operator(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], ...]:
    # NumPy's protocol costs 1.5 us per call, and computes squares by `np.power`.
    def of_left(self: ArrayLike, other: Any) -> Any:
        return function(self.tracked_value(), _read(other))

    def of_right(self: ArrayLike, other: Any) -> Any:
        return function(_read(other), self.tracked_value())

    return of_left, of_right


def _conversion(function: Callable[[Any], Any]) -> Callable[[ArrayLike], Any]:
    return lambda self: function(self.tracked_value())


class ArrayLike(NDArrayOperatorsMixin):
    """An object that behaves like the array that its `component` returns."""

    __array_priority__ = 1000.0

    def component(self) -> Array:
        """Return the array, untracked; on a GPU, a view of memory that must not be written."""
        raise NotImplementedError(f"{type(self).__name__} defines no component.")

    def raw_array(self) -> Array:
        """Return the array, untracked, for `ndistribute.device.as_array`."""
        return self.component()

    def tracked_value(self) -> Any:
        """Return the array to compute with, tracked by the tape that watches this variable."""
        recorder = current_frame().recorder
        array = self.component()
        return array if recorder is None else recorder.read(self, array)

    def read_value(self) -> Any:
        """Return a snapshot that never changes, tracked by the tape that watches this variable."""
        recorder = current_frame().recorder
        array = detached(self.component())
        return array if recorder is None else recorder.read(self, array)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy as a NumPy array, which the caller owns."""
        return np.array(to_host(self.component()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        # If a tape watches this variable, its tracked array raises, as the gradient would be lost.
        return np.array(to_host(self.tracked_value()), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        values = map(_read, inputs)
        if method == "__call__" and not kwargs:
            # CuPy's arrays support the operator, but not the generalised ufunc.
            return operator.matmul(*values) if ufunc is np.matmul else ufunc(*values)
        if method == "at" and isinstance(inputs[0], ArrayLike):
            self._refuse_in_place(f"np.{ufunc.__name__}.at(variable, ...)")
        self._refuse_as_output(f"np.{ufunc.__name__}", kwargs.get("out"))
        return getattr(ufunc, method)(*values, **tree.map_leaves(_read, kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._refuse_as_output(f"np.{function.__name__}", kwargs.get("out"))
        found = function(*tree.map_leaves(_read, args), **tree.map_leaves(_read, kwargs))
        return found if type(found) is np.ndarray else tree.map_leaves(detached, found)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.read_value(), name)

    def __getitem__(self, index: Any) -> Any:
        return detached(self.tracked_value()[_read(index)])

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse_in_place("variable[...] = value")

    def __contains__(self, item: Any) -> bool:
        return _read(item) in self.component()

    def __iter__(self) -> Any:
        return iter(self.read_value())

    def __index__(self) -> int:
        return operator.index(to_host(self.component())[()])

    def __format__(self, spec: str) -> str:
        return format(to_host(self.component())[()], spec) if spec else str(self)

    __hash__ = object.__hash__
    __len__ = _conversion(len)
    __bool__ = _conversion(bool)
    __float__ = _conversion(float)
    __int__ = _conversion(int)
    __complex__ = _conversion(complex)
    __add__, __radd__ = _operator(operator.add)
    __sub__, __rsub__ = _operator(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv)
    __matmul__, __rmatmul__ = _operator(operator.matmul)
    __pow__, __rpow__ = _operator(operator.pow)

    def _refuse_as_output(self, what: str, out: Any) -> None:
        if any(isinstance(one, ArrayLike) for one in (out if isinstance(out, tuple) else (out,))):
            self._refuse_in_place(f"{what}(..., out=variable), for example by +=,")

    def _refuse_in_place(self, what: str) -> NoReturn:
        raise TypeError(
            f"{what} cannot change a variable: use assign, assign_add, assign_sub or "
            "scatter_update, which change all its copies."
        )


def detached(value: Any) -> Any:
    """Return an array whose changes do not affect a variable."""
    # A snapshot on a CPU is read-only. CuPy has no such flag, so a view on a GPU is copied.
    if type(value) is np.ndarray or not is_gpu_array(value) or value.base is None:
        return value
    with working_on(device_of(value)):
        return value.copy()


def _read(value: Any) -> Any:
    return value.tracked_value() if isinstance(value, ArrayLike) else value
