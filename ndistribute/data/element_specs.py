"""Element specs: what the elements of a dataset look like, as workers tell it to each other.

A spec is a record of names and numbers. What is read of another worker's makes arrays without rows
and the containers that hold them, and nothing else: a class of the user's is one that this process
has itself, a named tuple or a dataclass with those very fields. Nothing is unpickled or imported.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from typing import Any

import numpy as np

from ndistribute.data.elements import Element
from ndistribute.transport.codec import MAX_DIMENSIONS, Decoder, MalformedError, Record, encode

__all__ = ["pack_spec", "unpack_spec"]

Key = str | int | float | bool | None
_PLAIN = {"tuple": tuple, "list": list}


class ArraySpec(Record, frozen=True):
    """An array: its dtype, and its shape but for the rows."""

    dtype: str
    shape: tuple[int, ...]


class NestSpec(Record, frozen=True):
    """A container.

    Args:
        kind: ``"tuple"``, ``"list"``, ``"dict"``, or the module and the name of a class.
        keys: of a dict, or the names of the class's fields.
        items: what it holds.
    """

    kind: str
    keys: tuple[Key, ...]
    items: tuple[ArraySpec | NestSpec, ...]


_specs: Decoder[ArraySpec | NestSpec] = Decoder(ArraySpec | NestSpec)


def pack_spec(element: Element) -> bytes:
    """Return the bytes that say what a batch is like.

    Raises:
        ValueError: another process could not make one like it.

    >>> unpack_spec(pack_spec({"x": np.ones((4, 2), np.float32)}))
    {'x': array([], shape=(0, 2), dtype=float32)}
    """
    return encode(_spec_of(element))[0]


def unpack_spec(data: bytes) -> Element:
    """Return a batch of no rows like the one that was packed.

    Raises:
        MalformedError: the bytes are no spec, or name a class that this process does not have.
    """
    try:
        return _element_of(_specs.decode(data))
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise MalformedError(f"another worker's element is not understood: {error}") from error


def _spec_of(element: Element) -> ArraySpec | NestSpec:
    if isinstance(element, np.ndarray):
        return ArraySpec(_text_of(element.dtype), element.shape[1:])
    kind: type = type(element)
    if kind is dict:
        keys, items = tuple(element), list(element.values())
        if not all(isinstance(key, Key) for key in keys):
            raise ValueError(
                f"the keys of an element are {keys!r}: where workers run out of input at different "
                "times, they must be strings or numbers."
            )
        return NestSpec("dict", keys, tuple(map(_spec_of, items)))
    if kind in _PLAIN.values():
        return NestSpec(kind.__name__, (), tuple(map(_spec_of, element)))
    name, fields = f"{kind.__module__}:{kind.__qualname__}", _fields_of(kind)
    if _class_named(name, fields) is not kind:
        raise ValueError(
            f"other workers can not find {kind!r}, which an element holds: define it at the top of "
            "a module, as a named tuple or a dataclass."
        )
    return NestSpec(name, fields, tuple(_spec_of(getattr(element, field)) for field in fields))


def _element_of(spec: ArraySpec | NestSpec) -> Element:
    if isinstance(spec, ArraySpec):
        if len(spec.shape) >= MAX_DIMENSIONS:
            raise ValueError(f"an array of {len(spec.shape) + 1} dimensions.")
        return np.empty((0, *spec.shape), _dtype_of(spec.dtype))
    items = [_element_of(item) for item in spec.items]
    if spec.kind in _PLAIN:
        return _PLAIN[spec.kind](items)
    named: dict[Any, Element] = dict(zip(spec.keys, items, strict=True))
    if spec.kind == "dict":
        return named
    found = _class_named(spec.kind, spec.keys)
    if found is None:
        raise ValueError(f"{spec.kind!r} with the fields {spec.keys} is no class of this process.")
    return found(**named)


def _class_named(name: str, fields: tuple[Key, ...]) -> Any:
    """Return a named tuple's class or a dataclass, None if this process has no such one."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # No code of a module is run for it.
    known = isinstance(found, type) and fields and _fields_of(found) == fields
    return found if known else None


def _fields_of(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(getattr(kind, "_fields", ())) if issubclass(kind, tuple) else ()


def _text_of(dtype: np.dtype[Any]) -> str:
    try:
        if np.dtype(dtype.name) == dtype:
            return dtype.name  # The only name of those that NumPy does not know by itself.
    except TypeError:
        pass
    return repr(np.lib.format.dtype_to_descr(dtype))


def _dtype_of(text: str) -> np.dtype[Any]:
    if text.startswith(("'", "[")):
        return np.lib.format.descr_to_dtype(ast.literal_eval(text))
    return np.dtype(text)
