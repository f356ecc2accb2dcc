"""The derivative rules, each under the NumPy function that it belongs to.

`RULES` holds one maker for each differentiable argument, `RULES_BY_PATH` one for all arguments,
which may stand inside lists, `JOINT_RULES` one for functions with several results, and `COMPOSED`
what is written again in terms of other functions. `CONSTANT` names the functions whose result
carries no gradient although it may be a float; `IN_PLACE` those that write to an argument, which a
tracked array does not allow. A function in none of the tables has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.rules import (
    decompositions,
    elementwise,
    fourier,
    indexing,
    linalg,
    products,
    reductions,
    shape,
    statistics,
    windows,
)

__all__ = [
    "COMPOSED",
    "CONSTANT",
    "IN_PLACE",
    "JOINT_RULES",
    "RULES",
    "RULES_BY_PATH",
    "UFUNC_REDUCTIONS",
]


RULES: dict[Any, tuple[Callable[..., Any], ...]] = {
    **elementwise.RULES,
    **products.RULES,
    **reductions.RULES,
    **shape.RULES,
    **indexing.RULES,
    **linalg.RULES,
    **fourier.RULES,
    **statistics.RULES,
    **windows.RULES,
}


def _each(maker: Callable[..., Any]) -> Callable[..., list[Any]]:
    return lambda out, paths, *call: [maker(out, path, *call) for path in paths]


RULES_BY_PATH: dict[Any, Callable[..., list[Any]]] = {
    **shape.RULES_BY_PATH,
    **{
        function: _each(maker)
        for table in (products, linalg, windows)
        for function, maker in table.RULES_BY_PATH.items()
    },
}

JOINT_RULES: dict[Any, Callable[..., Any]] = {**shape.JOINT_RULES, **linalg.JOINT_RULES}

_YOUNG = decompositions.COMPOSED_BY_NAME | statistics.COMPOSED_BY_NAME

COMPOSED: dict[Any, Callable[..., Any]] = {
    **decompositions.COMPOSED,
    **fourier.COMPOSED,
    **linalg.COMPOSED,
    **statistics.COMPOSED,
    **windows.COMPOSED,
    **{getattr(np, name): entry for name, entry in _YOUNG.items() if hasattr(np, name)},
}

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
