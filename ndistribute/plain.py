"""The encoder of the package: it turns nests of plain values into nodes for JSON and MessagePack.

Numbers, text, None, lists, and dicts whose keys are text need no encoding. The node of another kind
of value is a dict with the kind's name as its first key, such as ``{"$tuple": [1, 2]}``. A subclass
of `Encoder` adds values that are not plain, such as arrays. Decoding calls only the constructors of
these kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ndistribute.dtypes import dtype_named

Node = Any
Path = Any  # A text, or the path of a nest and the key or index in it.
_ATOMS = frozenset({str, int, bool, type(None)})
# The value may be of a derived class; `str` would call the `__str__` that an enumeration defines.
_BASES: dict[type[Any], Callable[[Any], Any]] = {str: str.__str__} | {
    base: base for base in (int, float, list, tuple, dict)
}


class Kind(NamedTuple):
    """A kind of plain values: its type, and how its values become simpler values and come back."""

    type: type[Any]
    body: Callable[[Any], Any]
    made: Callable[[Any], Any]


KINDS = {
    # Only if the number is not finite, which JSON cannot express.
    "float": Kind(float, repr, float),
    "tuple": Kind(tuple, list, tuple),
    # Only if a key is not text, or begins like the names of kinds.
    "dict": Kind(dict, lambda d: [[*d], [*d.values()]], lambda body: dict(zip(*body, strict=True))),
    "slice": Kind(slice, lambda s: [s.start, s.stop, s.step], lambda body: slice(*body)),
    "complex": Kind(complex, lambda z: [z.real, z.imag], lambda body: complex(*body)),
    "ellipsis": Kind(EllipsisType, lambda _: None, lambda _: ...),
    "dtype": Kind(np.dtype, lambda dtype: dtype.name, dtype_named),
}
_NAMES: dict[type[Any], str] = {kind.type: name for name, kind in KINDS.items()}


class Encoder:
    """Encode nests, and decode nodes.

    >>> node = Encoder().encode({"x": [1, (2.5, slice(3))]})
    >>> node
    {'x': [1, {'$tuple': [2.5, {'$slice': [None, 3, None]}]}]}
    >>> Encoder().decode(node)
    {'x': [1, (2.5, slice(None, 3, None))]}
    """

    # The kinds that the encoder handles besides numbers, text, None and lists, and the first
    # character of their names.
    kinds: ClassVar[frozenset[str]] = frozenset(KINDS)
    mark = "$"
    # The first keys of the nodes of values that are not plain.
    others: ClassVar[tuple[str, ...]] = ()
    # The error message for other values, with placeholders for the path, the value and its type.
    refusal: ClassVar[tuple[type[Exception], str]] = TypeError, "{path} is {value!r}: not plain."

    def encode(self, value: Any, path: Path = "") -> Node:
        """Return a value as a node; `path` names the value in errors."""
        kind = type(value)
        if kind in _ATOMS or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return self._encoded_parts(enumerate(value), path)
        name = _NAMES.get(kind, "")
        if name not in self.kinds:
            return self.encode_other(value, path)
        if kind is dict and all(isinstance(key, str) and key[:1] != "$" for key in value):
            return dict(zip(value, self._encoded_parts(value.items(), path), strict=True))
        return {self.mark + name: self.encode(KINDS[name].body(value), path)}

    def encode_other(self, value: Any, path: Path) -> Node:
        """Return the node of a value that is not plain: a derived class counts as its base."""
        kind, plain = type(value), value
        if isinstance(value, np.dtype) and "dtype" in self.kinds:  # Each dtype is a class.
            return {f"{self.mark}dtype": value.name}
        if isinstance(value, np.generic):
            plain = value.item()
        elif base := next((base for base in _BASES if issubclass(kind, base)), None):
            plain = _BASES[base](value)
        if type(plain) is kind:
            error, text = self.refusal
            raise error(text.format(path=self.name(path), value=value, kind=kind.__name__))
        return self.encode(plain, path)

    def _encoded_parts(self, items: Iterable[tuple[Any, Any]], path: Path) -> list[Node]:
        return [
            part if type(part) in _ATOMS else self.encode(part, (path, key)) for key, part in items
        ]

    def name(self, path: Path) -> str:
        """Return a path as text; only a few values need it."""
        return path if isinstance(path, str) else f"{self.name(path[0])}[{path[1]!r}]"

    def decode(self, node: Node) -> Any:
        """Return the value of a node."""
        if type(node) is list:
            return [self.decode(part) for part in node]
        if type(node) is not dict:
            return node
        tag = next(iter(node), "")
        if tag in self.others:
            return self.decode_other(tag, node)
        name = tag[len(self.mark) :] if tag.startswith(self.mark) else ""
        if name in self.kinds:
            return KINDS[name].made(self.decode(node[tag]))
        return {key: self.decode(part) for key, part in node.items()}

    def decode_other(self, tag: str, node: dict[str, Node]) -> Any:
        """Return the value of a node that `encode_other` returned, whose first key is `tag`."""
        raise NotImplementedError
