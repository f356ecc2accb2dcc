"""Writes of rules to a part of an array, which are recorded if one of the arrays is tracked.

Rules get tracked arrays when a tape records the backward pass of another one. Then nothing is
written in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import Shape, add_at, zeros
from ndistribute.devices import Array, as_array


def is_tracked(value: Any) -> bool:
    """Return True for a tracked array."""
    return hasattr(value, "placed")


def as_operand(value: Any) -> Any:
    """Return an array for a value; a tracked one for a tracked array or a watched variable."""
    value = value.tracked_value() if hasattr(value, "tracked_value") else value
    return value if is_tracked(value) else as_array(value)


def added(total: Array, index: Any, values: Array, distinct: bool = False) -> Array:
    """Return an array with values added at an index: the same array, unless one is tracked.

    With `distinct`, the index selects no element twice.
    """
    plain = type(values) is type(total) is np.ndarray
    if not plain and (is_tracked(values) or is_tracked(total)):
        return total + placed(values, total.shape, index, distinct)
    if distinct:
        total[index] += values
    else:
        add_at(total, index, values)
    return total


def placed(values: Any, shape: Shape, index: Any, distinct: bool = False) -> Array:
    """Return zeros with values added at an index."""
    if type(values) is not np.ndarray and is_tracked(values):
        tracked: Array = values.placed(shape, index, distinct)
        return tracked
    whole = zeros(values, shape)
    if not distinct:
        return added(whole, index, values)
    whole[index] = values
    return whole
