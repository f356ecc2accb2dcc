"""From a change that was asked for to one that can not fail.

`plan` checks everything and allocates what it needs; what it returns only writes. So the changes of
a transaction are planned first, all of them, and none is made unless all can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ndistribute.parameter_server import messages
from ndistribute.parameter_server.messages import Apply, Dense, Done, Gradient, Rows
from ndistribute.parameter_server.variables import Cell, Refused, Variables, check_indices, owned
from ndistribute.transport.codec import Array
from ndistribute.update_rules import Rule, rule_named

__all__ = ["OptimizerStep", "Planned", "plan", "summed"]

Simple = messages.Assign | messages.Add | messages.Subtract | messages.Scatter
Planned = Callable[[], messages.Outcome]

# A block of the gradient, the variable and two slots fit a core's second-level cache.
_BLOCK_ELEMENTS = 32 * 1024


def plan(variables: Variables, change: Simple | Apply) -> Planned:
    """Return a function that makes a change.

    Raises:
        Refused: it can not be made; nothing has changed.
    """
    match change:
        case messages.Assign():
            return _plan_assign(variables, change)
        case messages.Add() | messages.Subtract():
            return _plan_sum(variables, change)
        case messages.Scatter():
            return _plan_scatter(variables, change)
        case Apply():
            step = OptimizerStep(variables, change)
            step.open()
            fitted = step.fitted(change.gradients)
            return lambda: step.make(fitted)


def _plan_assign(variables: Variables, change: messages.Assign) -> Planned:
    cell = _fitting(variables, change.name, change.value)
    fresh: Array | None = None
    if variables.adopts and change.value.flags.writeable:
        fresh = change.value
    elif cell.is_shared:  # Else it is written in place, which spares the memory.
        fresh = owned(change.value)

    def assign() -> Done:
        if fresh is not None:
            cell.replace(fresh)
        else:
            np.copyto(cell.array, change.value)
        return _changed(cell)

    return assign


def _plan_sum(variables: Variables, change: messages.Add | messages.Subtract) -> Planned:
    cell = _fitting(variables, change.name, change.value)
    _check_numeric(cell.array, change.name, type(change).__name__.lower())
    cell.open()
    combine = np.add if isinstance(change, messages.Add) else np.subtract

    def add() -> Done:
        combine(cell.array, change.value, out=cell.array)
        return _changed(cell)

    return add


def _plan_scatter(variables: Variables, change: messages.Scatter) -> Planned:
    cell, indices, values = variables.cell(change.name), change.indices, change.values
    _check_rows(indices, values, cell.array.shape, change.name)
    if values.dtype != cell.array.dtype:
        raise _mismatch(change.name, cell.array, values)
    if change.how != "update":
        _check_numeric(cell.array, change.name, change.how)
    cell.open()

    def scatter() -> Done:
        if change.how == "update":
            cell.array[indices] = values
        else:
            (np.add if change.how == "add" else np.subtract).at(cell.array, indices, values)
        return _changed(cell)

    return scatter


def _changed(cell: Cell) -> Done:
    cell.version += 1
    return Done((cell.version,))


class OptimizerStep:
    """Change variables by an optimizer's rule, after everything was checked.

    Raises:
        Refused: it can not be made; nothing has changed.
    """

    def __init__(self, variables: Variables, change: Apply) -> None:
        try:
            self._rule = rule_named(change.rule, change.hyperparameters)
        except ValueError as error:
            raise Refused(str(error)) from error
        _check_names(change)
        self._counter = variables.cell(change.counter)
        if (self._counter.array.shape, self._counter.array.dtype) != ((), np.dtype(np.int64)):
            raise Refused(f"counter {change.counter!r} must be one int64.")
        self._learning_rate = change.learning_rate
        self._targets: list[tuple[Cell, ...]] = []  # Each variable, and its slots.
        for name, gradient, slots in zip(change.names, change.gradients, change.slots, strict=True):
            cell = variables.cell(name)
            _check_gradient(name, cell.array, gradient)
            cells = tuple(variables.cell(slot) for slot in slots)
            _check_slots(self._rule, name, cell, slots, cells)
            self._targets.append((cell, *cells))

    def open(self) -> None:
        """Make sure that no reader holds what will be written."""
        self._counter.open()
        for target in self._targets:
            for written in target:
                written.open()

    def fitted(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return gradients like those that were checked, in the form that the rule takes."""
        return [
            _fitted(self._rule, target[0].array, gradient)
            for target, gradient in zip(self._targets, gradients, strict=True)
        ]

    def make(self, fitted: Sequence[Gradient]) -> Done:
        """Make the step; all is open, and the gradients are fitted."""
        self._counter.array[...] += 1
        self._counter.version += 1
        # Somebody may have written anything into the counter.
        rate = self._rule.rate(max(1, int(self._counter.array)), self._learning_rate)
        for target, gradient in zip(self._targets, fitted, strict=True):
            _update(self._rule, [cell.array for cell in target], gradient, rate)
            for written in target:
                written.version += 1
        return Done(tuple(target[0].version for target in self._targets))


def summed(rows: Rows) -> Rows:
    """Return the same rows, each once, in rising order; equal ones are added in a fixed order.

    >>> once = summed(Rows(np.array([7, 2, 7]), np.array([[1.0], [2.0], [4.0]])))
    >>> once.indices, once.values.tolist()
    (array([2, 7]), [[2.0], [5.0]])
    """
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


def _fitting(variables: Variables, name: str, value: Array) -> Cell:
    cell = variables.cell(name)
    if (value.shape, value.dtype) != (cell.array.shape, cell.array.dtype):
        raise _mismatch(name, cell.array, value)
    return cell


def _mismatch(name: str, held: Array, value: Array) -> Refused:
    return Refused(
        f"variable {name!r} has shape {held.shape} and dtype {held.dtype}, got {value.shape} and "
        f"{value.dtype}. Nothing has changed.",
    )


def _check_numeric(array: Array, name: str, how: str) -> None:
    """Check that an operation is defined for the dtype: it must not fail once it writes."""
    if array.dtype.kind == "b":
        raise Refused(f"variable {name!r} of {array.dtype} can not {how}.")


def _check_rows(indices: Array, values: Array, shape: tuple[int, ...], name: str) -> None:
    check_indices(indices, shape, name)
    if values.shape != (len(indices), *shape[1:]):
        raise Refused(
            f"{len(indices)} row(s) of {name!r}, which has shape {shape}, need values of shape "
            f"{(len(indices), *shape[1:])}, got {values.shape}.",
        )


def _check_names(change: Apply) -> None:
    """Check that each variable is named once, and has a gradient and slots."""
    slots = [slot for each in change.slots for slot in each]
    written = [*change.names, *slots, change.counter]
    if len(set(written)) != len(written):
        twice = sorted({name for name in written if written.count(name) > 1})
        raise Refused(f"an optimizer's step names {', '.join(twice)} twice.")
    if not len(change.names) == len(change.gradients) == len(change.slots):
        raise Refused(
            f"an optimizer's step has {len(change.names)} variable(s), {len(change.gradients)} "
            f"gradient(s) and slots for {len(change.slots)}.",
        )


def _check_gradient(name: str, array: Array, gradient: Gradient) -> None:
    dtype, shape, values = array.dtype, array.shape, gradient.values
    if not _is_float(dtype) or not _is_float(values.dtype):
        raise Refused(f"a gradient of {values.dtype} can not train {name!r} of {dtype}.")
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise Refused(f"a gradient of {values.dtype} does not fit {name!r} of {dtype}.")
    if isinstance(gradient, Rows):
        _check_rows(gradient.indices, values, shape, name)
    elif values.shape != shape:
        raise Refused(f"the gradient of {name!r} has shape {values.shape}, the variable {shape}.")


def _check_slots(
    rule: Rule, name: str, cell: Cell, slots: tuple[str, ...], cells: tuple[Cell, ...]
) -> None:
    if len(cells) != len(rule.slot_names):
        raise Refused(
            f"{len(cells)} slot(s) are named for {name!r}, the rule needs {len(rule.slot_names)}.",
        )
    for slot, held in zip(slots, cells, strict=True):
        if (held.array.shape, held.array.dtype) != (cell.array.shape, cell.array.dtype):
            raise Refused(
                f"slot {slot!r} has shape {held.array.shape} and dtype {held.array.dtype}, its "
                f"variable {name!r} {cell.array.shape} and {cell.array.dtype}.",
            )


def _is_float(dtype: np.dtype[np.generic]) -> bool:
    return dtype.kind in "fc" or dtype.name == "bfloat16"
