"""When the copies of a variable are brought together, and how."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp

__all__ = [
    "VariableAggregation",
    "VariablePolicy",
    "VariableSynchronization",
    "check_aggregation",
    "parse_aggregation",
    "parse_synchronization",
]

E = TypeVar("E", bound=enum.Enum)


class VariableSynchronization(enum.Enum):
    """Choose when the replicas' values of a variable are combined.

    >>> VariableSynchronization("on_read").name
    'ON_READ'
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.Enum):
    """Choose how the replicas' values of a variable are combined.

    >>> VariableAggregation.SUM.reduce_op
    <ReduceOp.SUM: 'SUM'>
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"

    @property
    def reduce_op(self) -> ReduceOp | None:
        """Return the reduction over replicas, or None where there is none."""
        return {"sum": ReduceOp.SUM, "mean": ReduceOp.MEAN}.get(self.value)


@dataclass(frozen=True, slots=True)
class VariablePolicy:
    """Hold what was said of a variable at its creation, checked."""

    trainable: bool
    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation


def parse_synchronization(synchronization: Any) -> VariableSynchronization:
    """Return the synchronization that a name stands for; AUTO becomes ON_WRITE.

    Raises:
        ValueError: the name is unknown, or NONE.
    """
    parsed = _parse(VariableSynchronization, synchronization, "synchronization")
    if parsed is VariableSynchronization.NONE:
        raise ValueError(
            "synchronization NONE is not supported: replicas could not agree on a value. Use "
            "ON_WRITE, or ON_READ for one value per replica."
        )
    if parsed is VariableSynchronization.AUTO:
        return VariableSynchronization.ON_WRITE
    return parsed


def parse_aggregation(aggregation: Any) -> VariableAggregation:
    """Return the aggregation that a name stands for.

    Raises:
        ValueError: the name is unknown.
    """
    return _parse(VariableAggregation, aggregation, "aggregation")


def check_aggregation(aggregation: VariableAggregation, dtype: np.dtype[Any]) -> None:
    """Compare an aggregation with the dtype of what it aggregates.

    Raises:
        ValueError: the dtype has no mean.
    """
    if aggregation is VariableAggregation.MEAN and dtype.kind in "iub":
        raise ValueError(
            f"aggregation MEAN needs a floating dtype, got {dtype}: a mean of integers is none. "
            "Use SUM or ONLY_FIRST_REPLICA, or another dtype."
        )


def _parse(kind: type[E], value: Any, what: str) -> E:
    if isinstance(value, kind):
        return value
    try:
        return kind(str(value).lower())
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{what} must be one of {names}, got {value!r}.") from None
