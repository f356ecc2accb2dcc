"""Stubs of the namespaces, for editors and type checkers; `names_table.py` writes them, too.

A stub has the class that a name leads to, without what an adapter adds; other names may be
anything.
"""

import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ndistribute.compat import tf, tf1

FOLDER = Path(tf.__file__).parent
HEAD = "# Written by tests/compat/name_stubs.py from the tables of names.\n"


def stubs() -> dict[Path, str]:
    """Return the text of each stub by its path below the folder of the tables."""
    texts = {Path("tf/compat/v1.pyi"): f"{HEAD}from {tf1.__name__} import *\n"}
    for root in (tf, tf1):
        modules = {
            path: module
            for path, module in sys.modules.items()
            if f"{path}.".startswith(f"{root.__name__}.")
            and module.__name__ == path
            and f"{root.__name__}.compat" not in path
        }
        for path, module in modules.items():
            children = [other for other in modules if other.rpartition(".")[0] == path]
            lines = [f"from {path} import {_last(other)} as {_last(other)}" for other in children]
            if module is root:
                lines += [f"from {tf.__name__} import compat as compat", "__version__: str"]
            file = Path(*path.split(".")[2:])
            file = file / "__init__.pyi" if children else file.with_suffix(".pyi")
            below = [other for name, other in modules.items() if name.startswith(path)]
            if root is tf1 and not any(vars(other)["_leads"] for other in below):
                text = f"from {path.replace(root.__name__, tf.__name__, 1)} import *"
            else:
                text = "\n".join([*sorted(lines), *_names(module, set(map(_last, children)))])
            texts[file] = f"{HEAD}from typing import Any\n\n{text}\n"
    lines = [f"from {tf.__package__} import tf as v2", f"from {tf1.__package__} import tf1 as v1"]
    texts[Path("tf/compat/__init__.pyi")] = "\n".join([HEAD, *lines, "__all__ = ['v1', 'v2']", ""])
    return texts


def _names(module: Any, others: set[str]) -> list[str]:
    """Return the lines of the names of a namespace, but for those of namespaces below it."""
    base = vars(module)["_base"]
    leads = (vars(base)["_leads"] if base else {}) | vars(module)["_leads"]
    lines = []
    for name, (source, key, adapter) in sorted(leads.items()):
        where = "ndistribute" if source.startswith(".") else None
        value = None if source == "text" else getattr(import_module(source, where), key, None)
        if name in others:
            continue
        is_ours = getattr(value, "__module__", "").startswith("ndistribute.")
        if isinstance(value, type) and is_ours and adapter not in ("either", "variable"):
            alike = [kind for kind in value.__mro__ if kind.__name__ == value.__name__]
            made = next(kind for kind in (*alike, *value.__mro__) if _is_where_it_says(kind))
            lines.append(f"from {made.__module__} import {made.__name__} as _{name}")
            lines.append(f"{name} = _{name}")
        else:
            lines.append(f"{name}: {'str' if source == 'text' and not adapter else 'Any'}")
    return lines


def _is_where_it_says(kind: type) -> bool:
    """Return whether a class can be imported from its module; one that an adapter made cannot."""
    return vars(sys.modules[kind.__module__]).get(kind.__name__) is kind and not (
        kind.__module__.startswith((f"{tf.__name__}.", f"{tf1.__name__}."))
    )


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def write() -> None:
    """Write the stubs anew."""
    for old in ("tf", "tf1"):
        shutil.rmtree(FOLDER / old, ignore_errors=True)
    for file, text in stubs().items():
        (FOLDER / file).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / file).write_text(text)
