"""Plans of changes: first all checks and allocations, then writes that cannot fail.

A server plans all changes of a transaction before it makes the first one. This file also holds the
aggregates, which add up gradients until enough of them have arrived.
"""

from __future__ import annotations

import functools
import itertools
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ndistribute.dtypes import computing_dtype
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.messages import Apply, Done, Gradient
from ndistribute.parameter_server.variables import Cell, Refused, Variables, check_fits, owned
from ndistribute.transport.codec import Array
from ndistribute.update_rules import Rule, can_train, rule_named, update_rows, update_whole

Planned = Callable[[], m.Outcome]

_ROWS_KEPT = 16  # Sparse gradients kept before repeated rows are added.
_LAST_STEP = 1 << 62


def plan(
    variables: Variables, aggregates: ChainMap[str, Aggregation], client: str, change: m.Change
) -> Planned:
    """Return a function that makes a client's change, or refuse the change."""
    match change:
        case m.Update():
            return _plan_update(variables, change)
        case Apply():
            step = _OptimizerStep(variables, change)
            step.open()
            return step.prepare(change.gradients)
        case m.Aggregate():
            held = aggregates.setdefault(change.name, Aggregation())
            return _plan_aggregate(variables, held, client, change)


def _plan_update(variables: Variables, change: m.Update) -> Planned:
    cell, values, indices = variables.cell(change.name), change.values, change.indices
    check_fits(change.name, cell.array, values.shape, values.dtype, indices)
    if change.how != "assign" and cell.array.dtype.kind == "b":  # It would fail while it writes.
        raise Refused(f"variable {change.name!r} of {cell.array.dtype} cannot {change.how}.")
    fresh: Array | None = None
    if change.how != "assign" or indices is not None:
        cell.open()
    elif variables.adopts and values.flags.writeable:
        fresh = values
    elif cell.is_shared():  # Otherwise write in place, which needs no memory.
        fresh = owned(values)
    combine = np.add if change.how == "assign_add" else np.subtract

    def make() -> Done:
        if fresh is not None:
            cell.array = fresh
        elif change.how == "assign":
            cell.array[... if indices is None else indices] = values
        elif indices is None:
            combine(cell.array, values, out=cell.array)
        else:
            combine.at(cell.array, indices, values)
        cell.version += 1
        return Done((cell.version,))

    return make


def _plan_aggregate(
    variables: Variables, aggregate: Aggregation, client: str, change: m.Aggregate
) -> Planned:
    if change.count < 1 or not 0 <= change.at_step < _LAST_STEP:
        numbers = f"got {change.count} and {change.at_step}"
        raise Refused(f"{change.name!r} needs a count from 1 and a step from 0, {numbers}.")
    step = _OptimizerStep(variables, change.apply)
    aggregate.check(change.apply, change.at_step)
    others = len(aggregate.givers) if change.at_step == aggregate.step else 0
    if others + 1 >= change.count:
        step.open()

    def add() -> m.Accumulated:
        aggregate.join(client)
        taken = aggregate.add(client, change.apply, change.at_step)
        if taken and len(aggregate.givers) >= change.count:
            step.prepare(aggregate.finish())()
        return m.Accumulated(taken, aggregate.step)

    return add


class _OptimizerStep:
    """One step of an update rule; the constructor refuses what does not fit."""

    def __init__(self, variables: Variables, change: Apply) -> None:
        try:
            self._rule = rule_named(change.rule, change.hyperparameters)
        except ValueError as error:
            raise Refused(str(error)) from error
        _check_names(self._rule, change)
        self._counter = variables.cell(change.counter)
        check_fits(change.counter, self._counter.array, (), np.dtype(np.int64))
        self._learning_rate = change.learning_rate
        self._targets: list[list[Cell]] = []  # Per variable: itself and its slots.
        for name, gradient, slots in zip(change.names, change.gradients, change.slots, strict=True):
            array = variables.cell(name).array
            _check_gradient(name, array, gradient)
            dtype = computing_dtype(array.dtype)
            for slot in slots:
                check_fits(slot, variables.cell(slot).array, array.shape, dtype)
            self._targets.append([variables.cell(each) for each in (name, *slots)])
        self._written = [self._counter, *itertools.chain(*self._targets)]

    def open(self) -> None:
        for cell in self._written:
            cell.open()

    def prepare(self, gradients: Sequence[Gradient]) -> Planned:
        """Return a function that makes the step with gradients of the checked shapes and dtypes."""
        pairs = zip(self._targets, gradients, strict=True)
        fitted = [_fitted(self._rule, target[0].array, gradient) for target, gradient in pairs]
        return functools.partial(self._make, fitted)

    def _make(self, fitted: Sequence[Gradient]) -> Done:
        self._counter.array[...] += 1
        # Any client may have written to the counter.
        rate = self._rule.rate(max(1, int(self._counter.array)), self._learning_rate)
        try:
            for target, gradient in zip(self._targets, fitted, strict=True):
                _update(self._rule, [cell.array for cell in target], gradient, rate)
        finally:  # If a user's rule raises, readers see what it has changed.
            for cell in self._written:
                cell.version += 1
        return Done(tuple(target[0].version for target in self._targets))


@dataclass
class Aggregation:
    """The sum of the gradients of a step, and the clients that take part."""

    step: int = 0
    givers: set[str] = field(default_factory=set)  # Contributors to this step.
    # Per variable: gradients whose sum counts. Without givers, these are the buffers of the last
    # step, which are reused.
    sums: dict[str, list[Gradient]] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)  # Clients that take part.
    peak: int = 0  # The most members at a time since there were none.
    last_to_leave: str = ""

    def check(self, given: Apply, at_step: int) -> None:
        """Refuse gradients of other shapes or dtypes than the first ones of the step."""
        if at_step != self.step or not self.givers:
            return
        first = {name: _kind_of(kept[0]) for name, kept in self.sums.items()}
        these = dict(zip(given.names, map(_kind_of, given.gradients), strict=True))
        if these != first:
            unlike = sorted(these.items() ^ first.items())
            raise Refused(f"gradients for step {self.step} are unlike the first ones in {unlike}.")

    def add(self, client: str, given: Apply, at_step: int) -> bool:
        """Add checked gradients; return False if they are late or the client's second ones."""
        if at_step < self.step or (at_step == self.step and client in self.givers):
            return False
        if at_step > self.step:
            self.step, self.givers = at_step, set()
        self.sums = {
            name: _added(self.sums.get(name, []), gradient, first=not self.givers)
            for name, gradient in zip(given.names, given.gradients, strict=True)
        }
        self.givers.add(client)
        return True

    def finish(self) -> list[Gradient]:
        """Begin the next step, and return the means, which are valid until the next `add`."""
        means = [_joined(kept) for kept in self.sums.values()]
        for mean in means if len(self.givers) > 1 else ():
            np.divide(mean.values, len(self.givers), out=mean.values)
        self.step, self.givers = self.step + 1, set()
        return means

    def join(self, client: str) -> None:
        """Add a member; clients that left before the group was empty do not count."""
        if not self.members:
            self.peak = 0
        self.members.add(client)
        self.peak = max(self.peak, len(self.members))

    def leave(self, client: str) -> None:
        if client in self.members:
            self.members.remove(client)
            self.last_to_leave = client

    def reply(self, client: str, request: m.AwaitStep) -> m.Number | m.Failure | None:
        """Return the reply to a wait that is over or cannot succeed, else None."""
        over = self.step >= request.step or request.step > self.step + 1
        if over or client not in self.givers:
            return m.Number(self.step)
        if self.peak < request.count or len(self.members) >= request.count:
            return None
        return m.Failure(
            "left",
            f"aggregate {request.name!r} had {self.peak} member(s), of which "
            f"{self.last_to_leave!r} left last; {len(self.members)} of {request.count} needed are "
            "there.",
        )


def _added(kept: list[Gradient], gradient: Gradient, *, first: bool) -> list[Gradient]:
    """Return the kept gradients with one more; 16-bit floats are added in float32."""
    values, indices = gradient.values, gradient.indices
    if indices is not None:
        rows = Gradient(values.astype(computing_dtype(values.dtype)), indices.astype(np.int64))
        kept = [rows] if first else [*kept, rows]
        return [_joined(kept)] if len(kept) >= _ROWS_KEPT else kept
    if not kept or _kind_of(kept[0]) != _kind_of(gradient):
        # A copy, because the sum is changed in place.
        return [Gradient(values.astype(computing_dtype(values.dtype)))]
    if first:
        np.copyto(kept[0].values, values)
    else:
        np.add(kept[0].values, values, out=kept[0].values)
    return kept


def _joined(kept: list[Gradient]) -> Gradient:
    """Return the sum of gradients from `_added`, with unique rows."""
    if kept[0].indices is None:
        return kept[0]
    values = np.concatenate([part.values for part in kept])
    return _summed(values, np.concatenate([np.asarray(part.indices) for part in kept]))


def _summed(values: Array, indices: Array) -> Gradient:
    """Return unique rows in ascending order; repeated rows are added in a fixed order."""
    unique, inverse = np.unique(indices, return_inverse=True)
    if len(unique) == len(indices):
        return Gradient(values[np.argsort(indices)], unique)
    totals = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(totals, inverse, values)
    return Gradient(totals, unique)


def _fitted(rule: Rule, array: Array, gradient: Gradient) -> Gradient:
    if gradient.indices is None:
        return gradient
    values = gradient.values.astype(computing_dtype(gradient.values.dtype), copy=False)
    if rule.rows_alone:
        return _summed(values, gradient.indices)
    # A rule that changes every row needs the dense gradient.
    dense = np.zeros(array.shape, values.dtype)
    np.add.at(dense, gradient.indices, values)
    return Gradient(dense)


def _update(rule: Rule, arrays: list[Array], gradient: Gradient, rate: float) -> None:
    if gradient.indices is None:
        update_whole(rule, arrays, gradient.values, rate)
    else:
        update_rows(rule, arrays, gradient.values, gradient.indices, rate)


def _check_names(rule: Rule, change: Apply) -> None:
    """Refuse a step unless each variable occurs once and has a gradient and its slots."""
    written = [*change.names, *itertools.chain(*change.slots), change.counter]
    slots, needed = [len(some) for some in change.slots], len(rule.slot_names)
    complete = len(change.gradients) == len(change.names) == slots.count(needed) == len(slots)
    if not complete or len(set(written)) != len(written):
        raise Refused(
            f"a step of {change.rule!r} needs for each variable a gradient and {needed} slot(s), "
            f"and each name once, got {len(change.gradients)} gradient(s) and {written}."
        )


def _check_gradient(name: str, array: Array, gradient: Gradient) -> None:
    given = gradient.values.dtype
    if not can_train(given, array.dtype):
        raise Refused(f"a gradient of {given} cannot train {name!r} of {array.dtype}.")
    check_fits(name, array, gradient.values.shape, array.dtype, gradient.indices)


def _kind_of(gradient: Gradient) -> str:
    """Describe the form, shape and dtype that all gradients of a sum must share."""
    values = gradient.values
    form = f"dense {values.shape}" if gradient.indices is None else f"rows {values.shape[1:]}"
    return f"{form} {computing_dtype(values.dtype)}"
