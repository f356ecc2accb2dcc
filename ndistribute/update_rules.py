"""The arithmetic of optimizers: how a gradient changes a variable and what is kept beside it.

A rule knows nothing of replicas, servers or steps that were: it is given arrays and a rate, and
changes the arrays in place. The optimizers of `models` and the parameter servers both use these, so
a variable gets the same bits wherever it lives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ndistribute.device import Array, array_namespace

__all__ = ["RULES", "Adagrad", "Adam", "Rule", "Sgd", "hyperparameters_of", "rule_named"]


class Rule(Protocol):
    """What an optimizer, or a server in its place, needs to know of a rule."""

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the arrays kept beside each variable."""
        ...

    @property
    def rows_alone(self) -> bool:
        """Return whether a row without gradient stays as it is."""
        ...

    def initial_slot(self, name: str) -> float:
        """Return the value with which a slot starts."""
        ...

    def rate(self, step: int, learning_rate: float) -> float:
        """Return the number that an update needs, computed once a step.

        Args:
            step: the number of this step, from 1.
            learning_rate: in this step.
        """
        ...

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: Any) -> None:
        """Change a range of a variable and of its slots in place; `gradient` may be changed."""
        ...


@dataclass(frozen=True, slots=True)
class Sgd:
    """Step down the gradient, with momentum; see `models.optimizers.SGD`.

    >>> import numpy as np
    >>> variable = np.array([1.0, 2.0])
    >>> Sgd().update(variable, np.array([1.0, 1.0]), (), 0.5)
    >>> variable
    array([0.5, 1.5])
    """

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
        """Return whether there is no velocity: with one every row moves on in every step."""
        return not self.momentum

    def initial_slot(self, name: str) -> float:
        """Return zero."""
        return 0.0

    def rate(self, step: int, learning_rate: float) -> float:
        """Return the learning rate."""
        return learning_rate

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: Any) -> None:
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


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Divide the step by the root of the sum of squares; see `models.optimizers.Adagrad`.

    >>> import numpy as np
    >>> variable, accumulator = np.array([1.0]), np.array([0.0])
    >>> Adagrad(0.0, epsilon=0.0).update(variable, np.array([4.0]), [accumulator], 0.5)
    >>> variable, accumulator
    (array([0.5]), array([16.]))
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    slot_names: ClassVar[tuple[str, ...]] = ("accumulator",)
    rows_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.initial_accumulator_value < 0:
            raise ValueError(
                "initial_accumulator_value must be 0 or more, got "
                f"{self.initial_accumulator_value}."
            )

    def initial_slot(self, name: str) -> float:
        """Return where the sum of squares starts."""
        return self.initial_accumulator_value

    def rate(self, step: int, learning_rate: float) -> float:
        """Return the learning rate."""
        return learning_rate

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: Any) -> None:
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


@dataclass(frozen=True, slots=True)
class Adam:
    """Divide a running mean by the root of a running mean of squares; see `models.optimizers.Adam`.

    >>> import numpy as np
    >>> rule, variable = Adam(epsilon=0.0), np.array([1.0])
    >>> slots = [np.zeros(1), np.zeros(1)]
    >>> rule.update(variable, np.array([4.0]), slots, rule.rate(1, 0.5))
    >>> round(float(variable[0]), 6)
    0.5
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    slot_names: ClassVar[tuple[str, ...]] = ("m", "v")
    rows_alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} must be in [0, 1), got {beta}.")

    def initial_slot(self, name: str) -> float:
        """Return zero."""
        return 0.0

    def rate(self, step: int, learning_rate: float) -> float:
        """Return the learning rate with the correction for means that started at zero."""
        return learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: Any) -> None:
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


RULES: Mapping[str, type[Sgd] | type[Adagrad] | type[Adam]] = {
    "sgd": Sgd,
    "adagrad": Adagrad,
    "adam": Adam,
}


def rule_named(name: str, hyperparameters: Mapping[str, float]) -> Rule:
    """Return a rule, for example one that a message names.

    Args:
        name: of `RULES`.
        hyperparameters: its fields; those left out have their defaults.

    Raises:
        ValueError: there is no such rule, it has no such hyperparameter, or a value is out of
            range.

    >>> rule_named("sgd", {"momentum": 0.9, "nesterov": 1.0})
    Sgd(momentum=0.9, nesterov=True)
    """
    kind: Any = RULES.get(name)
    if kind is None:
        raise ValueError(f"there is no update rule {name!r}; there are {', '.join(RULES)}.")
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
    unknown = hyperparameters.keys() - defaults.keys()
    if unknown:
        raise ValueError(f"rule {name!r} has no {', '.join(sorted(unknown))}.")
    # A message holds numbers only, also for what is true or false.
    values = {key: type(defaults[key])(value) for key, value in hyperparameters.items()}
    rule: Rule = kind(**values)
    return rule


def hyperparameters_of(rule: Rule) -> tuple[str, dict[str, float]]:
    """Return what `rule_named` needs to make a rule again.

    >>> hyperparameters_of(Sgd(0.9))
    ('sgd', {'momentum': 0.9, 'nesterov': 0.0})
    """
    for name, kind in RULES.items():
        if type(rule) is kind:
            fields = dataclasses.fields(kind)
            return name, {field.name: float(getattr(rule, field.name)) for field in fields}
    raise ValueError(f"{rule!r} is no rule of {', '.join(RULES)}.")
