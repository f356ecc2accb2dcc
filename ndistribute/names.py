"""Names of classes, and what users may pass by its name.

Losses, metrics and layers are named after their classes; activations, initializers, regularizers,
losses, metrics and optimizers are found in a table of each kind, or among the custom objects: the
classes and functions that a program has registered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_custom: dict[str, Any] = {}


def snake_case(name: str) -> str:
    """Return the name of a class with underscores.

    >>> snake_case("MaxPool2D"), snake_case("GRUCell")
    ('max_pool2d', 'gru_cell')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def table_of(*kinds: Any, **others: Any) -> dict[str, Any]:
    """Return classes or functions by their names with underscores, and others by further names."""
    return {snake_case(kind.__name__): kind for kind in kinds} | others


def get_custom_objects() -> dict[str, Any]:
    """Return the table of custom objects by name, which may be changed.

    >>> get_custom_objects()["twice"] = lambda x: 2 * x
    >>> from ndistribute.models import layers
    >>> layers.Activation("twice")(3.0)
    6.0
    >>> del get_custom_objects()["twice"]
    """
    return _custom


def register_keras_serializable(package: str = "Custom", name: str | None = None) -> Any:
    """Return a decorator that makes a class or function a custom object, ``"package>name"``.

    A saved model that has one needs the module that registers it, but no `custom_objects`.

    >>> @register_keras_serializable("mine")
    ... def twice(x):
    ...     return 2 * x
    >>> registered_name(twice)
    'mine>twice'
    """

    def register(kind: T) -> T:
        _custom[f"{package}>{name or kind.__name__}"] = kind  # type: ignore[attr-defined]
        return kind

    return register


@contextlib.contextmanager
def custom_object_scope(*tables: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which the classes and functions of tables are custom objects."""
    before = dict(_custom)
    for table in tables:
        _custom.update(table)
    try:
        yield
    finally:
        _custom.clear()
        _custom.update(before)


def registered_name(kind: Any) -> str:
    """Return the name under which a class or function is a custom object, else its own."""
    return next((name for name, each in _custom.items() if each is kind), kind.__name__)


def named(table: Mapping[str, Any], name: Any, kind: str, /, **options: Any) -> Any:
    """Return the object of a name: an entry of a table, made with options if it is a class.

    What is not a name, but can be called, is returned unchanged. A dict is what `serialize`
    returns.

    Raises:
        ValueError: neither the table of this kind of objects nor the custom ones have the entry.
    """
    if callable(name):
        return name
    if isinstance(name, Mapping) and "class_name" in name:
        name, options = name["class_name"], _revived(table, name.get("config") or {}, kind)
    try:
        keys = name, str(name).lower(), snake_case(name)
        entry = next(each[key] for key in keys for each in (_custom, table) if key in each)
    except (StopIteration, TypeError):
        names = ", ".join(table)
        raise ValueError(f"unknown {kind} {name!r}: use one of {names}.") from None
    make = getattr(entry, "from_config", None)
    if not isinstance(entry, type):
        return entry
    return entry(**options) if make is None else make(options)


def serialize(made: Any) -> Any:
    """Return the class and the configuration of an object as a dict, or a function's name.

    >>> from ndistribute import optimizers
    >>> config = serialize(optimizers.SGD(0.5))
    >>> config["class_name"], optimizers.deserialize(config).learning_rate
    ('SGD', 0.5)

    Raises:
        ValueError: the object has no configuration.
    """
    if hasattr(made, "__name__"):
        return registered_name(made)
    if hasattr(made, "get_config"):
        config = dict(made.get_config())
    elif dataclasses.is_dataclass(made):
        config = {each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
    else:
        raise ValueError(f"serialize: {made!r} has neither get_config() nor a name.")
    for name, value in config.items():
        if hasattr(value, "get_config") or callable(value):
            config[name] = serialize(value)
    return {"class_name": registered_name(type(made)), "config": config}


def deserializing(get: Callable[[Any], T]) -> Callable[..., T]:
    """Return a function that makes an object of what `serialize` returns, by `get` of its kind."""

    def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> T:
        """Return a new object for what `serialize` returned, or the one of a name."""
        with custom_object_scope(custom_objects or {}):
            return get(config)

    return deserialize


def _revived(table: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a configuration with objects for what is serialized in it."""
    return {
        name: named(table, value, kind)
        if isinstance(value, Mapping) and "class_name" in value
        else value
        for name, value in config.items()
    }
