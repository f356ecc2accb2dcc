"""Values replica by replica: made for each, and taken apart again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ndistribute import tree
from ndistribute.values import DistributedValues
from ndistribute.variables.variable import Variable

__all__ = ["ValueContext", "components_of"]


@dataclass(frozen=True, slots=True)
class ValueContext:
    """Tell a value function which replica it makes a value for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def components_of(value: Any) -> tuple[Any, ...]:
    """Return the components of a value that this process holds.

    Args:
        value: a `DistributedValues` or variable, a nest that holds some, or something plain.

    Returns:
        One entry per replica: a component, or a nest of them; ``(value,)`` for a plain value.

    Raises:
        ValueError: the leaves of a nest have different numbers of components.
    """
    if isinstance(value, DistributedValues | Variable):
        return value.values
    held = [v for v in tree.flatten(value) if isinstance(v, DistributedValues | Variable)]
    if not held:
        return (value,)
    size = max(len(leaf.values) for leaf in held)
    return tuple(
        tree.map_leaves(lambda leaf, i=i: _component(leaf, i, size), value) for i in range(size)
    )


def _component(leaf: Any, index: int, size: int) -> Any:
    if not isinstance(leaf, DistributedValues | Variable):
        return leaf
    parts = leaf.values
    if isinstance(leaf, Variable) and len(parts) == 1:
        return parts[0]  # A central variable's one component stands for every replica's.
    if len(parts) != size:
        raise ValueError(
            f"local_results of a nest in which one leaf has {size} component(s) and another has "
            f"{len(parts)}: each needs one component for each replica."
        )
    return parts[index]
