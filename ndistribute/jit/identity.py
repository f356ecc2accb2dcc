"""Keys that identify the function of a compiled step, and the constants in its arguments.

A program contains what the code of its step read from outside: numbers, settings, functions, and
which objects exist. So the key of a step consists of all that, as it is at each call.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.diagnostics import is_user_file
from ndistribute.devices import is_device_array
from ndistribute.values import PerReplica

_PLAIN = (str, bytes, int, float, complex, types.NoneType)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_VALUES = (*_PLAIN, np.ndarray, np.generic, PerReplica)
_CONTAINERS = (tuple, list, set, frozenset, dict)
# The longest container whose items count; of a longer container, only the length counts.
_MOST_ITEMS = 64
_MOST_KNOWN = 64
# Attributes of layers and models on which no result depends.
_PROGRESS = {"built", "stop_training"}
_UNNAMED = {"__call__", "call"}  # The methods that Python calls without their names in the code.
_READS_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
_READS_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}


class Identities:
    """Keys that are equal for functions with the same code and the same surroundings.

    A key contains the code, the code of the functions that it calls, and what they read: globals,
    closure variables, and attributes of objects. Plain values, containers and settings of layers
    are compared by value, other objects by identity. They are read again only if some of them may
    have changed.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Any, _Look] = OrderedDict()

    def of(self, function: Any, arguments: Any = ()) -> Any:
        """Return the key of a function and of the objects among the arguments of a call."""
        objects = [leaf for leaf in tree.flatten(arguments) if not isinstance(leaf, _VALUES)]
        place = tuple(map(_place, (function, *objects)))
        known = self._known.get(place)
        if known is None or not known.is_current():
            known = self._known[place] = _Look((function, *objects))
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return known.key


class _Look:
    """A walk over objects and everything that their code reads; each object is visited once."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._things = things
        self._parts: list[Any] = []  # The parts of the key.
        self._seen: dict[int, Any] = {}  # By id, so the objects live as long as this walk.
        self._names = set(_UNNAMED)  # The names of the attributes that the code reads.
        # The objects, with the names that were looked up in them.
        self._objects: list[tuple[Any, set[str]]] = []
        self._reads: list[tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]] = []
        for thing in things:
            self._visit(thing)
        while any(len(known) < len(self._names) for _, known in self._objects):
            for thing, known in self._objects:  # This list and the names may grow during the loop.
                fresh = self._names - known
                known.update(fresh)
                self._attributes(thing, fresh)
        self.key = tuple(self._parts)

    def is_current(self) -> bool:
        """Return whether all objects that were read are still there; new ones count as changes."""
        for read, before in self._reads:
            now = tuple(read())
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return True

    def _read(self, read: Callable[[], Iterable[Any]]) -> tuple[Any, ...]:
        values = tuple(read())
        self._reads.append((read, values))
        return values

    def _visit(self, thing: Any) -> None:
        if isinstance(thing, _PLAIN):
            self._parts.append(constant_key(thing))
        elif isinstance(thing, types.MethodType):
            self._visit(thing.__func__)
            self._visit(thing.__self__)
        elif is_device_array(thing):  # A trace has left this object there.
            self._parts.append(None)
        elif id(thing) in self._seen:
            self._parts.append(_Same(thing))
        else:
            self._seen[id(thing)] = thing
            self._enter(thing)

    def _enter(self, thing: Any) -> None:
        if isinstance(thing, _CONTAINERS):
            self._parts.append((type(thing), len(thing)))
            items = functools.partial(iter, thing) if len(thing) <= _MOST_ITEMS else tuple
            inside = self._read(items)
            if isinstance(thing, dict) and inside:
                inside += self._read(thing.values)
            self._visit_all(inside)
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, functools.partial) and _is_users(thing.func):
            self._visit_all((thing.func, thing.args, thing.keywords))
        else:
            self._parts.append(_Same(thing))
            if hasattr(type(thing), "walk") and hasattr(type(thing), "penalties"):
                self._layer(thing)
            elif not isinstance(thing, _VALUES) and (
                not isinstance(thing, types.ModuleType) or _is_users(thing)
            ):
                self._object(thing)

    def _layer(self, layer: Any) -> None:
        for part in layer.walk():
            self._parts.append(_Same(part))
            for name, value in vars(part).items():
                if isinstance(value, str | int | float) and name not in _PROGRESS:
                    self._parts += name, constant_key(value)
            self._watch(vars(part))
            self._object(part)

    def _watch(self, container: Any) -> None:
        """Watch the items of a container, and of containers in it; they are not part of the key."""
        values = container.values if isinstance(container, dict) else container.__iter__
        for value in self._read(values):
            if isinstance(value, list | tuple | dict) and len(value) <= _MOST_ITEMS:
                self._watch(value)

    def _object(self, thing: Any) -> None:
        self._objects.append((thing, set()))
        if not isinstance(thing, type | types.ModuleType) and not _is_users(type(thing)):
            held = getattr(thing, "__dict__", {})  # The code calls the functions in the container.
            names = [name for name, value in held.items() if isinstance(value, _FUNCTIONS)]
            # This is not part of a program.
            names = [name for name in names if name != "learning_rate"]
            self._visit_all(self._read(functools.partial(map, held.get, names)))

    def _visit_all(self, things: Iterable[Any]) -> None:
        for thing in things:
            self._visit(thing)

    def _function(self, function: Any) -> None:
        is_users = _is_users(function)
        self._parts.append(function.__code__ if is_users else _Same(function))
        if function.__closure__:
            self._visit_all(self._read(functools.partial(map, _content, function.__closure__)))
        if is_users:
            self._parts.append(_Same(function.__globals__))
            names, attributes = _names_of(function.__code__)
            self._names |= attributes
            parts = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
            self._visit_all(self._read(functools.partial(parts, function))[1:])
            self._visit_all(self._read(functools.partial(map, function.__globals__.get, names)))

    def _attributes(self, thing: Any, names: set[str]) -> None:
        kinds = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
        for owner in (thing, *filter(_is_users, kinds)):
            held = getattr(owner, "__dict__", {})
            there = sorted(held.keys() & names)
            _, *values = self._read(functools.partial(_taken, held, there))
            for name, value in zip(there, values, strict=True):
                if isinstance(value, types.MemberDescriptorType) and owner is not thing:
                    self._visit_all(self._read(functools.partial(_slot, thing, name)))
                else:
                    self._visit(_function_of(value))


def _taken(held: Any, names: Iterable[str]) -> tuple[Any, ...]:
    return (len(held), *map(held.get, names))


def _slot(thing: Any, name: str) -> tuple[Any]:
    return (getattr(thing, name, None),)


def _function_of(value: Any) -> Any:
    """Return the function in a descriptor of a class, or any other value unchanged."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.func if isinstance(value, functools.cached_property) else value


def _place(thing: Any) -> Any:
    """Return a key for the same function of the same object."""
    if isinstance(thing, types.MethodType):
        return _Same(thing.__func__), _Same(thing.__self__)
    return _Same(thing)


@functools.lru_cache(1024)
def _names_of(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of globals and attributes that a code object reads, and its inner code."""
    names: dict[str, None] = {}
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS_GLOBALS:
            names[instruction.argval] = None
        elif instruction.opname in _READS_ATTRIBUTES:
            attributes.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inside, more = _names_of(inner)
            names |= dict.fromkeys(inside)
            attributes |= more
    return tuple(names), frozenset(attributes)


def _is_users(thing: Any) -> bool:
    """Return whether a function, class or module is the user's, and not part of a package."""
    code = getattr(getattr(thing, "__func__", thing), "__code__", None)
    if code is not None:
        return is_user_file(code.co_filename)
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return file is not None and is_user_file(file)


def _content(cell: Any) -> Any:
    """Return the content of a cell of a closure; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def constant_key(leaf: Any) -> Any:
    """Return the key of a constant of a program: its value, or its identity."""
    if isinstance(leaf, float | complex):  # 0.0 equals -0.0, and NaN does not equal itself.
        return type(leaf), repr(leaf)
    if isinstance(leaf, str | bytes | int | None):
        return type(leaf), leaf
    return _Same(leaf)


class _Same:
    """A key for an object, which equals only the key of the same object."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
