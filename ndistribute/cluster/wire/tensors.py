"""Tensors as bytes: a small header and the elements as they lie in memory.

What a process sends to a server, and what it gets back, is a message: a JSON head and tensors. All
sizes in one are checked against a limit, and against the bytes that really came, before anything
is allocated; the dtypes are those of a list, so nothing that comes over a wire is ever run.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "DTYPES",
    "HEAD_LIMIT_BYTES",
    "PART_BYTES",
    "Array",
    "Buffer",
    "MalformedError",
    "decode",
    "encode",
    "pack",
    "parts",
    "unpack",
]

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

MAX_DIMENSIONS = 32
PART_BYTES = 2 << 20
"""The most that a part holds; with two parts or more, each holds more than half of it."""
HEAD_LIMIT_BYTES = 1 << 20

# The place in the list is the code on the wire: append, never reorder.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
)
_CODES = {name: code for code, name in enumerate(DTYPES)}
_ALIGNMENT = 8
_TENSOR = struct.Struct("<4sBB2xQ")  # magic, dtype, dimensions, bytes of data; then the shape
_MESSAGE = struct.Struct("<4sIII")  # magic, bytes of the head, tensors, zero
_TENSOR_MAGIC = b"NDT1"
_MESSAGE_MAGIC = b"NDM1"


class MalformedError(ValueError):
    """Say that bytes are not what this module writes, or describe more than is allowed."""


def encode(array: Array) -> list[Buffer]:
    """Return a tensor as buffers to send one after the other.

    Args:
        array: its data is not copied if it is contiguous and of this machine's byte order, so do
            not change it before the buffers are sent.

    Raises:
        ValueError: the dtype is not one that travels, or there are too many dimensions.

    >>> header, data = encode(np.array([1.0, 2.0]))
    >>> len(header), data.nbytes
    (24, 16)
    """
    array = np.asarray(array)
    code = _code(array.dtype)
    if code is None:
        raise ValueError(
            f"an array of dtype {array.dtype} can not be sent. Convert it to one of "
            f"{', '.join(DTYPES)}."
        )
    if array.ndim > MAX_DIMENSIONS:
        raise ValueError(f"an array of {array.ndim} dimensions: at most {MAX_DIMENSIONS} travel.")
    flat = np.ascontiguousarray(array, _native(array.dtype)).reshape(-1)
    header = _TENSOR.pack(_TENSOR_MAGIC, code, array.ndim, flat.nbytes)
    return [header + struct.pack(f"<{array.ndim}Q", *array.shape), flat.view(np.uint8).data]


def decode(buffer: Buffer, limit_bytes: int) -> Array:
    """Return the tensor that a buffer holds, as a view of it: nothing is copied.

    Args:
        buffer: what `encode` returned, joined.
        limit_bytes: the most that the data may take.

    Raises:
        MalformedError: the buffer is something else, is cut short, or the data takes more.

    >>> decode(b"".join(encode(np.float32([[1, 2]]))), limit_bytes=100)
    array([[1., 2.]], dtype=float32)
    """
    view = _bytes_of(buffer)
    array, end = _take_tensor(view, 0, limit_bytes)
    if end != len(view):
        raise MalformedError(f"{len(view) - end} byte(s) follow the tensor.")
    return array


def pack(
    head: bytes, tensors: Sequence[Array], head_limit_bytes: int = HEAD_LIMIT_BYTES
) -> list[Buffer]:
    """Return a message of a head and tensors as buffers to send one after the other.

    Args:
        head: JSON.
        tensors: not copied, see `encode`.
        head_limit_bytes: the most that the head may take; more than usual is for files.

    >>> unpack(b"".join(pack(b"[]", [np.arange(3)])), limit_bytes=1000)
    (b'[]      ', [array([0, 1, 2])])
    """
    head += b" " * (-len(head) % _ALIGNMENT)
    if len(head) > head_limit_bytes:
        raise ValueError(f"a head of {len(head)} bytes: at most {head_limit_bytes} are taken.")
    buffers: list[Buffer] = [_MESSAGE.pack(_MESSAGE_MAGIC, len(head), len(tensors), 0) + head]
    for tensor in tensors:
        header, data = encode(tensor)
        buffers += [header, data]
        if padding := -len(data) % _ALIGNMENT:
            buffers.append(bytes(padding))
    return buffers


def unpack(
    buffer: Buffer, limit_bytes: int, head_limit_bytes: int = HEAD_LIMIT_BYTES
) -> tuple[bytes, list[Array]]:
    """Return the head and the tensors of a message; the tensors are views of the buffer.

    Args:
        buffer: what `pack` returned, joined.
        limit_bytes: the most that the whole message may take.
        head_limit_bytes: the most that its head may take.

    Raises:
        MalformedError: the buffer is something else, is cut short, or takes more.
    """
    view = _bytes_of(buffer)
    if len(view) > limit_bytes:
        raise MalformedError(f"a message of {len(view)} bytes, the limit is {limit_bytes}.")
    if len(view) < _MESSAGE.size:
        raise MalformedError(f"a message of {len(view)} bytes is cut short.")
    magic, head_bytes, count, zero = _MESSAGE.unpack_from(view)
    start = _MESSAGE.size + head_bytes
    if magic != _MESSAGE_MAGIC or zero or head_bytes % _ALIGNMENT:
        raise MalformedError("the bytes do not begin like a message.")
    if head_bytes > head_limit_bytes or start + count * _TENSOR.size > len(view):
        raise MalformedError(
            f"a head of {head_bytes} bytes and {count} tensor(s) do not fit {len(view)} bytes."
        )
    tensors = []
    end = start
    for _ in range(count):
        tensor, end = _take_tensor(view, end, limit_bytes)
        tensors.append(tensor)
        end += -end % _ALIGNMENT
    if end != len(view):
        raise MalformedError(f"a message of {end} bytes came as {len(view)}.")
    return bytes(view[_MESSAGE.size : start]), tensors


def parts(nbytes: int, part_bytes: int = PART_BYTES) -> list[slice]:
    """Return how to cut a long message into about equal parts, sent several at a time.

    Args:
        nbytes: what the message has.
        part_bytes: the most that a part holds.

    >>> [part.stop - part.start for part in parts(5_000_000)]
    [1666688, 1666688, 1666624]
    """
    count = -(-nbytes // part_bytes)
    if count == 0:
        return []
    length = -(-nbytes // count)
    length += -length % 64
    return [slice(at, min(at + length, nbytes)) for at in range(0, nbytes, length)]


def _take_tensor(view: memoryview, at: int, limit_bytes: int) -> tuple[Array, int]:
    """Return the tensor at a place, and where it ends."""
    if at + _TENSOR.size > len(view):
        raise MalformedError(f"the header of a tensor is cut short at byte {len(view)}.")
    magic, code, dimensions, nbytes = _TENSOR.unpack_from(view, at)
    start = at + _TENSOR.size + 8 * dimensions
    if magic != _TENSOR_MAGIC or code >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
        raise MalformedError(f"the bytes at {at} do not begin like a tensor.")
    if nbytes > limit_bytes:
        raise MalformedError(f"a tensor of {nbytes} bytes, the limit is {limit_bytes}.")
    if start + nbytes > len(view):
        raise MalformedError(
            f"a tensor of {nbytes} bytes is cut short: {max(0, len(view) - start)} came."
        )
    shape = struct.unpack_from(f"<{dimensions}Q", view, at + _TENSOR.size)
    dtype = _dtype(DTYPES[code])
    # An empty array has to have dimensions that NumPy can multiply as well.
    spanned = math.prod(filter(None, shape)) * dtype.itemsize
    if math.prod(shape) * dtype.itemsize != nbytes or spanned > sys.maxsize:
        raise MalformedError(f"{nbytes} bytes can not be {DTYPES[code]} of shape {shape}.")
    return np.ndarray(shape, dtype, view, start), start + nbytes


def _bytes_of(buffer: Buffer) -> memoryview:
    return memoryview(buffer).cast("B").toreadonly()


@functools.lru_cache
def _code(dtype: np.dtype[Any]) -> int | None:
    return _CODES.get(dtype.name)


@functools.lru_cache
def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if sys.byteorder == "big":
        return dtype.newbyteorder("<")
    return dtype.newbyteorder("=")


@functools.cache
def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name).newbyteorder("<")
    except TypeError as error:  # NumPy knows it once a package that defines it is imported.
        raise MalformedError(
            f"a tensor of {name} came, which NumPy alone does not know. Import ml_dtypes before."
        ) from error
