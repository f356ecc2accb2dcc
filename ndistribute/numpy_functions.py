"""The table of functions that operations of graphs may call, by name.

It has NumPy's ufuncs and array functions, those of ``numpy.linalg``, and what `register` adds.
Functions that write files, change their arguments or call other functions are not in it, because a
graph may come from another process.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

Function = Callable[..., Any]

_EXCLUDED = frozenset(
    "apply_along_axis apply_over_axes array2string array_repr array_str empty_like "
    "may_share_memory piecewise save savetxt savez savez_compressed shares_memory".split()
)
# Functions that write to their first argument, and keywords that may make others write.
_IN_PLACE = frozenset(
    {np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask}
)
WRITING_OPTIONS = frozenset({"copy", "out", "overwrite_input"})
# Functions whose results do not depend smoothly on their arguments, so that they have no gradient.
CONSTANT = frozenset(
    getattr(np, name)
    for name in (
        "all any argmax argmin argsort around ceil count_nonzero empty_like equal fix floor "
        "floor_divide full_like greater greater_equal heaviside histogram histogram_bin_edges "
        "isfinite isinf isnan less less_equal logical_and logical_not logical_or logical_xor "
        "nonzero not_equal ones_like rint round shape signbit size spacing trunc zeros_like"
    ).split()
)
# Functions with a list of results, whose number their second argument tells.
_SPLITTING = frozenset({np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit})
# Numbers of 8 bytes then take at most half of the memory.
MOST_ELEMENTS = min(1 << 31, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16)
MOST_WORK = 1 << 40  # Multiplications outside BLAS and LAPACK: about ten minutes.
_NUMBERS = frozenset("N minlength new_shape num repeats reps shape".split())
"""Arguments that tell the size of a result, some of them together with that of the first input."""
_OUTER = frozenset({"kron", "outer"})
_BOOL = np.dtype(bool)


def _product(*values: Any, **options: Any) -> int:
    return math.prod(max(1, np.size(value)) for value in values)


def _count(value: Any) -> list[int]:
    """Return a number of parts; nothing of a list of places, and of text that names a method."""
    return [] if isinstance(value, str) or np.ndim(value) else [int(value)]


def _contracted(a: Any, axes: Any) -> int:
    summed = range(-axes, 0) if isinstance(axes, int) else np.ravel(axes[0])
    return math.prod(np.shape(a)[k] for k in summed) or 1


def _einsum_work(*operands: Any, optimize: Any = False, **options: Any) -> int:
    if (most := _product(*operands)) <= MOST_WORK:
        return most
    report = np.einsum_path(*operands, optimize=optimize)[1]
    return int(float(report.partition("Optimized FLOP count:")[2].split()[0]))


_WORK: dict[Function, Callable[..., int]] = {
    **dict.fromkeys([np.convolve, np.correlate, np.polydiv, np.polymul, np.polyval], _product),
    np.diff: lambda a, n=1, *_, **__: max(1, np.size(a)) * int(n),
    np.einsum: _einsum_work,
    np.poly: lambda seq_of_zeros: np.size(seq_of_zeros) ** 2,
    np.roots: lambda p: np.size(p) ** 3,
}
"""The multiplications of functions that take longer than a few per element."""
_SHAPES: dict[Function, Callable[..., Sequence[int]]] = {
    np.array_split: lambda ary, indices_or_sections, axis=0: _count(indices_or_sections),
    np.diag: lambda v, k=0: [np.size(v) + abs(int(k))] * (2 if np.ndim(v) == 1 else 0),
    np.diagflat: lambda v, k=0: [np.size(v) + abs(int(k))] * 2,
    np.histogram: lambda a, bins=10, *_, **__: _count(bins),
    np.meshgrid: lambda *xi, sparse=False, **_: [0 if sparse else _product(*xi), len(xi)],
    np.pad: lambda array, pad_width, *_, **__: np.add(
        np.shape(array), np.broadcast_to(pad_width, (np.ndim(array), 2)).sum(1, float)
    ).tolist(),
    np.tensordot: lambda a, b, axes=2: [_product(a, b) // _contracted(a, axes) ** 2],
    np.vander: lambda x, *n, **named: [np.size(x), (n or [named.get("N")])[0] or np.size(x)],
}
"""The shapes of results that are larger than their arguments."""
_UFUNC_METHODS = ("accumulate", "outer", "reduce")

# Their values are arrays, as those of all operations are.
_COUNTS: dict[str, Function] = {
    f"numpy.{count.__name__}": lambda *args, count=count: np.array(count(*args), np.int64)
    for count in (np.ndim, np.shape, np.size)
}

_registered: dict[str, Function] = {}


def cast(x: Any, dtype: Any, **kwargs: Any) -> Any:
    """Return an array cast to a dtype, as the method `astype` does."""
    return x.astype(dtype, **kwargs)


class Results(enum.Enum):
    """How the results of a function depend on its arguments."""

    OTHER = enum.auto()
    ELEMENTWISE = enum.auto()
    """They have the shape to which the arguments broadcast, as those of a ufunc."""
    BY_IMAGE = enum.auto()
    """There is one for each image of the first argument."""
    OF_SHAPES = enum.auto()
    """Shapes alone decide their values."""
    OF_VALUES = enum.auto()
    """They may have one shape for zeros and for ones, and others for the rest."""


_results: dict[Function, Results] = {
    **dict.fromkeys([cast, np.clip, np.ones_like, np.where, np.zeros_like], Results.ELEMENTWISE),
    **dict.fromkeys(_COUNTS.values(), Results.OF_SHAPES),
    **{
        getattr(np, name): Results.OF_VALUES
        for name in (
            "bincount delete intersect1d setdiff1d setxor1d union1d unique unique_all "
            "unique_counts unique_inverse unique_values"
        ).split()
    },
}
"""Those of functions that are no ufuncs, and not `OTHER`."""


def register(name: str, function: Function, results: Results = Results.OTHER) -> Function:
    """Return a function for arrays and for tensors, of which it makes operations.

    Args:
        name: the type of its operations: a name with a prefix of your own, registered alike in all
            processes that run the graph.
        function: takes and returns arrays, and changes none of them. Its gradient is that of the
            NumPy code in it, or of `custom_gradient`.
        results: what is known of the shapes of its results; without it, small ones are computed.

    >>> from ndistribute import graph
    >>> cube = register("example.cube", lambda x: x**3)
    >>> cube(2.0), float(graph.Session().run(cube(graph.constant(2.0))))
    (8.0, 8.0)
    """
    if name in _registered and _registered[name] is not function:
        raise ValueError(f"another function is registered as {name!r}: choose another name.")
    _registered[name] = function
    if results is not Results.OTHER:
        _results[function] = results
    _names.cache_clear()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if hasattr(type(value), "__apply_named__"):  # A tensor of a graph.
                return value.__apply_named__(name, args, kwargs)
        return function(*args, **kwargs)

    return call


def results_of(function: Function) -> Results:
    """Return how the results of a function depend on its arguments; of ufuncs, `OTHER`."""
    return _results.get(function, Results.OTHER)


def function_named(name: str) -> Function:
    """Return the function of an operation type.

    Raises:
        KeyError: there is none.
    """
    function = _registered.get(name) or _COUNTS.get(name)
    return _functions()[name] if function is None else function


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
    functions: dict[str, Function] = {"cast": cast, "getitem": operator.getitem}
    for module in (np, np.linalg):
        for name in sorted(module.__all__):
            function = getattr(module, name)
            is_ufunc = isinstance(function, np.ufunc)
            is_known = is_ufunc or hasattr(function, "_implementation")
            if not is_known or name in _EXCLUDED or function in _IN_PLACE:
                continue
            path = f"{module.__name__}.{name}"
            functions[path] = function
            for method in _UFUNC_METHODS if is_ufunc and function.nin == 2 else ():
                functions[f"{path}.{method}"] = getattr(function, method)
    return functions


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
) -> float:
    """Raise a `ValueError` for a call that a server must not make, because nothing could end it.

    A power of Python's integers takes any time, and holds Python's lock. A result that is larger
    than the memory ends the process; its size is known of repetitions, shapes and broadcasting.

    Returns:
        About how many multiplications it takes.
    """
    for value in inputs:
        if getattr(value, "dtype", _BOOL).hasobject and (
            getattr(function, "__self__", function) is np.multiply
            or not all(isinstance(element, bytes | str) for element in value.flat)
        ):
            raise ValueError("it computes with Python objects instead of numbers or text.")
    elements = 1  # Of a result that has one for each tuple of elements of the arguments.
    for value in args:
        elements *= getattr(value, "size", 1)
    combines = isinstance(function, np.ufunc) or getattr(function, "__name__", "") in _OUTER
    if combines and elements <= MOST_ELEMENTS:
        return 0  # It is short.
    sizes: list[int] = [getattr(value, "size", 1) for value in args]
    if combines:
        check_shape(_shape_of(function, args) if isinstance(function, np.ufunc) else sizes)
        return float(max(sizes) ** (1.5 if function is np.matmul else 1))
    if function in _SHAPES:
        check_shape(_SHAPES[function](*args, **kwargs))
    work = _WORK[function](*args, **kwargs) if function in _WORK else sum(sizes) ** 1.5
    if work > MOST_WORK and function in _WORK:
        raise ValueError(f"it takes {work:.3g} multiplications, more than {MOST_WORK:.3g}.")
    for position, name in _numbers(function):
        argument: Any = kwargs.get(name) if position >= len(args) else args[position]
        numbers = [n for n in np.ravel(argument).tolist() if n]
        grows = name in ("num", "repeats", "reps")
        check_shape([*([max(numbers)] if name == "repeats" else numbers), *sizes[:grows]])
    return work


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


def written_to(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the arrays to which a call of a NumPy function would write, and what tells it to.

    >>> written_to(np.sum, ("a",), {}), written_to(np.sum, ("a", 0), {"out": "b"})
    ([], [('out=', 'b')])
    """
    written: list[tuple[str, Any]] = []
    is_common = len(args) < 2 or type(function) is np.ufunc
    if is_common and WRITING_OPTIONS.isdisjoint(kwargs) and function not in _IN_PLACE:
        return written
    if function in _IN_PLACE or getattr(function, "__name__", "") == "at":
        written.append(("its first argument", [*args, *kwargs.values()][0]))
    for position, option in _writing_options(function):
        value = args[position] if position < len(args) else kwargs.get(option)
        if option == "out":
            written += [("out=", array) for array in (value if type(value) is tuple else (value,))]
        elif (option == "copy") != bool(value) and (option in kwargs or position < len(args)):
            written.append((f"{option}={value}", [*args, *kwargs.values()][0]))
    return [(how, array) for how, array in written if array is not None]


@functools.cache
def _writing_options(function: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that may make a function write to arrays."""
    if isinstance(getattr(function, "__self__", function), np.ufunc):
        return [(sys.maxsize, "out")]  # It gets its output by name.
    parameters = inspect.signature(function).parameters.values()
    return [
        (sys.maxsize if parameter.kind is parameter.KEYWORD_ONLY else position, parameter.name)
        for position, parameter in enumerate(parameters)
        if parameter.name in ("out", "overwrite_input")
        or (parameter.name == "copy" and function is np.nan_to_num)
    ]


class ArrayMethods:
    """The methods of ``numpy.ndarray`` for an array-like, each by the function that it calls."""

    __slots__ = ()

    @staticmethod
    def _call(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a function with such array-likes among its arguments."""
        raise NotImplementedError

    T = property(np.transpose, doc="The array with its axes reversed.")
    mT = property(lambda self: np.swapaxes(self, -1, -2), doc="The transposed matrices.")
    real = property(np.real, doc="The real part.")
    imag = property(np.imag, doc="The imaginary part.")

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        """Return the array cast to a dtype; integers and booleans have no gradient."""
        return self._call(cast, (self, np.dtype(dtype)), kwargs)

    def clip(self, min: Any = None, max: Any = None, **kwargs: Any) -> Any:  # noqa: A002
        """Return the array with its elements limited to two bounds; None means no bound."""
        return self._call(np.clip, (self, min, max), kwargs)

    def reshape(self, *shape: Any, order: str = "C", **kwargs: Any) -> Any:
        """Return the array with another shape, given as one tuple or as several integers."""
        shape = shape[0] if len(shape) == 1 else shape
        return self._call(np.reshape, (self, shape, order), kwargs)

    def compress(self, condition: Any, axis: Any = None) -> Any:
        """Return the elements, or slices along an axis, where a condition holds."""
        return np.compress(condition, self, axis)  # type: ignore[call-overload]

    def transpose(self, *axes: Any) -> Any:
        """Return the array with its axes reordered, given as one tuple or as several integers."""
        return self._call(np.transpose, (self, axes[0] if len(axes) == 1 else axes or None), {})

    def flatten(self, order: str = "C") -> Any:
        """Return the elements along one axis."""
        return self._call(np.ravel, (self, order), {})


def _method(name: str) -> Function:
    function = getattr(np, name)

    def method(self: ArrayMethods, *args: Any, **kwargs: Any) -> Any:
        return self._call(function, (self, *args), kwargs)

    method.__name__, method.__doc__ = name, f"Return ``np.{name}(self, ...)``."
    return method


for _name in (
    "all any argmax argmin argpartition argsort conj conjugate copy cumprod cumsum diagonal dot "
    "max mean min nonzero prod ravel repeat round searchsorted squeeze std sum swapaxes take trace "
    "var"
).split():
    setattr(ArrayMethods, _name, _method(_name))
del _name
