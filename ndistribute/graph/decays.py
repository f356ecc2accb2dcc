"""Learning rates that depend on the global step, for the optimizers of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.graph.graph import as_tensor

__all__ = ["exponential_decay", "piecewise_constant", "polynomial_decay"]


def exponential_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str = "ExponentialDecay",
) -> Any:
    """Return ``learning_rate * decay_rate ** (global_step / decay_steps)`` as a tensor.

    Args:
        learning_rate: the rate at step 0.
        global_step: the variable that counts the steps.
        decay_steps: the steps after which the rate is multiplied by `decay_rate`.
        decay_rate: a number, usually less than 1.
        staircase: whether the rate changes at multiples of `decay_steps` only.
        name: the name scope of the operations.

    >>> from ndistribute.graph.session import Session
    >>> rate = exponential_decay(0.5, 25, 10, 0.1, staircase=True)
    >>> round(float(Session().run(rate)), 6)
    0.005
    """
    step = as_tensor(global_step)
    with step.graph.name_scope(name):
        periods: Any = step / decay_steps
        return learning_rate * np.power(decay_rate, np.floor(periods) if staircase else periods)


def piecewise_constant(
    x: Any, boundaries: Sequence[float], values: Sequence[float], name: str = "PiecewiseConstant"
) -> Any:
    """Return ``values[k]`` as a tensor, with the number `k` of boundaries that are less than `x`.

    Raises:
        ValueError: there is not one value more than boundaries.

    >>> from ndistribute.graph.session import Session
    >>> float(Session().run(piecewise_constant(7, [5, 10], [1.0, 0.5, 0.1])))
    0.5
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"piecewise_constant needs one value more than boundaries, got {len(values)} values "
            f"and {len(boundaries)} boundaries."
        )
    step = as_tensor(x)
    with step.graph.name_scope(name):
        return as_tensor(np.array(values))[np.sum(np.greater(step, np.array(boundaries)))]


def polynomial_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    name: str = "PolynomialDecay",
) -> Any:
    """Return a rate that falls to `end_learning_rate` in `decay_steps`, and stays there.

    >>> from ndistribute.graph.session import Session
    >>> float(Session().run(polynomial_decay(1.0, 5, 10, 0.0)))
    0.5
    """
    step = as_tensor(global_step)
    with step.graph.name_scope(name):
        left: Any = 1.0 - np.minimum(step / decay_steps, 1.0)
        return (learning_rate - end_learning_rate) * left**power + end_learning_rate
