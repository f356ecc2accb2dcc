"""When and how a strategy combines the replicas' values of a variable."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp

__all__ = ["VariableAggregation", "VariablePolicy", "VariableSynchronization"]

E = TypeVar("E", bound=enum.Enum)


class VariableSynchronization(enum.Enum):
    """The choice of when replicas' values are combined: on write, as for ``AUTO``, or on read.

    >>> VariableSynchronization("on_read").name
    'ON_READ'
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.Enum):
    """The choice of how the replicas' values of a variable are combined.

    >>> VariableAggregation.SUM.reduce_op
    <ReduceOp.SUM: 'SUM'>
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"

    @property
    def reduce_op(self) -> ReduceOp | None:
        """The reduction over replicas; None for ``NONE`` and ``ONLY_FIRST_REPLICA``."""
        return {"sum": ReduceOp.SUM, "mean": ReduceOp.MEAN}.get(self.value)


@dataclass(frozen=True, slots=True)
class VariablePolicy:
    """The arguments of a variable other than its initial value and dtype."""

    name: str
    trainable: bool = False
    synchronization: VariableSynchronization = VariableSynchronization.ON_WRITE
    aggregation: VariableAggregation = VariableAggregation.NONE

    @classmethod
    def parse(
        cls, name: str | None, trainable: bool, synchronization: Any, aggregation: Any
    ) -> VariablePolicy:
        """Return the policy for the arguments of `Variable`; a name of None becomes empty."""
        when = _parse(VariableSynchronization, synchronization, "synchronization")
        if when is VariableSynchronization.NONE:
            raise ValueError(
                "synchronization NONE is not supported: replicas could not agree on a value. Use "
                "ON_WRITE, or ON_READ for one value per replica."
            )
        if when is VariableSynchronization.AUTO:
            when = VariableSynchronization.ON_WRITE
        how = _parse(VariableAggregation, aggregation, "aggregation")
        if not isinstance(name, str | None) or not isinstance(trainable, bool | np.bool_):
            what = f"name={name!r} and trainable={trainable!r}"
            raise TypeError(f"{what} are not a str and a bool: write nd.Variable(x, name='w').")
        return cls(name or "", bool(trainable), when, how)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise a `ValueError` if the aggregation is undefined for a dtype."""
        if self.aggregation is VariableAggregation.MEAN and dtype.kind in "iub":
            raise ValueError(
                f"aggregation MEAN needs a floating dtype, got {dtype}: MEAN is undefined for "
                "integers. Use SUM or ONLY_FIRST_REPLICA, or another dtype."
            )


def _parse(kind: type[E], value: Any, what: str) -> E:
    if isinstance(value, kind):
        return value
    try:
        return kind(str(value).lower())
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{what} must be one of {names}, got {value!r}.") from None
