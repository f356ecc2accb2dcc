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
    """Return in which dtype arrays travel that are compressed, or None where they are not.

    Args:
        wire_dtype: ``"float16"``, ``"bfloat16"`` or None.
        dtype: the dtype in which values are combined; only float32 is compressed.

    Raises:
        ValueError: the name is unknown.

    >>> wire, back = np.empty(3, compressed_dtype("bfloat16", np.dtype("f4"))), np.empty(3, "f4")
    >>> compress(np.float32([1.0, 1.01, np.inf]), wire)
    >>> decompress(wire, back)
    >>> back.tolist()
    [1.0, 1.0078125, inf]
    """
    if wire_dtype is not None and wire_dtype not in _ON_THE_WIRE:
        raise ValueError(
            f"wire_dtype must be None, {' or '.join(map(repr, _ON_THE_WIRE))}, got {wire_dtype!r}."
        )
    return _ON_THE_WIRE[wire_dtype] if wire_dtype and dtype == np.float32 else None


def compress(values: Array, out: Array) -> None:
    """Round float32 values into an array of a `compressed_dtype`."""
    if out.dtype == np.float16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out[...] = values
        return
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


def decompress(wire: Array, out: Array) -> None:
    """Write the values of a compressed array into one of float32."""
    if wire.dtype == np.float16:
        out[...] = wire
        return
    bits = out.view(np.uint32)
    bits[...] = wire
    bits <<= 16
