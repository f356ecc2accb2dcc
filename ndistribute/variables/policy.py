"""When and how the replicas' values of a variable are combined, and checked writes to variables.

A variable's dtype never changes, so written values are cast to it. A cast that would lose a
fraction, an imaginary part or the high digits of an integer raises an error.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.context import current_trace
from ndistribute.devices import Array, as_array, device_of
from ndistribute.dtypes import can_cast, kind_of, standard
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.stream import working_on

E = TypeVar("E", bound=enum.Enum)


class VariableSynchronization(enum.Enum):
    """When the replicas' values of a variable are combined: on write (``AUTO`` too), or on read.

    >>> VariableSynchronization("on_read").name
    'ON_READ'
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.Enum):
    """How the replicas' values of a variable are combined: by sum, by mean, or from one replica.

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
    shard_axis: int | None = None  # The axis along which each replica stores one shard.

    @classmethod
    def parse(
        cls, name: str | None, trainable: bool | None, synchronization: Any, aggregation: Any
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
        trainable = when is not VariableSynchronization.ON_READ if trainable is None else trainable
        if not isinstance(name, str | None) or not isinstance(trainable, bool | np.bool_):
            what = f"name={name!r} and trainable={trainable!r}"
            raise TypeError(f"{what} must be a str and a bool: write nd.Variable(x, name='w').")
        return cls(name or "", bool(trainable), when, how)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise a `ValueError` if the aggregation is undefined for a dtype."""
        if self.aggregation is VariableAggregation.MEAN and dtype.kind in "iub":
            raise ValueError(
                f"aggregation MEAN needs a floating dtype, got {dtype}: MEAN is undefined for "
                "integers. Use SUM or ONLY_FIRST_REPLICA, or another dtype."
            )

    def __str__(self) -> str:
        cut = "" if self.shard_axis is None else f", sharded along axis {self.shard_axis}"
        return f"{self.synchronization.name}, {self.aggregation.name}{cut}"


def _parse(kind: type[E], value: Any, what: str) -> E:
    try:
        return value if isinstance(value, kind) else kind(str(value).lower())
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{what} must be one of {names}, got {value!r}.") from None


@dataclass(frozen=True, slots=True)
class Write:
    """A write to a variable."""

    how: str  # "assign", "assign_add" or "assign_sub".
    value: Any  # A whole array, or rows as `IndexedSlices`, of the variable's dtype.

    @property
    def sparse(self) -> bool:
        """True if only some rows are written."""
        return isinstance(self.value, IndexedSlices)

    def rows_once(self) -> Any:
        """Return the value; if rows are assigned, each index occurs once, with its last row."""
        rows = self.value
        if self.how != "assign" or not self.sparse:
            return rows
        return rows.last_rows()

    def aggregated(self, aggregation: VariableAggregation, communicator: Any) -> Write:
        """Return the combination of all replicas' writes; a collective call."""
        rows, op = self.value, aggregation.reduce_op
        if op is not None:
            return Write(self.how, communicator.all_reduce(op, self.rows_once()))
        if not self.sparse:
            return Write(self.how, communicator.broadcast(rows, root=0))
        if current_trace() is not None:  # All replicas have as many rows.
            indices, values = communicator.broadcast((rows.indices, rows.values), root=0)
        else:
            first = slice(None if communicator.rank == 0 else 0)
            pair = (rows.indices[first], rows.values[first])
            indices, values = communicator.all_gather(pair, axis=0)
        return Write(self.how, IndexedSlices(values, indices, rows.dense_shape))


def cast(value: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Return a value as an array of a dtype; an error names the operation `what`."""
    array = as_array(value)
    if array.dtype == dtype:
        return array
    with working_on(device_of(array)):
        if not _fits(value, array, dtype):
            raise ValueError(
                f"{what}: the cast from {array.dtype} to {dtype} would lose information. "
                "Convert the value with astype first. Nothing has changed."
            )
        return array.astype(dtype)


def fitted(array: Array, dtype: np.dtype[Any]) -> Array | None:
    """Return an array in a dtype, rounded; None if more would be lost or a value is too large."""
    try:
        with np.errstate(over="ignore"):
            narrow = cast(array, dtype, "fitted")
    except ValueError:
        return None
    return None if (np.isfinite(array) & ~np.isfinite(narrow)).any() else narrow


def _fits(value: Any, array: Array, dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind == "O":  # This is an integer of more than 64 bits, or not a number.
        return False
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        # Whether integers fit a narrower or an unsigned dtype depends on their values.
        safe = np.can_cast(array.dtype, dtype)
        return safe or bool((array.astype(dtype) == array).all())
    if isinstance(value, bool | int | float | complex):
        # A Python number has a kind, but no width.
        return np.result_type(type(value), standard(dtype)).kind == kind_of(dtype)
    return can_cast(array.dtype, dtype)
