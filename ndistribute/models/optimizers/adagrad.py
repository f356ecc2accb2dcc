"""Adagrad: a rate for each element that falls with what it has moved."""

from __future__ import annotations

from typing import ClassVar

from ndistribute import update_rules
from ndistribute.models.optimizers.optimizer import LearningRate, Optimizer

__all__ = ["Adagrad"]


class Adagrad(Optimizer):
    """Divide the step by the root of the sum of squared gradients so far.

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", 2011.

    Args:
        learning_rate: a number, or a function from the number of steps done to one.
        initial_accumulator_value: where the sum of squares starts, 0 or more.
        epsilon: added to the sum before the root.
        clipping: `clipnorm`, `global_clipnorm` or `clipvalue`, see `Optimizer`.
        name: see `Optimizer`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Adagrad(0.5, initial_accumulator_value=0.0, epsilon=0.0).apply_gradients([([4.0], v)])
    >>> v.numpy()
    array([0.5])
    """

    slot_names: ClassVar[tuple[str, ...]] = update_rules.Adagrad.slot_names
    rows_alone: ClassVar[bool] = update_rules.Adagrad.rows_alone

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        name: str | None = None,
    ) -> None:
        self.rule = update_rules.Adagrad(initial_accumulator_value, epsilon)
        super().__init__(
            learning_rate,
            clipnorm=clipnorm,
            global_clipnorm=global_clipnorm,
            clipvalue=clipvalue,
            name=name,
        )
