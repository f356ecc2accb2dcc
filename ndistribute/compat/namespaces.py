"""Namespaces of names that are looked up in a table when they are used.

They are importable like modules, and name what is similar to a missing name. What a name leads to
is imported at its first use, so it costs nothing until then.
"""

from __future__ import annotations

import difflib
import sys
import types
from importlib import import_module
from typing import Any

ROOT = "ndistribute.compat.tf"


class Names(types.ModuleType):
    """The namespace `tf`, or one below it, such as ``Names("keras.layers")``."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{ROOT}.{path}", f"Names of ``tf.{path}``.")
        self.__all__: list[str] = []
        sys.modules[self.__name__] = self  # For `from ndistribute.compat.tf.keras import layers`.
        parent, _, name = self.__name__.rpartition(".")
        vars(sys.modules[parent])[name] = self
        if name not in sys.modules[parent].__all__:
            sys.modules[parent].__all__.append(name)

    def _fill(self, words: str) -> None:
        """Read where the names are found.

        Args:
            words: ``module:`` is where the names after it are found; a leading dot stands for this
                package, and ``text`` for the word itself. ``name`` leads to the attribute of that
                name, ``name=other`` to another one, and ``*`` stands for all public names.
                ``module/adapter:`` makes of them, by a function in `ADAPTERS`, what `tf` has.
        """
        source = adapter = ""
        self._leads: dict[str, tuple[str, str, str]] = {}
        for word in words.split():
            if word.endswith(":"):
                source, _, adapter = word[:-1].partition("/")
                continue
            name, _, other = word.partition("=")
            names = import_module(source, "ndistribute").__all__ if name == "*" else [name]
            self._leads |= {each: (source, other or each, adapter) for each in names}
        self.__all__ += self._leads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._leads:
            raise AttributeError(self._missing(name))
        source, key, adapter = self._leads[name]
        value = key if source == "text" else getattr(import_module(source, "ndistribute"), key)
        if adapter:
            adapters = import_module("ndistribute.compat.adapters")
            plain, value = value, adapters.ADAPTERS[adapter](value)
            if value is not plain and isinstance(
                value, types.FunctionType | type
            ):  # Pickles refer to it by this name.
                value.__module__, value.__qualname__ = self.__name__, name
        return vars(self).setdefault(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self.__all__)

    def __reduce__(self) -> Any:  # Functions that are sent to workers refer to namespaces.
        return import_module, (self.__name__,)

    def _missing(self, name: str) -> str:
        where = f"tf{self.__name__.removeprefix(ROOT)}"
        lower = {word.lower(): word for word in self.__all__}
        close = difflib.get_close_matches(name.lower(), lower, cutoff=0.5)
        similar = ", ".join(lower[word] for word in close)
        hint = f"Similar names: {similar}." if similar else f"dir({where}) lists the names."
        elsewhere = [
            f"tf{path.removeprefix(ROOT)}.{name}"
            for path, module in list(sys.modules.items())
            if path.startswith(ROOT) and name in getattr(module, "__all__", ())
        ]
        if elsewhere:
            hint = f"Use {min(elsewhere, key=len)}."
        return f"{where}.{name} does not exist in {ROOT}. {hint}"
