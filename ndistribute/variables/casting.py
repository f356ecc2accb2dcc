"""Which numbers an array of a dtype can take without losing anything but digits.

A variable keeps its dtype for life, so what is written to it is cast; a cast that would cut off a
fraction, an imaginary part or the high digits of an integer is an error instead. Variables, and
what changes them, are in this machine's byte order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.device import Array, as_array, device_of
from ndistribute.stream import working_on

__all__ = ["cast", "native"]


def native(array: Array) -> Array:
    """Return an array in this machine's byte order: itself, unless it was made for another one.

    >>> native(np.array([1.0], ">f4"))
    array([1.], dtype=float32)
    """
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def cast(value: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Return a value as an array of a dtype.

    Args:
        value: an array or number.
        dtype: the dtype that is wanted.
        what: what is about to happen, for the error.

    Raises:
        ValueError: the dtype can not hold the value.

    >>> cast([1, 2], np.dtype(np.uint8), "assign")
    array([1, 2], dtype=uint8)
    """
    array = as_array(value)
    if array.dtype == dtype:
        return array
    with working_on(device_of(array)):
        if not _fits(value, array, dtype):
            raise ValueError(
                f"{what}: {array.dtype} does not fit {dtype}, the cast would lose information. "
                "Convert the value with astype first. Nothing has changed."
            )
        return array.astype(dtype)


def _fits(value: Any, array: Array, dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind == "O":  # An integer of more than 64 bits, or no number at all.
        return False
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        # Only the values say whether integers fit a narrower or an unsigned dtype.
        safe = np.can_cast(array.dtype, dtype)
        return safe or bool((array.astype(dtype) == array).all())
    if isinstance(value, bool | int | float | complex):
        # A number of Python's has a kind, but no width of its own.
        return np.result_type(type(value), dtype).kind == dtype.kind
    return np.can_cast(array.dtype, dtype, "same_kind")
