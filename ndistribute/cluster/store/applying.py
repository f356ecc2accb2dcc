"""An optimizer's step on a server: its rule over the variables, in blocks that fit a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ndistribute.cluster.protocol.replies import Done
from ndistribute.cluster.protocol.requests import Apply, Dense, Gradient, Rows
from ndistribute.cluster.store.accumulator import is_float
from ndistribute.cluster.store.cell import Cell
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.rows import check_rows, dense_of, summed
from ndistribute.cluster.store.state import State
from ndistribute.cluster.wire.tensors import Array
from ndistribute.update_rules import Rule, rule_named

__all__ = ["Update"]

# A block of the gradient, the variable and two slots fit a core's second-level cache.
_BLOCK_ELEMENTS = 32 * 1024


@dataclass(frozen=True, slots=True)
class _Target:
    """A variable and what the rule keeps beside it."""

    name: str
    cell: Cell
    slots: tuple[Cell, ...]


class Update:
    """An optimizer's step that is checked.

    Args:
        state: what there is.
        change: what is asked for.

    Raises:
        Refused: it can not be made; nothing has changed.
    """

    def __init__(self, state: State, change: Apply) -> None:
        try:
            self._rule = rule_named(change.rule, change.hyperparameters)
        except ValueError as error:
            raise Refused("mismatch", str(error)) from error
        _check_names(change)
        self._counter = state.variable(change.counter)
        if (self._counter.array.shape, self._counter.array.dtype) != ((), np.dtype(np.int64)):
            raise Refused("mismatch", f"counter {change.counter!r} must be one int64.")
        self._state = state
        self._learning_rate = change.learning_rate
        self._targets = []
        for name, gradient, slots in zip(change.names, change.gradients, change.slots, strict=True):
            cell = state.variable(name)
            _check_gradient(name, cell.array, gradient)
            cells = tuple(state.variable(slot) for slot in slots)
            _check_slots(self._rule, name, cell, slots, cells)
            self._targets.append(_Target(name, cell, cells))

    def open(self) -> None:
        """Have what is written for ourselves: no reader may see it change."""
        self._counter.open()
        for target in self._targets:
            for written in (target.cell, *target.slots):
                written.open()

    def fitted(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return gradients like those that were checked in the form that the rule takes."""
        return [
            _fitted(self._rule, target.cell.array, gradient)
            for target, gradient in zip(self._targets, gradients, strict=True)
        ]

    def make(self, fitted: Sequence[Gradient]) -> Done:
        """Make the step; all is open, and the gradients are fitted."""
        self._state.begin_writing()
        self._counter.array[...] += 1
        self._counter.version += 1
        # Somebody may have written anything into the counter.
        rate = self._rule.rate(max(1, int(self._counter.array)), self._learning_rate)
        for target, gradient in zip(self._targets, fitted, strict=True):
            arrays = [target.cell.array, *(slot.array for slot in target.slots)]
            _update(self._rule, arrays, gradient, rate)
            for written in (target.cell, *target.slots):
                written.version += 1
        return Done(tuple(target.cell.version for target in self._targets))


def _check_names(change: Apply) -> None:
    """Check that each variable is named once, and has a gradient and slots."""
    slots = [slot for each in change.slots for slot in each]
    written = [*change.names, *slots, change.counter]
    if len(set(written)) != len(written):
        twice = sorted({name for name in written if written.count(name) > 1})
        raise Refused("mismatch", f"an optimizer's step names {', '.join(twice)} twice.")
    if not len(change.names) == len(change.gradients) == len(change.slots):
        raise Refused(
            "mismatch",
            f"an optimizer's step has {len(change.names)} variable(s), {len(change.gradients)} "
            f"gradient(s) and slots for {len(change.slots)}.",
        )


def _check_gradient(name: str, array: Array, gradient: Gradient) -> None:
    dtype, shape, values = array.dtype, array.shape, gradient.values
    if not is_float(dtype) or not is_float(values.dtype):
        raise Refused(
            "mismatch", f"a gradient of {values.dtype} can not train {name!r} of {dtype}."
        )
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise Refused("mismatch", f"a gradient of {values.dtype} does not fit {name!r} of {dtype}.")
    if isinstance(gradient, Rows):
        check_rows(gradient.indices, values, shape, name)
    elif values.shape != shape:
        raise Refused(
            "mismatch", f"the gradient of {name!r} has shape {values.shape}, the variable {shape}."
        )


def _check_slots(
    rule: Rule, name: str, cell: Cell, slots: tuple[str, ...], cells: tuple[Cell, ...]
) -> None:
    if len(cells) != len(rule.slot_names):
        raise Refused(
            "mismatch",
            f"{len(cells)} slot(s) are named for {name!r}, the rule needs {len(rule.slot_names)}.",
        )
    for slot, held in zip(slots, cells, strict=True):
        if (held.array.shape, held.array.dtype) != (cell.array.shape, cell.array.dtype):
            raise Refused(
                "mismatch",
                f"slot {slot!r} has shape {held.array.shape} and dtype {held.array.dtype}, its "
                f"variable {name!r} {cell.array.shape} and {cell.array.dtype}.",
            )


def _fitted(rule: Rule, array: Array, gradient: Gradient) -> Gradient:
    if isinstance(gradient, Rows):
        # A rule that moves every row is given the dense gradient that rows stand for.
        once = rule.rows_alone
        return summed(gradient) if once else Dense(dense_of(gradient, array.shape))
    return gradient


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
