"""Rules for casts between dtypes and for the dtypes of computation, including bfloat16.

The package ml_dtypes adds bfloat16 to NumPy, but NumPy treats it as bytes, of the kind ``"V"``. So
NumPy's own rules allow casts from complex numbers to bfloat16, and no cast from bfloat16 to
float16.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ndistribute.devices import Array
from ndistribute.errors import MissingDependencyError

_FLOAT16 = np.dtype(np.float16)
PORTABLE = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 bfloat16 complex64 complex128".split()
)
"""The names of the dtypes that files and messages may contain."""


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return NumPy's letter for a dtype's kind of numbers, ``"f"`` for bfloat16."""
    return standard(dtype).kind


def can_cast(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if a cast keeps fractions and imaginary parts; it may lose digits or range."""
    return source == dtype or np.can_cast(standard(source), standard(dtype), "same_kind")


@functools.lru_cache(maxsize=64)
def computing_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for computations and state: float32 for 16-bit floats, others unchanged."""
    return np.dtype(np.float32) if standard(dtype).char == "e" else dtype


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; for bfloat16, import ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            "NumPy needs a package for bfloat16: pip install ml_dtypes."
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def native(array: Array) -> Array:
    """Return an array in this machine's byte order, without a copy if it has that order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def standard(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype whose NumPy rules apply: float16 for bfloat16, others unchanged."""
    return _FLOAT16 if dtype.kind == "V" and dtype.name == "bfloat16" else dtype
