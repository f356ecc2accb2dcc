"""`Model`, a layer that can be trained, and `Sequential`, a model of one layer after another."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.models.export import export
from ndistribute.models.layers.layer import Layer
from ndistribute.models.training import Trainer

__all__ = ["Model", "Sequential"]


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

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the architecture and the weights, and return the folder; see `models.load`.

        Every worker must call this; the chief writes. No code is written: `load` needs the classes
        of layers that are not this package's.

        Args:
            path: the folder's path, to which a number is appended.

        Raises:
            ValueError: the model is not built, or an argument of a layer cannot be written.
        """
        return export(self, path)

    def summary(self) -> str:
        """Return a table of the layers with the shapes and numbers of their variables."""
        rows = [("layer", "variables", "parameters")]
        for layer in self._parts():
            shapes = ", ".join(str(variable.shape) for variable in layer.variables)
            kind = type(layer).__name__
            rows.append((f"{layer.name} ({kind})", shapes or "-", f"{layer.count_params():,}"))
        trained = sum(variable.size for variable in self.trainable_variables)
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {shapes:<{widths[1]}}  {count:>{widths[2]}}"
            for name, shapes, count in rows
        ]
        lines.insert(1, "-" * len(lines[0]))
        lines.insert(0, f"Model {self.name!r}")
        lines.append(f"Parameters: {self.count_params():,}, to train: {trained:,}")
        return "\n".join(lines)

    def _parts(self) -> list[Layer]:
        """Return the layers that the model itself holds."""
        return [one for path, one in self._held() if isinstance(one, Layer) and "/" not in path]


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
        if first is not None and first.input_shape is not None:
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
