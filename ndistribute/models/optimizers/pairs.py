"""What an optimizer is given: gradients and the variables that they belong to."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, as_array
from ndistribute.variables.casting import native
from ndistribute.variables.mirrored import MirroredVariable
from ndistribute.variables.variable import Variable

__all__ = ["checked_pairs", "opened_arrays", "trainable_kind"]

_log = logging.getLogger("ndistribute")


def checked_pairs(grads_and_vars: Iterable[tuple[Any, Variable]]) -> list[tuple[Any, Variable]]:
    """Return the pairs that have a gradient.

    Raises:
        ValueError: none has, or a shape or dtype does not fit.
    """
    pairs = list(grads_and_vars)
    kept: list[tuple[Any, Variable]] = []
    for given, variable in pairs:
        if given is None:
            _log.warning("no gradient for variable %r: it stays as it is", variable.name)
            continue
        if isinstance(given, IndexedSlices):
            gradient: Any = given
            if not (given.values.dtype.isnative and given.indices.dtype.isnative):
                values, indices = native(given.values), native(given.indices)
                gradient = IndexedSlices(values, indices, given.dense_shape)
        else:
            gradient = native(as_array(given))
        if gradient.shape != variable.shape or gradient.dtype.kind not in "fc":
            raise ValueError(
                f"the gradient of variable {variable.name!r} has shape {gradient.shape} and dtype "
                f"{gradient.dtype}, the variable {variable.shape} and {variable.dtype}. Nothing "
                "has changed."
            )
        kept.append((gradient, variable))
    if not kept:
        raise ValueError(
            "no variable has a gradient: check that the loss is computed inside the tape, from "
            f"the variables {[variable.name for _, variable in pairs]}."
        )
    return kept


def trainable_kind(variable: Any) -> MirroredVariable:
    """Return a variable whose replicas hold one value.

    Raises:
        ValueError: they do not.
    """
    if not isinstance(variable, MirroredVariable):
        raise ValueError(
            f"variable {getattr(variable, 'name', variable)!r} is synchronized on read: its "
            "replicas have values of their own, which an optimizer can not train."
        )
    return variable


def opened_arrays(variable: Any) -> list[Array]:
    """Return the arrays of a variable to change in place, one for each memory space."""
    return trainable_kind(variable).begin_update()
