"""What a package exports: the names that its `__init__` imports, so that no list repeats them."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def export(namespace: dict[str, Any], also: str = "") -> None:
    """Set `__all__` to the public names of a package, and let completion show no others.

    Args:
        namespace: the `vars` of a package that has imported what it exports.
        also: the modules, which have an `__all__`, and names with an underscore to export too.
    """
    values, more = namespace.items(), also.split()
    hidden = {name for name, value in values if name[0] == "_" or isinstance(value, ModuleType)}
    namespace["__all__"] = sorted(namespace.keys() - hidden | {*more})
    modules = (vars(namespace[name]) for name in more if name in hidden and name[0] != "_")
    for shown in (namespace, *modules):
        shown["__dir__"] = lambda shown=shown: shown["__all__"]
