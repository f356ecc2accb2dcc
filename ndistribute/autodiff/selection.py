"""Choose the derivative rules of one call.

A call has tracked arrays at some paths among its arguments; each gets a rule of its own, or all get
one joint rule. Nothing here fails: a call without a rule gets one that fails when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff import fallback
from ndistribute.autodiff.rules import JOINT_RULES, RULES, RULES_BY_PATH
from ndistribute.autodiff.rules.fit import fit
from ndistribute.autodiff.rules.special import special_rules
from ndistribute.device import Array

__all__ = ["Rules", "joint_rule", "rules_of"]

Path = tuple[Any, ...]

# No NumPy function has rules for more arguments.
_POSITIONS = (0, 1, 2)

# One function per tracked argument, or one that returns all their gradients.
Rules = tuple[Callable[[Array], Any], ...] | Callable[[Any], Sequence[Any]]


def rules_of(
    function: Any,
    result: Array,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    paths: Sequence[Path],
) -> Rules:
    """Return the rules of a call that returned one array.

    Args:
        function: a NumPy function.
        result: what it returned.
        args: its raw positional arguments.
        kwargs: its raw keyword arguments.
        paths: where its tracked arguments stand: ``(1,)``, ``(0, 2)`` inside a list, ``("x",)``.
    """
    try:
        makers = RULES.get(function) or special_rules(function)
        if makers is None:
            return _by_path(function, result, args, kwargs, paths)
        if any(len(path) > 1 or path[0] not in _POSITIONS[: len(makers)] for path in paths):
            return _other(function, result, args, kwargs, paths)
        if isinstance(function, np.ufunc) and kwargs:
            return tuple(_fitted(makers[k], result, args, kwargs, k) for (k,) in paths)
        return tuple(makers[k](result, *args, **kwargs) for (k,) in paths)
    except (TypeError, NotImplementedError) as error:
        return fallback.missing(function, str(error))


def joint_rule(
    function: Any,
    results: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    paths: Sequence[Path],
) -> Callable[[Sequence[Array | None]], Sequence[Any]]:
    """Return the rule of a call that returned several arrays; it takes one gradient for each."""
    own = JOINT_RULES.get(function)
    if own is not None and all(path in ((0,), (1,)) for path in paths):
        try:
            rule = own(results, args, kwargs)
            if paths == [(0,)]:
                return rule  # type: ignore[no-any-return]
            return lambda gradients: [rule(gradients)[k] for (k,) in paths]
        except NotImplementedError as error:
            return fallback.missing(function, str(error))
    return _other(function, results, args, kwargs, paths)


def _by_path(
    function: Any,
    result: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    paths: Sequence[Path],
) -> Rules:
    by_path = RULES_BY_PATH.get(function)
    rules = tuple(by_path(result, path, args, kwargs) for path in paths) if by_path else (None,)
    found = tuple(rule for rule in rules if rule is not None)
    if len(found) < len(rules):
        # Keywords of einsum say how to compute and not what.
        return _other(function, result, args, {} if by_path else kwargs, paths)
    return found


def _other(
    function: Any,
    result: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    paths: Sequence[Path],
) -> Callable[[Any], Sequence[Any]]:
    if any(len(path) > 1 or not isinstance(path[0], int) for path in paths):
        return fallback.missing(function, "a tracked array inside a list or a keyword")
    return fallback.joint_rule(function, result, args, kwargs, [path[0] for path in paths])


def _fitted(
    maker: Callable[..., Any], result: Array, args: Sequence[Any], kwargs: Mapping[str, Any], k: int
) -> Callable[[Array], Array]:
    """Return a ufunc's rule where keywords may have changed the result's dtype."""
    if "where" in kwargs:
        raise NotImplementedError("where=: use np.where")
    rule, shape, dtype = maker(result, *args), args[k].shape, args[k].dtype
    return lambda g: fit(rule(g), shape, dtype)
