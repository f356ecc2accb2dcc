"""`plot_model`: the layers of a model, and what leads to each, as Graphviz draws them."""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ndistribute.mistakes import accepting
from ndistribute.models.layers.layer import shapes_of

_log = logging.getLogger("ndistribute")
_OF_LOOKS = (
    "dpi expand_nested layer_range show_dtype show_layer_activations show_layer_names "
    "show_trainable splines subgraph"
)


@accepting(*_OF_LOOKS.split())
def plot_model(
    model: Any, to_file: Any = "model.png", show_shapes: bool = False, rankdir: str = "TB"
) -> None:
    """Draw a model to a file by the command ``dot``; without it, write what it would draw.

    Args:
        model: a model; one without symbolic inputs is drawn as a row of its layers.
        to_file: the path, whose end tells the format; ``.dot`` is the description itself.
        show_shapes: whether to show the shapes of the outputs.
        rankdir: ``"TB"`` draws downwards, ``"LR"`` to the right.
    """
    path = Path(to_file)
    lines = [f"  rankdir={rankdir};", *_nodes(model, show_shapes)]
    text = "\n".join(["digraph {", "  node [shape=box];", *lines, "}", ""])
    if path.suffix != ".dot" and shutil.which("dot") is None:
        _log.warning(
            "plot_model: Graphviz is not installed, so its input is in %s.",
            path.with_suffix(".dot"),
        )
        path = path.with_suffix(".dot")
    if path.suffix == ".dot":
        path.write_text(text)
        return
    command = ["dot", f"-T{path.suffix[1:]}", "-o", str(path)]
    subprocess.run(command, input=text.encode(), check=True)


def _nodes(model: Any, show_shapes: bool) -> Iterator[str]:
    calls = [] if model._graph is None else model._graph.calls
    for call in calls:
        kind = type(call.function).__name__
        shapes = f"\\n{shapes_of(call.outputs)}" if show_shapes else ""
        yield f'  {id(call)} [label="{call.name} ({kind}){shapes}"];'
        yield from dict.fromkeys(f"  {id(x.call)} -> {id(call)};" for x in call.inputs)
    if not calls:
        parts = model.layers
        yield from (
            f'  {id(each)} [label="{each.name} ({type(each).__name__})"];' for each in parts
        )
        yield from (f"  {id(a)} -> {id(b)};" for a, b in itertools.pairwise(parts))
