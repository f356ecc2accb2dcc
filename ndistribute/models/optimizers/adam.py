"""Adam: steps of about one learning rate, whatever the scale of the gradient."""

from __future__ import annotations

from typing import ClassVar

from ndistribute import update_rules
from ndistribute.models.optimizers.optimizer import LearningRate, Optimizer

__all__ = ["Adam"]


class Adam(Optimizer):
    """Divide a running mean of gradients by the root of a running mean of their squares.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, in the form of the
    end of its section 2, where the bias correction is part of the rate.

    Args:
        learning_rate: a number, or a function from the number of steps done to one.
        beta_1: how slowly the mean moves, in ``[0, 1)``.
        beta_2: how slowly the mean of squares moves, in ``[0, 1)``.
        epsilon: added to the root.
        clipping: `clipnorm`, `global_clipnorm` or `clipvalue`, see `Optimizer`.
        name: see `Optimizer`.

    Raises:
        ValueError: a beta is out of range.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Adam(0.5, epsilon=0.0).apply_gradients([([4.0], v)])
    >>> round(float(v[0]), 6)
    0.5
    """

    slot_names: ClassVar[tuple[str, ...]] = update_rules.Adam.slot_names

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        name: str | None = None,
    ) -> None:
        self.rule = update_rules.Adam(beta_1, beta_2, epsilon)
        super().__init__(
            learning_rate,
            clipnorm=clipnorm,
            global_clipnorm=global_clipnorm,
            clipvalue=clipvalue,
            name=name,
        )
