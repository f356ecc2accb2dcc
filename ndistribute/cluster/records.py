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
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

import numpy as np

from ndistribute.cluster.tensors import Array, Buffer, MalformedError, pack, unpack

__all__ = ["decode", "encode", "from_message", "to_message"]

_Source = Iterator[tuple[int, Array]]

_LARGEST = 2**63
_MOST = sys.float_info.max


def to_message(record: Any) -> tuple[Any, list[Array]]:
    """Return a record as something that JSON can hold, and the arrays that it holds.

    >>> from ndistribute.cluster.requests import Read
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
    record = _read(kinds, head, source, "message")
    if next(source, None) is not None:
        raise MalformedError("the message holds tensors that none of its fields names.")
    return record


def encode(record: Any) -> list[Buffer]:
    """Return a record as buffers to send one after the other; tensors are not copied."""
    head, tensors = to_message(record)
    return pack(json.dumps(head, allow_nan=False, separators=(",", ":")).encode(), tensors)


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
        parsed = json.loads(head, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError("the head of the message is no JSON.") from error
    return from_message(parsed, tensors, kinds)


def _write(value: Any, tensors: list[Array]) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.ndarray):
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, tuple | list):
        return [_write(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _write(item, tensors) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        fields = {name: _write(getattr(value, name), tensors) for name in _schema(kind)}
        return {"record": kind.__name__, **fields}
    raise TypeError(f"a {type(value).__name__} can not be sent; make it an array or a number.")


def _read(hint: Any, node: Any, source: _Source, where: str) -> Any:
    """Return the value of a node, which must be what the annotation says."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _read(_chosen(hint, node, where), node, source, where)
    if origin is np.ndarray:
        return _read_tensor(node, source, where)
    if origin is Literal:
        if isinstance(node, str) and node in typing.get_args(hint):
            return node
        _refuse(node, f"one of {typing.get_args(hint)}", where)
    if origin is tuple:
        if not isinstance(node, list):
            _refuse(node, "a list", where)
        item_hint = typing.get_args(hint)[0]
        return tuple(_read(item_hint, item, source, where) for item in node)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(node, dict):
            _refuse(node, "a dictionary", where)
        value_hint = typing.get_args(hint)[1]
        return {key: _read(value_hint, item, source, where) for key, item in node.items()}
    if dataclasses.is_dataclass(hint):
        return _read_record(hint, node, source, where)
    return _read_plain(hint, node, where)


def _chosen(hint: Any, node: Any, where: str) -> Any:
    """Return the member of a union that a node is meant to be."""
    members = _members(hint)
    if node is None and types.NoneType in members.values():
        return types.NoneType
    if isinstance(node, dict):
        kind = node.get("record")
        if isinstance(kind, str) and kind in members:
            return members[kind]
        _refuse(kind, f"one of {', '.join(members)}", where)
    plain = [hint for hint in members.values() if not dataclasses.is_dataclass(hint)]
    plain = [hint for hint in plain if hint is not types.NoneType]
    if len(plain) != 1:
        _refuse(node, f"one of {', '.join(members)}", where)
    return plain[0]


@functools.cache
def _members(hint: Any) -> dict[str, Any]:
    members = (typing.get_args(hint)) or (hint,)
    return {getattr(member, "__name__", str(member)): member for member in members}


@functools.cache
def _schema(record: Any) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _read_record(record: Any, node: Any, source: _Source, where: str) -> Any:
    where = f"{where}.{record.__name__}"
    schema = _schema(record)
    if not isinstance(node, dict) or node.keys() != {"record", *schema}:
        _refuse(node, f"the fields {', '.join(schema)}", where)
    if node["record"] != record.__name__:
        _refuse(node["record"], record.__name__, where)
    return record(
        **{
            name: _read(hint, node[name], source, f"{where}.{name}")
            for name, hint in schema.items()
        }
    )


def _read_tensor(node: Any, source: _Source, where: str) -> Array:
    """Return the next tensor: they stand in the order of the fields, each named once."""
    following = next(source, None)
    if following is None or type(node) is not int or node != following[0]:
        _refuse(node, "the number of the next tensor", where)
    return following[1]


def _read_plain(hint: Any, node: Any, where: str) -> Any:
    if hint is types.NoneType and node is None:
        return None
    if hint is float and type(node) in (int, float) and -_MOST <= node <= _MOST:
        return float(node)
    if type(node) is not hint or hint not in (str, bool, int):
        _refuse(node, getattr(hint, "__name__", str(hint)), where)
    if hint is int and not -_LARGEST <= node < _LARGEST:
        _refuse("a number", "one of 64 bits", where)
    return node


def _refuse(node: Any, expected: str, where: str) -> NoReturn:
    raise MalformedError(f"{where} must be {expected}, got {str(node)[:80]!r}.")


def _no_constant(name: str) -> NoReturn:
    raise MalformedError(f"a message may not hold {name}.")
