"""Make an object usable wherever the array that it stands for is.

NumPy's functions and operators reach a variable through its protocols; each use reads a snapshot
first, which is where a gradient tape learns of it. In-place changes are refused: they belong to
`assign` and its relatives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ndistribute import tree
from ndistribute.device import Array, to_host

__all__ = ["ArrayLike"]


class ArrayLike:
    """Behave like the array that `tracked_value` returns."""

    __array_priority__ = 1000.0

    def component(self) -> Array:
        """Return the array itself, untracked."""
        raise NotImplementedError(f"{type(self).__name__} defines no component.")

    def raw_array(self) -> Array:
        """Return the array itself, as `ndistribute.device.as_array` asks for it."""
        return self.component()

    def tracked_value(self) -> Any:
        """Return the array, tracked by a tape that watches it."""
        raise NotImplementedError(f"{type(self).__name__} defines no tracked_value.")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(to_host(self.component()), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "at" and isinstance(inputs[0], ArrayLike):
            self._refuse_in_place(f"np.{ufunc.__name__}.at(variable, ...)")
        self._refuse_as_output(f"np.{ufunc.__name__}", kwargs.get("out"))
        return getattr(ufunc, method)(*map(_read, inputs), **tree.map_leaves(_read, kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._refuse_as_output(f"np.{function.__name__}", kwargs.get("out"))
        return function(*tree.map_leaves(_read, args), **tree.map_leaves(_read, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.tracked_value(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.tracked_value()[_read(index)]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse_in_place("variable[...] = value")

    def __contains__(self, item: Any) -> bool:
        return _read(item) in self.component()

    def __len__(self) -> int:
        return len(self.component())

    def __iter__(self) -> Any:
        return iter(self.tracked_value())

    def __bool__(self) -> bool:
        return bool(self.component())

    def __float__(self) -> float:
        return float(self.component())

    def __int__(self) -> int:
        return int(self.component())

    def __complex__(self) -> complex:
        return complex(self.component())

    def __index__(self) -> int:
        return operator.index(to_host(self.component())[()])

    def __format__(self, spec: str) -> str:
        return format(to_host(self.component())[()], spec) if spec else str(self)

    __hash__ = object.__hash__

    def _refuse_as_output(self, what: str, out: Any) -> None:
        if any(isinstance(one, ArrayLike) for one in (out if isinstance(out, tuple) else (out,))):
            self._refuse_in_place(f"{what}(..., out=variable)")

    def _refuse_in_place(self, what: str) -> NoReturn:
        raise TypeError(
            f"{what}: a variable is changed by assign, assign_add, assign_sub or scatter_update, "
            "which keep all its copies alike."
        )


def _read(value: Any) -> Any:
    return value.tracked_value() if isinstance(value, ArrayLike) else value


def _function(name: str) -> Callable[..., Any]:
    return divmod if name == "divmod" else getattr(operator, name)


def _binary(name: str) -> Callable[[ArrayLike, Any], Any]:
    function = _function(name)

    def forward(self: ArrayLike, other: Any) -> Any:
        return function(self.tracked_value(), _read(other))

    return forward


def _unary(name: str) -> Callable[[ArrayLike], Any]:
    function = getattr(operator, name)

    def apply(self: ArrayLike) -> Any:
        return function(self.tracked_value())

    return apply


def _reflected(name: str) -> Callable[[ArrayLike, Any], Any]:
    function = _function(name)

    def backward(self: ArrayLike, other: Any) -> Any:
        return function(_read(other), self.tracked_value())

    return backward


def _in_place(name: str) -> Callable[[ArrayLike, Any], NoReturn]:
    def refuse(self: ArrayLike, _: Any) -> NoReturn:
        self._refuse_in_place(f"an in-place operator ({name})")

    return refuse


for _name in (
    "add sub mul truediv floordiv mod divmod pow matmul and_ or_ xor lshift rshift"
).split():
    _dunder = _name.rstrip("_")
    setattr(ArrayLike, f"__{_dunder}__", _binary(_name))
    setattr(ArrayLike, f"__r{_dunder}__", _reflected(_name))
    setattr(ArrayLike, f"__i{_dunder}__", _in_place(_name))
for _name in "lt le gt ge eq ne".split():
    setattr(ArrayLike, f"__{_name}__", _binary(_name))
for _name in "neg pos abs invert".split():
    setattr(ArrayLike, f"__{_name}__", _unary(_name))
del _name, _dunder
