"""Computes gradients so that they are summed over replicas while others are still computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.collective.buckets import LeafSpec
from ndistribute.variables.variable import Variable

__all__ = ["EarlyGradients"]


class EarlyGradients:
    """Take gradients from a tape and sum them early, where that pays.

    It does between hosts, and only for a backward pass that makes no collectives of its own. What
    a first step has shown to be dense, with a gradient for every variable, is summed early from
    the second step on: all replicas must decide alike without asking each other.
    """

    def __init__(self) -> None:
        # By the identities of the variables, which the optimizer keeps.
        self._shown_dense: dict[tuple[int, ...], bool] = {}

    def compute(
        self, loss: Any, variables: Sequence[Variable], tape: Any, communicator: Any
    ) -> tuple[list[Any], bool]:
        """Return the gradients, and whether they are summed over replicas already."""
        key = tuple(id(variable) for variable in variables)
        reduction = None
        if self._shown_dense.get(key) and not tape.records_collectives:
            reduction = communicator.early_reduction(
                tuple(LeafSpec(np.dtype(variable.dtype), variable.size) for variable in variables)
            )
        if reduction is None:
            gradients = tape.gradient(loss, list(variables))
            dense = all(isinstance(gradient, np.ndarray) for gradient in gradients)
            self._shown_dense.setdefault(key, dense)
            return gradients, False
        reduction.begin()

        def on_ready(leaf: int, gradient: Any) -> None:
            reduction.add(leaf, _dense(gradient, variables[leaf]))

        tape.gradient(loss, list(variables), on_ready=on_ready)
        totals = reduction.finish()
        return [
            total.reshape(variable.shape) for total, variable in zip(totals, variables, strict=True)
        ], True


def _dense(gradient: Any, variable: Variable) -> Any:
    """Return a gradient as an array, whatever form it has in this step."""
    if gradient is None:
        return np.zeros(variable.shape, variable.dtype)
    return gradient.to_dense() if hasattr(gradient, "to_dense") else gradient
