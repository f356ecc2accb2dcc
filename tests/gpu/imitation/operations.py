"""Imitated ufuncs, functions and methods: NumPy's values, and CuPy's refusals."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.gpu.imitation.array import arrays_in, compute, host_of, ndarray, upload
from tests.gpu.imitation.real import check_call

__all__ = ["Function", "Ufunc", "connect"]

_WORDS = (np.int32, np.uint32)
_AT = {  # the dtypes that have atomic operations in CuPy 13
    "add": (*_WORDS, np.uint64, np.float16, np.float32, np.float64),
    "subtract": _WORDS,
    "maximum": (*_WORDS, np.uint64, np.float32, np.float64),
    "minimum": (*_WORDS, np.uint64, np.float32, np.float64),
}
_SCALARS = {bool, int, float, complex, *(np.dtype(char).type for char in "?bhilqBHILQefdFD")}
_COMPARISONS = {"less", "less_equal", "equal", "not_equal", "greater", "greater_equal"}
_METHODS = (
    "all any argmax argmin argsort clip conj cumprod cumsum diagonal dot flatten max mean min "
    "nonzero prod ravel repeat round searchsorted squeeze std sum swapaxes take trace var"
).split()


class Ufunc:
    """Play ``cupy.ufunc``."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.name = name
        self._function: Any = getattr(np, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_call(self.name, *args, **kwargs)
        out, dtype = kwargs.pop("out", None), kwargs.pop("dtype", None)
        casting = kwargs.pop("casting", "same_kind")
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        args, rest = args[: self._function.nin], args[self._function.nin :]
        out = rest[0] if rest else out[0] if isinstance(out, tuple) else out
        inputs = [_operand(one) for one in args]
        if not isinstance(out, ndarray | None):
            raise TypeError(f"Unsupported type {type(out)}")
        named: dict[str, Any] = {} if out is None else {"out": out.host, "casting": casting}
        if dtype is not None:
            named |= {"dtype": dtype, "casting": "unsafe"}  # Inputs are cast without a question.
        result = compute(
            lambda: self._function(*map(host_of, inputs), **named),
            arrays_in(inputs),
            arrays_in(out),
        )
        return result if out is None else out

    def at(self, a: ndarray, indices: Any, b: Any = None) -> None:
        if self.name not in _AT:
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        items = indices if isinstance(indices, tuple) else (indices,)
        fancy = any(isinstance(one, ndarray | np.ndarray | list) for one in items)
        if fancy and a.dtype.type not in _AT[self.name]:
            raise TypeError(f"cupy.{self.name}.at does not support {a.dtype}")
        value = b if isinstance(b, ndarray) else upload(np.asarray(b))
        where = tuple(map(host_of, items))
        compute(
            lambda: self._function.at(a.host, where, value.host),
            [value, *arrays_in(list(items))],
            [a],
        )

    def reduce(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        methods = {"add": "sum", "multiply": "prod"}
        if self.name not in methods:
            raise NotImplementedError(f"`cupy_{self.name}.reduce` is not supported yet")
        return getattr(array, methods[self.name])(*args, **{"axis": 0, **kwargs})


class Function:
    """Play a function of CuPy: NumPy's values, and no array of the host."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._function = operator.attrgetter(name)(np)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_call(self.__name__, *args, **kwargs)
        everything = [*args, *kwargs.values()]
        if self.__name__ != "take":  # It carries indices over.
            _refuse_host(self.__name__, everything)
        if self.__name__ == "where" and not isinstance(args[0], ndarray):
            raise AttributeError(f"{type(args[0]).__name__!r} object has no attribute 'astype'")
        hosts = {key: host_of(value) for key, value in kwargs.items()}
        return compute(
            lambda: self._function(*map(host_of, args), **hosts),
            arrays_in(everything),
            arrays_in(kwargs.get("out")),
        )


def connect() -> None:
    """Give the imitated array its methods, and what leads there from NumPy's functions."""
    for name in _METHODS:
        setattr(ndarray, name, _method(name))
    ndarray.__array_ufunc__ = _array_ufunc  # type: ignore[method-assign]
    ndarray.__array_function__ = _array_function  # type: ignore[attr-defined]


def _method(name: str) -> Callable[..., Any]:
    def call(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        check_call(f"ndarray.{name}", self, *args, **kwargs)
        hosts = {key: host_of(value) for key, value in kwargs.items()}
        return compute(
            lambda: getattr(self.host, name)(*host_of(args), **hosts),
            [self, *arrays_in(args), *arrays_in(list(kwargs.values()))],
            arrays_in(kwargs.get("out")),
        )

    return call


def _array_ufunc(self: ndarray, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
    if "out" in named:
        (named["out"],) = named["out"]
    for one in (*inputs, named.get("out", 0)):
        known = isinstance(one, ndarray | np.ndarray) or type(one) in _SCALARS
        if not known and not hasattr(one, "__cuda_array_interface__"):
            return NotImplemented
    if ufunc.__name__ in _COMPARISONS:
        inputs = tuple(
            one.item() if isinstance(one, np.ndarray) and one.ndim == 0 else one for one in inputs
        )
    function = Ufunc(ufunc.__name__)
    return (function if method == "__call__" else getattr(function, method))(*inputs, **named)


def _array_function(self: ndarray, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if not all(issubclass(one, ndarray | np.ndarray) for one in types):
        return NotImplemented
    name = ".".join([*function.__module__.split(".")[1:], function.__name__])
    return Function(name)(*args, **kwargs)


def _refuse_host(name: str, args: Sequence[Any]) -> None:
    for arg in args:
        if isinstance(arg, list | tuple):
            _refuse_host(name, arg)
        elif isinstance(arg, np.ndarray):
            raise TypeError(f"Unsupported type {type(arg)} for cupy.{name}")


def _operand(value: Any) -> Any:
    if isinstance(value, ndarray) or type(value) in _SCALARS:
        return value
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"Unsupported type {type(value)}")
    return interface["imitated"]
