"""What a transaction may change on a parameter server: one frozen record for each kind of change.

Alone they are nothing: a `Transaction` of `requests` holds them, and gives them their origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ndistribute.cluster.protocol.terms import Gradient
from ndistribute.cluster.wire.tensors import Array

__all__ = [
    "Accumulate",
    "Add",
    "Aggregate",
    "Apply",
    "Assign",
    "Change",
    "Enqueue",
    "IncrementStep",
    "Scatter",
    "Subtract",
]


@dataclass(frozen=True, slots=True, eq=False)
class Assign:
    """Replace a variable's value; its outcome is `Done`."""

    name: str
    value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """Add to a variable; its outcome is `Done`."""

    name: str
    value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Subtract:
    """Subtract from a variable; its outcome is `Done`."""

    name: str
    value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Change some rows of a variable; its outcome is `Done`.

    Indices may repeat: of several updates of a row the last stays, all others are combined.
    """

    name: str
    how: Literal["update", "add", "sub", "mul", "div", "min", "max"]
    indices: Array
    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """Change variables by their gradients as an optimizer does; its outcome is `Done`.

    Args:
        names: the variables; the outcome holds their versions.
        gradients: one for each.
        slots: for each variable the names of those that the rule keeps beside it, of the same
            shape and dtype, in the order of the rule's `slot_names`.
        counter: the name of a variable of one int64: it rises by one, to the number of this step.
        rule: a name of `update_rules.RULES`.
        learning_rate: of this step.
        hyperparameters: of the rule; those left out have their defaults.
    """

    names: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    slots: tuple[tuple[str, ...], ...]
    counter: str
    rule: str
    learning_rate: float
    hyperparameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Aggregate:
    """Add a set of gradients to those of a step; its outcome is `Accumulated`.

    With the last set that is needed their mean is applied, and the step is one higher.

    Args:
        name: of the aggregate, made on first use at step 0.
        at_step: the aggregate's step that the gradients were computed for. A lower one than the
            aggregate's is dropped; a higher one, which a server restored from an older snapshot
            gets, moves the aggregate there, without the sets that it had.
        count: how many sets are needed; a second one of a series for a step is dropped.
        apply: the gradients and what is done with their mean; in the last set it counts.
    """

    name: str
    at_step: int
    count: int
    apply: Apply


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate:
    """Add a gradient to a sum, unless it is stale; its outcome is `Accumulated`.

    Args:
        name: of the accumulator, made on first use.
        gradient: of the shape and dtype of the accumulator's first.
        at_step: the accumulator's step that it was computed for.
        max_staleness: how many steps it may be behind.
    """

    name: str
    gradient: Gradient
    at_step: int
    max_staleness: int = 0


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Put tokens in a queue, made on first use; its outcome is `Done`."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IncrementStep:
    """Raise the global step; its outcome is `Step`."""

    by: int = 1


Change = (
    Assign | Add | Subtract | Scatter | Apply | Aggregate | Accumulate | Enqueue | IncrementStep
)
