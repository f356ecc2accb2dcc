"""Adagrad: a rate for each element that falls with what it has moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from ndistribute.device import Array, array_namespace
from ndistribute.optimizers.optimizer import LearningRate, Optimizer, Options
from ndistribute.update_rules import Rule

__all__ = ["Adagrad", "AdagradRule"]


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
