"""Dispatch of NumPy functions: it calls them on raw values, and records their gradient rules.

Every operation on a tracked array runs this code: `unary` and `binary` handle operators and plain
ufunc calls, `apply` all other functions. The recorder of the thread's frame is the graph that
records. A tracked array of a graph that no longer records is a constant; one of a graph that
records in another frame is an error. A call without a rule raises only if its gradient is needed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import missing, name_of, refuse_elsewhere, user_line
from ndistribute.autodiff.rules import (
    COMPOSED,
    CONSTANT,
    IN_PLACE,
    JOINT_RULES,
    RULES,
    RULES_BY_PATH,
    UFUNC_REDUCTIONS,
)
from ndistribute.autodiff.rules.elementwise import special_rules
from ndistribute.autodiff.rules.unbroadcast import unbroadcast
from ndistribute.context import current_frame
from ndistribute.device import is_gpu_array

# The position of an argument: (1,), (0, 2) inside a list, ("x",) for a keyword.
Path = tuple[Any, ...]

# One rule for each tracked argument, or one rule that returns the gradients of all.
Rules = tuple[Callable[[Any], Any], ...] | Callable[[Any], Sequence[Any]]

# Types without tracked arrays inside, so that one look-up decides the common case.
_PLAIN = frozenset({np.ndarray, float, int, bool, np.float32, np.float64, type(None), str, slice})

# The types that NumPy functions take without a conversion.
_OPERANDS = (np.ndarray, np.generic, int, float, complex)

# Functions whose first argument has a rule, except ufuncs, whose rules do not accept the keywords
# of a call, and functions that may have several results.
_FIRST_ARGUMENT = frozenset(
    function for function in RULES.keys() - JOINT_RULES.keys() if not isinstance(function, np.ufunc)
)

# Keywords that may make a function write to an argument.
_WRITING = frozenset({"copy", "out", "overwrite_input"})

# The methods of arrays, which are a microsecond faster than these functions.
_METHODS = {np.sum: "sum", np.mean: "mean", np.max: "max", np.min: "min", np.prod: "prod"}

# More than NumPy and SciPy have, but bounded, because programs may create ufuncs.
_UFUNCS = 512


class Recorded:
    """A raw array, and the index of its entry in the graph of a gradient tape."""

    __slots__ = ("graph", "index", "value")

    def __init__(self, value: Any, graph: Any, index: int) -> None:
        self.value = value
        self.graph = graph
        self.index = index


@functools.lru_cache(_UFUNCS)
def unary(ufunc: Any) -> Callable[[Any], Any]:
    """Return the function that calls a ufunc of one tracked argument."""
    makers = RULES.get(ufunc) or special_rules(ufunc)
    if makers is None:
        return lambda x: apply(ufunc, (x,), {})

    def call(x: Any) -> Any:
        value = x.value
        result = ufunc(value)
        graph: Any = current_frame().recorder
        if graph is not x.graph:
            refuse_detached(ufunc, x)
            return result
        return graph.record(result, (x.index,), (makers[0](result, value),))

    return call


@functools.lru_cache(_UFUNCS)
def binary(ufunc: Any) -> Callable[[Any, Any], Any]:
    """Return the function that calls a ufunc of two arguments, at least one of them tracked."""
    makers = RULES.get(ufunc)
    if makers is None:
        return lambda x, y: apply(ufunc, (x, y), {})
    of_x, of_y = makers[0], makers[-1]

    def call(x: Any, y: Any) -> Any:
        graph: Any = current_frame().recorder
        left = right = None
        if isinstance(x, Recorded):
            if x.graph is graph:
                left = x.index
            else:
                refuse_detached(ufunc, x)
            x = x.value
        elif type(x) not in _PLAIN:
            x, left = _converted(ufunc, x, graph)
        if isinstance(y, Recorded):
            if y.graph is graph:
                right = y.index
            else:
                refuse_detached(ufunc, y)
            y = y.value
        elif type(y) not in _PLAIN:
            y, right = _converted(ufunc, y, graph)
        result = ufunc(x, y)
        if left is None:
            if right is None:
                return result
            return graph.record(result, (right,), (of_y(result, x, y),))
        if right is None:
            return graph.record(result, (left,), (of_x(result, x, y),))
        return graph.record(result, (left, right), (of_x(result, x, y), of_y(result, x, y)))

    return call


def apply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a NumPy function with tracked arrays among its arguments.

    Results with a gradient are tracked; others, such as integers, stay plain.
    """
    result: Any = NotImplemented
    if function in _FIRST_ARGUMENT and args and isinstance(args[0], Recorded):
        result = _apply_to_first(function, args[0], args[1:], kwargs)
    elif function in COMPOSED and _takes(COMPOSED[function], args, kwargs):
        result = COMPOSED[function](*args, **kwargs)
    if result is not NotImplemented:
        return result
    if kwargs and any(_hides_array(value) for name, value in kwargs.items() if name != "out"):
        bound = _bound(function, args, kwargs)
        if bound is not None:
            args, kwargs = bound.args, bound.kwargs
    graph: Any = current_frame().recorder
    found: dict[Path, int | None] = {}
    raw_args = [strip(arg, graph, found, (k,)) for k, arg in enumerate(args)]
    raw_kwargs = {name: strip(kwargs[name], graph, found, (name,)) for name in kwargs}
    _refuse_writes(function, args, kwargs, bool(found))
    if function in RULES and max(map(len, found), default=1) > 1:
        joined = [_without_list(arg) for arg in args]
        if any(new is not old for new, old in zip(joined, args, strict=True)):
            return apply(function, joined, kwargs)
    result = function(*raw_args, **raw_kwargs)
    if not found or function in CONSTANT:
        return result
    several = isinstance(result, list | tuple)
    if any(map(is_differentiable, result)) if several else is_differentiable(result):
        if None in found.values():
            refuse_elsewhere(function)
        rules = _rules_of(function, result, raw_args, raw_kwargs, list(found))
        record = graph.record_many if several else graph.record
        return record(result, tuple(found.values()), rules)
    if isinstance(result, np.ndarray) and result.dtype.kind == "O":
        raise TypeError(
            f"{name_of(function)} of a tracked array at {user_line()} returned an array of "
            "objects, which has no gradient: use NumPy functions, or define a derivative with "
            "nd.custom_gradient."
        )
    return result


def ufunc_method(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a ufunc method, or of a ufunc call with keywords."""
    if method == "__call__":
        return apply(ufunc, inputs, kwargs)
    if method == "reduce" and ufunc in UFUNC_REDUCTIONS:
        return apply(UFUNC_REDUCTIONS[ufunc], inputs, {"axis": 0, **kwargs})
    if method == "accumulate" and ufunc is np.add:
        return apply(np.cumsum, inputs, {"axis": 0, **kwargs})
    if method == "outer" and not kwargs:
        first, second = (x if hasattr(x, "dtype") else np.asarray(x) for x in inputs)
        return ufunc(np.reshape(first, first.shape + (1,) * second.ndim), second)
    return apply(getattr(ufunc, method), inputs, kwargs)


def refuse_detached(function: Any, x: Any) -> None:
    """Raise a `TypeError` if the tape of an argument records, but not in this frame."""
    if _is_detached(x):
        refuse_elsewhere(function)


def _is_detached(x: Any) -> bool:
    frame = current_frame()
    detached = isinstance(x, Recorded) and x.graph is not frame.recorder and x.graph.is_recording
    # The function of a `merge_call` computes for the waiting replicas, without a tape.
    return detached and not frame.merging


def read_only(value: Any) -> Any:
    """Return a read-only view, or a copy of a GPU array, so that the value cannot change."""
    if is_gpu_array(value):
        return value.copy()
    view = np.asarray(value).view()
    view.flags.writeable = False
    return view


def is_differentiable(value: Any) -> bool:
    """Return True for arrays and NumPy scalars of a floating or complex dtype."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and (dtype.kind in "fc" or dtype.name == "bfloat16")


def operand(x: Any, graph: Any) -> tuple[Any, int | None]:
    """Return an argument's raw value and its entry in the graph; None if it has none there."""
    if not isinstance(x, Recorded):
        if getattr(x, "is_distributed_variable", False):
            x = x.tracked_value()
        if not isinstance(x, Recorded):
            return x, None
    return x.value, x.index if x.graph is graph else None


def strip(value: Any, graph: Any, found: dict[Path, int | None], path: Path = ()) -> Any:
    """Return an argument with raw values instead of tracked arrays and variables.

    `found` receives the entry in the recording graph of each tracked array, also in lists, by its
    path; None for an array whose tape records in another frame. Other arrays are constants.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        items = [strip(item, graph, found, (*path, k)) for k, item in enumerate(value)]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else items if isinstance(value, list) else tuple(items)
    raw, index = operand(value, graph)
    if index is not None or _is_detached(value):
        found[path] = index
    elif type(raw) not in _PLAIN and _is_foreign(raw):
        raw = np.asarray(raw)
    return raw


def _apply_to_first(function: Any, x: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a function with only its first argument tracked, such as a reduction.

    It is `NotImplemented` if the call needs the general code of `apply`.
    """
    for value in (*rest, *kwargs.values()):
        if type(value) not in _PLAIN and (_hides_array(value) or _is_foreign(value)):
            return NotImplemented
    if kwargs and not _WRITING.isdisjoint(kwargs):
        return NotImplemented
    value = x.value
    if function in _METHODS:
        result = getattr(value, _METHODS[function])(*rest, **kwargs)
    else:
        result = function(value, *rest, **kwargs)
    graph: Any = current_frame().recorder
    if not is_differentiable(result):
        return result
    if graph is not x.graph:
        refuse_detached(function, x)
        return result if getattr(result, "base", None) is None else read_only(result)
    try:
        rules: Rules = (RULES[function][0](result, value, *rest, **kwargs),)
    except (TypeError, NotImplementedError) as error:
        rules = missing(function, str(error))
    return graph.record(result, (x.index,), rules)


def _rules_of(
    function: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], paths: list[Path]
) -> Rules:
    """Return the rules of a call for the tracked arguments at the given paths."""
    makers = RULES.get(function) or special_rules(function) or ()
    try:
        if isinstance(result, list | tuple):
            if function in JOINT_RULES and all(path in ((0,), (1,)) for path in paths):
                return _chosen(JOINT_RULES[function](result, *args, **kwargs), paths)
        elif function in RULES_BY_PATH:
            rules = tuple(RULES_BY_PATH[function](result, paths, args, kwargs))
            if None not in rules:
                return rules
        elif all(len(path) == 1 and path[0] in range(len(makers)) for path in paths):
            if isinstance(function, np.ufunc) and kwargs:
                return tuple([_cast_rule(makers[k], result, args, kwargs, k) for (k,) in paths])
            return tuple([makers[k](result, *args, **kwargs) for (k,) in paths])
    except (TypeError, NotImplementedError) as error:
        return missing(function, str(error))
    nested = any(len(path) > 1 or not isinstance(path[0], int) for path in paths)
    return missing(function, "a tracked array inside a list or a keyword" if nested else "")


def _chosen(joint: Callable[[Any], Sequence[Any]], paths: Sequence[Path]) -> Rules:
    """Return the rule for the gradients of the given arguments only."""
    if paths == [(0,)]:
        return joint

    def chosen(gradients: Any) -> Sequence[Any]:
        changes = joint(gradients)
        return [changes[position] for (position,) in paths]

    return chosen


def _cast_rule(
    maker: Callable[..., Any], result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], k: int
) -> Callable[[Any], Any]:
    """Return a ufunc's rule for a call with keywords, which may change the result's dtype."""
    if "where" in kwargs:
        raise NotImplementedError("where=: use np.where")
    rule, shape, dtype = maker(result, *args), args[k].shape, args[k].dtype
    return lambda g: unbroadcast(rule(g), shape, dtype)


def _converted(ufunc: Any, value: Any, graph: Any) -> tuple[Any, int | None]:
    """Return the result of `operand`, with lists and arrays of other libraries converted.

    What NumPy would convert to an array of objects is refused.
    """
    value, place = operand(value, graph)
    if place is not None or isinstance(value, _OPERANDS) or is_gpu_array(value):
        return value, place
    if isinstance(value, list | tuple) and _hides_array(value):
        return operand(_without_list(value), graph)
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(
            f"{name_of(ufunc)} of a tracked array and a {type(value).__module__}."
            f"{type(value).__qualname__} at {user_line()}: convert it to a NumPy array first, "
            "or wrap the operation in nd.custom_gradient."
        )
    return array, None


def _without_list(value: Any) -> Any:
    """Return a tracked array for a list with tracked arrays, and other values unchanged."""
    if not isinstance(value, list | tuple) or not _hides_array(value):
        return value
    return np.stack([_without_list(item) for item in value])


def _is_foreign(value: Any) -> bool:
    """Return True for arrays of other libraries, such as pandas, which are constants."""
    known = isinstance(value, _OPERANDS) or not hasattr(type(value), "__array__")
    return not known and not is_gpu_array(value)


def _hides_array(value: Any) -> bool:
    if type(value) in _PLAIN:
        return False
    if isinstance(value, list | tuple):
        return any(_hides_array(item) for item in value)
    return isinstance(value, Recorded) or getattr(value, "is_distributed_variable", False)


def _bound(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """Return the arguments of a call by position, if the signature is known and accepts them."""
    try:
        return _signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None


def _takes(composed: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a decomposition accepts these keywords."""
    return not kwargs or (kwargs.get("out") is None and _bound(composed, args, kwargs) is not None)


_signature = functools.lru_cache(_UFUNCS)(inspect.signature)


def _refuse_writes(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], recorded: bool
) -> None:
    """Raise a TypeError if a call with tracked arguments would write to an array."""
    out = kwargs.get("out")
    targets = list(out) if isinstance(out, tuple) else [] if out is None else [out]
    name = getattr(function, "__name__", "")
    in_place = kwargs.get("overwrite_input") or (name == "nan_to_num" and not kwargs.get("copy", 1))
    if function in IN_PLACE or name == "at" or in_place:
        targets.append(args[0])
    if targets and (recorded or any(isinstance(target, Recorded) for target in targets)):
        raise TypeError(
            f"{name_of(function)} at {user_line()} would write to an array, and one of its "
            "arguments is tracked: tapes do not record writes. Use the result instead, as "
            "in x = np.add(x, y) or x = x + y."
        )
