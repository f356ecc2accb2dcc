"""Names of classes, and what users may pass by its name.

Losses, metrics and layers are named after their classes; activations, initializers, regularizers,
losses and metrics are found in a table of each kind.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ndistribute.context import get_strategy


def snake_case(name: str) -> str:
    """Return the name of a class with underscores.

    >>> snake_case("MaxPool2D"), snake_case("GRUCell")
    ('max_pool2d', 'gru_cell')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def table_of(*kinds: Any, **others: Any) -> dict[str, Any]:
    """Return classes or functions by their names with underscores, and others by further names."""
    return {snake_case(kind.__name__): kind for kind in kinds} | others


def named(table: Mapping[str, Any], name: Any, kind: str, /, **options: Any) -> Any:
    """Return the object of a name: an entry of a table, made with options if it is a class.

    What is not a name, but can be called, is returned unchanged.

    Raises:
        ValueError: the table of this kind of objects has no such entry.
    """
    if callable(name):
        return name
    try:
        entry = table[name]
    except (KeyError, TypeError):
        names = ", ".join(table)
        raise ValueError(f"unknown {kind} {name!r}: use one of {names}.") from None
    return entry(**options) if isinstance(entry, type) else entry


_numbers: weakref.WeakKeyDictionary[Any, dict[str, Iterator[int]]] = weakref.WeakKeyDictionary()


def numbered(kind: str) -> str:
    """Return a class name in snake case, with a number from the second of a strategy on.

    So the names are the same in all processes that run the same program.
    """
    label = snake_case(kind)
    numbers = _numbers.setdefault(get_strategy(), defaultdict(itertools.count))
    number = next(numbers[label])
    return f"{label}_{number}" if number else label
