"""The pairs of a gradient and a variable that an optimizer gets: what must hold, and their sums.

Nothing here changes a variable, so an error leaves all as it was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ndistribute import update_rules
from ndistribute.devices import as_array
from ndistribute.dtypes import native
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.variables.mirrored import MirroredVariable, divided
from ndistribute.variables.served import ServedVariable
from ndistribute.variables.variable import Variable

_log = logging.getLogger("ndistribute")
_reporting = threading.Lock()


def checked_pairs(
    grads_and_vars: Iterable[tuple[Any, Variable]], reported: set[str]
) -> tuple[list[Any], list[Variable]]:
    """Return the gradients that are not None and their variables; raise if a pair does not fit."""
    pairs = list(grads_and_vars)
    gradients: list[Any] = []
    variables: list[Variable] = []
    missing: list[str] = []
    for pair in pairs:
        listed = isinstance(pair, (tuple, list))
        if not listed or len(pair) != 2 or not isinstance(pair[1], Variable):
            kinds = [type(part).__name__ for part in pair] if listed else type(pair).__name__
            raise TypeError(
                f"apply_gradients needs pairs (gradient, variable), got {kinds}: write "
                "zip(gradients, variables). Nothing has changed."
            )
        raw, variable = pair
        if raw is None:
            missing.append(variable.name)
            continue
        if isinstance(raw, IndexedSlices):
            values, indices = native(raw.values), native(raw.indices)
            gradient: Any = IndexedSlices(values, indices, raw.dense_shape)
        else:
            gradient = native(as_array(raw))
        fits = update_rules.can_train(gradient.dtype, variable.dtype)
        if gradient.shape != variable.shape or not fits:
            raise ValueError(
                f"the gradient of variable {variable.name!r} has shape {gradient.shape} and dtype "
                f"{gradient.dtype}, the variable {variable.shape} and {variable.dtype}: the shapes "
                "must be equal, and both floating, or the variable complex. Nothing has changed."
            )
        gradients.append(gradient)
        variables.append(variable)
    if len(set(map(id, variables))) < len(variables):
        raise ValueError("a variable occurs twice: add its gradients first. Nothing has changed.")
    if not variables:
        raise ValueError(
            "no variable has a gradient: check that the loss is computed inside the tape, from "
            f"the variables {', '.join(map(repr, missing))}."
            if pairs
            else "apply_gradients got no pairs: a zip is empty after its first use. Write "
            "list(zip(gradients, variables)) to use it again."
        )
    if not reported.issuperset(missing):
        with _reporting:  # Only the first step and replica logs a name.
            missing = [name for name in missing if name not in reported]
            reported.update(missing)
        if missing:
            names = ", ".join(missing)
            _log.warning("no gradient for variable(s) %s: they do not change", names)
    return gradients, variables


def check_home(variables: Sequence[Any]) -> None:
    """Raise a `ValueError` if variables cannot be trained, or not together."""
    here = [variable for variable in variables if not isinstance(variable, ServedVariable)]
    for variable in here:
        if not isinstance(variable, MirroredVariable):
            raise ValueError(
                f"variable {variable.name!r} is synchronized on read: an optimizer cannot train "
                "variables with a value per replica. Use synchronization='on_write'."
            )
    if here and len(here) < len(variables):
        raise ValueError(
            "some of the variables are on parameter servers, "
            f"{', '.join(repr(v.name) for v in here)} are not: create all variables in the scope "
            "of one strategy."
        )


def check_whole(variables: Sequence[Any], advice: str) -> None:
    """Raise a `ValueError` with an advice if a variable is divided among replicas."""
    for index in divided(variables):
        raise ValueError(f"variable {variables[index].name!r} is sharded over replicas: {advice}")


def sum_over(replica: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return gradients summed over replicas; those of shards are complete already."""
    shards, made = divided(variables), list(gradients)
    shared = [index for index in range(len(made)) if index not in shards]
    sums = replica.all_reduce("sum", [made[index] for index in shared])
    for index, total in zip(shared, sums, strict=True):
        made[index] = total
    return made
