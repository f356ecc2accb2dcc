"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from ndistribute import update_rules
from ndistribute.models.optimizers.optimizer import LearningRate, Optimizer

__all__ = ["SGD"]


class SGD(Optimizer):
    """Step down the gradient.

    With momentum m the velocity is ``v = m * v - rate * g`` and the step is v; with Nesterov's
    correction it is ``m * v - rate * g`` (Sutskever et al., "On the importance of initialization
    and momentum in deep learning", 2013).

    Args:
        learning_rate: a number, or a function from the number of steps done to one.
        momentum: in ``[0, 1]``; 0 keeps no velocity.
        nesterov: whether to look ahead; needs momentum.
        clipping: `clipnorm`, `global_clipnorm` or `clipvalue`, see `Optimizer`.
        name: see `Optimizer`.

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
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        name: str | None = None,
    ) -> None:
        self.rule = update_rules.Sgd(momentum, nesterov)
        super().__init__(
            learning_rate,
            clipnorm=clipnorm,
            global_clipnorm=global_clipnorm,
            clipvalue=clipvalue,
            name=name,
        )
        self.slot_names = self.rule.slot_names  # type: ignore[misc]
        self.rows_alone = self.rule.rows_alone  # type: ignore[misc]
