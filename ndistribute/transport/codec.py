"""Records and tensors as the parts of a frame: a short control record, and the tensors' raw bytes.

A record is a frozen `msgspec` structure whose annotations are its schema: what comes is read by
them alone, so no message can make an object that they do not name. An array in a record becomes a
buffer beside it, of which the record holds the number, the dtype and the shape.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

MAX_DIMENSIONS = 32
DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 bfloat16 complex64 complex128".split()
)


class MalformedError(ValueError):
    """Say that bytes are not what this package writes, or describe more than is allowed."""


class Record(
    msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True, eq=False
):
    """Be the base of everything that travels as a control record."""


_buffers = threading.local()
"""`now`: the buffers of the record that this thread encodes or decodes."""


def encode(record: Record) -> tuple[bytes, list[Buffer]]:
    """Return a record's control bytes, and its arrays' data: copied only where not contiguous.

    >>> class Scale(Record):
    ...     by: Array
    >>> control, buffers = encode(Scale(np.array([1.0, 2.0])))
    >>> Decoder(Scale).decode(control, buffers).by
    array([1., 2.])
    """
    buffers: list[Buffer] = []
    _buffers.now = buffers
    try:
        return _encoder.encode(record), buffers
    finally:
        _buffers.now = []


class Decoder(Generic[T]):
    """Read records of a class, or of a union of some."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            kinds, dec_hook=_read_array
        )

    def decode(self, control: Buffer, buffers: Sequence[Buffer] = ()) -> T:
        """Return the record that `encode` was given; its arrays are views of the buffers."""
        _buffers.now = list(buffers)
        try:
            return self._decoder.decode(control)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedError(f"a message is not what was expected: {error}") from error
        finally:
            _buffers.now = []


def nbytes_of(buffer: Buffer) -> int:
    """Return how many bytes a buffer has."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _write_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a {type(value).__name__} can not be sent.")
    name = _name_of(value.dtype)
    if value.ndim > MAX_DIMENSIONS:
        raise ValueError(f"an array of {value.ndim} dimensions: at most {MAX_DIMENSIONS} travel.")
    flat = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1)
    buffers = _buffers.now
    buffers.append(flat.view(np.uint8).data)
    return (len(buffers) - 1, name, value.shape)


def _read_array(kind: Any, node: Any) -> Any:
    try:
        number, name, shape = node
        data = _buffers.now[number]
        nbytes = nbytes_of(data)
        plain = number >= 0 and len(shape) <= MAX_DIMENSIONS and all(type(n) is int for n in shape)
        if plain and min(shape, default=0) >= 0:
            # An array without elements needs dimensions that NumPy can multiply all the same.
            spanned = math.prod(n for n in shape if n) * _dtype_of(name).itemsize
            if spanned < 1 << 62 and (spanned if 0 not in shape else 0) == nbytes:
                return np.ndarray(shape, _dtype_of(name), data)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise MalformedError(f"an array is described by {str(node)[:80]!r}: {error}") from error
    raise MalformedError(f"{nbytes} bytes can not be {name} of shape {str(shape)[:80]}.")


@functools.lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    if dtype.name not in DTYPES:
        raise ValueError(
            f"an array of dtype {dtype} can not be sent. Convert it to one of "
            f"{', '.join(sorted(DTYPES))}."
        )
    return dtype.name


@functools.lru_cache
def _dtype_of(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise ValueError(f"no dtype {name!r} travels.")
    try:
        return np.dtype(name).newbyteorder("<")
    except TypeError as error:  # NumPy knows it once a package that defines it is imported.
        raise ValueError(f"NumPy alone does not know {name}: import ml_dtypes before.") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_write_array)
