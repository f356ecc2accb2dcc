"""The tables of derivative rules, by NumPy function, and the rules of a call.

`RULES` has one maker for each differentiable argument, `RULES_BY_PATH` one for all arguments,
including those in lists, `JOINT_RULES` one for functions with several results, and `COMPOSED` the
decompositions into other functions. A function in none of the tables has no derivative.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import missing
from ndistribute.autodiff.rules import elementwise, linalg, shape
from ndistribute.autodiff.rules.decompositions import COMPOSED
from ndistribute.autodiff.rules.elementwise import special_rules
from ndistribute.autodiff.rules.shape import Args, Kwargs, Path
from ndistribute.autodiff.rules.unbroadcast import unbroadcast
from ndistribute.numpy_functions import written_to

__all__ = ["COMPOSED", "JOINT_RULES", "RULES", "RULES_BY_PATH", "bound", "decomposed", "rules_of"]

# One rule for each tracked argument, or one rule that returns the gradients of all.
Rules = tuple[Callable[[Any], Any], ...] | Callable[[Any], Sequence[Any]]

RULES: dict[Any, tuple[Callable[..., Any], ...]] = elementwise.RULES | shape.RULES | linalg.RULES
RULES_BY_PATH: dict[Any, Callable[..., Any]] = shape.RULES_BY_PATH | linalg.RULES_BY_PATH
JOINT_RULES: dict[Any, Callable[..., Any]] = shape.JOINT_RULES | linalg.JOINT_RULES


def rules_of(function: Any, result: Any, args: Args, kwargs: Kwargs, paths: list[Path]) -> Rules:
    """Return the rules of a call for the tracked arguments at the given paths."""
    makers = RULES.get(function) or special_rules(function) or ()
    positions = [*map(operator.itemgetter(0), paths)]
    try:
        if isinstance(result, list | tuple):
            if function in JOINT_RULES and max(map(len, paths)) == 1:
                joint = JOINT_RULES[function](result, *args, **kwargs)
                return lambda gradients: [*map(joint(gradients).__getitem__, positions)]
        elif function in RULES_BY_PATH:
            rules = tuple(RULES_BY_PATH[function](result, paths, args, kwargs))
            if None not in rules:
                return rules
        elif max(map(len, paths)) == 1 and {*positions} <= {*range(len(makers))}:
            if isinstance(function, np.ufunc) and kwargs:
                return tuple([_cast_rule(makers[k], result, args, kwargs, k) for k in positions])
            return tuple([makers[k](result, *args, **kwargs) for k in positions])
    except (TypeError, NotImplementedError) as error:
        return missing(function, str(error))
    nested = max(map(len, paths)) > 1 or any(isinstance(position, str) for position in positions)
    return missing(function, "a tracked array inside a list or a keyword" if nested else "")


def _cast_rule(
    maker: Callable[..., Any], result: Any, args: Args, kwargs: Kwargs, k: int
) -> Callable[[Any], Any]:
    """Return a ufunc's rule for a call with keywords, which may change the result's dtype."""
    if "where" in kwargs:
        raise NotImplementedError("where=: use np.where")
    rule, shape, dtype = maker(result, *args), args[k].shape, args[k].dtype
    return lambda g: unbroadcast(rule(g), shape, dtype)


def decomposed(function: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the result of a decomposition; `NotImplemented` if it does not take the arguments."""
    composed = COMPOSED[function]
    if written_to(function, args, kwargs) or (kwargs and bound(composed, args, kwargs) is None):
        return NotImplemented
    return composed(*args, **kwargs)


def bound(function: Any, args: Args, kwargs: Kwargs) -> inspect.BoundArguments | None:
    """Return the arguments of a call by position, if the signature is known and accepts them."""
    try:
        return _signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None


_signature = functools.lru_cache(512)(inspect.signature)
