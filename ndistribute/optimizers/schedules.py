"""Learning-rate schedules: functions of the number of steps made, for `learning_rate`.

They are plain values, so a model that is saved keeps its schedule, and every replica computes the
same rate.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ndistribute.exports import export as _export


@dataclass(frozen=True)
class LearningRateSchedule:
    """The base class of schedules, which are dataclasses called with the number of steps made."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of the step after `step` steps."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__.")


@dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """A rate that is multiplied by a factor every so many steps.

    Args:
        initial_learning_rate: the first rate.
        decay_steps: the number of steps in which the rate decays by `decay_rate`.
        decay_rate: the factor.
        staircase: whether the rate changes only every `decay_steps` steps.

    >>> ExponentialDecay(1.0, decay_steps=10, decay_rate=0.5)(20)
    0.25
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        power = step / self.decay_steps
        exponent = math.floor(power) if self.staircase else power
        return float(self.initial_learning_rate * self.decay_rate**exponent)


@dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """A rate that falls along half a cosine.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    Args:
        initial_learning_rate: the first rate.
        decay_steps: the number of steps until the last rate.
        alpha: the last rate, as a share of the first.

    >>> schedule = CosineDecay(1.0, decay_steps=10)
    >>> schedule(0), round(schedule(5), 6), schedule(10), schedule(11)
    (1.0, 0.5, 0.0, 0.0)
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0

    def __call__(self, step: int) -> float:
        done = min(1.0, step / self.decay_steps)
        share = 0.5 * (1 + math.cos(math.pi * done))
        return self.initial_learning_rate * ((1 - self.alpha) * share + self.alpha)


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """Rates that change at given steps.

    Args:
        boundaries: the numbers of steps up to which, inclusive, each rate but the last holds.
        values: the rates, one more than the boundaries.

    Raises:
        ValueError: the boundaries do not rise, or the number of values is wrong.

    >>> schedule = PiecewiseConstantDecay([10, 20], [1.0, 0.1, 0.01])
    >>> schedule(10), schedule(11), schedule(30)
    (1.0, 0.1, 0.01)
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"PiecewiseConstantDecay: {len(self.boundaries)} boundaries need one value more, "
                f"got {len(self.values)}."
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"PiecewiseConstantDecay: {self.boundaries} must rise.")

    def __call__(self, step: int) -> float:
        return float(self.values[bisect.bisect_left(self.boundaries, step)])


@dataclass(frozen=True)
class WarmUp(LearningRateSchedule):
    """A rate that rises from 0 in a line, and then follows another schedule.

    Args:
        schedule: a rate, or a schedule, which starts after the warm-up.
        warmup_steps: the number of steps of the rise.

    >>> schedule = WarmUp(0.5, warmup_steps=5)
    >>> schedule(1), schedule(5)
    (0.1, 0.5)
    """

    schedule: float | LearningRateSchedule
    warmup_steps: int

    def __call__(self, step: int) -> float:
        after = max(0, step - self.warmup_steps)
        rate = self.schedule(after) if callable(self.schedule) else self.schedule
        return rate * min(1.0, step / self.warmup_steps) if self.warmup_steps else rate


_export(vars())
