"""How float32 values become 16 bits for the wire, and float32 again.

Half the bytes travel; what is added stays float32. Both forms round to the nearest value, ties to
even, and keep infinities and NaN. float16 has the finer steps, bfloat16 the whole range of
float32; above 65504 a float16 is infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.device import Array

__all__ = ["compress", "compressed_dtype", "decompress"]

# NumPy has no bfloat16: its bits travel as integers.
_ON_THE_WIRE = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}


def compressed_dtype(wire_dtype: str | None, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return in which dtype arrays travel that are combined in another, None if in that one.

    Only float32 is compressed.

    >>> wire = np.empty(3, compressed_dtype("bfloat16", np.dtype("f4")))
    >>> decompress(compress(np.float32([1.0, 1.01, np.inf]), wire), np.empty(3, "f4")).tolist()
    [1.0, 1.0078125, inf]
    """
    return _ON_THE_WIRE[wire_dtype] if wire_dtype and dtype == np.float32 else None


def compress(values: Array, out: Array) -> Array:
    """Round float32 values into an array of a `compressed_dtype`, and return that."""
    if out.dtype == np.float16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out[...] = values
        return out
    bits = values.view(np.uint32)
    # Adding just below half of the last kept place, and one more where that place is odd, carries
    # into the kept half exactly when rounding to nearest, ties to even, goes up.
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
    """Write the values of a compressed array into one of float32, and return that."""
    if wire.dtype == np.float16:
        out[...] = wire
        return out
    bits = out.view(np.uint32)
    bits[...] = wire
    bits <<= 16
    return out
