"""The table of functions that operations may call, by name.

It has NumPy's ufuncs and array functions, those of ``numpy.linalg``, and what `register` adds.
Functions that write files, change their arguments or call other functions are not in it, because a
graph may come from another process.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from ndistribute.autodiff.rules.elementwise import cast

Function = Callable[..., Any]

_EXCLUDED = frozenset(
    "apply_along_axis apply_over_axes array2string array_repr array_str copyto empty_like "
    "fill_diagonal may_share_memory piecewise place put put_along_axis putmask save savetxt savez "
    "savez_compressed shares_memory".split()
)
# Functions with a list of results, whose number their second argument tells.
_SPLITTING = frozenset({np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit})
MOST_ELEMENTS = 1 << 31
_NUMBERS = frozenset("N minlength new_shape num repeats reps shape".split())
"""Arguments that tell the size of a result, some of them together with that of the first input."""
_OUTER = frozenset({"kron", "outer"})
_BOOL = np.dtype(bool)
_UFUNC_METHODS = ("accumulate", "outer", "reduce")

# Their values are arrays, as those of all operations are.
_COUNTS: dict[str, Function] = {
    f"numpy.{count.__name__}": lambda *args, count=count: np.array(count(*args), np.int64)
    for count in (np.ndim, np.shape, np.size)
}

_registered: dict[str, Function] = {}


def register(name: str, function: Function) -> None:
    """Put a function into the table; see `ndistribute.graph.register`."""
    if name in _registered and _registered[name] is not function:
        raise ValueError(f"another function is registered as {name!r}.")
    _registered[name] = function
    _names.cache_clear()


def function_named(name: str) -> Function:
    """Return the function of an operation type.

    Raises:
        KeyError: there is none.
    """
    found = _registered.get(name) or _COUNTS.get(name)
    return _functions()[name] if found is None else found


def name_of(function: Function) -> str:
    """Return the name of a function.

    Raises:
        TypeError: operations cannot call it.

    >>> name_of(np.matmul)
    'numpy.matmul'
    """
    try:
        return _names()[function]
    except (KeyError, TypeError):
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{name} cannot be an operation of a graph. Use a function of NumPy without side "
            "effects, or py_function in a session of this process."
        ) from None


@functools.cache
def _functions() -> dict[str, Function]:
    return dict(_listed())


def _listed() -> Iterator[tuple[str, Function]]:
    for module in (np, np.linalg):
        for name in sorted(module.__all__):
            function = getattr(module, name)
            is_ufunc = isinstance(function, np.ufunc)
            if name in _EXCLUDED or not (is_ufunc or hasattr(function, "_implementation")):
                continue
            path = f"{module.__name__}.{name}"
            yield path, function
            for method in _UFUNC_METHODS if is_ufunc and function.nin == 2 else ():
                yield f"{path}.{method}", getattr(function, method)
    yield "cast", cast
    yield "getitem", operator.getitem


@functools.cache
def _names() -> dict[Function, str]:
    # Of several names of one function the first counts: numpy.abs is numpy.absolute.
    names: dict[Function, str] = {}
    for name, function in (_functions() | _registered).items():
        names.setdefault(function, name)
    return names


def number_of_parts(function: Any, args: Sequence[Any]) -> int:
    """Return the number of results of a call of `np.split`; 0: of another function, or unknown."""
    if function not in _SPLITTING or len(args) < 2 or hasattr(args[1], "graph"):
        return 0
    return len(args[1]) + 1 if np.ndim(args[1]) else int(args[1])


def check_call(
    function: Any, inputs: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise a `ValueError` for a call that a server must not make, because nothing could end it.

    A power of Python's integers takes any time, and holds Python's lock. A result that is larger
    than the memory ends the process; its size is known of repetitions, shapes and broadcasting.
    """
    for value in inputs:
        if getattr(value, "dtype", _BOOL).hasobject and (
            getattr(function, "__self__", function) is np.multiply
            or not all(isinstance(element, bytes | str) for element in value.flat)
        ):
            raise ValueError("it computes with Python objects, and not with numbers or text.")
    sizes = [getattr(value, "size", 1) for value in args]
    if isinstance(function, np.ufunc) or getattr(function, "__name__", "") in _OUTER:
        if math.prod(sizes) > MOST_ELEMENTS:
            check_shape(_shape_of(function, args) if isinstance(function, np.ufunc) else sizes)
        return
    for position, name in _numbers(function):
        argument: Any = kwargs.get(name) if position >= len(args) else args[position]
        numbers = [n for n in np.ravel(argument).tolist() if n]
        grows = name in ("num", "repeats", "reps")
        check_shape([*([max(numbers)] if name == "repeats" else numbers), *sizes[:grows]])


def _shape_of(function: np.ufunc, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of a ufunc's result; one of matrices or vectors is at most as large."""
    shapes = [np.shape(value) for value in args]
    if function is np.matmul and min(map(len, shapes)) > 1:
        (*rows, _), (*others, _, columns) = shapes
        shapes = [(*rows, 1), (*others, 1, columns)]
    elif function.signature is not None:
        return max(shapes, key=math.prod)
    return np.broadcast_shapes(*shapes)


@functools.cache
def _numbers(function: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that tell the size of a function's result."""
    try:
        parameters = enumerate(inspect.signature(function).parameters)
    except ValueError:  # A registered function of another language has none.
        return []
    return [(k, name) for k, name in parameters if name in _NUMBERS and function is not np.reshape]


def check_shape(shape: Sequence[int]) -> None:
    """Raise a `ValueError` for the shape of an array that is larger than what a message carries."""
    if math.prod(map(abs, shape)) > MOST_ELEMENTS:
        raise ValueError(f"its result of shape {(*shape,)} has more than {MOST_ELEMENTS} elements.")


def refuse_writing(what: str) -> NoReturn:
    """Raise the error for code that would change a tensor in place."""
    raise TypeError(f"{what} on a tensor of a graph, which is read-only: compute a new tensor.")


def written_argument(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the argument with which a call of a NumPy function would change an array, or None."""
    for name, value in (dict(zip(_positional(function), args, strict=False)) | kwargs).items():
        into = name == "out" and value is not None
        replaces = name == "copy" and function is np.nan_to_num and not value
        if into or replaces or (name == "overwrite_input" and value):
            return f"{name}={value!r}"
    return None


@functools.cache
def _positional(function: Any) -> list[str]:
    """Return the names of the arguments that a function takes by position."""
    parameters = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [one.name for one in parameters if one.kind in kinds]
