"""Checks of the arguments that users pass to the input layer, with one wording for all of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__ = ["at_least", "function", "index_below", "integer"]


def integer(value: Any, what: str) -> int:
    """Return an integer as Python's.

    Raises:
        TypeError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {value!r}.") from None


def at_least(lowest: int, value: Any, what: str) -> int:
    """Return an integer that is not below a bound.

    Raises:
        TypeError: the value is no integer.
        ValueError: it is below the bound.

    >>> at_least(1, 3, "batch: n")
    3
    """
    number = integer(value, what)
    if number < lowest:
        raise ValueError(f"{what} must be at least {lowest}, got {number}.")
    return number


def index_below(count: int, value: Any, what: str) -> int:
    """Return an integer that numbers one of `count` things.

    Raises:
        TypeError: the value is no integer.
        ValueError: it is negative or too high.

    >>> index_below(2, 1, "shard: index")
    1
    """
    number = integer(value, what)
    if not 0 <= number < count:
        raise ValueError(f"{what} must be 0 to {count - 1}, got {number}.")
    return number


def function(value: Any, what: str) -> Callable[..., Any]:
    """Return what can be called.

    Raises:
        TypeError: the value can not be called.
    """
    if not callable(value):
        raise TypeError(f"{what} must be a function, got {value!r}.")
    return value  # type: ignore[no-any-return]
