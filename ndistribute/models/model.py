"""`Model`, a layer that can be trained, and `Sequential`, a model of one layer after another."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.models.export import export
from ndistribute.models.layers.layer import Layer
from ndistribute.models.training import Trainer
from ndistribute.variables import Variable

_WIDTH, _LEAST = 80, 20  # Of a summary, and of its column of shapes.
_UNBROKEN = "\N{NO-BREAK SPACE}"


class Model(Trainer):
    """A model: a subclass creates layers in its constructor, and computes with them in `call`.

    Create and compile it in the scope of a strategy, which then runs it.

    Args:
        name: the name in messages and summaries; None: the class name, with a number.
        options: `trainable` and `dtype`, see `Layer`.

    >>> class Classifier(Model):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.hidden = layers.Dense(8, activation="relu")
    ...         self.output = layers.Dense(2)
    ...
    ...     def call(self, x):
    ...         return self.output(self.hidden(x))
    >>> from ndistribute.models import layers
    >>> import numpy as np
    >>> model = Classifier()
    >>> model(np.zeros((3, 4), np.float32)).shape, model.count_params()
    ((3, 2), 58)
    """

    def export(self, path: str | os.PathLike[str], max_to_keep: int | None = None) -> Path:
        """Write the architecture and the weights, and return the folder; see `models.load`.

        Every worker must call this; the chief writes. No code is written: `load` needs the classes
        of layers that are not this package's.

        Args:
            path: the folder's path, to which a number is appended.
            max_to_keep: the number of exports of this path to keep; None: all.

        Raises:
            ValueError: the model is not built, or an argument of a layer cannot be written.
        """
        return export(self, path, max_to_keep)

    def summary(self) -> str:
        """Return a table of the layers with the shapes and numbers of their variables.

        >>> from ndistribute.models.layers import Dense
        >>> print(Sequential([Dense(8, input_shape=(4,), name="hidden")], name="net").summary())
        Model 'net'
        layer           variables     parameters
        ----------------------------------------
        hidden (Dense)  (4, 8), (8,)          40
        ----------------------------------------
        Parameters: 40, to train: 40
        """
        rows = [("layer", "variables", "parameters"), *map(_row, self._parts())]
        variables = [held for _, held in self._own() if isinstance(held, Variable)]
        if variables:
            rows.append(_row(self, variables))
        room = max(_LEAST, _WIDTH - 4 - sum(max(len(row[k]) for row in rows) for k in (0, 2)))
        rows = [line for row in rows for line in _wrapped(*row, room)]
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        layout = "{{:<{}}}  {{:<{}}}  {{:>{}}}".format(*widths)
        lines = [layout.format(*row).rstrip() for row in rows]
        rule = "-" * len(lines[0])
        trained = sum(variable.size for variable in self.trainable_variables)
        total = f"Parameters: {self.count_params():,}, to train: {trained:,}"
        if not all(map(_is_built, self._parts())):
            total += "\nThe other variables are created when the model is first called."
        return "\n".join([f"Model {self.name!r}", lines[0], rule, *lines[1:], rule, total])

    def _parts(self) -> list[Layer]:
        """Return the layers that the model itself holds, also in lists and dicts, each once."""
        parts = {id(held): held for _, held in self._own() if isinstance(held, Layer)}
        return list(parts.values())


def _row(layer: Layer, variables: Sequence[Variable] | None = None) -> tuple[str, str, str]:
    """Return the row of a layer in a summary, in which equal shapes are counted."""
    name = f"{layer.name} ({type(layer).__name__})"
    if variables is None and not _is_built(layer):
        return name, "not built", "?"
    shown = layer.variables if variables is None else variables
    counts = Counter(str(variable.shape) for variable in shown)
    each = (f"{n} x {shape}" if n > 1 else shape for shape, n in counts.items())
    shapes = ", ".join(shape.replace(" ", _UNBROKEN) for shape in each)
    return name, shapes or "-", f"{sum(variable.size for variable in shown):,}"


def _wrapped(name: str, shapes: str, count: str, room: int) -> list[tuple[str, str, str]]:
    """Return a row of a summary as lines, which end between shapes."""
    first, *others = textwrap.wrap(shapes, room, break_long_words=False)
    lines = [(name, first, count), *(("", line, "") for line in others)]
    return [(left, middle.replace(_UNBROKEN, " "), right) for left, middle, right in lines]


def _is_built(layer: Layer) -> bool:
    return all(part.built for part in layer.walk())


class Sequential(Model):
    """A model that applies layers in turn.

    Args:
        layers: the layers; more can be added.
        name: the name in messages and summaries.

    >>> from ndistribute.models.layers import Dense
    >>> model = Sequential([Dense(8, activation="relu"), Dense(2)])
    >>> import numpy as np
    >>> model(np.zeros((3, 4), np.float32)).shape
    (3, 2)
    """

    def __init__(self, layers: Iterable[Layer] = (), name: str | None = None) -> None:
        super().__init__(name=name)
        self.layers: list[Layer] = []
        for layer in layers:
            self._append(layer)
        self._build_early()

    def add(self, layer: Layer) -> None:
        """Append a layer.

        Raises:
            TypeError: it is not a `Layer`.
        """
        self._append(layer)
        self._build_early()

    def _append(self, layer: Layer) -> None:
        if not isinstance(layer, Layer):
            raise TypeError(f"Sequential needs Layer objects, got {layer!r}.")
        self.layers.append(layer)

    def _build_early(self) -> None:
        """Create the variables, if the first layer knows the shape of its input."""
        first = self.layers[0] if self.layers else None
        if first is not None and first.input_shape is not None and None not in first.input_shape:
            self.build_for(np.zeros((0, *first.input_shape), first.compute_dtype))

    def call(self, inputs: Any) -> Any:
        """Return the output of the last layer."""
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs

    def get_config(self) -> dict[str, Any]:
        """Return the layers."""
        return {"layers": list(self.layers)}

    def _parts(self) -> list[Layer]:
        return self.layers
