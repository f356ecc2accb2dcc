"""Frozen records as messages: their fields in a JSON head, their arrays as tensors.

The annotations of a record's fields are its schema: what comes is read by them and by nothing
else, so a message can make no object that they do not name, and a field of another type, a field
too many or too few, or a tensor that nobody reads makes it malformed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import numpy as np

from ndistribute.cluster.wire.tensors import Array, Buffer, MalformedError, pack, unpack

__all__ = ["decode", "encode", "from_message", "to_message"]

_Source = Iterator[tuple[int, Array]]
_Where = tuple[str, ...]
_Reader = Callable[[Any, _Source, _Where], Any]
_Writer = Callable[[Any, list[Array]], Any]

_LARGEST = 2**63
_MOST = sys.float_info.max
_PLAIN = {str, bool, int, float, types.NoneType}


def to_message(record: Any) -> tuple[Any, list[Array]]:
    """Return a record as something that JSON can hold, and the arrays that it holds.

    >>> from ndistribute.cluster.protocol.requests import Read
    >>> to_message(Read("weights"))
    ({'record': 'Read', 'name': 'weights', 'newer_than': None}, [])
    """
    tensors: list[Array] = []
    return _write(record, tensors), tensors


def from_message(head: Any, tensors: list[Array], kinds: Any) -> Any:
    """Return the record that `to_message` was given.

    Args:
        head: what JSON held.
        tensors: the arrays.
        kinds: the class of the record, or a union of classes.

    Raises:
        MalformedError: the message holds none of them.
    """
    source = iter(enumerate(tensors))
    record = _reader(kinds)(head, source, ("message",))
    if next(source, None) is not None:
        raise MalformedError("the message holds tensors that none of its fields names.")
    return record


def encode(record: Any) -> list[Buffer]:
    """Return a record as buffers to send one after the other; tensors are not copied."""
    head, tensors = to_message(record)
    return pack(_JSON_OUT.encode(head).encode(), tensors)


def decode(buffer: Buffer, kinds: Any, limit_bytes: int) -> Any:
    """Return the record that a buffer holds; its tensors are views of the buffer.

    Args:
        buffer: what `encode` returned, joined.
        kinds: the class of the record, or a union of classes.
        limit_bytes: the most that the buffer may take.

    Raises:
        MalformedError: the buffer is something else, is cut short, or takes more.
    """
    head, tensors = unpack(buffer, limit_bytes)
    try:
        parsed = _JSON_IN.decode(head.decode())
    except (ValueError, RecursionError) as error:
        raise MalformedError("the head of the message is no JSON.") from error
    return from_message(parsed, tensors, kinds)


def _write(value: Any, tensors: list[Array]) -> Any:
    kind: Any = type(value)
    return value if kind in _PLAIN else _writer(kind)(value, tensors)


@functools.cache
def _writer(kind: Any) -> _Writer:
    """Return what writes values of a class."""
    if issubclass(kind, np.ndarray):
        return _write_tensor
    if issubclass(kind, tuple | list):
        return lambda value, tensors: [_write(item, tensors) for item in value]
    if issubclass(kind, Mapping):
        return lambda value, tensors: {str(k): _write(v, tensors) for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return _record_writer(kind)
    if issubclass(kind, str | int | float):  # A subclass of them.
        return lambda value, tensors: value
    raise TypeError(f"a {kind.__name__} can not be sent; make it an array or a number.")


def _write_tensor(value: Any, tensors: list[Array]) -> Any:
    tensors.append(value)
    return len(tensors) - 1


def _record_writer(record: Any) -> _Writer:
    title, names = {"record": record.__name__}, tuple(_schema(record))

    def write(value: Any, tensors: list[Array]) -> Any:
        node: dict[str, Any] = title.copy()
        for name in names:
            node[name] = _write(getattr(value, name), tensors)
        return node

    return write


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Return what reads a node as the annotation says, and refuses any other."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_reader(typing.get_args(hint))
    if origin is np.ndarray:
        return _read_tensor
    if origin is Literal:
        return _literal_reader(typing.get_args(hint))
    if origin is tuple:
        return _tuple_reader(_reader(typing.get_args(hint)[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(_reader(typing.get_args(hint)[1]))
    if dataclasses.is_dataclass(hint):
        return _record_reader(hint)
    return functools.partial(_read_plain, hint)


def _union_reader(members: tuple[Any, ...]) -> _Reader:
    named = {getattr(member, "__name__", str(member)): member for member in members}
    known = [name for name, kind in named.items() if dataclasses.is_dataclass(kind)]
    records = {name: _reader(named[name]) for name in known}
    others = [_reader(kind) for name, kind in named.items() if name not in (*records, "NoneType")]
    expected = f"one of {', '.join(named)}"

    def read(node: Any, source: _Source, where: _Where) -> Any:
        if node is None and types.NoneType in members:
            return None
        if isinstance(node, dict):
            kind = node.get("record")
            if isinstance(kind, str) and kind in records:
                return records[kind](node, source, where)
            _refuse(kind, expected, where)
        if len(others) != 1:
            _refuse(node, expected, where)
        return others[0](node, source, where)

    return read


def _literal_reader(values: tuple[Any, ...]) -> _Reader:
    def read(node: Any, source: _Source, where: _Where) -> Any:
        if isinstance(node, str) and node in values:
            return node
        _refuse(node, f"one of {values}", where)

    return read


def _tuple_reader(item: _Reader) -> _Reader:
    def read(node: Any, source: _Source, where: _Where) -> Any:
        if not isinstance(node, list):
            _refuse(node, "a list", where)
        return tuple([item(one, source, where) for one in node])

    return read


def _mapping_reader(value: _Reader) -> _Reader:
    def read(node: Any, source: _Source, where: _Where) -> Any:
        if not isinstance(node, dict):
            _refuse(node, "a dictionary", where)
        return {key: value(one, source, where) for key, one in node.items()}

    return read


def _record_reader(record: Any) -> _Reader:
    name = record.__name__
    keys = {"record", *(field.name for field in dataclasses.fields(record))}
    fields: dict[str, _Reader] = {}  # Filled when the first comes: it may hold one of its kind.

    def read(node: Any, source: _Source, where: _Where) -> Any:
        where = (*where, name)
        if not fields:
            fields.update((field, _reader(hint)) for field, hint in _schema(record).items())
        if not isinstance(node, dict) or node.keys() != keys:
            _refuse(node, f"the fields {', '.join(_schema(record))}", where)
        if node["record"] != name:
            _refuse(node["record"], name, where)
        found = {
            field: reader(node[field], source, (*where, field)) for field, reader in fields.items()
        }
        return record(**found)

    return read


@functools.cache
def _schema(record: Any) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _read_tensor(node: Any, source: _Source, where: _Where) -> Array:
    """Return the next tensor: they stand in the order of the fields, each named once."""
    following = next(source, None)
    if following is None or type(node) is not int or node != following[0]:
        _refuse(node, "the number of the next tensor", where)
    return following[1]


def _read_plain(hint: Any, node: Any, source: _Source, where: _Where) -> Any:
    if hint is types.NoneType and node is None:
        return None
    if hint is float and type(node) in (int, float) and -_MOST <= node <= _MOST:
        return float(node)
    if type(node) is not hint or hint not in (str, bool, int):
        _refuse(node, getattr(hint, "__name__", str(hint)), where)
    if hint is int and not -_LARGEST <= node < _LARGEST:
        _refuse("a number", "one of 64 bits", where)
    return node


def _refuse(node: Any, expected: str, where: _Where) -> NoReturn:
    raise MalformedError(f"{'.'.join(where)} must be {expected}, got {str(node)[:80]!r}.")


def _no_constant(name: str) -> NoReturn:
    raise MalformedError(f"a message may not hold {name}.")


_JSON_OUT = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_JSON_IN = json.JSONDecoder(parse_constant=_no_constant)
