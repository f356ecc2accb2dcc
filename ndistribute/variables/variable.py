"""`Variable`: an array that a strategy keeps consistent over its replicas.

This file holds what every kind shares: creation, checks, and behaving like the array it holds.
A kind says where its components live and what a write does; the strategy in scope chooses the kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute import context
from ndistribute.device import Array, to_host
from ndistribute.variables.array_like import ArrayLike
from ndistribute.variables.creation import Request, create_variable
from ndistribute.variables.policy import (
    VariableAggregation,
    VariablePolicy,
    VariableSynchronization,
)
from ndistribute.variables.write import Write, check_rows, check_value

__all__ = ["Variable"]


class Variable(ArrayLike):
    """Hold an array that lives across steps and replicas.

    Args:
        initial_value: an array, a number, or a callable that returns one; copied.
        trainable: whether tapes watch it.
        name: shown in messages.
        dtype: of the variable; None keeps that of the initial value.
        synchronization: `VariableSynchronization` or its value.
        aggregation: `VariableAggregation` or its value.

    Raises:
        ValueError: the policy is unknown or does not fit the dtype, or replicas differ.

    >>> v = Variable([1.0, 2.0])
    >>> v.assign_add([1.0, 1.0]).numpy()
    array([2., 3.])
    >>> v * 2
    array([4., 6.])
    """

    is_distributed_variable = True

    def __new__(
        cls,
        initial_value: Any,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = "auto",
        aggregation: VariableAggregation | str = "none",
    ) -> Variable:
        request = Request(initial_value, trainable, name, dtype, synchronization, aggregation)
        made: Variable = create_variable(request)
        return made

    @classmethod
    def make(cls, strategy: Any, array: Array, policy: VariablePolicy) -> Variable:
        """Make a variable of this kind; ``Variable(...)`` finds out which, and calls this."""
        made = object.__new__(cls)
        made._set_up(strategy, array, policy)
        return made

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        """Allocate the components; a kind extends this."""
        self._strategy = strategy
        self._shape = tuple(array.shape)
        self._dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._policy = policy

    @property
    def values(self) -> tuple[Array, ...]:
        """Return a snapshot of every component of this process."""
        raise NotImplementedError(f"{type(self).__name__} defines no values.")

    def _write(self, write: Write) -> None:
        """Carry out a checked write by the rules of the kind."""
        raise NotImplementedError(f"{type(self).__name__} defines no writes.")

    def read_value(self) -> Any:
        """Return a snapshot, tracked by the tape that watches this variable."""
        return self.tracked_value()

    @property
    def value(self) -> Any:
        """Return a snapshot, tracked by the tape that watches this variable."""
        return self.tracked_value()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy on the host that the caller owns."""
        return np.array(to_host(self.component()))

    def tracked_value(self) -> Any:
        """Return a snapshot, tracked by the tape that watches this variable."""
        recorder = context.current_frame().recorder
        if recorder is None:
            return self.component()
        return recorder.read(self, self.component())

    @property
    def distribute_strategy(self) -> Any:
        """Return the strategy that the variable belongs to."""
        return self._strategy

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(np.prod(self._shape))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype."""
        return self._dtype

    @property
    def name(self) -> str:
        """Return the name."""
        return self._policy.name

    @property
    def trainable(self) -> bool:
        """Return whether tapes watch the variable."""
        return self._policy.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """Return when the replicas' values are combined."""
        return self._policy.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """Return how the replicas' values are combined."""
        return self._policy.aggregation

    def assign(self, value: Any) -> Variable:
        """Set the value by the variable's synchronization and aggregation.

        Args:
            value: an array or number of the variable's shape; in a replica, this replica's own.

        Returns:
            The variable.

        Raises:
            ValueError: the shape or dtype does not fit, or the aggregation is missing; nothing
                has changed then.
        """
        return self._checked_write("assign", value)

    def assign_add(self, value: Any) -> Variable:
        """Add to the value; see `assign`."""
        return self._checked_write("assign_add", value)

    def assign_sub(self, value: Any) -> Variable:
        """Subtract from the value; see `assign`."""
        return self._checked_write("assign_sub", value)

    def scatter_add(self, indices: Any, values: Any = None) -> Variable:
        """Add rows to the rows at these indices.

        Args:
            indices: integers of shape ``(k,)``, or an `IndexedSlices`.
            values: rows of shape ``(k, *shape[1:])``; equal indices add up.

        Raises:
            ValueError: an index is out of range, or the shapes do not fit.
        """
        return self._checked_scatter("assign_add", indices, values)

    def scatter_sub(self, indices: Any, values: Any = None) -> Variable:
        """Subtract rows from the rows at these indices; see `scatter_add`."""
        return self._checked_scatter("assign_sub", indices, values)

    def scatter_update(self, indices: Any, values: Any = None) -> Variable:
        """Set the rows at these indices; of equal indices the last one holds."""
        return self._checked_scatter("assign", indices, values)

    def replica(self, what: str) -> Any:
        """Return this thread's replica of the variable's strategy, or None across replicas.

        Raises:
            RuntimeError: another strategy is current.
        """
        frame = context.current_frame()
        current = frame.strategy
        if current is None:
            return None
        if current is self._strategy:
            alone = frame.replica is not None and frame.replica.num_replicas_in_sync == 1
            return None if alone else frame.replica
        plain = self._strategy.is_default
        if plain and (what == "read" or frame.replica is None):
            return None
        raise RuntimeError(
            f"{what} of variable {self.name!r} of {self._strategy!r} under {current!r}: create the "
            "variable inside the scope of the strategy that uses it."
        )

    def _checked_write(self, how: str, value: Any) -> Variable:
        self._write(Write(how, check_value(self, how, value)))
        return self

    def _checked_scatter(self, how: str, indices: Any, values: Any) -> Variable:
        self._write(Write(how, check_rows(self, how, indices, values)))
        return self

    def __repr__(self) -> str:
        try:
            shown = np.array2string(to_host(self.component()), threshold=20)
        except (ValueError, RuntimeError) as error:
            shown = f"<not readable here: {error}>"
        return (
            f"<{type(self).__name__} {self._policy.name!r} {self._dtype.name}{self._shape} {shown}>"
        )
