"""What a package or module exports, derived from its names, so that no list repeats them."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def export(namespace: dict[str, Any], also: str = "", but: str = "") -> None:
    """Set `__all__` to the public names of a package or module, and let completion show no others.

    Args:
        namespace: the `vars` of a package that has imported what it exports, or of a module that
            has defined it.
        also: modules, which have an `__all__`, and other names to export too.
        but: public names of a module that only this package uses.
    """

    def is_hidden(name: str, value: Any) -> bool:
        is_foreign = getattr(value, "__module__", None) != namespace["__name__"]
        return name[0] == "_" or isinstance(value, ModuleType) or (is_foreign and not is_package)

    is_package, more = "__path__" in namespace, also.split()
    hidden = {name for name, value in namespace.items() if is_hidden(name, value)}
    namespace["__all__"] = sorted(namespace.keys() - hidden - {*but.split()} | {*more})
    values = [namespace.get(name) for name in more]  # One that is imported lazily is not there.
    modules = [vars(value) for value in values if isinstance(value, ModuleType)]
    for shown in (namespace, *modules):
        shown["__dir__"] = lambda shown=shown: shown["__all__"]
