"""Checks of the numbers that users pass to the input layer, with one wording for all of them."""

from __future__ import annotations

import operator

__all__ = ["at_least", "index_below"]


def at_least(lowest: int, value: int, what: str) -> int:
    """Return an integer that is not below a bound.

    Raises:
        ValueError: it is.

    >>> at_least(1, 3, "batch: n")
    3
    """
    number = operator.index(value)
    if number < lowest:
        raise ValueError(f"{what} must be at least {lowest}, got {number}.")
    return number


def index_below(count: int, value: int, what: str) -> int:
    """Return an integer that numbers one of `count` things.

    Raises:
        ValueError: it is negative or too high.

    >>> index_below(2, 1, "shard: index")
    1
    """
    number = operator.index(value)
    if not 0 <= number < count:
        raise ValueError(f"{what} must be 0 to {count - 1}, got {number}.")
    return number
