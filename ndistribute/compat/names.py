"""Namespaces that are importable like modules, and name what is similar to a missing name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import types
from collections.abc import Iterable
from typing import Any

__all__ = ["ROOT", "Names", "classes", "derived", "missing", "public"]

ROOT = "ndistribute.compat.tf"


class Names(types.ModuleType):
    """A namespace below `tf`.

    Args:
        path: its path, such as ``"keras.layers"``.
        names: what it holds, by name.
    """

    def __init__(self, path: str, names: dict[str, Any]) -> None:
        super().__init__(f"{ROOT}.{path}", f"Names of ``tf.{path}``.")
        vars(self).update(names)
        self.__all__ = sorted(names)
        sys.modules[self.__name__] = self  # For `from ndistribute.compat.tf.keras import layers`.

    def __getattr__(self, name: str) -> Any:
        raise missing(f"tf{self.__name__.removeprefix(ROOT)}", name, self.__all__)

    def __dir__(self) -> list[str]:
        return self.__all__

    def __reduce__(self) -> Any:  # Functions that are sent to workers refer to namespaces.
        return importlib.import_module, (self.__name__,)


def missing(where: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a name that a namespace lacks."""
    if name.startswith("__"):
        return AttributeError(name)
    lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), lower, cutoff=0.5)
    similar = ", ".join(lower[one] for one in close)
    hint = f"Similar names: {similar}." if similar else f"dir({where}) lists the names."
    elsewhere = [
        f"tf{module.removeprefix(ROOT)}.{name}"
        for module, held in list(sys.modules.items())
        if module.startswith(ROOT) and name in getattr(held, "__all__", ())
    ]
    if elsewhere:
        hint = f"Use {min(elsewhere, key=len)}."
    return AttributeError(f"{where}.{name} does not exist in {ROOT}. {hint}")


def derived(path: str, kind: Any, *ignored: str, **more: Any) -> Any:
    """Return a subclass with more attributes, whose constructor ignores some keywords.

    Args:
        path: the namespace where it is found.
        kind: the class.
        ignored: the keywords.
        more: the attributes.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        own = {name: one for name, one in kwargs.items() if name not in ignored}
        kind.__init__(self, *args, **own)

    body = {"__init__": __init__, "__doc__": kind.__doc__, "__module__": f"{ROOT}.{path}"}
    return type(kind.__name__, (kind,), {**body, **more})


def public(module: Any) -> dict[str, Any]:
    """Return the public names of a module."""
    return {name: getattr(module, name) for name in module.__all__}


def classes(module: Any) -> dict[str, Any]:
    """Return the public classes of a module."""
    return {name: one for name, one in public(module).items() if inspect.isclass(one)}
