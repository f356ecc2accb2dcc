"""Imports point down only, and an optional package has one door.

The rules are the two tables below; docs/architecture.md explains them. Imports are read from the
source, those inside functions and under ``if TYPE_CHECKING:`` too.
"""

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ndistribute"

# From the ground up. A unit is a module or a folder of the package. It may import units of lower
# layers, and itself; units of one layer do not know each other, but for those on the ground.
LAYERS = (
    {
        "blas",
        "dtypes",
        "errors",
        "event_files",
        "exports",
        "indexed_slices",
        "mistakes",
        "guest_tensors",
        "names",
        "numpy_functions",
        "ownership",
        "plain",
        "values",
        "tree",
        "devices",
        "stream",
        "tensor_files",
        "timeline",
        "timers",
        "trace_report",
        "tracebacks",
        "update_rules",
        "version",
    },
    {"cluster", "context"},
    {"summaries", "transport"},
    {"task"},
    {"collective", "parameter_server", "launcher"},
    {"variables", "data", "autodiff"},
    {"jit"},
    {"coordinator"},
    {"strategies", "optimizers"},
    {"models"},
    {"graph"},
    {"estimator"},
    {"cli", "compat", "interop"},
    {"__main__"},
)
# What a layer may not import although it lies lower: models know strategies through context alone.
FORBIDDEN = {("models", "strategies")}
# What stands above the package, and may import it by its own name.
ABOVE = {"compat"}

REQUIRED = {"msgspec", "numpy", "safetensors", "threadpoolctl"}
# An optional package, and the files that may import it; an empty set: any one file.
OPTIONAL: dict[str, set[str]] = {
    "cupy": {"devices.py"},
    "cloudpickle": set(),
    "distributed": set(),
    "jax": {"devices.py"},
    "keras": set(),
    "kubernetes": set(),
    "matplotlib": set(),
    "PIL": set(),
    "ml_dtypes": set(),
    "mpi4py": set(),
    "ray": set(),
    "sklearn": set(),
    "tensorflow": set(),
    "torch": {"interop/torch.py"},
    "tqdm": set(),
}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, where it stands, and whether only a call runs it."""

    module: str
    line: int
    lazy: bool


@functools.cache
@functools.cache
def imports_of(source: str) -> list[Import]:
    """Return what a module imports, in any of its functions and for type checkers too."""
    return list(_imports(ast.parse(source), lazy=False))


def layer_violations(path: str, source: str) -> list[str]:
    """Say which imports of a file, named relative to the package, break the table of layers."""
    unit = _unit(path)
    if unit == "__init__":
        return []
    if _layer(unit) is None:
        return [f"{path}: {unit} stands on no layer: add it to LAYERS and docs/architecture.md"]
    found = []
    for item in imports_of(source):
        root, _, rest = item.module.partition(".")
        if root != "ndistribute":
            continue
        target = rest.partition(".")[0]
        if not (_allowed(unit, target) or (not target and unit in ABOVE)):
            found.append(f"{path}:{item.line}: {unit} imports {item.module}")
    return found


def package_violations(sources: dict[str, str]) -> list[str]:
    """Say which imports of other packages are undeclared, or stand in more than one file."""
    homes: dict[str, set[str]] = defaultdict(set)
    found = []
    for path, source in sources.items():
        for item in imports_of(source):
            root = item.module.partition(".")[0]
            if root in OPTIONAL:
                homes[root].add(path)
                if not item.lazy and not OPTIONAL[root]:
                    found.append(f"{path}:{item.line}: {root} is optional: import it in a function")
            elif root not in REQUIRED | {"ndistribute"} | sys.stdlib_module_names:
                found.append(f"{path}:{item.line}: {root} is no declared dependency")
    for root, paths in homes.items():
        allowed = OPTIONAL[root]
        if (allowed and paths - allowed) or (not allowed and len(paths) > 1):
            found.append(f"{root} is imported in {', '.join(sorted(paths))}")
    return found


def cycles(sources: dict[str, str]) -> set[frozenset[str]]:
    """Return the groups of modules that reach each other by imports of any kind."""
    graph = {
        _dotted(path): {item.module for item in imports_of(source)}
        for path, source in sources.items()
        if path != "__init__.py"
    }
    reached = {module: _reachable(graph, module) for module in graph}
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def _imports(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            case ast.ImportFrom():
                yield from _imports_from(child, lazy)
            case ast.Call(args=[ast.Constant(str() as name), *_]) if _is_import_call(child):
                yield Import(name, child.lineno, lazy)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, lazy=True)
            case _:
                yield from _imports(child, lazy)


def _imports_from(node: ast.ImportFrom, lazy: bool) -> Iterator[Import]:
    module = "." * node.level + (node.module or "")
    for alias in node.names:
        # `from ndistribute import tree` and `from ndistribute.x import y` may name a module.
        yield Import(f"{module}.{alias.name}", node.lineno, lazy)


def _is_import_call(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("import_module", "__import__")


def _unit(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def _layer(unit: str) -> int | None:
    return next((number for number, units in enumerate(LAYERS) if unit in units), None)


def _allowed(unit: str, target: str) -> bool:
    here, there = _layer(unit), _layer(target)
    if unit == target:
        return True
    if here is None or there is None or (unit, target) in FORBIDDEN:
        return False
    return there < here or here == there == 0


def _dotted(path: str) -> str:
    return "ndistribute." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            # An imported name is a module, or stands in one.
            module = name if name in graph else name.rpartition(".")[0]
            if module in graph and module not in seen:
                seen.add(module)
                waiting.append(module)
    return seen


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}


def test_imports_point_down_only(sources):
    found = [found for item in sources.items() for found in layer_violations(*item)]
    assert not found, "\n".join(found)


def test_optional_packages_have_one_door(sources):
    found = package_violations(sources)
    assert not found, "\n".join(found)


def test_no_module_imports_itself_by_way_of_others(sources):
    assert cycles(sources) == set()


def test_a_forbidden_import_is_caught():
    for path, line in (
        ("context.py", "from ndistribute import strategies"),
        ("collective/threads.py", "import ndistribute.variables.variable"),
        ("collective/threads.py", "from ndistribute.launcher.commands import Host"),
        ("data/dataset.py", "def late():\n    from ndistribute.variables import variable"),
        ("data/dataset.py", "import importlib\nimportlib.import_module('ndistribute.autodiff')"),
        ("models/model.py", "from ndistribute.strategies.base import Strategy"),
        ("models/model.py", "import ndistribute as nd"),
        ("tree.py", "from ndistribute.context import get_strategy"),
        (
            "context.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n"
            "    from ndistribute.strategies.base import Strategy\n",
        ),
        ("novel.py", ""),
    ):
        assert len(layer_violations(path, line)) == 1, (path, line)


def test_an_allowed_import_passes():
    for path, line in (
        ("__init__.py", "from ndistribute.strategies.local import MirroredStrategy"),
        ("tree.py", "from ndistribute.values import PerReplica"),
        ("models/model.py", "from ndistribute.context import get_strategy"),
        ("models/model.py", "from ndistribute.models.layers import Dense"),
        ("variables/variable.py", "from ndistribute import context, tree\nimport numpy as np"),
    ):
        assert layer_violations(path, line) == [], (path, line)


def test_a_second_door_or_an_undeclared_package_is_caught():
    for files in (
        {"tree.py": "def f():\n    import cupy"},
        {"autodiff/rules.py": "import cupy.fft"},
        {"jit/box.py": "def f():\n    import jax.numpy"},
        {"a.py": "def f():\n    import ray", "b.py": "def f():\n    from ray import util"},
        {"a.py": "import pandas"},
    ):
        assert len(package_violations(files)) == 1, files


def test_a_cycle_is_caught():
    for back in (
        "from ndistribute.data import a",
        "def f():\n    from ndistribute.data import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ndistribute.data.a",
    ):
        files = {"data/a.py": "from ndistribute.data.b import thing", "data/b.py": back}
        assert cycles(files) == {frozenset({"ndistribute.data.a", "ndistribute.data.b"})}
        assert cycles({**files, "data/b.py": ""}) == set()
