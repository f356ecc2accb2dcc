"""From a change that was asked for to one that can not fail.

`plan` checks everything and allocates what it needs; what it returns only writes. So the changes of
a transaction are planned first, all of them, and none is made unless all can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ndistribute.cluster.protocol.replies import Accumulated, Done, Outcome, Step
from ndistribute.cluster.protocol.requests import (
    Accumulate,
    Add,
    Aggregate,
    Apply,
    Assign,
    Change,
    Enqueue,
    IncrementStep,
    Scatter,
    Subtract,
)
from ndistribute.cluster.store.accumulator import Accumulator
from ndistribute.cluster.store.aggregation import Aggregation
from ndistribute.cluster.store.applying import Update
from ndistribute.cluster.store.cell import Cell, owned
from ndistribute.cluster.store.limits import Limits
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.rows import change_rows, check_rows
from ndistribute.cluster.store.state import State
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Planned", "plan"]

Planned = Callable[[], Outcome]

_LARGEST_STEP = 1 << 31
_LAST_STEP = 1 << 62


def plan(state: State, series: str, change: Change, limits: Limits, pending: State) -> Planned:
    """Return how to make a change.

    Args:
        state: what there is.
        series: of the transaction's origin.
        change: what is asked for.
        limits: what there may be.
        pending: for what changes planned together make on first use; a new one for each plan.

    Raises:
        Refused: it can not be made; nothing has changed.
    """
    match change:
        case Assign():
            return _plan_assign(state, change)
        case Add() | Subtract():
            return _plan_sum(state, change)
        case Scatter():
            return _plan_scatter(state, change)
        case Apply():
            return _plan_apply(state, change)
        case Aggregate():
            return _plan_aggregate(state, series, change, pending)
        case Accumulate():
            return _plan_accumulate(state, change, pending)
        case Enqueue():
            return _plan_enqueue(state, change, limits, pending)
        case IncrementStep():
            return _plan_step(state, change)


def _plan_assign(state: State, change: Assign) -> Planned:
    cell = _fitting(state, change.name, change.value)
    # Written in place where nobody reads, which spares the memory.
    fresh = owned(change.value) if cell.shared else None

    def assign() -> Done:
        state.begin_writing()
        if fresh is not None:
            cell.replace(fresh)
        else:
            np.copyto(cell.array, change.value)
        return _changed(cell)

    return assign


def _plan_sum(state: State, change: Add | Subtract) -> Planned:
    cell = _fitting(state, change.name, change.value)
    _check_numeric(cell.array, change.name, type(change).__name__.lower())
    cell.open()
    combine = np.add if isinstance(change, Add) else np.subtract

    def add() -> Done:
        state.begin_writing()
        combine(cell.array, change.value, out=cell.array)
        return _changed(cell)

    return add


def _plan_scatter(state: State, change: Scatter) -> Planned:
    cell = state.variable(change.name)
    check_rows(change.indices, change.values, cell.array.shape, change.name)
    if change.values.dtype != cell.array.dtype:
        raise _mismatch(change.name, cell.array, change.values)
    if change.how != "update":
        _check_numeric(cell.array, change.name, change.how)
    cell.open()

    def scatter() -> Done:
        state.begin_writing()
        change_rows(cell.array, change.how, change.indices, change.values)
        return _changed(cell)

    return scatter


def _plan_apply(state: State, change: Apply) -> Planned:
    update = Update(state, change)
    update.open()
    fitted = update.fitted(change.gradients)
    return lambda: update.make(fitted)


def _plan_aggregate(state: State, series: str, change: Aggregate, pending: State) -> Planned:
    if change.count < 1 or not 0 <= change.at_step < _LAST_STEP:
        raise Refused(
            "mismatch",
            f"aggregate {change.name!r} needs a count from 1 and a step from 0, got {change.count} "
            f"and {change.at_step}.",
        )
    asked, at_step = change.apply, change.at_step
    update = Update(state, asked)
    held = state.aggregates.get(change.name)
    if held is None:
        held = pending.aggregates.setdefault(change.name, Aggregation())
    aggregate = held
    aggregate.check(asked.names, asked.gradients, at_step)
    if aggregate.completes(series, at_step, change.count):
        update.open()

    def add() -> Accumulated:
        state.aggregates[change.name] = aggregate
        taken = aggregate.takes(series, at_step)
        if taken:
            complete = aggregate.completes(series, at_step, change.count)
            aggregate.add(series, asked.names, asked.gradients, at_step)
            if complete:
                update.make(update.fitted(aggregate.finish()))
        return Accumulated(taken, aggregate.step)

    return add


def _plan_accumulate(state: State, change: Accumulate, pending: State) -> Planned:
    found = state.accumulators.get(change.name) or pending.accumulators.get(change.name)
    if found is None:
        found = pending.accumulators[change.name] = Accumulator()
        found.check(change.gradient, change.name)
        found.adopt(change.gradient)
    else:
        found.check(change.gradient, change.name)
    accumulator = found

    def accumulate() -> Accumulated:
        state.accumulators[change.name] = accumulator
        fresh = change.at_step >= accumulator.step - max(0, change.max_staleness)
        if fresh:
            accumulator.add(change.gradient)
        return Accumulated(fresh, accumulator.step)

    return accumulate


def _plan_enqueue(state: State, change: Enqueue, limits: Limits, pending: State) -> Planned:
    planned = pending.queues.setdefault(change.name, deque())
    held = len(state.queues.get(change.name, ())) + len(planned)
    if held + len(change.tokens) > limits.tokens:
        raise Refused(
            "full",
            f"queue {change.name!r} holds {held} token(s) and takes {limits.tokens}; dequeue some.",
        )
    planned.extend(change.tokens)

    def enqueue() -> Done:
        state.queues.setdefault(change.name, deque()).extend(change.tokens)
        return Done()

    return enqueue


def _plan_step(state: State, change: IncrementStep) -> Planned:
    if abs(change.by) > _LARGEST_STEP:
        raise Refused("mismatch", f"the global step can not rise by {change.by}.")

    def increment() -> Step:
        state.step += change.by
        return Step(state.step)

    return increment


def _fitting(state: State, name: str, value: Array) -> Cell:
    cell = state.variable(name)
    if value.shape != cell.array.shape or value.dtype != cell.array.dtype:
        raise _mismatch(name, cell.array, value)
    return cell


def _mismatch(name: str, held: Array, value: Array) -> Refused:
    return Refused(
        "mismatch",
        f"variable {name!r} has shape {held.shape} and dtype {held.dtype}, got {value.shape} and "
        f"{value.dtype}. Nothing has changed.",
    )


def _check_numeric(array: Array, name: str, how: str) -> None:
    """Check that an operation is one of the dtype: it must not fail once it writes."""
    if array.dtype.kind == "b" or (how == "div" and array.dtype.kind in "iu"):
        raise Refused("mismatch", f"variable {name!r} of {array.dtype} can not {how}.")


def _changed(cell: Cell) -> Done:
    cell.version += 1
    return Done((cell.version,))
