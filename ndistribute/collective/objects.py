"""Exchange of Python values between the processes of a job, without pickle.

A value is encoded as JSON and the bytes of its arrays. Decoding creates only plain values, arrays
and containers of them, and imports nothing. A user's class must exist in this process as a named
tuple or dataclass with the same fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any, Protocol

import numpy as np

from ndistribute.devices import as_array, to_host
from ndistribute.dtypes import dtype_named
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.plain import Encoder
from ndistribute.transport.codec import Decoder, MalformedError, Record, encode
from ndistribute.transport.failures import Failure, error_of, failure_of

_ERRORS = {"TypeError": TypeError, "ValueError": ValueError, "": ValueError}


class ProcessGroup(Protocol):
    """The processes of a job; a `Communicator` has this interface."""

    @property
    def rank(self) -> int: ...

    def all_gather(self, value: Any, axis: int) -> Any: ...


class PackedObject(Record, frozen=True):
    """A value: its node as JSON, with integers of any length, and the data of its arrays."""

    text: str
    arrays: tuple[bytes, ...] = ()


_decoder: Decoder[PackedObject | Failure] = Decoder(PackedObject | Failure)


def all_gather_object(group: ProcessGroup, value: Any) -> list[Any]:
    """Return the values of all processes in rank order; all processes must call this.

    A value consists of plain values and arrays in tuples, lists, dicts, named tuples and
    dataclasses; or it is a ValueError or TypeError that all processes should raise.

    Raises:
        ValueError: on all processes, if one passed a value that others cannot create, or an error.
        TypeError: on all processes, if an array contains objects.
    """
    try:
        if isinstance(value, Exception):
            raise value
        encoded = pack(value)
    except Exception as error:  # Every error is sent, because the other processes wait.
        encoded = encode(failure_of(error, _ERRORS))[0]
    data = np.frombuffer(encoded, np.uint8)
    sizes, joined = group.all_gather((np.array([data.size]), data), axis=0)
    blobs = np.split(joined, np.cumsum(sizes)[:-1])
    return [unpack(blob.tobytes(), f"worker {rank}: ") for rank, blob in enumerate(blobs)]


def pack(value: Any) -> bytes:
    """Return a value as bytes.

    >>> unpack(pack({"x": np.ones(2, np.float32), "y": (1, None)}))
    {'x': array([1., 1.], dtype=float32), 'y': (1, None)}
    """
    arrays: list[bytes] = []
    node = _Objects(arrays).encode(value)
    return encode(PackedObject(json.dumps(node), tuple(arrays)))[0]


def unpack(data: bytes, teller: str = "") -> Any:
    """Return the value of bytes from `pack`; its arrays are read-only.

    Raises:
        MalformedError: the bytes are invalid, or name a class that is unknown here.
        ValueError, TypeError: the value is one of these errors.
    """
    try:
        packed = _decoder.decode(data)
        if isinstance(packed, PackedObject):
            return _Objects(packed.arrays).decode(json.loads(packed.text))
    except Exception as error:
        raise MalformedError(f"{teller}its value cannot be decoded: {error}") from error
    raise error_of(packed, _ERRORS, teller)


class _Objects(Encoder):
    """Encode arrays as indices of their data, and named tuples and dataclasses by their names."""

    kinds = frozenset({"float", "tuple", "dict"})
    others = ("$array", "$class")

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays

    def encode_other(self, value: Any, path: Any) -> Any:
        kind: Any = type(value)
        if fields := _fields_of(kind):
            name = f"{kind.__module__}:{kind.__qualname__}"
            if _class_named(name, fields) is not kind:
                what = f"other workers cannot find {kind!r}: define it at the top of a module,"
                raise ValueError(f"{what} as a named tuple or a dataclass.")
            values = [self.encode(getattr(value, field), (path, field)) for field in fields]
            return {"$class": [name, fields, values]}
        if isinstance(value, str | int | float) and not isinstance(value, np.generic):
            return super().encode_other(value, path)
        array = to_host(as_array(value))
        if array.dtype.hasobject and array.size:
            what = f"a {kind.__name__} of dtype {array.dtype} cannot travel between processes:"
            what = f"{self.name(path)}: {what}" if path else what
            raise TypeError(f"{what} pass numbers or arrays of numbers.")
        self._arrays.append(b"" if array.dtype.hasobject else array.tobytes())
        # Dtypes of other packages, such as bfloat16, are known by name only.
        is_foreign = array.dtype.isbuiltin == 2
        dtype = array.dtype.name if is_foreign else np.lib.format.dtype_to_descr(array.dtype)
        return {"$array": [len(self._arrays) - 1, self.encode(dtype), list(array.shape)]}

    def decode_other(self, tag: str, node: dict[str, Any]) -> Any:
        first, second, third = self.decode(node[tag])
        if tag == "$array":
            return _array_of(self._arrays[first], second, third)
        kind = _class_named(first, tuple(second))
        if kind is None:
            raise ValueError(f"{first!r} with the fields {second} is not a class of this process.")
        return kind(**dict(zip(second, third, strict=True)))


def _array_of(data: bytes, descr: Any, shape: Any) -> Any:
    dtype = dtype_named(descr) if isinstance(descr, str) else np.lib.format.descr_to_dtype(descr)
    if data and not dtype.hasobject:
        return np.frombuffer(data, dtype).reshape(shape)[()]
    if math.prod(shape):
        raise ValueError(f"an array of shape {shape} came without its elements.")
    return np.empty(shape, dtype)


def _class_named(name: str, fields: tuple[Any, ...]) -> Any:
    """Return this process's named tuple or dataclass with these fields, or None."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, "__dict__", {}).get(part)  # This runs no code of the module.
    known = isinstance(value, type) and fields and _fields_of(value) == fields
    return value if known else None


def _fields_of(kind: type) -> tuple[str, ...]:
    if kind is IndexedSlices:
        return ("values", "indices", "dense_shape")
    if kind is Failure:
        return Failure.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(getattr(kind, "_fields", ())) if issubclass(kind, tuple) else ()
