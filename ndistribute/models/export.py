"""Models as files: the architecture as JSON and the weights as tensors, without code.

The architecture is the class and the constructor's arguments of each layer. Reading makes objects
of known classes only, so a file can be loaded without trusting who wrote it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.context import get_strategy
from ndistribute.dtypes import dtype_named
from ndistribute.models import activations, initializers, regularizers
from ndistribute.models.checkpoint import Weights, by_chief, read_newest
from ndistribute.models.layers.layer import Layer

__all__ = ["export", "load"]

_PLAIN = (str, int, float, bool, type(None))


def export(model: Any, path: str | os.PathLike[str], max_to_keep: int | None = None) -> Path:
    """Write a model; see `Model.export`."""
    if model.input_spec is None:
        raise ValueError(
            f"export of model {model.name!r}: it is not built yet, so it has no weights. Fit it, "
            "or call it on an input first."
        )
    path, writer = Path(path), _Writer()
    data = {"model": writer.described(model, ""), "input": writer.described(model.input_spec, "")}
    data["trainable"] = [layer.trainable for layer in model.walk()]
    weights = Weights(model=model)
    write = weights.writer(path.parent, path.name, max_to_keep, {"architecture": data}, "model")
    return Path(by_chief(model.strategy, write))


def load(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Return the model that `Model.export` wrote, in the strategy of the current scope.

    Args:
        path: the result of `export`, or the path that was passed to it, for its last model.
        custom_objects: classes and functions that are not this package's, by name.

    Raises:
        FileNotFoundError: there is no model.
        CheckpointCorruptError: it is damaged.
        ValueError: it needs a class or function that is unknown here, is no model, or its class
            makes other variables here.

    >>> import tempfile
    >>> from ndistribute.models import Sequential, layers
    >>> model = Sequential([layers.Dense(2, activation="relu")])
    >>> y = model(np.ones((1, 3), np.float32))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     loaded = load(model.export(f"{directory}/model"))
    >>> bool(np.array_equal(loaded(np.ones((1, 3), np.float32)), y))
    True
    """
    source, tensors, data = by_chief(get_strategy(), lambda: read_newest(Path(path)))
    if "architecture" not in data:
        raise ValueError(f"{source} is no exported model: write one with model.export(path).")
    described = data["architecture"]
    reader = _Reader(source, custom_objects or {})
    model = reader.made(described["model"])
    model.build_for(reader.made(described["input"]))
    for layer, trainable in zip(model.walk(), described.get("trainable", ()), strict=False):
        layer.trainable = trainable
    Weights(model=model).load(source, tensors, {"states": {}})
    return model


class _Writer:
    """Describes values as JSON; a layer that occurs again is described by its number."""

    def __init__(self) -> None:
        self._layers: dict[int, int] = {}

    def described(self, value: Any, where: str) -> Any:
        """Return the description of a value; `where` names it in errors."""
        if isinstance(value, _PLAIN) and not isinstance(value, np.generic):
            return value
        if isinstance(value, list | tuple):
            items = [self.described(item, f"{where}[{k}]") for k, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, Mapping):
            return {"dict": {k: self.described(v, f"{where}[{k!r}]") for k, v in value.items()}}
        if isinstance(value, Layer):
            return self._layer(value, where)
        if isinstance(value, np.dtype):
            return {"dtype": value.name}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            fields = {n: self.described(getattr(value, n), f"{where}.{n}") for n in names}
            return {"object": type(value).__name__, "fields": fields}
        if isinstance(value, np.ndarray) and not value.size:
            return {"empty": list(value.shape), "dtype": value.dtype.name}
        if isinstance(value, np.generic | np.ndarray):
            return self.described(value.tolist(), where)
        name = getattr(value, "__name__", "<lambda>")
        if callable(value) and name != "<lambda>":
            return {"function": name}
        raise ValueError(
            f"export: the argument {where} is {value!r}, which cannot be written: use a name, a "
            "number, a layer, or a function with a name."
        )

    def _layer(self, layer: Layer, where: str) -> Any:
        number = self._layers.get(id(layer))
        if number is not None:
            return {"shared": number}
        self._layers[id(layer)] = len(self._layers)
        config = {
            name: self.described(value, f"{where or layer.name}.{name}")
            for name, value in layer.get_config().items()
        }
        return {"layer": type(layer).__name__, "name": layer.name, "config": config}


class _Reader:
    """Makes values of their descriptions, of known classes and functions only."""

    def __init__(self, source: str, custom: Mapping[str, Callable[..., Any]]) -> None:
        self._source = source
        self._custom = custom
        self._layers: list[Any] = []

    def made(self, described: Any) -> Any:
        """Return the value of a description."""
        match described:
            case list():
                return [self.made(item) for item in described]
            case {"tuple": items}:
                return tuple(self.made(items))
            case {"dict": items}:
                return self._all(items)
            case {"empty": shape, "dtype": dtype}:
                return np.zeros(shape, dtype_named(dtype))
            case {"dtype": name}:
                return dtype_named(name)
            case {"shared": number}:
                return self._layers[number]
            case {"function": name}:
                return self._known(activations.NAMED, name)
            case {"object": name, "fields": fields}:
                return self._known(_OBJECTS, name)(**self._all(fields))
            case {"layer": kind, "name": name, "config": config}:
                place = len(self._layers)
                self._layers.append(None)  # Layers are numbered as the writer met them.
                layer = self._layers[place] = self._known(Layer.known, kind)(**self._all(config))
                layer.name = name
                return layer
        return described

    def _all(self, described: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.made(value) for name, value in described.items()}

    def _known(self, table: Mapping[str, Any], name: str) -> Any:
        known = self._custom.get(name, table.get(name))
        if known is None:
            raise ValueError(
                f"{self._source} needs {name!r}, which is unknown here: import the module that "
                f"defines it, or pass custom_objects={{{name!r}: ...}}."
            )
        return known


_KINDS: tuple[Any, ...] = (*initializers.NAMED.values(), *regularizers.NAMED.values())
_OBJECTS = {kind.__name__: kind for kind in _KINDS}
