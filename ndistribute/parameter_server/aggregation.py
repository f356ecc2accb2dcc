"""`Aggregation`: the sets of gradients that clients gave for a step, summed until enough came.

What synchronous training over parameter servers needs: the step rises with the set that completes
it, and a set for a step that is over does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ndistribute.parameter_server.messages import (
    Accumulated,
    Aggregate,
    Apply,
    AwaitStep,
    Dense,
    Failure,
    Gradient,
    Number,
    Rows,
)
from ndistribute.parameter_server.updates import OptimizerStep, Planned, summed
from ndistribute.parameter_server.variables import Refused, Variables
from ndistribute.transport.codec import Array

__all__ = ["Aggregation", "plan_aggregate"]

# Rows of so many gradients are kept before those that repeat are added up.
_ROWS_KEPT = 16
_LAST_STEP = 1 << 62


def plan_aggregate(
    variables: Variables, aggregate: Aggregation, client: str, change: Aggregate
) -> Planned:
    """Return a function that adds a client's gradients and makes the step that they complete."""
    if change.count < 1 or not 0 <= change.at_step < _LAST_STEP:
        raise Refused(
            f"aggregate {change.name!r} needs a count from 1 and a step from 0, got {change.count} "
            f"and {change.at_step}."
        )
    step = OptimizerStep(variables, change.apply)
    aggregate.check(change.apply, change.at_step)
    others = len(aggregate.givers) if change.at_step == aggregate.step else 0
    if others + 1 >= change.count:
        step.open()

    def add() -> Accumulated:
        aggregate.join(client)
        taken = aggregate.add(client, change.apply, change.at_step)
        if taken and len(aggregate.givers) >= change.count:
            step.make(step.fitted(aggregate.finish()))
        return Accumulated(taken, aggregate.step)

    return add


@dataclass
class Sum:
    """Sum the gradients of one variable for one step, 16-bit floats in float32."""

    kind: str = ""  # What is common to the gradients, in words.
    dtype: str = ""  # Of the gradients, and of their mean.
    total: Array | None = None  # Of dense gradients; of an earlier step it is memory to use again.
    rows: list[Rows] = field(default_factory=list)  # Their sum is what counts.

    def add(self, gradient: Gradient, *, first: bool) -> None:
        """Add a gradient that was checked, to those of this step unless it is the first."""
        values, total = gradient.values, self.total
        wide = np.dtype(np.float32) if values.dtype.itemsize == 2 else values.dtype
        if first:
            self.kind, self.dtype, self.rows = _kind_of(gradient), values.dtype.name, []
        if isinstance(gradient, Rows):
            self.rows.append(Rows(gradient.indices.astype(np.int64), values.astype(wide)))
            if len(self.rows) >= _ROWS_KEPT:
                self.rows = [self._joined()]
        elif total is None or (total.shape, total.dtype) != (values.shape, wide):
            self.total = values.astype(wide)  # A copy: the sum is ours to change.
        elif first:
            np.copyto(total, values)
        else:
            total += values

    def mean(self, count: int) -> Gradient:
        """Return the mean, which is valid until the next step begins."""
        if self.rows:
            once = self._joined()
            return Rows(once.indices, self._divided(once.values, count))
        return Dense(self._divided(np.asarray(self.total), count))

    def _joined(self) -> Rows:
        indices = np.concatenate([part.indices for part in self.rows])
        return summed(Rows(indices, np.concatenate([part.values for part in self.rows])))

    def _divided(self, total: Array, count: int) -> Array:
        if count > 1:
            total /= count
        return total.astype(self.dtype, copy=False)


@dataclass
class Aggregation:
    """Sum the sets of a step, and know who takes part.

    Members are the clients that are there and gave a set or waited, now or in an earlier step.
    """

    step: int = 0
    givers: set[str] = field(default_factory=set)  # The clients that gave a set for the step.
    sums: dict[str, Sum] = field(default_factory=dict)  # Of the step before, until there is a set.
    members: set[str] = field(default_factory=set)
    peak: int = 0  # How many members there were at most at a time, since there was none.
    last_to_leave: str = ""

    def check(self, given: Apply, at_step: int) -> None:
        """Refuse a set that is not like the step's first."""
        if at_step != self.step or not self.givers:
            return
        if tuple(self.sums) != given.names:
            raise Refused(
                f"a set of gradients for step {self.step} is of {', '.join(given.names)}, the "
                f"first one was of {', '.join(self.sums)}. All must be of the same variables."
            )
        for name, gradient in zip(given.names, given.gradients, strict=True):
            first, this = self.sums[name].kind, _kind_of(gradient)
            if this != first:
                raise Refused(
                    f"the first gradient of {name!r} for step {self.step} was {first}, got {this}. "
                    "All clients must give the same."
                )

    def add(self, client: str, given: Apply, at_step: int) -> bool:
        """Add a set that was checked; return False if it comes late or is the client's second."""
        if at_step < self.step or (at_step == self.step and client in self.givers):
            return False
        if at_step > self.step:
            self.step, self.givers = at_step, set()
        first = not self.givers
        if first:
            self.sums = {name: self.sums.get(name, Sum()) for name in given.names}
        for name, gradient in zip(given.names, given.gradients, strict=True):
            self.sums[name].add(gradient, first=first)
        self.givers.add(client)
        return True

    def finish(self) -> list[Gradient]:
        """Return the means, valid until the next set is added, and begin the next step."""
        means = [held.mean(len(self.givers)) for held in self.sums.values()]
        self.step, self.givers = self.step + 1, set()
        return means

    def join(self, client: str) -> None:
        """Count a client as a member; who left an empty group belongs to work that is over."""
        if not self.members:
            self.peak = 0
        self.members.add(client)
        self.peak = max(self.peak, len(self.members))

    def leave(self, client: str) -> None:
        """Count a client as a member no more."""
        if client in self.members:
            self.members.remove(client)
            self.last_to_leave = client

    def reply(self, client: str, request: AwaitStep) -> Number | Failure | None:
        """Return the reply to a wait once it is over, or in vain."""
        over = self.step >= request.step or request.step > self.step + 1
        if over or client not in self.givers:
            return Number(self.step)
        if self.peak < request.count or len(self.members) >= request.count:
            return None
        return Failure(
            "left",
            f"aggregate {request.name!r} had {self.peak} member(s), of which "
            f"{self.last_to_leave!r} left last; {len(self.members)} of {request.count} needed are "
            "there.",
        )


def _kind_of(gradient: Gradient) -> str:
    shape, dtype = gradient.values.shape, gradient.values.dtype
    return f"rows {shape[1:]} {dtype}" if isinstance(gradient, Rows) else f"dense {shape} {dtype}"
