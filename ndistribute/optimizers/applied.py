"""The steps before an update: an optimizer checks, sums and clips the gradients.

Nothing here changes a variable, so an error leaves all variables as they were. Clipping applies to
the gradients that update the variables: the sums over replicas. The gradient of a shard is the
replica's own, and the other replicas hold the rest of its norm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ndistribute import update_rules
from ndistribute.context import current_trace, get_replica_context
from ndistribute.devices import Array, array_namespace, as_array, device_of
from ndistribute.dtypes import computing_dtype, native
from ndistribute.indexed_slices import IndexedSlices, map_values
from ndistribute.stream import working_on
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
                f"{gradient.dtype}, but the variable has {variable.shape} and {variable.dtype}: "
                "the shapes must be equal, and both dtypes floating, or that of the variable "
                "complex. Nothing has changed."
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
            _log.warning("no gradient for %s: a variable without a gradient does not change", names)
    return gradients, variables


def check_home(variables: Sequence[Any]) -> None:
    """Raise a `ValueError` if variables cannot be trained, or cannot be trained together."""
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
    """Raise a `ValueError` that contains the advice if a variable is divided among replicas."""
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


def one_bound(**bounds: float | None) -> tuple[str, float] | None:
    """Return the kind and the size of the bound that the user set; None if there is none."""
    limits = [(kind, bound) for kind, bound in bounds.items() if bound is not None]
    if len(limits) > 1:
        raise ValueError("pass at most one of clipnorm, global_clipnorm and clipvalue.")
    if limits and (isinstance(limits[0][1], str) or not limits[0][1] > 0):
        raise ValueError(f"a clipping bound must be a number above 0, got {limits[0][1]!r}.")
    return limits[0] if limits else None


def clipped(
    kind: str, bound: float, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Return clipped copies of gradients; copies of 16-bit gradients are float32."""
    wide = [_summed(map_values(widened, gradient)) for gradient in gradients]
    if kind == "clipvalue":
        return [map_values(partial(_cut, float(bound)), gradient) for gradient in wide]
    norms = [_norm(gradient) for gradient in wide]
    shards = divided(variables)
    if shards:  # Each replica has a part of their norms.
        replica: Any = get_replica_context()
        squares = replica.all_reduce("sum", np.stack([norms[index] ** 2 for index in shards]))
        for index, square in zip(shards, squares, strict=True):
            norms[index] = np.sqrt(square)
    if kind == "global_clipnorm":
        norms = [np.sqrt(sum(norm**2 for norm in norms))] * len(norms)
    pairs = zip(wide, norms, strict=True)
    return [map_values(partial(_scaled, bound, norm), gradient) for gradient, norm in pairs]


def _scaled(bound: float, norm: Any, array: Array) -> Array:
    if current_trace() is None:
        return array if norm <= bound else array * float(bound / norm)
    return array * np.where(norm <= bound, 1, bound / norm).astype(array.dtype)


def _cut(bound: float, array: Array) -> Array:
    xp = array_namespace(array)
    if array.dtype.kind != "c":
        return xp.clip(array, -bound, bound)
    parts = xp.ascontiguousarray(array).view(array.real.dtype)
    return xp.clip(parts, -bound, bound).view(array.dtype).reshape(array.shape)


def widened(array: Array) -> Array:
    """Return an array in a dtype that is wide enough for sums: 16-bit floats as float32."""
    return array.astype(computing_dtype(array.dtype), copy=False)


def _summed(gradient: Any) -> Any:
    if not isinstance(gradient, IndexedSlices):
        return gradient
    with working_on(device_of(gradient.values)):
        return gradient.summed()


def _norm(gradient: Any) -> Any:
    array = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    with working_on(device_of(array)):
        norm = array_namespace(array).linalg.norm(array.reshape(-1)).astype(np.float64)
        return norm if current_trace() is not None else float(norm)
