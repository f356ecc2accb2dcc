"""How ``Variable(...)`` becomes an object: which kind, made once for all replicas.

The strategy in scope chooses the kind. Inside `run` every replica asks for a variable and all get
the same one, so what they ask for is compared first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute import context
from ndistribute.device import Array, as_array
from ndistribute.values import DistributedValues
from ndistribute.variables.casting import cast
from ndistribute.variables.policy import (
    VariablePolicy,
    check_aggregation,
    parse_aggregation,
    parse_synchronization,
)

__all__ = ["Request", "create_variable"]


def create_variable(request: Request) -> Any:
    """Return the variable that a caller asked for, one and the same for all replicas."""
    replica = context.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return request.create(context.get_strategy())
    strategy = replica.strategy
    if replica is strategy.replica_contexts[0]:
        # Now, on its own thread: the value may be drawn from its generator.
        request.array()

    def create(requests: Sequence[Request]) -> Any:
        for rank, other in enumerate(requests):
            other.check_like(requests[0], rank)
        return requests[0].create(strategy)

    return replica.communicator.merge("Variable", request, create)


class Request:
    """What the caller of ``Variable(...)`` asked for."""

    def __init__(
        self,
        initial_value: Any,
        trainable: bool,
        name: str | None,
        dtype: Any,
        synchronization: Any,
        aggregation: Any,
    ) -> None:
        if isinstance(initial_value, DistributedValues):
            raise ValueError(
                "the initial value of a variable is the same on every replica, got a "
                f"{type(initial_value).__name__}."
            )
        self.initial_value = initial_value
        self.trainable = trainable
        self.name = name
        self.dtype = dtype
        self.synchronization = parse_synchronization(synchronization)
        self.aggregation = parse_aggregation(aggregation)
        self._array: Array | None = None

    def array(self) -> Array:
        """Return the initial value; a callable is called the first time alone."""
        if self._array is None:
            value = self.initial_value() if callable(self.initial_value) else self.initial_value
            made = as_array(value)
            wanted = np.dtype(made.dtype if self.dtype is None else self.dtype)
            for dtype in (made.dtype, wanted):
                if dtype.kind not in "biufc" and dtype.name != "bfloat16":
                    raise ValueError(f"a variable holds numbers, not {dtype}, got {value!r}.")
            wanted = wanted.newbyteorder("=")
            self._array = cast(value, wanted, "the initial value of a variable")
        return self._array

    def create(self, strategy: Any) -> Any:
        what = f"variable {self.name!r}, {self.synchronization.name}, {self.aggregation.name}"
        array = strategy.agree_on(self.array(), what)
        check_aggregation(self.aggregation, array.dtype)
        policy = VariablePolicy(
            trainable=self.trainable,
            name=self.name or "Variable",
            synchronization=self.synchronization,
            aggregation=self.aggregation,
        )
        return strategy.make_variable(array, policy)

    def check_like(self, first: Request, rank: int) -> None:
        own, wanted = self._description(), first._description()
        if own != wanted:
            raise ValueError(
                f"replica {rank} created a variable with {own}, replica 0 with {wanted}. "
                "Variables created inside run are matched by their order, and must be alike."
            )

    def _description(self) -> str:
        value = self.initial_value
        dtype = None if self.dtype is None else np.dtype(self.dtype)
        if callable(value):
            shown = "a callable initial value"
        else:
            array = as_array(value)
            shown, dtype = f"shape {array.shape}", dtype or np.dtype(array.dtype)
        return f"{shown}, dtype {dtype}, {self.synchronization.name}, {self.aggregation.name}"
