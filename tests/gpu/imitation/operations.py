"""Imitated ufuncs, functions and methods: NumPy's values for the arguments that CuPy takes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.gpu.imitation.array import arrays_in, compute, host_of, ndarray, upload
from tests.gpu.imitation.signatures import METHODS, binder

__all__ = ["SCALARS", "Function", "Ufunc", "method"]

_WORDS = (np.int32, np.uint32)
_AT = {  # the dtypes that have atomic operations in CuPy 13
    "add": (*_WORDS, np.uint64, np.float16, np.float32, np.float64),
    "subtract": _WORDS,
    "maximum": (*_WORDS, np.uint64, np.float32, np.float64),
    "minimum": (*_WORDS, np.uint64, np.float32, np.float64),
}
SCALARS = {bool, int, float, complex, *(np.dtype(char).type for char in "?bhilqBHILQefdFD")}


class Ufunc:
    """Play ``cupy.ufunc``."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.name = name
        self._function: Any = getattr(np, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, dtype = kwargs.pop("out", None), kwargs.pop("dtype", None)
        casting = kwargs.pop("casting", "same_kind")
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        nin = getattr(self._function, "nin", 1)  # np.fix is none.
        args, rest = args[:nin], args[nin:]
        out = rest[0] if rest else out[0] if isinstance(out, tuple) else out
        inputs = [_operand(one) for one in args]
        if not isinstance(out, ndarray | None):
            raise TypeError(f"Unsupported type {type(out)}")
        named: dict[str, Any] = {} if out is None else {"out": out.host, "casting": casting}
        if dtype is not None:
            named |= {"dtype": dtype, "casting": "unsafe"}  # Inputs are cast without a question.
        reads = arrays_in(inputs)
        result = compute(
            lambda: self._function(*map(host_of, inputs), **named), reads, arrays_in(out)
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

    def reduce(
        self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        methods = {"add": "sum", "multiply": "prod"}
        if self.name not in methods:
            raise NotImplementedError(f"`cupy_{self.name}.reduce` is not supported yet")
        return getattr(array, methods[self.name])(axis, dtype, out, keepdims)

    def accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        methods = {"add": "cumsum", "multiply": "cumprod"}
        if self.name not in methods:
            raise NotImplementedError(f"`cupy_{self.name}.accumulate` is not supported yet")
        return getattr(array, methods[self.name])(axis, dtype, out)

    def outer(self, A: ndarray, B: ndarray, **kwargs: Any) -> Any:  # noqa: N803
        return self(A.reshape(*A.shape, *(1,) * B.ndim), B, **kwargs)


class Function:
    """Play a function of CuPy: NumPy's values, CuPy's arguments, and no array of the host.

    Args:
        name: of the function, in NumPy too.
        signature: what CuPy takes.
    """

    def __init__(self, name: str, signature: str) -> None:
        self.__name__ = name
        self._bind = binder(signature)
        self._function = operator.attrgetter(name)(np)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, named = self._bind(*args, **kwargs)
        named = {key: value for key, value in named.items() if key not in ("subok", "casting")}
        everything = [*given, *named.values()]
        if self.__name__ != "take":  # It carries indices over.
            _refuse_host(self.__name__, everything)
        if self.__name__ == "where" and not isinstance(given[0], ndarray):
            raise AttributeError(f"{type(given[0]).__name__!r} object has no attribute 'astype'")
        hosts = {key: host_of(value) for key, value in named.items()}
        return compute(
            lambda: self._function(*map(host_of, given), **hosts),
            arrays_in(everything),
            arrays_in(named.get("out")),
        )


def _refuse_host(name: str, args: Sequence[Any]) -> None:
    for arg in args:
        if isinstance(arg, list | tuple):
            _refuse_host(name, arg)
        elif isinstance(arg, np.ndarray):
            raise TypeError(f"Unsupported type {type(arg)} for cupy.{name}")


def _operand(value: Any) -> Any:
    if isinstance(value, ndarray) or type(value) in SCALARS:
        return value
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"Unsupported type {type(value)}")
    return interface["imitated"]


def method(name: str) -> Callable[..., Any]:
    """Return a method of the imitated array, which takes what CuPy's takes."""
    bind = binder(METHODS[name])

    @functools.wraps(getattr(np.ndarray, name))
    def call(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        given, named = bind(self, *args, **kwargs)
        reads = [self, *arrays_in(given[1:]), *arrays_in(list(named.values()))]
        hosts = {key: host_of(value) for key, value in named.items()}
        return compute(
            lambda: getattr(self.host, name)(*host_of(given[1:]), **hosts),
            reads,
            arrays_in(named.get("out")),
        )

    return call
