"""Names of classes, and what users may pass by its name.

Losses, metrics and layers are named after their classes; activations, initializers, regularizers,
losses and metrics are found in a table of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def snake_case(name: str) -> str:
    """Return the name of a class with underscores.

    >>> snake_case("MaxPool2D"), snake_case("GRUCell")
    ('max_pool2d', 'gru_cell')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def found(table: Mapping[str, Any], name: Any, kind: str) -> Any:
    """Return an entry of a table of a kind of objects; raise a `ValueError` if it has none."""
    try:
        return table[name]
    except (KeyError, TypeError):
        names = ", ".join(table)
        raise ValueError(f"unknown {kind} {name!r}: use one of {names}.") from None
