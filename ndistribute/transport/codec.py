"""Encoding of records and tensors into a short control record and the tensors' raw bytes.

A record is a frozen `msgspec` structure whose annotations are its schema. Decoding follows only the
schema, so a message cannot create an object of another class. An array in a record becomes a
separate buffer; the control record contains the number, dtype and shape of the buffer.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ndistribute.devices import is_device_array, to_host
from ndistribute.dtypes import PORTABLE, dtype_named

MAX_DIMENSIONS = 32
Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class MalformedError(ValueError):
    """The received bytes violate the format of this package, or exceed a limit."""


class Record(
    msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True, eq=False
):
    """The base class of all control records."""


class _Described(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The description of an array in a control record."""

    number: _Count
    dtype: str
    shape: _Shape


# `now`: the buffers of the record that the current thread encodes or decodes.
_buffers = threading.local()


def encode(record: Record) -> tuple[bytes, list[Buffer]]:
    """Return a record's control bytes and its arrays' data, copied only if not contiguous.

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
    """Decodes records of one class, or of a union of classes."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            kinds, dec_hook=_read_array
        )

    def decode(self, control: Buffer, buffers: Sequence[Buffer] = ()) -> T:
        """Return the decoded record; its arrays are views of the buffers."""
        _buffers.now = list(buffers)
        try:
            return self._decoder.decode(control)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedError(f"a message differs from what was expected: {error}") from error
        finally:
            _buffers.now = []


def _write_other(value: Any) -> Any:
    """Return a value to send in place of a NumPy number, the length of an axis, or an array."""
    if is_device_array(value):
        value = to_host(value)
    if not isinstance(value, np.ndarray):
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, int):
            return int(value)
        raise NotImplementedError(f"a {type(value).__name__} cannot be sent.")
    name = name_of(value.dtype)
    if value.ndim > MAX_DIMENSIONS:
        raise ValueError(
            f"an array of {value.ndim} dimensions exceeds the limit of {MAX_DIMENSIONS}."
        )
    flat = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1)
    buffers = _buffers.now
    buffers.append(flat.view(np.uint8).data)
    return (len(buffers) - 1, name, value.shape)


def _read_array(kind: Any, node: Any) -> Any:
    described = msgspec.convert(node, _Described)
    if described.number >= len(_buffers.now):
        raise MalformedError(f"buffer {described.number} of {len(_buffers.now)} is missing.")
    data, dtype, shape = _buffers.now[described.number], _dtype_of(described.dtype), described.shape
    # NumPy multiplies the dimensions even if the array has no elements.
    spanned = math.prod(n for n in shape if n) * dtype.itemsize
    if spanned >= 1 << 62 or (0 if 0 in shape else spanned) != len(data):
        raise MalformedError(f"{len(data)} bytes cannot be {dtype} of shape {shape}.")
    return np.ndarray(shape, dtype, data)


@functools.lru_cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in messages; a ValueError says which ones can be sent."""
    if dtype.name not in PORTABLE:
        what = f"an array of dtype {dtype} cannot be sent."
        raise ValueError(f"{what} Convert it to one of {', '.join(sorted(PORTABLE))}.")
    return dtype.name


@functools.lru_cache
def _dtype_of(name: str) -> np.dtype[Any]:
    if name not in PORTABLE:
        raise ValueError(f"dtype {name!r} cannot be sent.")
    try:
        return dtype_named(name).newbyteorder("<")
    except ImportError as error:
        raise ValueError(str(error)) from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_write_other)
