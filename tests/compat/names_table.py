"""The table of names in docs/tensorflow-names.md.

``python -m tests.compat.names_table`` writes it, and the stubs of the names.

The names that work come from the namespaces. What to use instead of a missing name comes from its
error. This file tells how names differ.
"""

import re
import sys
from pathlib import Path

from ndistribute.compat import tf
from ndistribute.compat.tables import INSTEAD
from tests.compat import name_stubs

PAGE = Path(__file__).parents[2] / "docs/tensorflow-names.md"
START, END = "<!-- names: written by tests/compat/names_table.py -->", "<!-- end of names -->"
DIFFERS = {
    "Module": "`with_name_scope` changes no name",
    "control_dependencies": "has no effect on arrays, which come in order, like `group`, `no_op`",
    "data.Dataset": "has read-only elements; shuffles without a seed are the same on all workers",
    "dtypes.float32": "is NumPy's, like all dtypes: use `x.dtype.kind == 'f'` for `is_floating`",
    "device": "places only operations of graphs, not arrays; `name_scope` names only these, too",
    "errors.OutOfRangeError": "is Python's `StopIteration`",
    "estimator.Estimator": "writes checkpoints as [folders](checkpoints.md)",
    "function": "returns its function, or with `jit_compile=True` [compiles](compiled.md) it",
    "image.resize": "resizes bilinearly or by nearest neighbours, without antialiasing",
    "keras.Model": "runs steps as NumPy functions: see [Keras](from-tensorflow.md)",
    "keras.optimizers.Optimizer": "has a number or a function as `learning_rate`, not a variable",
    "nn.conv2d": "takes images with channels last, without dilations, like the poolings",
    "random.normal": "returns other numbers than TensorFlow for a seed, like all random functions",
    "random.Generator": "has a `state` of six integers, and `skip` skips blocks of four numbers",
    "saved_model.save": "saves models, without their code",
    "strings.split": "splits a single text, not an array of texts",
    "strings.lower": "returns Unicode text; as in TensorFlow, `numpy()` returns bytes",
    "summary.histogram": "always has 30 buckets",
    "train.Checkpoint": "writes folders with a number, and does not read TensorFlow's files",
    "compat.v1.Session": "returns NumPy arrays and bytes; queues do not exist",
    "compat.v1.train.Saver": "writes folders, as all [checkpoints](checkpoints.md) do",
}
"""How names differ from TensorFlow's."""


def table() -> str:
    """Return the table: a row for each namespace."""
    rows = ["| module | works | differs | missing: use instead |", "|---|---|---|---|"]
    paths = {_path(name): module for name, module in sys.modules.items() if _path(name) is not None}
    kept = {path: module for path, module in paths.items() if _own(path, module)}
    for path in sorted({*kept, *map(_parent, INSTEAD)}):
        known = kept.get(path)
        works = "" if known is None else _works(path, known)
        cells = [works, _told(DIFFERS, path, " "), _told(INSTEAD, path, ": ")]
        title = f"`tf.{path}`" if path else "`tf`"
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _told(texts: dict[str, str], path: str, between: str) -> str:
    """Return what is told of names of a namespace."""
    names = [name for name in texts if _parent(name) == path]
    return "; ".join(f"`{name.rpartition('.')[2]}`{between}{texts[name]}" for name in names)


def _path(name: str) -> str | None:
    """Return the path of a namespace below tf; None for other modules, and for aliases."""
    match = re.fullmatch(rf"{re.escape(tf.__name__)}(?:\.(.*))?", name)
    path = None if match is None else match[1] or ""
    return None if path is None or sys.modules[name].__name__ != name else path


def _own(path: str, module: object) -> bool:
    """Return whether a namespace has names in the tables, apart from other namespaces."""
    return bool(vars(module)["_leads"])


def _works(path: str, module: object) -> str:
    leads = vars(module)["_leads"]
    sources = {source for source, _, _ in leads.values()}
    same = sources.pop().removeprefix(".compat.") if len(sources) == 1 else ""
    if same.startswith("tf.") and len(leads) > 3:
        return f"the names of `{same}`"
    return " ".join(f"`{name}`" for name in sorted(leads))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def written(page: str) -> str:
    """Return the page with the table of today."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    name_stubs.write()
    PAGE.write_text(written(PAGE.read_text()))
