"""Keras objects from text, dicts and files: objects of `tf.keras`, not the native ones.

If a program defines classes with the same names, its files mean these classes.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

from ndistribute import models
from ndistribute.compat.signatures import adapted
from ndistribute.mistakes import accepting
from ndistribute.models import layers
from ndistribute.names import (
    custom_object_scope,
    deserializing,
    get_custom_objects,
    named,
    serialize,
)
from ndistribute.optimizers import schedules

_IN_FILES = "optimizers", "layers", "models"


def _loading(load: Any) -> Any:
    def call(source: Any, custom_objects: Any = None, **options: Any) -> Any:
        return load(source, _classes(*_IN_FILES) | (custom_objects or {}), **options)

    return adapted(call, "options", "safe_mode", filepath="source", json_string="source")


load_model, model_from_json = _loading(models.load), _loading(models.model_from_json)


def _classes(*modules: str) -> dict[str, Any]:
    """Return the classes of Keras's namespaces by name, except those that the program redefines."""
    kinds: dict[str, Any] = {}
    for module in modules:
        names: Any = import_module(f"ndistribute.compat.tf.keras.{module}")
        kinds |= {name: getattr(names, name) for name in names.__all__}
    kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, type)}
    known = layers.Layer.known
    return {name: kind for name, kind in kinds.items() if known.get(name, kind) in kind.__mro__}


def get_optimizer(identifier: Any) -> Any:
    """Return an optimizer for a name; return an optimizer unchanged."""
    if isinstance(identifier, models.optimizers.Optimizer):
        return identifier
    kinds = _classes("optimizers")
    with custom_object_scope({name.lower(): kind for name, kind in kinds.items()}):
        return models.optimizers.get(identifier)


deserialize_optimizer = deserializing(get_optimizer)


def serialize_object(obj: Any) -> Any:
    """Return what `serialize` returns, also for lists; text, numbers and dicts unchanged."""
    if isinstance(obj, list | tuple):
        return [serialize_object(each) for each in obj]
    return serialize(obj) if hasattr(obj, "get_config") or callable(obj) else obj


def deserialize_object(config: Any, custom_objects: Any = None) -> Any:
    """Return a new object for a result of `serialize_object`; other text unchanged."""
    if isinstance(config, list):
        return [deserialize_object(each, custom_objects) for each in config]
    if not isinstance(config, dict) or "class_name" not in config:
        known = get_custom_objects() | (custom_objects or {})
        return known.get(config, config) if isinstance(config, str) else config
    kinds = _classes(*_IN_FILES, "losses", "metrics", "initializers", "regularizers")
    with custom_object_scope(custom_objects or {}):
        return named(layers.Layer.known | kinds | models.activations.NAMED, config, "object")


class PyDataset:
    """Batches by number, whose order `fit` may change; a subclass defines two methods.

    Its arguments have no effect: batches are made one after another, ahead of the steps.
    """

    @accepting("max_queue_size", "use_multiprocessing", "workers")
    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} defines no __len__.")

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __getitem__.")

    def __iter__(self) -> Any:
        return (self[number] for number in range(len(self)))

    def on_epoch_end(self) -> None:
        """Do nothing; a subclass may change the batches of the next epoch here."""


def with_decay(kind: Any) -> Any:
    """Return the constructor of an optimizer that also accepts the keywords of early Keras."""
    construct: Any = kind.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, lr: Any = None, decay: Any = None, **options: Any) -> None:
        if lr is not None:
            options["learning_rate"] = lr
        if decay:
            usual = inspect.signature(construct).parameters["learning_rate"].default
            first, args = options.get("learning_rate", args[0] if args else usual), args[1:]
            options["learning_rate"] = schedules.InverseTimeDecay(first, 1, decay)
        self._arguments = args, options  # For `get_config`.
        construct(self, *args, **options)

    return init
