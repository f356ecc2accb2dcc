"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from ndistribute.device import Array
from ndistribute.optimizers.optimizer import LearningRate, Optimizer, Options
from ndistribute.update_rules import Rule

__all__ = ["SGD", "SGDRule"]


@dataclass(frozen=True)
class SGDRule(Rule):
    """Step down the gradient; see `SGD`."""

    name = "sgd"
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], got {self.momentum}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0, for example momentum=0.9.")

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Return the velocity's name, where there is one."""
        return ("momentum",) if self.momentum else ()

    @property
    def rows_alone(self) -> bool:
        """Return True if there is no velocity: with one every row moves on in every step."""
        return not self.momentum

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        """Step down the gradient, in place."""
        gradient *= rate
        if not slots:
            variable -= gradient
            return
        velocity = slots[0]
        velocity *= self.momentum
        velocity -= gradient
        if self.nesterov:
            variable -= gradient
            variable += self.momentum * velocity
        else:
            variable += velocity


class SGD(Optimizer):
    """Step down the gradient.

    With momentum m the velocity is ``v = m * v - rate * g`` and the step is v; with Nesterov's
    correction it is ``m * v - rate * g`` (Sutskever et al., "On the importance of initialization
    and momentum in deep learning", 2013).

    Args:
        learning_rate: a number, or a function from the number of steps done to one.
        momentum: in ``[0, 1]``; 0 keeps no velocity.
        nesterov: whether to look ahead; needs momentum.
        options: `clipnorm`, `global_clipnorm`, `clipvalue` and `name`, see `Optimizer`.

    Raises:
        ValueError: momentum is out of range, or nesterov goes without it.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0, 2.0])
    >>> SGD(0.5).apply_gradients([([1.0, 1.0], v)])
    >>> v.numpy()
    array([0.5, 1.5])
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(SGDRule(momentum, nesterov), learning_rate, **options)
