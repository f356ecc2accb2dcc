"""An optimizer's step on a server: its rule over the variables, in blocks that fit a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ndistribute.cluster.replies import Done
from ndistribute.cluster.requests import Apply, Dense, Gradient, Rows
from ndistribute.cluster.store.accumulator import is_float
from ndistribute.cluster.store.cell import Cell
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.rows import check_rows, dense_of, summed
from ndistribute.cluster.store.state import OptimizerState, State
from ndistribute.cluster.tensors import Array
from ndistribute.update_rules import Rule, rule_named

__all__ = ["plan_apply"]

# A block of the gradient, the variable and two slots fit a core's second-level cache.
_BLOCK_ELEMENTS = 32 * 1024


@dataclass(frozen=True, slots=True)
class _Target:
    """A variable, its gradient (rows once each), and its slots, old or new."""

    name: str
    cell: Cell
    gradient: Gradient
    slots: tuple[Cell, ...]


def plan_apply(state: State, change: Apply, pending: State) -> Callable[[], Done]:
    """Return how to make an optimizer's step.

    Args:
        state: what there is.
        change: what is asked for.
        pending: optimizers and slots that changes planned together make on first use.

    Raises:
        Refused: it can not be made; nothing has changed.
    """
    try:
        rule = rule_named(change.rule, change.hyperparameters)
    except ValueError as error:
        raise Refused("mismatch", str(error)) from error
    if len(set(change.names)) != len(change.names) or len(change.names) != len(change.gradients):
        raise Refused("mismatch", "an optimizer's step needs each variable once, with a gradient.")
    fresh = pending.optimizers.setdefault(change.optimizer, OptimizerState(change.rule))
    held = state.optimizers.get(change.optimizer, fresh)
    if not held.rule == fresh.rule == change.rule:
        raise Refused(
            "mismatch",
            f"optimizer {change.optimizer!r} uses rule {held.rule!r} here, not {change.rule!r}; "
            "give another one another name.",
        )
    targets = []
    for name, gradient in zip(change.names, change.gradients, strict=True):
        cell = state.variable(name)
        fitting = _fitting(rule, name, cell.array, gradient)
        slots = held.slots.get(name, fresh.slots.get(name))
        if slots is None:
            slots = fresh.slots[name] = _new_slots(rule, cell.array)
        _check_slots(rule, slots, name)
        for written in (cell, *slots):
            written.open()
        targets.append(_Target(name, cell, fitting, slots))

    def apply() -> Done:
        optimizer = state.optimizers.setdefault(change.optimizer, held)
        optimizer.count += 1
        rate = rule.rate(optimizer.count, change.learning_rate)
        for target in targets:
            optimizer.slots[target.name] = target.slots
            arrays = [target.cell.array, *(slot.array for slot in target.slots)]
            _update(rule, arrays, target.gradient, rate)
            target.cell.version += 1
        return Done(tuple(target.cell.version for target in targets))

    return apply


def _fitting(rule: Rule, name: str, array: Array, gradient: Gradient) -> Gradient:
    """Return a gradient in the form that the rule takes."""
    dtype, shape, values = array.dtype, array.shape, gradient.values
    if not is_float(dtype) or not is_float(values.dtype):
        raise Refused(
            "mismatch", f"a gradient of {values.dtype} can not train {name!r} of {dtype}."
        )
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise Refused("mismatch", f"a gradient of {values.dtype} does not fit {name!r} of {dtype}.")
    if isinstance(gradient, Rows):
        check_rows(gradient.indices, values, shape, name)
        # A rule that moves every row is given the dense gradient that rows stand for.
        return summed(gradient) if rule.rows_alone else Dense(dense_of(gradient, shape))
    if values.shape != shape:
        raise Refused(
            "mismatch", f"the gradient of {name!r} has shape {values.shape}, the variable {shape}."
        )
    return gradient


def _new_slots(rule: Rule, array: Array) -> tuple[Cell, ...]:
    return tuple(
        Cell(np.full(array.shape, rule.initial_slot(slot), array.dtype)) for slot in rule.slot_names
    )


def _check_slots(rule: Rule, slots: tuple[Cell, ...], name: str) -> None:
    if len(slots) != len(rule.slot_names):
        raise Refused(
            "mismatch",
            f"{len(slots)} slot(s) are kept for {name!r}, the rule needs {len(rule.slot_names)}; "
            "give an optimizer with other hyperparameters another name.",
        )


def _update(rule: Rule, arrays: list[Array], gradient: Gradient, rate: float) -> None:
    dtype = arrays[0].dtype
    if isinstance(gradient, Rows):
        taken = [array[gradient.indices] for array in arrays]
        rule.update(taken[0], gradient.values.astype(dtype), taken[1:], rate)
        for array, part in zip(arrays, taken, strict=True):
            array[gradient.indices] = part
        return
    flat, flats = gradient.values.reshape(-1), [array.reshape(-1) for array in arrays]
    for start in range(0, flat.size, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        variable, *slots = (array[block] for array in flats)
        rule.update(variable, flat[block].astype(dtype), slots, rate)
