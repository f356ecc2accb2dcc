"""What tells a function of a compiled step from others, and a constant in its arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

_PLAIN = (str, int, float)
_PROGRESS = {"built", "stop_training"}  # Of layers and models, on which no result depends.


def identity_of(function: Any) -> Any:
    """Return a key that is equal for functions of one code with the same things around it.

    Things are told apart by what they are; numbers and texts by their values, also those that are
    attributes which the code names, or attributes of layers.
    """
    if hasattr(function, "__func__"):  # A method, which has the code of its function, too.
        inner, thing = function.__func__, function.__self__
        names = getattr(getattr(inner, "__code__", None), "co_names", ())
        return identity_of(inner), _Same(thing), _attributes(thing, names)
    code = getattr(function, "__code__", None)
    if code is None:
        return _Same(function)
    cells = [_content(cell) for cell in function.__closure__ or ()]
    around = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    around += [function.__globals__.get(name) for name in code.co_names]
    attributes = [_attributes(thing, code.co_names) for thing in around]
    return code, _Same(function.__globals__), *map(constant_key, around), *attributes


def _attributes(thing: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    held = getattr(thing, "__dict__", None)
    if held is None:
        return ()
    values = tuple(constant_key(held[n]) for n in names if isinstance(held.get(n), _PLAIN))
    return values + (settings_of(thing) if hasattr(type(thing), "walk") else ())


def settings_of(layer: Any) -> tuple[Any, ...]:
    """Return the numbers and texts that are attributes of a layer and of all layers in it."""
    kept: list[Any] = []
    seen, holders = {id(layer)}, [(True, vars(layer))]
    for is_layer, held in holders:  # It grows. `walk` finds the same, and takes ten times as long.
        for name, value in held.items():
            kind: Any = type(value)
            sort = _sort_of(kind)
            if sort == "setting":
                if is_layer and name not in _PROGRESS:
                    kept += name, kind, repr(value) if isinstance(value, float) else value
            elif sort is not None and name != "_arguments" and id(value) not in seen:
                seen.add(id(value))
                inner = dict(enumerate(value)) if sort == "sequence" else value
                holders.append((True, vars(value)) if sort == "layer" else (False, inner))
    return tuple(kept)


@functools.lru_cache(256)
def _sort_of(kind: Any) -> str | None:
    """Return what a value of a type is for `settings_of`; None: nothing."""
    if issubclass(kind, _PLAIN):
        return "setting"
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, list | tuple):
        return "sequence"
    return "layer" if hasattr(kind, "walk") else None


def _content(cell: Any) -> Any:
    """Return what a cell of a closure contains; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def constant_key(leaf: Any) -> Any:
    """Return what tells a constant of a program from others: its value, or itself."""
    if isinstance(leaf, float | complex):  # 0.0 equals -0.0, and NaN not itself.
        return type(leaf), repr(leaf)
    if isinstance(leaf, str | bytes | int | None):
        return type(leaf), leaf
    return _Same(leaf)


class _Same:
    """A key for an object that equals itself only."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
