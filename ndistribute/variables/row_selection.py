"""Which rows of an array an index needs: what stands in brackets, as a plan.

``array[index]`` is ``array[rows][rest]``, where `rows` are read from wherever the array is, and
`rest` is applied to them. Pure arithmetic on the shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.device import Array, to_host

__all__ = ["Selection", "select_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Plan the read of part of an array.

    Args:
        rows: the numbers of the rows that are needed, rising and each once; None for all.
        rest: what to ask of those rows.
    """

    rows: Array | None
    rest: Any


def select_rows(index: Any, shape: tuple[int, ...]) -> Selection:
    """Return which rows an index needs.

    Args:
        index: any that NumPy takes.
        shape: of the array, with at least one axis.

    Raises:
        IndexError: a row is out of range, or a mask has another shape.

    >>> plan = select_rows([7, -1, 7], (9, 2))
    >>> plan.rows, plan.rest
    (array([7, 8]), array([0, 1, 0]))
    """
    first, *others = index if isinstance(index, tuple) and index else (index,)
    found = _selected(first, shape)
    if found is None:
        return Selection(None, index)
    rows, rest = found
    return Selection(rows, (rest, *others) if isinstance(index, tuple) else rest)


def _selected(first: Any, shape: tuple[int, ...]) -> tuple[Array, Any] | None:
    """Return the rows that the first item of an index needs, and what takes its place."""
    if first is None or first is Ellipsis or isinstance(first, bool | np.bool_ | tuple):
        return None
    if isinstance(first, slice):
        return _sliced(first, shape[0])
    array = np.asarray(to_host(first) if hasattr(first, "dtype") else first)
    if array.dtype.kind == "b" and array.ndim:
        return _masked(array, shape)
    if isinstance(first, list) and not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        return None  # NumPy itself knows what to say.
    return _numbered(array, shape[0])


def _sliced(first: slice, length: int) -> tuple[Array, Any] | None:
    numbers = range(*first.indices(length))
    if len(numbers) == length:
        return None
    if numbers.step > 0:
        return np.arange(numbers.start, numbers.stop, numbers.step), slice(None)
    return np.arange(numbers.start, numbers.stop, numbers.step)[::-1], slice(None, None, -1)


def _masked(mask: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
    if mask.shape != shape[: mask.ndim]:
        raise IndexError(
            f"a boolean index of shape {mask.shape} does not fit an array of shape {shape}: the "
            "lengths of its axes must be the same."
        )
    rows = np.flatnonzero(mask.any(axis=tuple(range(1, mask.ndim))))
    return rows, mask[rows]


def _numbered(numbers: Array, length: int) -> tuple[Array, Any]:
    outside = numbers[(numbers < -length) | (numbers >= length)]
    if outside.size:
        raise IndexError(f"index {outside.flat[0]} is out of bounds for axis 0 with size {length}.")
    wanted = numbers.astype(np.int64)
    wanted = np.where(wanted < 0, wanted + length, wanted)
    if not numbers.ndim:
        return wanted.reshape(1), 0
    rows, places = np.unique(wanted, return_inverse=True)
    return rows, places.reshape(numbers.shape)
