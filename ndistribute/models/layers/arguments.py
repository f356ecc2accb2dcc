"""What layers check of their arguments, and the random numbers that they draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.context import get_replica_context, get_strategy

Pair = int | Sequence[int]


def dropout_factors(like: Any, shape: Sequence[int], rate: float) -> Any:
    """Return an array of 0, with the probability `rate`, and ``1 / (1 - rate)``; None for rate 0.

    Args:
        like: an array, plain or tracked, of the dtype and device of the result.
        shape: the shape of the result.
        rate: the share of zeros.
    """
    if not rate:
        return None
    factors = (random_generator().random(shape, dtype=np.float32) >= rate).astype(like.dtype)
    factors *= like.dtype.type(1 / (1 - rate))
    return factors


def random_generator() -> Any:
    """Return the generator of this replica; outside of replicas, that of the first."""
    replica: Any = get_replica_context() or get_strategy().replica_contexts[0]
    return replica.rng


def as_floats(x: Any, variable: Any) -> Any:
    """Return an array in a variable's dtype, unless it has fewer bits: no computation is wider."""
    narrow = x.dtype.kind not in "iub" and x.dtype.itemsize <= variable.dtype.itemsize
    return x if narrow else x.astype(variable.dtype)


def rate_of(rate: float, what: str) -> float:
    """Return a share of elements to drop, which must be in ``[0, 1)``."""
    if not 0 <= rate < 1:
        raise ValueError(f"{what} must be in [0, 1), got {rate}.")
    return float(rate)


def positive(value: int, what: str) -> int:
    """Return an integer, which must be 1 or more."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{what} must be an integer, 1 or more, got {value!r}.")
    return int(value)


def lengths(value: Pair, what: str, rank: int) -> tuple[int, ...]:
    """Return one or two positive integers, for what a user passed."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * rank
    if len(values) != rank:
        count = "a sequence of one" if rank == 1 else "two of them"
        raise ValueError(f"{what} must be an integer or {count}, got {value!r}.")
    return tuple(positive(each, what) for each in values)


def padding_of(padding: str, kind: str, *others: str) -> str:
    """Return the name of a padding in lower case, which must be a known one."""
    name = str(padding).lower()
    if name not in ("valid", "same", *others):
        known = " or ".join(map(repr, ("valid", "same", *others)))
        raise ValueError(f"{kind}: padding must be {known}, got {padding!r}.")
    return name
