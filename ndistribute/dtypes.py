"""What dtypes can hold and in which one is computed, with bfloat16 among the floats.

NumPy knows bfloat16 from the package ml_dtypes and counts it as bytes, of the kind ``"V"``; so its
own rules for casts let a complex number become one, and let none of it become a float16.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ndistribute.device import Array
from ndistribute.errors import MissingDependencyError

__all__ = ["can_cast", "computing_dtype", "dtype_named", "kind_of", "native", "standard"]

_FLOAT16 = np.dtype(np.float16)


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return NumPy's letter for the kind of numbers, ``"f"`` for bfloat16."""
    return standard(dtype).kind


def can_cast(given: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if a cast loses digits or range at most, no fraction and no imaginary part.

    >>> can_cast(np.dtype(float), np.dtype(np.float16)), can_cast(np.dtype(float), np.dtype(int))
    (True, False)
    """
    return given == dtype or np.can_cast(standard(given), standard(dtype), "same_kind")


@functools.lru_cache(maxsize=64)
def computing_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to compute in and to keep state in: float32 for 16-bit floats.

    >>> computing_dtype(np.dtype(np.float16)), computing_dtype(np.dtype(np.float64))
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float32) if standard(dtype).char == "e" else dtype


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, bfloat16 without its package having been imported.

    Raises:
        TypeError: there is none of that name.
        MissingDependencyError: it is bfloat16, and ml_dtypes is not installed.

    >>> dtype_named("bfloat16").itemsize
    2
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            "NumPy knows bfloat16 from a package: pip install ml_dtypes."
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def native(array: Array) -> Array:
    """Return an array in this machine's byte order: itself, unless it was made for another one.

    >>> native(np.array([1.0], ">f4"))
    array([1.], dtype=float32)
    """
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def standard(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype by whose rules NumPy may treat this one: float16 for bfloat16."""
    return _FLOAT16 if dtype.kind == "V" and dtype.name == "bfloat16" else dtype
