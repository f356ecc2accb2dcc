"""From a change that was asked for to one that can not fail.

A plan checks everything and allocates what it needs; what it returns only writes. So the changes of
a transaction are planned first, all of them, and none is made unless all can be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ndistribute.parameter_server.messages import (
    Apply,
    Dense,
    Done,
    Gradient,
    Outcome,
    Rows,
    Update,
)
from ndistribute.parameter_server.variables import (
    Cell,
    Refused,
    Variables,
    check_fits,
    owned,
)
from ndistribute.transport.codec import Array
from ndistribute.update_rules import Rule, rule_named

__all__ = ["OptimizerStep", "Planned", "plan_apply", "plan_update", "summed"]

Planned = Callable[[], Outcome]

# A block of the gradient, the variable and two slots fit a core's second-level cache.
_BLOCK_ELEMENTS = 32 * 1024


def plan_update(variables: Variables, change: Update) -> Planned:
    """Return a function that writes to a variable, or refuse what does not fit it."""
    cell, values, indices = variables.cell(change.name), change.values, change.indices
    check_fits(change.name, cell.array, values.shape, values.dtype, indices)
    if change.how != "assign" and cell.array.dtype.kind == "b":  # It must not fail once it writes.
        raise Refused(f"variable {change.name!r} of {cell.array.dtype} can not {change.how}.")
    fresh: Array | None = None
    if change.how != "assign" or indices is not None:
        cell.open()
    elif variables.adopts and values.flags.writeable:
        fresh = values
    elif cell.is_shared:  # Else it is written in place, which spares the memory.
        fresh = owned(values)
    combine = np.add if change.how == "assign_add" else np.subtract

    def make() -> Done:
        if fresh is not None:
            cell.replace(fresh)
        elif change.how == "assign":
            cell.array[... if indices is None else indices] = values
        elif indices is None:
            combine(cell.array, values, out=cell.array)
        else:
            combine.at(cell.array, indices, values)
        cell.version += 1
        return Done((cell.version,))

    return make


def plan_apply(variables: Variables, change: Apply) -> Planned:
    """Return a function that makes an optimizer's step, or refuse it."""
    step = OptimizerStep(variables, change)
    step.open()
    fitted = step.fitted(change.gradients)
    return lambda: step.make(fitted)


class OptimizerStep:
    """Change variables by an optimizer's rule; what does not fit is refused at once."""

    def __init__(self, variables: Variables, change: Apply) -> None:
        try:
            self._rule = rule_named(change.rule, change.hyperparameters)
        except ValueError as error:
            raise Refused(str(error)) from error
        _check_names(self._rule, change)
        self._counter = variables.cell(change.counter)
        check_fits(change.counter, self._counter.array, (), np.dtype(np.int64))
        self._learning_rate = change.learning_rate
        self._targets: list[list[Cell]] = []  # Each variable, and its slots.
        for name, gradient, slots in zip(change.names, change.gradients, change.slots, strict=True):
            array = variables.cell(name).array
            _check_gradient(name, array, gradient)
            for slot in slots:
                check_fits(slot, variables.cell(slot).array, array.shape, array.dtype)
            self._targets.append([variables.cell(each) for each in (name, *slots)])
        self._written = [self._counter, *itertools.chain(*self._targets)]

    def open(self) -> None:
        """Make sure that no reader holds what will be written."""
        for cell in self._written:
            cell.open()

    def fitted(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return gradients like those that were checked, in the form that the rule takes."""
        return [
            _fitted(self._rule, target[0].array, gradient)
            for target, gradient in zip(self._targets, gradients, strict=True)
        ]

    def make(self, fitted: Sequence[Gradient]) -> Done:
        """Make the step; all is open, and the gradients are fitted."""
        self._counter.array[...] += 1
        # Somebody may have written anything into the counter.
        rate = self._rule.rate(max(1, int(self._counter.array)), self._learning_rate)
        for target, gradient in zip(self._targets, fitted, strict=True):
            _update(self._rule, [cell.array for cell in target], gradient, rate)
        for cell in self._written:
            cell.version += 1
        return Done(tuple(target[0].version for target in self._targets))


def summed(rows: Rows) -> Rows:
    """Return the same rows, each once, in rising order; equal ones are added in a fixed order."""
    unique, inverse = np.unique(rows.indices, return_inverse=True)
    if len(unique) == len(rows.indices):
        return Rows(unique, rows.values[np.argsort(rows.indices)])
    totals = np.zeros((len(unique), *rows.values.shape[1:]), rows.values.dtype)
    np.add.at(totals, inverse, rows.values)
    return Rows(unique, totals)


def _fitted(rule: Rule, array: Array, gradient: Gradient) -> Gradient:
    if not isinstance(gradient, Rows):
        return gradient
    if rule.rows_alone:
        return summed(gradient)
    # A rule that moves every row is given the dense gradient that the rows stand for.
    dense = np.zeros(array.shape, gradient.values.dtype)
    np.add.at(dense, gradient.indices, gradient.values)
    return Dense(dense)


def _update(rule: Rule, arrays: list[Array], gradient: Gradient, rate: float) -> None:
    dtype = arrays[0].dtype
    if isinstance(gradient, Rows):
        taken = [array[gradient.indices] for array in arrays]
        rule.update(taken[0], gradient.values.astype(dtype), taken[1:], rate)
        for array, part in zip(arrays, taken, strict=True):
            array[gradient.indices] = part
        return
    flat, flats = gradient.values.reshape(-1), [array.reshape(-1) for array in arrays]
    scratch = np.empty(min(flat.size, _BLOCK_ELEMENTS), dtype)
    for start in range(0, flat.size, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        variable, *slots = (array[block] for array in flats)
        values = scratch[: variable.size]
        np.copyto(values, flat[block], casting="same_kind")
        rule.update(variable, values, slots, rate)


def _check_names(rule: Rule, change: Apply) -> None:
    """Check that each variable is named once, and has a gradient and slots."""
    written = [*change.names, *itertools.chain(*change.slots), change.counter]
    if len(set(written)) != len(written):
        twice = sorted({name for name in written if written.count(name) > 1})
        raise Refused(f"an optimizer's step names {', '.join(twice)} twice.")
    needed, counts = len(rule.slot_names), [len(slots) for slots in change.slots]
    if len(change.gradients) != len(change.names) or counts != [needed] * len(change.names):
        raise Refused(
            f"a step of {change.rule!r} for {len(change.names)} variable(s) needs a gradient and "
            f"{needed} slot(s) for each, got {len(change.gradients)} gradient(s), and {counts} "
            "slots."
        )


def _check_gradient(name: str, array: Array, gradient: Gradient) -> None:
    given = gradient.values.dtype
    fits = _is_float(array.dtype) and _is_float(given)
    if not fits or not np.can_cast(given, array.dtype, "same_kind"):
        raise Refused(f"a gradient of {given} can not train {name!r} of {array.dtype}.")
    indices = gradient.indices if isinstance(gradient, Rows) else None
    check_fits(name, array, gradient.values.shape, array.dtype, indices)


def _is_float(dtype: np.dtype[np.generic]) -> bool:
    return dtype.kind in "fc" or dtype.name == "bfloat16"
