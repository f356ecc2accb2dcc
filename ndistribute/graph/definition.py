"""Operations as data: what a graph is made of, and what a client sends to a server.

A definition names its function; `numpy_functions.py` and `kernels.py` have the tables in which the
process that runs it looks the name up. So a graph from another process can only call what stands in
these tables. The arguments of a function are a template: nested lists of plain values, in which
``["input", k]`` stands for the operation's k-th input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from ndistribute.devices import Device, as_array, to_host
from ndistribute.dtypes import dtype_named
from ndistribute.errors import InvalidArgumentError
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.transport.codec import Array, MalformedError, Record, name_of

_PLAIN = (bool, int, float, str, type(None))
_DEEPEST = 32
_NO_TEMPLATE = "the arguments of an operation are no template."
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Value(Record, frozen=True):
    """A value of a tensor: an array, rows of one, or text; None if it has neither."""

    array: Array | None = None
    indices: Array | None = None  # The rows of `array` in an array of shape `shape`.
    shape: tuple[int, ...] = ()
    text: tuple[bytes, ...] | None = None  # The elements of an array of shape `shape`.
    encoding: str = ""  # Of text; empty: bytes.


class BodyDef(Record, frozen=True):
    """A function of tensors: a branch of `cond`, or the condition or the body of `while_loop`."""

    inputs: tuple[str, ...]  # Names of placeholders among the operations.
    operations: tuple[OperationDef, ...]
    outputs: tuple[str, ...]


class OperationDef(Record, frozen=True):
    """An operation of a graph. A tensor is named by its operation and position: ``"matmul:0"``."""

    name: str
    kind: str  # A function such as ``"numpy.matmul"``, or a kernel such as ``"assign"``.
    inputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()  # Operations that run before this one.
    outputs: _Count = 1
    device: str = ""
    call: Any = None  # The template of a function's arguments.
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)  # Plain values.
    value: Value | None = None  # Of a constant.
    bodies: tuple[BodyDef, ...] = ()
    source: str = ""  # The line of the program that made it.


class OperationInput(NamedTuple):
    """An operation's k-th input, in the arguments of a function."""

    k: int


def call_template(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the template of a call whose arguments contain `OperationInput`.

    Raises:
        TypeError: an argument is something that cannot be sent.

    >>> call_template((OperationInput(0), slice(1, None)), {"axis": 0})
    [[['input', 0], ['slice', 1, None, None]], {'axis': 0}]
    """
    return [[*map(_encoded, args)], {name: _encoded(value) for name, value in kwargs.items()}]


def filler(template: Any, count: int) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    """Return a function from an operation's inputs to the arguments of its function.

    Raises:
        MalformedError: the template is not one, or refers to an input that is not among `count`.
    """
    if template in (None, [[["input", k] for k in range(count)], {}]):
        return lambda inputs: (inputs, {})
    if not isinstance(template, list) or list(map(type, template)) != [list, dict]:
        raise MalformedError(_NO_TEMPLATE)
    args, kwargs = template
    parts = [_decoded(arg, count) for arg in args]
    named = {str(name): _decoded(value, count) for name, value in kwargs.items()}
    return lambda inputs: (
        [part(inputs) for part in parts],
        {name: part(inputs) for name, part in named.items()},
    )


def refuse_objects(node: Any) -> None:
    """Raise an error for a template whose call makes arrays of Python objects.

    To compute with them may take for ever, holds Python's lock, and cannot be ended.

    Raises:
        MalformedError: it names such a dtype, or has lists of what is neither number nor text.
    """
    parts = [*node, *node.values()] if isinstance(node, dict) else node
    is_bad = isinstance(node, str) and (node in ("sig", "signature") or _is_of_objects(node))
    if isinstance(node, list) and node[0] in ("list", "tuple"):
        kinds = [part[0] if isinstance(part, list) else part for part in node[1:]]
        is_bad = any(kind in (None, "dtype", "ellipsis", "slice") for kind in kinds)
    if is_bad:
        raise MalformedError(f"no {node!r}: operations compute with numbers and text alone.")
    for part in parts if isinstance(node, dict | list) else ():
        refuse_objects(part)


def _is_of_objects(text: str) -> bool:
    try:
        return np.dtype(text).hasobject if re.search("O|object", text) else False
    except (SyntaxError, TypeError, ValueError):  # It is no dtype.
        return False


def _encoded(value: Any) -> Any:
    if isinstance(value, OperationInput):
        return ["input", value.k]
    if isinstance(value, np.generic) and not isinstance(value, np.complexfloating):
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [type(value).__name__ if type(value) is list else "tuple", *map(_encoded, value)]
    if isinstance(value, slice):
        return ["slice", *map(_encoded, (value.start, value.stop, value.step))]
    if value is Ellipsis:
        return ["ellipsis"]
    if isinstance(value, complex | np.complexfloating):
        return ["complex", value.real, value.imag]
    if isinstance(value, np.dtype) or (isinstance(value, type) and _is_dtype(value)):
        return ["dtype", np.dtype(value).name]
    why = "graphs contain arrays, numbers, strings, slices, dtypes, and lists of these."
    raise TypeError(f"a {type(value).__name__} cannot be an argument of an operation: {why}")


def _is_dtype(kind: type) -> bool:
    return issubclass(kind, np.generic) or kind in (bool, int, float, complex)


def _decoded(node: Any, count: int, depth: int = 0) -> Callable[[Sequence[Any]], Any]:
    """Return a function from an operation's inputs to one argument."""
    if isinstance(node, _PLAIN):
        return lambda inputs: node
    if depth > _DEEPEST or not isinstance(node, list) or not node:
        raise MalformedError(_NO_TEMPLATE)
    kind, rest = node[0], node[1:]
    if kind == "input":
        k = rest[0] if len(rest) == 1 else None
        if type(k) is not int or not 0 <= k < count:
            raise MalformedError(f"an operation has no input {k!r}.")
        return lambda inputs: inputs[k]
    if kind == "ellipsis" and not rest:
        return lambda inputs: Ellipsis
    if kind == "dtype" and len(rest) == 1 and isinstance(rest[0], str):
        dtype = _dtype(rest[0])
        return lambda inputs: dtype
    made = _MADE.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise MalformedError(_NO_TEMPLATE)
    parts = [_decoded(part, count, depth + 1) for part in rest]
    return lambda inputs: made([part(inputs) for part in parts])


_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "slice": lambda parts: slice(*parts),
    "complex": lambda parts: complex(*parts),
}


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(dtype_named(name))
    except (TypeError, ValueError, ImportError) as error:
        raise MalformedError(f"no dtype {name!r} is known here.") from error


def pack(value: Any) -> Value:
    """Return the value of a tensor as a message.

    Raises:
        TypeError: the value is no array, number, text or None.
    """
    if value is None:
        return Value()
    if isinstance(value, IndexedSlices):
        rows = value.on(Device("cpu:0"))
        return Value(rows.values, rows.indices, rows.dense_shape)
    array = to_host(as_array(value))
    if array.dtype.kind in "USO":
        elements = array.reshape(-1).tolist()
        if all(isinstance(element, bytes) for element in elements):
            return Value(shape=array.shape, text=tuple(elements))
        if not all(isinstance(element, str) for element in elements):
            raise TypeError(f"an array of objects cannot be sent: {elements[:3]!r}.")
        text = tuple(element.encode() for element in elements)
        return Value(shape=array.shape, text=text, encoding="utf-8")
    return Value(array)


def sendable(name: str, value: Any) -> Value:
    """Return the value of a tensor of some name as a message to another process.

    Raises:
        InvalidArgumentError: it cannot be sent.
    """
    try:
        packed = pack(value)
        if packed.array is not None:
            name_of(packed.array.dtype)
        return packed
    except (TypeError, ValueError) as why:
        op = name.rpartition(":")[0]
        raise InvalidArgumentError(f"the value of {name!r} cannot be sent: {why}", op=op) from why


def unpack(value: Value) -> Any:
    """Return what `pack` got, as arrays."""
    if value.text is not None:
        try:
            elements = [part.decode() if value.encoding else part for part in value.text]
            # NumPy's dtype of bytes would drop zeros at their ends.
            return np.array(elements, str if value.encoding else object).reshape(value.shape)
        except ValueError as error:
            raise MalformedError(f"{len(value.text)} texts have shape {value.shape}.") from error
    if value.indices is not None and value.array is not None:
        return IndexedSlices(value.array, value.indices, value.shape)
    return value.array
