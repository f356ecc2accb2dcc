"""Namespaces whose names are looked up in a table when they are used.

They can be imported like modules, and say what to use instead of a missing name. The object of a
name is imported at its first use, so it costs nothing until then.
"""

from __future__ import annotations

import difflib
import sys
import types
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from ndistribute.compat.tables import INSTEAD

ROOT = "ndistribute.compat."
_ALIKE = 0.85  # The least similarity, out of 1, of a mistyped name.


class Names(types.ModuleType):
    """A namespace, such as ``tf.keras.layers``.

    Args:
        path: the namespace's path below `ROOT`.
        program: the `Program` that decides whether names with two meanings make operations of
            graphs.
        base: the namespace where names are looked up that this one's table lacks; or None.
    """

    def __init__(self, path: str, program: Any, base: Names | None) -> None:
        super().__init__(ROOT + path, f"Names of ``{path}``.")
        parent, _, name = self.__name__.rpartition(".")
        # This supports `from ndistribute.compat.tf.keras import layers`.
        sys.modules[self.__name__] = self
        vars(sys.modules[parent])[name] = self
        sys.modules[parent].__all__.append(name)
        self._set_up(program, base)

    def _set_up(self, program: Any, base: Names | None) -> None:
        """Begin with an empty table."""
        self._program, self._base = program, base
        self._leads: dict[str, tuple[str, str, str]] = {}
        self.__all__: list[str] = list(base._leads) if base else []

    def _fill(self, words: str) -> None:
        """Read a table that says where the names are found.

        Args:
            words: the names after ``module:`` are found in that module. A leading dot stands for
                this package, and ``text`` for the word itself. ``name`` refers to the attribute of
                that name, ``name=other`` to the attribute ``other``, and ``*`` to all public names.
                After ``module/adapter:``, a function in `ADAPTERS` converts the attributes to what
                `tf` has.
        """
        source = adapter = ""
        leads: dict[str, tuple[str, str, str]] = {}
        for word in words.split():
            if word.endswith(":"):
                source, _, adapter = word[:-1].partition("/")
                continue
            name, _, other = word.partition("=")
            names = _public(import_module(source, "ndistribute")) if name == "*" else [name]
            leads |= {each: (source, other or each, adapter) for each in names}
        self._leads |= leads
        self.__all__ += [name for name in leads if name not in self.__all__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        adapters = import_module("ndistribute.compat.adapters")
        lead, base = self._leads.get(name), self._base
        if lead is None and base and name in base._leads:
            if base._leads[name][2] not in adapters.BY_PROGRAM:
                return vars(self).setdefault(name, getattr(base, name))
            lead = base._leads[name]
        if lead is None:
            raise AttributeError(self._missing(name))
        source, key, adapter = lead
        value = key if source == "text" else getattr(import_module(source, "ndistribute"), key)
        plain = value
        if adapter in adapters.BY_PROGRAM:
            value = adapters.BY_PROGRAM[adapter](value, self._program)
        elif adapter:
            value = adapters.ADAPTERS[adapter](value)
        if value is not plain and isinstance(value, types.FunctionType | type):
            value.__module__, value.__qualname__ = self.__name__, name  # For pickles.
        return vars(self).setdefault(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self.__all__)

    def __reduce__(self) -> Any:  # Functions that are sent to workers refer to namespaces.
        return import_module, (self.__name__,)

    def _missing(self, name: str) -> str:
        where = self.__name__.removeprefix(ROOT)
        root = where.partition(".")[0]
        path = f"{where}.{name}".partition(".")[2].removeprefix("compat.v1.")
        elsewhere = [
            f"{at.removeprefix(ROOT)}.{name}"
            for at, module in list(sys.modules.items())
            if f"{at}.".startswith(f"{ROOT}{root}.") and name in getattr(module, "__all__", ())
        ]
        close = [word for word in self.__all__ if _is_mistyped(name.lower(), word.lower())]
        hint = f"Similar names: {', '.join(close)}." if close else f"dir({where}) lists the names."
        if elsewhere:
            hint = f"Use {min(elsewhere, key=lambda at: ('compat' in at, len(at)))}."
        instead = [INSTEAD[pattern] for pattern in INSTEAD if fnmatchcase(path, pattern)]
        hint = f"Use {instead[0]}." if instead else hint
        return f"{where}.{name} does not exist in {ROOT}{root}. {hint}"


def _public(module: Any) -> list[str]:
    """Return the names that a module lists, or that it defines without an underscore."""
    known = {name: vars(module)[name] for name in vars(module) if name[0] != "_"}
    here = [name for name in known if getattr(known[name], "__module__", "") == module.__name__]
    return getattr(module, "__all__", here + [name for name in known if name.isupper()])


def _is_mistyped(name: str, word: str) -> bool:
    """Return whether a name may be a mistyped word, and not a longer name or another number."""
    matcher = difflib.SequenceMatcher(None, name.rstrip("s"), word.rstrip("s"))
    if not matcher.real_quick_ratio() >= _ALIKE <= matcher.ratio():
        return False
    same = [each for each in name if each.isdigit()] == [each for each in word if each.isdigit()]
    return same and (matcher.ratio() == 1 or not (name in word or word in name))


def build(path: str, program: Any, table: str, base: str | None = None) -> None:
    """Make the namespaces of a module, and those below it.

    Args:
        path: the module's path below `ROOT`.
        program: see `Names`.
        table: a text with sections, each a path in brackets and the words of its namespace.
        base: the module whose namespaces have the names that this module's namespaces lack.
    """

    def namespace(below: str) -> Names:
        name = f"{path}.{below}".removesuffix(".")
        known: Any = sys.modules.get(ROOT + name)
        if isinstance(known, Names):
            return known
        like: Any = sys.modules.get(f"{ROOT}{base}.{below}".removesuffix("."))
        if known is None:
            return Names(name, program, like)
        known.__class__ = Names
        known._set_up(program, like)
        return sys.modules[ROOT + name]  # type: ignore[return-value]

    namespace("")
    root = f"{ROOT}{base}."
    for name in [name.removeprefix(root) for name in sys.modules if name.startswith(root)]:
        if not name.startswith("compat."):
            namespace(name)
    for section in table.split("[")[1:]:
        below, words = section.split("]")
        namespace(below)._fill(words)
    if base:
        _alias(f"{path}.compat.v1", path)
    _alias(f"{path}.compat.v2", "tf")


def _alias(path: str, other: str) -> None:
    """Make a path refer to another namespace, in imports too."""
    parent, _, name = (ROOT + path).rpartition(".")
    sys.modules[ROOT + path] = vars(sys.modules[parent])[name] = sys.modules[ROOT + other]
    sys.modules[parent].__all__.append(name)
