"""Regularizers: functions of a variable that return a penalty, which is added to the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient
from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.names import named

__all__ = ["L1", "L2", "Regularizer", "get"]


@dataclass(frozen=True)
class Regularizer:
    """The base class of regularizers: dataclasses that are called with a variable."""

    def __call__(self, variable: Any) -> Any:
        """Return the penalty, a number."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__.")


@dataclass(frozen=True)
class L1(Regularizer):
    """A factor times the sum of absolute values.

    >>> float(L1(0.5)(np.array([1.0, -2.0])))
    1.5
    """

    l1: float = 0.01

    def __call__(self, variable: Any) -> Any:
        """Return the penalty."""
        return self.l1 * np.abs(as_operand(variable)).sum()


@dataclass(frozen=True)
class L2(Regularizer):
    """A factor times the sum of squares.

    >>> float(L2(0.5)(np.array([1.0, -2.0])))
    2.5
    """

    l2: float = 0.01

    def __call__(self, variable: Any) -> Any:
        """Return the penalty."""
        return _squares(variable, factor=self.l2)


@custom_gradient
def _squares(variable: Any, *, factor: float) -> Any:
    array = as_operand(variable)
    flat = array.reshape(-1)
    total = factor * (flat @ flat)
    return total, [lambda g: array * (2 * factor * g).astype(array.dtype)]


NAMED: dict[str, type[Regularizer]] = {"l1": L1, "l2": L2}


def get(regularizer: str | Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Return a regularizer for its name; callables and None are returned unchanged.

    Raises:
        ValueError: the name is unknown.

    >>> get("l2")
    L2(l2=0.01)
    """
    name = regularizer.lower() if isinstance(regularizer, str) else regularizer
    return None if name is None else named(NAMED, name, "regularizer")
