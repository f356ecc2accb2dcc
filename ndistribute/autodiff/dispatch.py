"""Run a NumPy function on raw values, and record how its gradient flows back.

Every operation on a tracked array comes through here: operators and plain ufunc calls by two short
paths, everything else by `apply`. What is recorded goes to the graph that this thread's frame
names; a tracked array of another graph, or of none that still records, is a constant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.face import ArrayFace
from ndistribute.autodiff.fallback import missing, name_of
from ndistribute.autodiff.rules import COMPOSED, CONSTANT, IN_PLACE, RULES, UFUNC_REDUCTIONS
from ndistribute.autodiff.rules.special import special_rules
from ndistribute.autodiff.selection import Path, joint_rule, rules_of
from ndistribute.context import current_frame

__all__ = [
    "apply",
    "binary",
    "is_differentiable",
    "operand",
    "strip",
    "ufunc_method",
    "unary",
]

# Types whose values never hide a tracked array: the common case is told by one look-up.
_PLAIN = frozenset({np.ndarray, float, int, bool, np.float32, np.float64, type(None), str, slice})

# Functions whose first argument has a rule. Ufuncs are not among them: their keywords say how to
# compute, and mean nothing to a rule.
_FIRST_ARGUMENT = frozenset(function for function in RULES if not isinstance(function, np.ufunc))

# The array's own method does the same as the function, a microsecond sooner.
_METHODS = {np.sum: "sum", np.mean: "mean", np.max: "max", np.min: "min", np.prod: "prod"}


def unary(ufunc: Any, x: Any) -> Any:
    """Call a ufunc of one tracked argument."""
    makers = RULES.get(ufunc) or special_rules(ufunc)
    if makers is None:
        return apply(ufunc, (x,), {})
    value = x.value
    result = ufunc(value)
    graph: Any = current_frame().recorder
    if graph is not x.graph:
        return result
    return graph.record(result, (x.index,), (makers[0](result, value),))


def binary(ufunc: Any, x: Any, y: Any) -> Any:
    """Call a ufunc of two arguments, of which at least one is tracked."""
    makers = RULES.get(ufunc)
    if makers is None:
        return apply(ufunc, (x, y), {})
    graph: Any = current_frame().recorder
    left = right = None
    if isinstance(x, ArrayFace):
        if x.graph is graph:
            left = x.index
        x = x.value
    elif type(x) not in _PLAIN:
        x, left = operand(_without_list(x), graph)
    if isinstance(y, ArrayFace):
        if y.graph is graph:
            right = y.index
        y = y.value
    elif type(y) not in _PLAIN:
        y, right = operand(_without_list(y), graph)
    result = ufunc(x, y)
    if left is None:
        if right is None:
            return result
        return graph.record(result, (right,), (makers[1](result, x, y),))
    if right is None:
        return graph.record(result, (left,), (makers[0](result, x, y),))
    rules = (makers[0](result, x, y), makers[1](result, x, y))
    return graph.record(result, (left, right), rules)


def operand(x: Any, graph: Any) -> tuple[Any, int | None]:
    """Return an argument's raw value, and its place in the graph if it is recorded there."""
    if not isinstance(x, ArrayFace):
        if getattr(x, "is_distributed_variable", False):
            x = x.tracked_value()
        if not isinstance(x, ArrayFace):
            return x, None
    return x.value, x.index if x.graph is graph else None


def _without_list(value: Any) -> Any:
    """Turn a list into an array, a tracked one if it holds tracked arrays."""
    if not isinstance(value, list | tuple):
        return value
    if not _hides_array(value):
        return np.asarray(value)
    return np.stack([_without_list(item) for item in value])


def apply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a NumPy function with tracked arrays anywhere among its arguments.

    Returns:
        Tracked arrays where gradients can flow; integers, booleans and everything that is not an
        array come back plain.

    Raises:
        TypeError: the function would write into an array.
    """
    if function in _FIRST_ARGUMENT and args and isinstance(args[0], ArrayFace):
        result = _apply_to_first(function, args[0], args[1:], kwargs)
        if result is not NotImplemented:
            return result
    composed = COMPOSED.get(function)
    if composed is not None and kwargs.get("out") is None:
        result = composed(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if any(_hides_array(value) for name, value in kwargs.items() if name != "out"):
        args, kwargs = _positional(function, args, kwargs)
    graph: Any = current_frame().recorder
    found: dict[Path, int] = {}
    raw_args = [strip(arg, graph, found, (k,)) for k, arg in enumerate(args)]
    raw_kwargs = {name: strip(value, graph, found, (name,)) for name, value in kwargs.items()}
    _refuse_writes(function, args, kwargs, bool(found))
    result = function(*raw_args, **raw_kwargs)
    if not found or function in CONSTANT:
        return result
    paths, parents = list(found), tuple(found.values())
    if isinstance(result, list | tuple):
        joint = joint_rule(function, result, raw_args, raw_kwargs, paths)
        return graph.record_many(result, parents, joint)
    if not is_differentiable(result):
        return result
    return graph.record(result, parents, rules_of(function, result, raw_args, raw_kwargs, paths))


def _apply_to_first(function: Any, x: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function whose first argument alone is tracked: reductions, reshapes and the like.

    Returns:
        `NotImplemented` if there is more to it, for `apply` to deal with.
    """
    for value in (*rest, *kwargs.values()):
        if type(value) not in _PLAIN and _hides_array(value):
            return NotImplemented
    if "out" in kwargs:
        return NotImplemented
    value = x.value
    if function in _METHODS:
        result = getattr(value, _METHODS[function])(*rest, **kwargs)
    else:
        result = function(value, *rest, **kwargs)
    graph: Any = current_frame().recorder
    if graph is not x.graph or not is_differentiable(result):
        return result
    try:
        rule = RULES[function][0](result, value, *rest, **kwargs)
    except (TypeError, NotImplementedError) as error:
        return graph.record(result, (x.index,), missing(function, str(error)))
    return graph.record(result, (x.index,), (rule,))


def ufunc_method(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a ufunc in another way than by itself with plain arguments."""
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


def is_differentiable(value: Any) -> bool:
    """Say whether a value is an array, or a NumPy number, of a dtype that gradients can have."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and (dtype.kind in "fc" or dtype.name == "bfloat16")


def strip(value: Any, graph: Any, found: dict[Path, int], path: Path = ()) -> Any:
    """Replace tracked arrays and variables in an argument by raw values.

    Args:
        value: the argument; lists and tuples are searched.
        graph: tracked arrays of this graph count, others are constants.
        found: gets the place in the graph of each that counts, under its path.
        path: where the argument stands in the call.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        items = [strip(item, graph, found, (*path, k)) for k, item in enumerate(value)]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else items if isinstance(value, list) else tuple(items)
    raw, index = operand(value, graph)
    if index is not None:
        found[path] = index
    return raw


def _hides_array(value: Any) -> bool:
    if type(value) in _PLAIN:
        return False
    if isinstance(value, list | tuple):
        return any(_hides_array(item) for item in value)
    return isinstance(value, ArrayFace) or getattr(value, "is_distributed_variable", False)


def _positional(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Turn keywords into positions where the function's signature is known."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    return bound.args, bound.kwargs


def _refuse_writes(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], recorded: bool
) -> None:
    """Raise where a call would write into a tracked array, or past the tape into a plain one."""
    out = kwargs.get("out")
    targets = [one for one in (out if isinstance(out, tuple) else (out,)) if one is not None]
    if function in IN_PLACE or getattr(function, "__name__", "") == "at":
        targets.append(args[0])
    if targets and (recorded or any(isinstance(target, ArrayFace) for target in targets)):
        raise TypeError(
            f"{name_of(function)} would write into an array, and one of its arguments is tracked: "
            "the tape could not take that back. Use the result instead, as in x = np.add(x, y) or "
            "x = x + y."
        )
