"""How operators and NumPy's functions lead from the imitated array to the imitated CuPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu.imitation.array import ndarray
from tests.gpu.imitation.operations import SCALARS, method
from tests.gpu.imitation.signatures import METHODS

__all__ = ["connect"]

_COMPARISONS = {"less", "less_equal", "equal", "not_equal", "greater", "greater_equal"}


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
    for name in METHODS:
        setattr(ndarray, name, method(name))
    setattr(ndarray, "__pos__", lambda self: self)  # noqa: B010


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
    return lambda x, y: getattr(cupy, name)(x, y, x)


def _unary(cupy: Any, name: str) -> Callable[[ndarray], Any]:
    return lambda x: getattr(cupy, name)(x)  # noqa: PLW0108  # found when it is called


def _array_ufunc(
    self: ndarray, cupy: Any, ufunc: Any, method: str, *inputs: Any, **named: Any
) -> Any:
    inout = inputs + named.get("out", ())
    if "out" in named:
        named["out"] = named["out"][0]
    function = getattr(cupy, ufunc.__name__, None)
    if function is not None and method != "__call__":
        function = getattr(function, method, None)
    if function is None:
        return NotImplemented
    for one in inout:
        known = isinstance(one, ndarray | np.ndarray) or type(one) in SCALARS
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
