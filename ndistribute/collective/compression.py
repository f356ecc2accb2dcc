"""Conversion of float32 values to 16 bits for the wire, and back.

It halves the bytes that are sent; sums are still computed in float32. Both formats round to
nearest, ties to even, and keep infinities and NaN. float16 is more precise; bfloat16 has the range
of float32, while values above 65504 are infinite in float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.device import Array

__all__ = ["compress", "compressed_dtype", "decompress"]

# NumPy has no bfloat16: its bits are sent as integers.
_ON_THE_WIRE = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}


def compressed_dtype(wire_dtype: str | None, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype in which arrays of `dtype` are sent, or None if they are sent unchanged.

    Only float32 is compressed.

    >>> wire = np.empty(3, compressed_dtype("bfloat16", np.dtype("f4")))
    >>> decompress(compress(np.float32([1.0, 1.01, np.inf]), wire), np.empty(3, "f4")).tolist()
    [1.0, 1.0078125, inf]
    """
    return _ON_THE_WIRE[wire_dtype] if wire_dtype and dtype == np.float32 else None


def compress(values: Array, out: Array) -> Array:
    """Round float32 values into `out`, an array of a `compressed_dtype`, and return it."""
    if out.dtype == np.float16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out[...] = values
        return out
    bits = values.view(np.uint32)
    # Add just under half a unit of the last kept bit, plus that bit: the sum carries into the upper
    # half exactly if rounding to nearest, ties to even, rounds up.
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out[...] = rounded
    unordered = np.isnan(values)
    if unordered.any():
        out[unordered] = 0x7FC0  # The carry may have turned a NaN into an infinity.
    return out


def decompress(wire: Array, out: Array) -> Array:
    """Convert a compressed array to float32 in `out`, and return it."""
    if wire.dtype == np.float16:
        out[...] = wire
        return out
    bits = out.view(np.uint32)
    bits[...] = wire
    bits <<= 16
    return out
