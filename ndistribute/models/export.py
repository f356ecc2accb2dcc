"""Models as files: the architecture as JSON and the weights as tensors, without code.

The architecture is the class and the constructor's arguments of each layer. Reading makes objects
of known classes only, so a file can be loaded without trusting who wrote it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute import tensor_files
from ndistribute.context import get_strategy
from ndistribute.dtypes import dtype_named
from ndistribute.mistakes import Explaining
from ndistribute.models import activations, initializers, regularizers
from ndistribute.models.checkpoint import Checkpoint, Weights, by_chief, read_newest
from ndistribute.models.layers.layer import Layer
from ndistribute.models.losses import Loss
from ndistribute.models.metrics import Metric
from ndistribute.models.symbolic import SymbolicArray
from ndistribute.numpy_functions import function_named, name_of
from ndistribute.optimizers import Optimizer, schedules
from ndistribute.plain import Encoder

__all__ = ["export", "load"]


def export(
    model: Any, path: str | os.PathLike[str], max_to_keep: int | None = None, state: Any = None
) -> Path:
    """Write a model, with its weights or another state; see `Model.export` and `Model.save`."""
    if model.input_spec is None:
        raise ValueError(
            f"export of model {model.name!r}: it is not built yet, so it has no weights. Fit it, "
            "or call it on an input first."
        )
    path, encoder = Path(path), Architecture()
    data = {"model": encoder.encode(model), "input": encoder.encode(model.input_spec)}
    data["trainable"] = [layer.trainable for layer in model.walk()]
    if state is not None and model.compiled is not None:
        data["compiled"] = encoder.encode(model.compiled | {"optimizer": model.optimizer})
    state = Weights(model=model) if state is None else state
    write = state.writer(path.parent, path.name, max_to_keep, {"architecture": data}, "model")
    return Path(by_chief(model.strategy, write))


def load(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Return the model that `export` or `save` wrote, in the strategy of the current scope.

    Args:
        path: the path that was passed to `save`; the result of `export`, or the path that was
            passed to it, for its last model.
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
    source, tensors, data = by_chief(get_strategy(), lambda: read_newest(_saved(Path(path))))
    if "architecture" not in data:
        raise ValueError(f"{source} is no exported model: write one with model.export(path).")
    described = data["architecture"]
    decoder = Architecture(source, custom_objects)
    model = decoder.decode(described["model"])
    if not model.built:
        model.build_for(decoder.decode(described["input"]))
    for layer, trainable in zip(model.walk(), described.get("trainable", ()), strict=False):
        layer.trainable = trainable
    if "compiled" in described:
        model.compile(**decoder.decode(described["compiled"]))
        data.pop("random")  # The generators are those of this program.
        Checkpoint(model=model).load(source, tensors, data)
    else:
        Weights(model=model).load(source, tensors, {"states": {}})
    return model


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a model and its training; see `Model.save`."""
    export(model, Path(path) / _NAME, 1, Checkpoint(model=model))


def _saved(path: Path) -> Path:
    """Return the path of the model in a folder that `save` wrote; another path unchanged."""
    return path / _NAME if tensor_files.paths(path, _NAME) else path


class Architecture(Encoder):
    """Encode the arguments of layers for JSON; a layer that occurs again is a number.

    Decoding makes values of known classes and functions only.
    """

    kinds = frozenset({"float", "tuple", "dtype", "slice", "ellipsis"})
    mark = ""
    others = tuple("made dict empty array shared function numpy object layer symbolic".split())
    refusal = (
        ValueError,
        "export: the argument {path} is {value!r}, which cannot be written: use a name, a number, "
        "a layer, or a function with a name.",
    )

    def __init__(self, source: str = "", custom: Mapping[str, Callable[..., Any]] | None = None):
        self._source, self._custom = source, custom or {}
        self._numbers: dict[int, int] = {}  # Of layers that were encoded.
        self._layers: list[Any] = []  # Those that were decoded.
        self._symbols: dict[Any, int] = {}  # The numbers of symbolic arrays that were encoded.
        self._values: dict[int, SymbolicArray] = {}  # Those that were decoded.

    def encode_other(self, value: Any, path: Any) -> Any:
        if isinstance(value, Layer):
            return self._encoded_layer(value, self.name(path))
        if isinstance(value, SymbolicArray):
            return {"symbolic": self._symbols.setdefault(value, len(self._symbols))}
        if isinstance(value, Explaining):
            config = value.get_config()
            if (
                isinstance(value, Optimizer) and "learning_rate" in config
            ):  # It may have been changed.
                config["learning_rate"] = value.learning_rate
            group = next(name for name, kind in _GROUPS.items() if isinstance(value, kind))
            node = {"made": type(value).__name__, "group": group}
            return node | {"config": self.encode_other(config, path)}
        if isinstance(value, Mapping):
            return {"dict": {k: self.encode(v, (path, k)) for k, v in value.items()}}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            here = self.name(path)
            fields = {name: self.encode(getattr(value, name), f"{here}.{name}") for name in names}
            return {"object": type(value).__name__, "fields": fields}
        if isinstance(value, np.ndarray):
            flat = self.encode(value.ravel().tolist(), path)
            return {"array": flat, "shape": list(value.shape), "dtype": value.dtype.name}
        if getattr(value, "__name__", "<lambda>") != "<lambda>" and callable(value):
            with contextlib.suppress(TypeError):
                return {"numpy": name_of(value)}
            return {"function": value.__name__}
        return super().encode_other(value, path)

    def _encoded_layer(self, layer: Layer, path: str) -> Any:
        number = self._numbers.get(id(layer))
        if number is not None:
            return {"shared": number}
        self._numbers[id(layer)] = len(self._numbers)
        config = {
            name: self.encode(value, f"{path or layer.name}.{name}")
            for name, value in layer.get_config().items()
        }
        return {"layer": type(layer).__name__, "name": layer.name, "config": config}

    def decode_other(self, tag: str, node: dict[str, Any]) -> Any:
        match node:
            case {"dict": items}:
                return self._all(items)
            case {"empty": shape, "dtype": dtype}:  # Of earlier versions.
                return np.zeros(shape, dtype_named(dtype))
            case {"array": flat, "shape": shape, "dtype": dtype}:
                return np.array(self.decode(flat), dtype_named(dtype)).reshape(shape)
            case {"symbolic": number}:
                nothing = SymbolicArray(None, (), np.dtype(np.float32))
                return self._values.setdefault(number, nothing)
            case {"numpy": name}:
                return function_named(name)
            case {"shared": number}:
                return self._layers[number]
            case {"made": name, "group": group, "config": config}:
                self._known(_GROUPS, group)
                module = import_module(f"ndistribute.{group}")
                table = {each: getattr(module, each) for each in module.__all__}
                return self._known(table, name)(**self.decode(config))
            case {"function": name}:
                return self._known(activations.NAMED, name)
            case {"object": name, "fields": fields}:
                return self._known(_OBJECTS, name)(**self._all(fields))
        place = len(self._layers)
        self._layers.append(None)  # Layers are numbered as they were met when they were encoded.
        kind = self._known(Layer.known, node[tag])
        layer = self._layers[place] = kind.assembled(self._all(node["config"]))
        layer.name = node["name"]
        return layer

    def _all(self, nodes: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.decode(node) for name, node in nodes.items()}

    def _known(self, table: Mapping[str, Any], name: str) -> Any:
        value = self._custom.get(name, table.get(name))
        if value is None:
            raise ValueError(
                f"{self._source} needs {name!r}, which is unknown here: import the module that "
                f"defines it, or pass custom_objects={{{name!r}: ...}}."
            )
        return value


_NAME = "model"  # In the folder of a saved model.
_GROUPS = {"models.losses": Loss, "models.metrics": Metric, "optimizers": Optimizer}
_KINDS: tuple[Any, ...] = (
    *initializers.NAMED.values(),
    *regularizers.NAMED.values(),
    *(kind for kind in vars(schedules).values() if dataclasses.is_dataclass(kind)),
)
_OBJECTS = {kind.__name__: kind for kind in _KINDS}
