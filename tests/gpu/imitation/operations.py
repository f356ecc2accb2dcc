"""Imitated ufuncs and functions of CuPy, and how NumPy's protocols lead to them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.gpu.imitation.array import arrays_in, compute, host_of, ndarray, upload
from tests.gpu.imitation.signatures import binder

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
    if isinstance(value, ndarray) or type(value) in _SCALARS:
        return value
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"Unsupported type {type(value)}")
    return interface["imitated"]


def connect(cupy: Any) -> None:
    """Give the imitated array its operators and protocols, which lead to a namespace.

    Args:
        cupy: the imitated module.
    """
    ndarray.__array_ufunc__ = functools.partialmethod(_array_ufunc, cupy)  # type: ignore[attr-defined]
    ndarray.__array_function__ = functools.partialmethod(_array_function, cupy)  # type: ignore[attr-defined]
    for dunder, name in _OPERATORS.items():
        forward, reflected = _operators(cupy, name)
        setattr(ndarray, f"__{dunder}__", forward)
        if name not in _COMPARISONS:
            setattr(ndarray, f"__r{dunder}__", reflected)
            if name != "matmul":
                setattr(ndarray, f"__i{dunder}__", _in_place(cupy, name))
    for dunder, name in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
        setattr(ndarray, f"__{dunder}__", _unary(cupy, name))
    ndarray.__pos__ = lambda self: self  # type: ignore[attr-defined]


_OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
    "gt": "greater",
    "ge": "greater_equal",
}


def _operators(cupy: Any, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x: ndarray, y: Any) -> Any:
        if isinstance(y, ndarray):
            return getattr(cupy, name)(x, y)
        if _defers(x, y):
            return NotImplemented
        return getattr(np, name)(x, y)

    def reflected(y: ndarray, x: Any) -> Any:
        return NotImplemented if _defers(y, x) else getattr(np, name)(x, y)

    return forward, reflected


def _defers(x: ndarray, y: Any) -> bool:
    """Say whether the other operand has its own way, by the rule of NEP 13."""
    if hasattr(y, "__array_ufunc__"):
        return y.__array_ufunc__ is None
    return bool(x.__array_priority__ < getattr(y, "__array_priority__", 0))


def _in_place(cupy: Any, name: str) -> Callable[[ndarray, Any], ndarray]:
    return lambda x, y: getattr(cupy, name)(x, y, x)  # type: ignore[no-any-return]


def _unary(cupy: Any, name: str) -> Callable[[ndarray], Any]:
    return lambda x: getattr(cupy, name)(x)


def _array_ufunc(self: ndarray, cupy: Any, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
    inout = inputs + named.get("out", ())
    if "out" in named:
        named["out"] = named["out"][0]
    function = getattr(cupy, ufunc.__name__, None)
    if function is not None and method != "__call__":
        function = getattr(function, method, None)
    if function is None:
        return NotImplemented
    for one in inout:
        known = isinstance(one, ndarray | np.ndarray) or type(one) in _SCALARS
        if not known and not hasattr(one, "__cuda_array_interface__"):
            return NotImplemented
    if ufunc.__name__ in _COMPARISONS:
        inputs = tuple(
            one.item() if isinstance(one, np.ndarray) and one.ndim == 0 else one for one in inputs
        )
    return function(*inputs, **named)


def _array_function(
    self: ndarray, cupy: Any, function: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    try:
        module = functools.reduce(getattr, function.__module__.split(".")[1:], cupy)
        own = getattr(module, function.__name__)
    except AttributeError:
        return NotImplemented
    if own is function or not all(issubclass(one, ndarray | np.ndarray) for one in types):
        return NotImplemented
    return own(*args, **kwargs)
