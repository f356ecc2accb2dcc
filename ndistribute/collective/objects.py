"""Exchange of Python values between the processes of a job, without pickle.

A value is encoded as a record of names, numbers and bytes. Decoding creates only plain values,
arrays and containers of them; a class of the user must exist in this process as a named tuple or
dataclass with the same fields. Decoding imports nothing.
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
from ndistribute.transport.codec import Decoder, MalformedError, Record, encode
from ndistribute.transport.failures import Failure, error_of, failure_of

_ERRORS = {"TypeError": TypeError, "ValueError": ValueError, "": ValueError}
_PLAIN = (str, int, float, type(None))  # bool is an int.


class ProcessGroup(Protocol):
    """The processes of a job; a `Communicator` has this interface."""

    rank: int

    def all_gather(self, value: Any, axis: int) -> Any: ...


class PlainSpec(Record, frozen=True):
    """A plain value as JSON, whose integers have any length."""

    text: str


class ArraySpec(Record, frozen=True):
    """An array, or a NumPy scalar as an array without axes; the dtype is JSON."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""


class NestSpec(Record, frozen=True):
    """A container."""

    kind: str  # "tuple", "list", "dict", or the module and name of a class.
    keys: tuple[str | int | float | bool | None, ...]  # Of a dict, or the fields of the class.
    items: tuple[PlainSpec | ArraySpec | NestSpec, ...]


Spec = PlainSpec | ArraySpec | NestSpec | Failure
_decoder: Decoder[Spec] = Decoder(Spec)


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
    except Exception as error:  # Any error, because the others wait.
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
    return encode(_spec_of(value))[0]


def unpack(data: bytes, teller: str = "") -> Any:
    """Return the value of bytes from `pack`; its arrays are read-only.

    Raises:
        MalformedError: the bytes are invalid, or name a class that is unknown here.
        ValueError, TypeError: the value is such an error.
    """
    try:
        spec = _decoder.decode(data)
        if not isinstance(spec, Failure):
            return _value_of(spec)
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise MalformedError(f"{teller}its value cannot be decoded: {error}") from error
    raise error_of(spec, _ERRORS, teller)


def _spec_of(value: Any) -> PlainSpec | ArraySpec | NestSpec:
    kind: Any = type(value)
    if isinstance(value, _PLAIN) and not isinstance(value, np.generic):
        return PlainSpec(json.dumps(value))
    if kind is dict:
        keys = tuple(value)
        if not all(isinstance(key, _PLAIN) for key in keys):
            what = f"the keys of a dict are {keys!r}: where workers tell each other of it,"
            raise ValueError(f"{what} they must be strings or numbers.")
        return NestSpec("dict", keys, tuple(map(_spec_of, value.values())))
    if kind in (tuple, list):
        return NestSpec(kind.__name__, (), tuple(map(_spec_of, value)))
    if fields := _fields_of(kind):
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _class_named(name, fields) is not kind:
            what = f"other workers cannot find {kind!r}: define it at the top of a module,"
            raise ValueError(f"{what} as a named tuple or a dataclass.")
        return NestSpec(name, fields, tuple(_spec_of(getattr(value, field)) for field in fields))
    array = to_host(as_array(value))
    if array.dtype.hasobject and array.size:
        what = f"a {kind.__name__} of dtype {array.dtype} cannot travel between processes:"
        raise TypeError(f"{what} pass numbers or arrays of numbers.")
    data = b"" if array.dtype.hasobject else array.tobytes()
    # Dtypes of other packages, such as bfloat16, are known by name only.
    is_foreign = array.dtype.isbuiltin == 2
    dtype = array.dtype.name if is_foreign else np.lib.format.dtype_to_descr(array.dtype)
    return ArraySpec(json.dumps(dtype), array.shape, data)


def _value_of(spec: PlainSpec | ArraySpec | NestSpec) -> Any:
    if isinstance(spec, PlainSpec):
        return json.loads(spec.text)
    if isinstance(spec, ArraySpec):
        descr = _descr(json.loads(spec.dtype))
        simple = isinstance(descr, str)
        dtype = dtype_named(descr) if simple else np.lib.format.descr_to_dtype(descr)
        if spec.data and not dtype.hasobject:
            return np.frombuffer(spec.data, dtype).reshape(spec.shape)[()]
        if math.prod(spec.shape):
            raise ValueError(f"an array of shape {spec.shape} without its elements.")
        return np.empty(spec.shape, dtype)
    items = [_value_of(item) for item in spec.items]
    if spec.kind in ("tuple", "list"):
        return tuple(items) if spec.kind == "tuple" else items
    named: dict[Any, Any] = dict(zip(spec.keys, items, strict=True))
    if spec.kind == "dict":
        return named
    kind = _class_named(spec.kind, spec.keys)
    if kind is None:
        raise ValueError(f"{spec.kind!r} with the fields {spec.keys} is no class of this process.")
    return kind(**named)


def _descr(node: Any) -> Any:
    """Return the description of a dtype, whose tuples JSON has turned into lists.

    `ast.literal_eval` would keep them, but it fails at random on several threads in Python 3.11.
    """
    if not isinstance(node, list):
        return node
    if all(isinstance(field, list) for field in node):
        return [tuple(map(_descr, field)) for field in node]
    return tuple(node)


def _class_named(name: str, fields: tuple[Any, ...]) -> Any:
    """Return this process's named tuple or dataclass with these fields, or None."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, "__dict__", {}).get(part)  # Runs no code of the module.
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
