"""The tables of derivative rules, by NumPy function.

`RULES` has one maker for each differentiable argument, `RULES_BY_PATH` one for all arguments,
including those in lists, `JOINT_RULES` one for functions with several results, and `COMPOSED` the
decompositions into other functions. `CONSTANT` contains the functions whose result has no gradient
although it may be a float; `IN_PLACE` those that write to an argument, which tracked arrays do not
allow. A function in none of the tables has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules import elementwise, linalg, reductions, shape
from ndistribute.autodiff.rules.decompositions import COMPOSED

__all__ = [
    "COMPOSED",
    "CONSTANT",
    "IN_PLACE",
    "JOINT_RULES",
    "RULES",
    "RULES_BY_PATH",
    "UFUNC_REDUCTIONS",
]

RULES: dict[Any, tuple[Callable[..., Any], ...]] = (
    elementwise.RULES | reductions.RULES | shape.RULES | linalg.RULES
)
RULES_BY_PATH: dict[Any, Callable[..., Any]] = shape.RULES_BY_PATH | linalg.RULES_BY_PATH
JOINT_RULES: dict[Any, Callable[..., Any]] = shape.JOINT_RULES | linalg.JOINT_RULES

CONSTANT: frozenset[Any] = frozenset(
    getattr(np, name)
    for name in (
        "ceil empty_like fix floor floor_divide full_like heaviside histogram "
        "histogram_bin_edges ones_like rint around round spacing trunc zeros_like"
    ).split()
)
IN_PLACE: frozenset[Any] = frozenset(
    {np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask}
)
UFUNC_REDUCTIONS: dict[Any, Any] = {
    np.add: np.sum,
    np.multiply: np.prod,
    np.maximum: np.max,
    np.minimum: np.min,
}
