"""How float32 values become 16 bits for the wire, and float32 again.

Half the bytes travel; what is added stays float32. Both codes round to the nearest value, ties to
even, and keep infinities and NaN. float16 has the finer steps, bfloat16 the whole range of
float32; above 65504 a float16 is infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ndistribute.device import Array

__all__ = ["Codec", "codec_for"]

_DECODED = np.dtype(np.float32)


class Codec(NamedTuple):
    """Name a code for float32 arrays: its dtype on the wire, and how to get there and back."""

    dtype: np.dtype[Any]
    encode: Callable[[Array, Array], None]
    decode: Callable[[Array, Array], None]


def codec_for(wire_dtype: str | None, dtype: np.dtype[Any]) -> Codec | None:
    """Return how arrays of a dtype are compressed, or None where they travel as they are.

    Args:
        wire_dtype: ``"float16"``, ``"bfloat16"`` or None.
        dtype: the dtype in which values are combined; only float32 is compressed.

    Raises:
        ValueError: the code is unknown.

    >>> codec = codec_for("bfloat16", np.dtype(np.float32))
    >>> wire, back = np.empty(3, codec.dtype), np.empty(3, np.float32)
    >>> codec.encode(np.float32([1.0, 1.01, np.inf]), wire)
    >>> codec.decode(wire, back)
    >>> back.tolist()
    [1.0, 1.0078125, inf]
    """
    if wire_dtype is None:
        return None
    if wire_dtype not in _CODECS:
        raise ValueError(
            f"wire_dtype must be None, {' or '.join(map(repr, _CODECS))}, got {wire_dtype!r}."
        )
    return _CODECS[wire_dtype] if dtype == _DECODED else None


def _encode_float16(values: Array, out: Array) -> None:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out[...] = values


def _decode_float16(wire: Array, out: Array) -> None:
    out[...] = wire


def _encode_bfloat16(values: Array, out: Array) -> None:
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


def _decode_bfloat16(wire: Array, out: Array) -> None:
    bits = out.view(np.uint32)
    bits[...] = wire
    bits <<= 16


_CODECS = {
    "float16": Codec(np.dtype(np.float16), _encode_float16, _decode_float16),
    "bfloat16": Codec(np.dtype(np.uint16), _encode_bfloat16, _decode_bfloat16),
}
