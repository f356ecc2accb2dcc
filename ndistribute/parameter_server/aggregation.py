"""`Aggregation`: the sets of gradients that clients gave for a step, summed until enough came.

What synchronous training over parameter servers needs: the step rises with the set that completes
it, and a set for a step that is over does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ndistribute.parameter_server.messages import Accumulated, Aggregate, Dense, Gradient, Rows
from ndistribute.parameter_server.updates import OptimizerStep, Planned, summed
from ndistribute.parameter_server.variables import Refused, Variables
from ndistribute.transport.codec import Array

__all__ = ["Aggregation", "Sum", "plan_aggregate"]

# Rows of so many gradients are kept before those that repeat are added up.
_ROWS_KEPT = 16
_LAST_STEP = 1 << 62


def plan_aggregate(
    variables: Variables,
    aggregates: dict[str, Aggregation],
    pending: dict[str, Aggregation],
    client: str,
    change: Aggregate,
) -> Planned:
    """Return a function that adds a client's gradients, and makes the step that they complete.

    `pending` has the aggregates that other changes of the same transaction will make.

    Raises:
        Refused: it can not be made; nothing has changed.
    """
    if change.count < 1 or not 0 <= change.at_step < _LAST_STEP:
        raise Refused(
            f"aggregate {change.name!r} needs a count from 1 and a step from 0, got {change.count} "
            f"and {change.at_step}.",
        )
    asked, at_step = change.apply, change.at_step
    step = OptimizerStep(variables, asked)
    held = aggregates.get(change.name)
    if held is None:
        held = pending.setdefault(change.name, Aggregation())
    aggregate = held
    aggregate.check(asked.names, asked.gradients, at_step)
    if aggregate.completes(client, at_step, change.count):
        step.open()

    def add() -> Accumulated:
        aggregates[change.name] = aggregate
        aggregate.join(client)
        takes = aggregate.takes(client, at_step)
        if takes:
            complete = aggregate.completes(client, at_step, change.count)
            aggregate.add(client, asked.names, asked.gradients, at_step)
            if complete:
                step.make(step.fitted(aggregate.finish()))
        return Accumulated(takes, aggregate.step)

    return add


@dataclass
class Sum:
    """Sum the gradients of one variable for one step, 16-bit floats in float32."""

    kind: str = ""  # What is common to the gradients, in words.
    dtype: str = ""  # Of the gradients, and of their mean.
    count: int = 0
    total: Array | None = None  # Of dense gradients; while there is none, memory to use again.
    rows: list[Rows] = field(default_factory=list)  # Their sum is what counts.

    def begin(self, gradient: Gradient) -> None:
        """Begin a step whose first gradient is this one, which is yet to be added."""
        self.kind, self.dtype = _kind_of(gradient), gradient.values.dtype.name
        self.count, self.rows = 0, []

    def add(self, gradient: Gradient) -> None:
        """Add a gradient that was checked."""
        values, total = gradient.values, self.total
        wide = np.dtype(np.float32) if values.dtype.itemsize == 2 else values.dtype
        self.count += 1
        if isinstance(gradient, Rows):
            self.rows.append(Rows(gradient.indices.astype(np.int64), values.astype(wide)))
            if len(self.rows) >= _ROWS_KEPT:
                self.rows = [self._joined()]
        elif self.count > 1 and total is not None:
            total += values
        elif total is not None and (total.shape, total.dtype) == (values.shape, wide):
            np.copyto(total, values)
        else:
            self.total = values.astype(wide)  # A copy: the sum is ours to change.

    def mean(self) -> Gradient:
        """Return the mean, which is valid until the next step begins."""
        if self.rows:
            once = self._joined()
            return Rows(once.indices, self._divided(once.values))
        return Dense(self._divided(np.asarray(self.total)))

    def _joined(self) -> Rows:
        indices = np.concatenate([part.indices for part in self.rows])
        return summed(Rows(indices, np.concatenate([part.values for part in self.rows])))

    def _divided(self, total: Array) -> Array:
        if self.count > 1:
            total /= self.count
        return total.astype(self.dtype, copy=False)


@dataclass
class Aggregation:
    """Sum the sets of a step, and know who takes part.

    Members are the clients that are there and gave a set or waited, now or in an earlier step.

    >>> aggregate = Aggregation()
    >>> aggregate.add("worker:0", ["w"], [Dense(np.array([1.0, 3.0]))], at_step=0)
    >>> aggregate.completes("worker:1", at_step=0, count=2)
    True
    """

    step: int = 0
    givers: set[str] = field(default_factory=set)  # The clients that gave a set for the step.
    sums: dict[str, Sum] = field(default_factory=dict)  # Of the step before, until there is a set.
    members: set[str] = field(default_factory=set)
    peak: int = 0  # How many members there were at most at a time, since there was none.
    last_to_leave: str = ""

    def check(self, names: Sequence[str], gradients: Sequence[Gradient], at_step: int) -> None:
        """Refuse a set that is not like the step's first."""
        if at_step != self.step or not self.givers:
            return
        if tuple(self.sums) != tuple(names):
            raise Refused(
                f"a set of gradients for step {self.step} is of {', '.join(names)}, the first one "
                f"was of {', '.join(self.sums)}. All must be of the same variables.",
            )
        for name, gradient in zip(names, gradients, strict=True):
            first, this = self.sums[name].kind, _kind_of(gradient)
            if this != first:
                raise Refused(
                    f"the first gradient of {name!r} for step {self.step} was {first}, got {this}. "
                    "All clients must give the same.",
                )

    def takes(self, client: str, at_step: int) -> bool:
        """Return True if a set would be added."""
        return at_step > self.step or (at_step == self.step and client not in self.givers)

    def completes(self, client: str, at_step: int, count: int) -> bool:
        """Return True if a set would be the last one that its step needs."""
        held = len(self.givers) if at_step == self.step else 0
        return self.takes(client, at_step) and held + 1 >= count

    def add(
        self, client: str, names: Sequence[str], gradients: Sequence[Gradient], at_step: int
    ) -> None:
        """Add a set that was checked and is taken."""
        if at_step > self.step:
            self.step, self.givers = at_step, set()
        if not self.givers:
            self.sums = {name: self.sums.get(name, Sum()) for name in names}
            for name, gradient in zip(names, gradients, strict=True):
                self.sums[name].begin(gradient)
        for name, gradient in zip(names, gradients, strict=True):
            self.sums[name].add(gradient)
        self.givers.add(client)

    def finish(self) -> list[Gradient]:
        """Return the means, valid until the next set is added, and begin the next step."""
        self.step, self.givers = self.step + 1, set()
        return [held.mean() for held in self.sums.values()]

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

    def what_is_missing(self, name: str, count: int) -> str | None:
        """Return why `count` sets can not come any more, or None while they may."""
        if self.peak < count or len(self.members) >= count:
            return None
        return (
            f"aggregate {name!r} had {self.peak} member(s), of which {self.last_to_leave!r} left "
            f"last; {len(self.members)} of {count} needed are there."
        )


def _kind_of(gradient: Gradient) -> str:
    shape, dtype = gradient.values.shape, gradient.values.dtype
    return f"rows {shape[1:]} {dtype}" if isinstance(gradient, Rows) else f"dense {shape} {dtype}"
