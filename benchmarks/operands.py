"""What the ranks of an all-reduce bring, and what must come out, for any size in little memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["contribution", "error_of"]

# The numbers repeat with this period, so that nobody needs the whole exact sum.
PERIOD = 1 << 16

Floats = npt.NDArray[np.float32]


def contribution(rank: int, count: int) -> Floats:
    """Return what a rank brings; ranks bring different numbers."""
    return np.resize(_pattern(rank), count)


def error_of(total: Any, ranks: int) -> float:
    """Return the largest difference of any element from the exact sum over the ranks."""
    exact = np.sum([_pattern(rank).astype(np.float64) for rank in range(ranks)], axis=0)
    flat = np.asarray(total).reshape(-1)
    worst = 0.0
    for start in range(0, flat.size, PERIOD):
        part = flat[start : start + PERIOD]
        worst = max(worst, float(np.max(np.abs(part - exact[: part.size]))))
    return worst


def _pattern(rank: int) -> Floats:
    return np.random.default_rng(rank).random(PERIOD, np.float32)
