"""Operations as data: the parts of a graph, in the form that a client sends to a server.

A definition names its function. The process that runs it looks the name up in the tables of
`numpy_functions.py` and `kernels.py`. So a graph from another process can only call the functions
of these tables. The arguments of a function are a template: a node of plain values, in which
``{"$input": k}`` stands for the operation's k-th input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from ndistribute.devices import Device, as_array, to_host
from ndistribute.errors import InvalidArgumentError
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.mistakes import count_of
from ndistribute.plain import KINDS, Encoder, Kind
from ndistribute.transport.codec import Array, MalformedError, Record, name_of

# Values that are arguments themselves, and values that arrays of numbers or text cannot contain.
_LEAVES = (bool, int, float, complex, str, type(None), EllipsisType, np.dtype)
_NO_ELEMENTS = (type(None), EllipsisType, np.dtype, slice)
_DTYPES = (np.generic, bool, int, float, complex)  # Classes that stand for their dtypes.
_NESTS = {kind.type: kind for kind in (Kind(list, list, list), KINDS["tuple"], KINDS["slice"])}
_DEEPEST = 32
_NO_TEMPLATE = "the arguments of an operation have no valid structure."
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Value(Record, frozen=True):
    """A value of a tensor: an array, rows of an array, or text; None if it has none of these."""

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


class _Templates(Encoder):
    """Encode the arguments of functions, among which are inputs."""

    kinds = frozenset({"float", "tuple", "slice", "complex", "ellipsis", "dtype"})
    others = ("$input",)
    refusal = (
        TypeError,
        "a {kind} cannot be an argument of an operation: graphs contain arrays, numbers, strings, "
        "slices, dtypes, and lists of these.",
    )

    def encode(self, value: Any, path: Any = "") -> Any:
        if type(value) is OperationInput:  # First, because most arguments are inputs.
            return {"$input": value.k}
        return super().encode(value, path)

    def encode_other(self, value: Any, path: Any) -> Any:
        if isinstance(value, type) and issubclass(value, _DTYPES):
            return self.encode(np.dtype(value))
        return super().encode_other(value, path)

    def decode_other(self, tag: str, node: dict[str, Any]) -> OperationInput:
        return OperationInput(node[tag])


_templates = _Templates()


def call_template(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the template of a call whose arguments contain `OperationInput`.

    Raises:
        TypeError: an argument cannot be sent.

    >>> call_template((OperationInput(0), slice(1, None)), {"axis": 0})
    [[{'$input': 0}, {'$slice': [1, None, None]}], {'axis': 0}]
    """
    named = {name: _templates.encode(value) for name, value in kwargs.items()}
    return [[*map(_templates.encode, args)], named]


def arguments(template: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a template, with `OperationInput` for the inputs.

    Raises:
        MalformedError: `template` is not a template.
    """
    try:
        args, kwargs = _templates.decode([[], {}] if template is None else template)
        return [*args], {**kwargs}
    except Exception as error:  # Any client may have sent it.
        raise MalformedError(f"{_NO_TEMPLATE} {error}") from error


def filler(template: Any, count: int) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    """Return a function from an operation's inputs to the arguments of its function.

    Raises:
        MalformedError: `template` is not a template, or refers to an input that does not exist.
    """
    if template in (None, [[{"$input": k} for k in range(count)], {}]):
        return lambda inputs: (inputs, {})
    args, kwargs = arguments(template)
    parts = [_filled(arg, count) for arg in args]
    named = {str(name): _filled(value, count) for name, value in kwargs.items()}
    return lambda inputs: (
        [part(inputs) for part in parts],
        {name: part(inputs) for name, part in named.items()},
    )


def refuse_objects(template: Any) -> None:
    """Raise an error for a template whose call would make arrays of Python objects.

    Computing with such arrays holds Python's lock, may never end, and cannot be stopped.

    Raises:
        MalformedError: the template names such a dtype, or its lists contain other values than
            numbers and text.
    """
    args, kwargs = arguments(template)
    values = [*args, *kwargs, *kwargs.values()]
    for value in values:
        is_bad = isinstance(value, np.dtype) and value.hasobject
        if isinstance(value, list | tuple):
            values += value
            is_bad = any(isinstance(part, _NO_ELEMENTS) for part in value)
        if is_bad or (isinstance(value, str) and _is_of_objects(value)):
            raise MalformedError(
                f"an argument contains {value!r}, but operations compute only with numbers and "
                "text."
            )


def _is_of_objects(text: str) -> bool:
    try:
        is_dtype = re.search("O|object", text) and np.dtype(text).hasobject
    except (SyntaxError, TypeError, ValueError):
        return False
    return bool(is_dtype) or text in ("sig", "signature")


def _filled(value: Any, count: int, depth: int = 0) -> Callable[[Sequence[Any]], Any]:
    """Return a function from an operation's inputs to one argument."""
    if isinstance(value, OperationInput):
        k = value.k
        if type(k) is not int or not 0 <= k < count:
            raise MalformedError(
                f"an operation refers to input {k!r}, but has {count_of(count, 'input')}."
            )
        return lambda inputs: inputs[k]
    if isinstance(value, _LEAVES):
        return lambda inputs: value
    nest = _NESTS.get(type(value))
    if nest is None or depth > _DEEPEST:
        raise MalformedError(_NO_TEMPLATE)
    made = nest.made
    parts = [_filled(part, count, depth + 1) for part in nest.body(value)]
    return lambda inputs: made([part(inputs) for part in parts])


def pack(value: Any) -> Value:
    """Return the value of a tensor as a message.

    Raises:
        TypeError: the value is not an array, number, text or None.
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
        InvalidArgumentError: the value cannot be sent.
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
    """Return the value that was passed to `pack`, as arrays."""
    if value.text is not None:
        try:
            elements = [part.decode() if value.encoding else part for part in value.text]
            # NumPy's dtype of bytes would drop zeros at their ends.
            return np.array(elements, str if value.encoding else object).reshape(value.shape)
        except ValueError as error:
            raise MalformedError(
                f"{count_of(len(value.text), 'text')} cannot have the shape {value.shape}."
            ) from error
    if value.indices is not None and value.array is not None:
        return IndexedSlices(value.array, value.indices, value.shape)
    return value.array
