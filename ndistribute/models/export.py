"""Models as files: the architecture as JSON and the weights as tensors, without code.

The architecture is the class and the constructor's arguments of each layer. Reading a file creates
objects of known classes only, so you can load a file without trusting its author.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.context import get_strategy
from ndistribute.dtypes import dtype_named
from ndistribute.models import activations, initializers, regularizers
from ndistribute.models.checkpoint import NAME, Checkpoint, Weights, by_chief, read_newest
from ndistribute.models.layers.layer import Layer
from ndistribute.models.losses import Loss
from ndistribute.models.metrics import Metric
from ndistribute.models.symbolic import SymbolicArray
from ndistribute.names import custom_object_scope, get_custom_objects, registered_name
from ndistribute.numpy_functions import function_named, name_of
from ndistribute.optimizers import Optimizer
from ndistribute.optimizers.schedules import LearningRateSchedule
from ndistribute.plain import Encoder

__all__ = ["export", "load", "model_from_json"]


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
    data = _described(model, encoder)
    if state is not None and model.compiled is not None:
        data["compiled"] = encoder.encode(model.get_compile_config())
    state = Weights(model=model) if state is None else state
    write = state.writer(path.parent, path.name, max_to_keep, {"architecture": data}, "model")
    return Path(by_chief(model.strategy, write) or path)


def load(
    path: str | os.PathLike[str],
    custom_objects: Mapping[str, Callable[..., Any]] | None = None,
    compile: bool = True,  # noqa: A002 - As in Keras.
) -> Any:
    """Return the model that `export` or `save` wrote, in the strategy of the current scope.

    Args:
        path: the path that was passed to `save`; the result of `export`; or the path that was
            passed to `export`, for the last model of that path.
        custom_objects: the classes and functions from outside this package, by name.
        compile: whether to compile a model that `save` wrote, with its optimizer and metrics.

    Raises:
        FileNotFoundError: there is no model.
        CheckpointCorruptError: the model is damaged.
        ValueError: the file is not a model, it needs an unknown class or function, or its class
            creates other variables here.

    >>> import tempfile
    >>> from ndistribute.models import Sequential, layers
    >>> model = Sequential([layers.Dense(2, activation="relu")])
    >>> y = model(np.ones((1, 3), np.float32))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     loaded = load(model.export(f"{directory}/model"))
    >>> bool(np.array_equal(loaded(np.ones((1, 3), np.float32)), y))
    True
    """
    strategy = get_strategy()
    source, tensors, data = by_chief(strategy, lambda: read_newest(Path(path)), reads=True)
    if "architecture" not in data:
        raise ValueError(f"{source} is not an exported model: write one with model.export(path).")
    described, decoder = data["architecture"], Architecture(source)
    with custom_object_scope(custom_objects or {}):
        model = _made(described, decoder)
        compiled = decoder.decode(described.get("compiled", {})) if compile else {}
    if compiled:
        model.compile_from_config(compiled)
    if model.compiled is not None:
        data.pop("random")  # The generators are those of this program.
        Checkpoint(model=model).load(source, tensors, data)
    else:
        Weights(model=model).load(source, tensors, {"states": {}})
    return model


def to_json(model: Any) -> str:
    """Return the architecture of a model as text, without weights; see `model_from_json`."""
    return json.dumps(_described(model, Architecture()))


def model_from_json(
    json_string: str, custom_objects: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Return a new model from a result of `Model.to_json`, with new weights; see `load`.

    >>> from ndistribute.models import Sequential, layers
    >>> model = Sequential([layers.Input((3,)), layers.Dense(2)])
    >>> model_from_json(model.to_json()).count_params()
    8
    """
    with custom_object_scope(custom_objects or {}):
        return _made(json.loads(json_string), Architecture("the text"))


def _described(model: Any, encoder: Architecture) -> dict[str, Any]:
    data = {"model": encoder.encode(model), "input": encoder.encode(model.input_spec)}
    return data | {"trainable": [layer.trainable for layer in model.walk()]}


def _made(described: Mapping[str, Any], decoder: Architecture) -> Any:
    model, inputs = decoder.decode(described["model"]), decoder.decode(described["input"])
    if not model.built and inputs is not None:
        model.build_for(inputs)
    for layer, trainable in zip(model.walk(), described.get("trainable", ()), strict=False):
        layer.trainable = trainable
    return model


def save(model: Any, path: str | os.PathLike[str], include_optimizer: bool = True) -> None:
    """Write a model and the state of its training; see `Model.save`."""
    export(model, Path(path) / NAME, 1, Checkpoint(model=model) if include_optimizer else None)


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

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._numbers: dict[int, int] = {}  # The numbers of encoded layers.
        self._layers: list[Any] = []  # Those that were decoded.
        self._symbols: dict[Any, int] = {}  # The numbers of encoded symbolic arrays.
        self._values: dict[int, SymbolicArray] = {}  # Those that were decoded.

    def encode_other(self, value: Any, path: Any) -> Any:
        if isinstance(value, Layer):
            return self._encoded_layer(value, self.name(path))
        if isinstance(value, SymbolicArray):
            return {"symbolic": self._symbols.setdefault(value, len(self._symbols))}
        group = next((name for name, kind in _GROUPS.items() if isinstance(value, kind)), None)
        if group is not None:
            node = {"made": registered_name(type(value)), "group": group}
            return node | {"config": self.encode_other(value.get_config(), path)}
        if isinstance(value, Mapping):
            return {"dict": {k: self.encode(v, (path, k)) for k, v in value.items()}}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            here = self.name(path)
            fields = {name: self.encode(getattr(value, name), f"{here}.{name}") for name in names}
            return {"object": type(value).__name__, "fields": fields}
        if isinstance(value, np.ndarray):
            flat = self.encode(value.ravel().tolist(), path)
            kind = "str" if value.dtype.kind == "U" else value.dtype.name
            return {"array": flat, "shape": list(value.shape), "dtype": kind}
        if getattr(value, "__name__", "<lambda>") != "<lambda>" and callable(value):
            with contextlib.suppress(TypeError):
                return {"numpy": name_of(value)}
            return {"function": registered_name(value)}
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
        kind = registered_name(type(layer))
        return {"layer": kind, "name": layer.name, "config": config}

    def decode_other(self, tag: str, node: dict[str, Any]) -> Any:
        match node:
            case {"dict": items}:
                return self._all(items)
            case {"array": flat, "shape": shape, "dtype": dtype}:
                return np.array(self.decode(flat), dtype_named(dtype)).reshape(shape)
            case {"empty": shape, "dtype": dtype}:  # Earlier versions wrote this.
                return np.zeros(shape, dtype_named(dtype))
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
                return self._known(table, name).from_config(self.decode(config))
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
        value = get_custom_objects().get(name, table.get(name))
        if value is None:
            raise ValueError(
                f"{self._source} needs {name!r}, which this program does not define: import the "
                f"module that defines it, or pass custom_objects={{{name!r}: ...}}."
            )
        return value


_GROUPS: dict[str, type[Any]] = {
    "models.losses": Loss,
    "models.metrics": Metric,
    "optimizers": Optimizer,
    "optimizers.schedules": LearningRateSchedule,
}
_KINDS: tuple[Any, ...] = (*initializers.NAMED.values(), *regularizers.NAMED.values())
_OBJECTS = {kind.__name__: kind for kind in _KINDS}
