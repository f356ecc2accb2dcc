"""The optimizers, each with the rule that it has: `SGD`, `Adagrad`, `Adam`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from ndistribute.device import Array, array_namespace
from ndistribute.optimizers.optimizer import LearningRate, Optimizer, Options
from ndistribute.update_rules import Rule

__all__ = ["SGD", "Adagrad", "AdagradRule", "Adam", "AdamRule", "SGDRule"]


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


@dataclass(frozen=True)
class AdagradRule(Rule):
    """Divide the step by the root of the sum of squares; see `Adagrad`."""

    name = "adagrad"
    slot_names = ("accumulator",)
    rows_alone = True
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        if self.initial_accumulator_value < 0:
            raise ValueError(
                "initial_accumulator_value must be 0 or more, got "
                f"{self.initial_accumulator_value}."
            )

    def initial_slot(self, name: str) -> float:
        """Return where the sum of squares starts."""
        return self.initial_accumulator_value

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        """Step down the scaled gradient, in place."""
        (accumulator,) = slots
        xp = array_namespace(gradient)
        scratch = xp.square(gradient)
        accumulator += scratch
        xp.add(accumulator, self.epsilon, out=scratch)
        xp.sqrt(scratch, out=scratch)
        gradient /= scratch
        gradient *= rate
        variable -= gradient


class Adagrad(Optimizer):
    """Divide the step by the root of the sum of squared gradients so far.

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", 2011.

    Args:
        learning_rate: a number, or a function from the number of steps done to one.
        initial_accumulator_value: where the sum of squares starts, 0 or more.
        epsilon: added to the sum before the root.
        options: `clipnorm`, `global_clipnorm`, `clipvalue` and `name`, see `Optimizer`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Adagrad(0.5, initial_accumulator_value=0.0, epsilon=0.0).apply_gradients([([4.0], v)])
    >>> v.numpy()
    array([0.5])
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        rule = AdagradRule(initial_accumulator_value, epsilon)
        super().__init__(rule, learning_rate, **options)


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
