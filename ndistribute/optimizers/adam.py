"""Adam: steps of about one learning rate, whatever the scale of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from ndistribute.device import Array, array_namespace
from ndistribute.optimizers.optimizer import LearningRate, Optimizer, Options
from ndistribute.update_rules import Rule

__all__ = ["Adam", "AdamRule"]


@dataclass(frozen=True)
class AdamRule(Rule):
    """Divide a running mean by the root of a running mean of squares; see `Adam`."""

    name = "adam"
    slot_names = ("m", "v")
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} must be in [0, 1), got {beta}.")

    def rate(self, step: int, learning_rate: float) -> float:
        """Return the learning rate with the correction for means that started at zero."""
        return learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        """Step by the mean gradient over its root mean square, in place."""
        mean, square = slots
        xp = array_namespace(gradient)
        scratch = gradient - mean
        scratch *= 1 - self.beta_1
        mean += scratch
        gradient *= gradient
        gradient -= square
        gradient *= 1 - self.beta_2
        square += gradient
        xp.sqrt(square, out=gradient)
        gradient += self.epsilon
        xp.divide(mean, gradient, out=gradient)
        gradient *= rate
        variable -= gradient


class Adam(Optimizer):
    """Divide a running mean of gradients by the root of a running mean of their squares.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, in the form of the
    end of its section 2, where the bias correction is part of the rate.

    Args:
        learning_rate: a number, or a function from the number of steps done to one.
        beta_1: how slowly the mean moves, in ``[0, 1)``.
        beta_2: how slowly the mean of squares moves, in ``[0, 1)``.
        epsilon: added to the root.
        options: `clipnorm`, `global_clipnorm`, `clipvalue` and `name`, see `Optimizer`.

    Raises:
        ValueError: a beta is out of range.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Adam(0.5, epsilon=0.0).apply_gradients([([4.0], v)])
    >>> round(float(v[0]), 6)
    0.5
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(AdamRule(beta_1, beta_2, epsilon), learning_rate, **options)
