"""Learning-rate schedules: functions of the number of steps made, for `learning_rate`.

A schedule is a plain value, so a saved model keeps its schedule and every replica computes the same
rate. Schedules compute with NumPy's functions, so the number of steps may also be an array or a
tensor of a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ndistribute.context import get_strategy
from ndistribute.exports import export as _export
from ndistribute.mistakes import count_of
from ndistribute.names import deserializing, named


@dataclass(frozen=True)
class LearningRateSchedule:
    """The base class of schedules, which map the number of steps made to a learning rate.

    A subclass is a dataclass, or it also defines `get_config`. The `name` has no effect on the
    rate.
    """

    name: str | None = field(default=None, kw_only=True, repr=False)

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of the step after `step` steps."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__.")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that create an equal schedule, by name."""
        if "__dataclass_fields__" not in vars(type(self)):
            kind = type(self).__name__
            raise ValueError(f"{kind} cannot be saved: define get_config, or make it a dataclass.")
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return a new schedule from the result of `get_config`."""
        return cls(**config)


@dataclass(frozen=True)
class _Decay(LearningRateSchedule):
    """The base class of schedules that decay by `decay_rate` every `decay_steps` steps."""

    initial_learning_rate: Any
    decay_steps: Any
    decay_rate: Any
    staircase: bool = False

    def part(self, step: Any) -> Any:
        """Return how many times the rate has decayed."""
        part = step / self.decay_steps
        return np.floor(part) if self.staircase else part


@dataclass(frozen=True)
class ExponentialDecay(_Decay):
    """A rate that decays exponentially: each `decay_steps` steps multiply it by a factor.

    Args:
        initial_learning_rate: the first rate.
        decay_steps: the number of steps in which the rate is multiplied by `decay_rate`.
        decay_rate: the factor.
        staircase: whether the rate changes only every `decay_steps` steps.

    >>> ExponentialDecay(1.0, decay_steps=10, decay_rate=0.5)(20)
    0.25
    """

    def __call__(self, step: Any) -> Any:
        return _plain(self.initial_learning_rate * self.decay_rate ** self.part(step))


@dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """A rate that falls along half a cosine.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    Args:
        initial_learning_rate: the first rate.
        decay_steps: the number of steps until the last rate.
        alpha: the last rate, as a share of the rate from which it falls.
        warmup_target: the rate at the end of a linear warm-up, from which it falls; None: no
            warm-up, it falls from the first rate.
        warmup_steps: the number of steps of the warm-up, before the `decay_steps`.

    >>> schedule = CosineDecay(1.0, decay_steps=10)
    >>> schedule(0), round(schedule(5), 6), schedule(10), schedule(11)
    (1.0, 0.5, 0.0, 0.0)
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __call__(self, step: Any) -> Any:
        first, rise = self.initial_learning_rate, self.warmup_steps
        target, rise = (first, 0) if self.warmup_target is None else (self.warmup_target, rise)
        part = np.clip((step - rise) / self.decay_steps, 0.0, 1.0)
        rate = target * ((1 - self.alpha) * 0.5 * (1 + np.cos(np.pi * part)) + self.alpha)
        if rise:
            rate = np.where(np.less(step, rise), first + (target - first) * step / rise, rate)
        return _plain(rate)


@dataclass(frozen=True)
class InverseTimeDecay(_Decay):
    """A rate that is divided by a number which grows linearly with the steps.

    Args:
        initial_learning_rate: the first rate.
        decay_steps: the number of steps in which the divisor grows by `decay_rate`.
        decay_rate: the growth of the divisor in `decay_steps` steps.
        staircase: whether the rate changes only every `decay_steps` steps.

    >>> InverseTimeDecay(1.0, decay_steps=10, decay_rate=0.5)(20)
    0.5
    """

    def __call__(self, step: Any) -> Any:
        return _plain(self.initial_learning_rate / (1 + self.decay_rate * self.part(step)))


@dataclass(frozen=True)
class PolynomialDecay(LearningRateSchedule):
    """A rate that falls to a last rate along a polynomial, and then stays there.

    Args:
        initial_learning_rate: the first rate.
        decay_steps: the number of steps until the last rate.
        end_learning_rate: the last rate.
        power: the exponent of the polynomial; 1 for a line.
        cycle: whether the rate jumps up at the end and falls again, with the last rate at 2, 3, ...
            times `decay_steps`.

    >>> schedule = PolynomialDecay(1.0, decay_steps=10, end_learning_rate=0.0)
    >>> schedule(0), schedule(5), schedule(11)
    (1.0, 0.5, 0.0)
    """

    initial_learning_rate: Any
    decay_steps: Any
    end_learning_rate: Any = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __call__(self, step: Any) -> Any:
        part = step / self.decay_steps
        end = np.maximum(np.ceil(part), 1.0) if self.cycle else 1.0
        left = 1.0 - np.minimum(part / end, 1.0)
        fallen = self.initial_learning_rate - self.end_learning_rate
        return _plain(fallen * left**self.power + self.end_learning_rate)


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """A rate that is constant between steps at which it changes.

    Args:
        boundaries: for each rate but the last, the last number of steps at which it holds.
        values: the rates, one more than there are boundaries.

    Raises:
        ValueError: the boundaries do not increase, or the number of values is wrong.

    >>> schedule = PiecewiseConstantDecay([10, 20], [1.0, 0.1, 0.01])
    >>> schedule(10), schedule(11), schedule(30)
    (1.0, 0.1, 0.01)
    """

    boundaries: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                "PiecewiseConstantDecay: pass one value more than boundaries, got "
                f"{count_of(len(self.boundaries), 'boundary', 'boundaries')} and "
                f"{count_of(len(self.values), 'value')}."
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(
                "PiecewiseConstantDecay: each boundary must be above the one before it, got "
                f"{self.boundaries}."
            )

    def __call__(self, step: Any) -> Any:
        rate: Any = self.values[0]
        for boundary, value in zip(self.boundaries, self.values[1:], strict=True):
            rate = np.where(np.greater(step, boundary), value, rate)
        return _plain(rate)


@dataclass(frozen=True)
class WarmUp(LearningRateSchedule):
    """A rate that rises linearly from 0, and then follows another schedule.

    Args:
        schedule: a rate, or a schedule that starts after the warm-up.
        warmup_steps: the number of steps of the rise.

    >>> schedule = WarmUp(0.5, warmup_steps=5)
    >>> schedule(1), schedule(5)
    (0.1, 0.5)
    """

    schedule: float | LearningRateSchedule
    warmup_steps: int

    def __call__(self, step: Any) -> Any:
        after = _plain(np.maximum(step - self.warmup_steps, 0))
        rate = self.schedule(after) if callable(self.schedule) else self.schedule
        if not self.warmup_steps:
            return rate
        return _plain(rate * np.minimum(step / self.warmup_steps, 1.0))


@dataclass(frozen=True)
class ScaledByWorkers(LearningRateSchedule):
    """A rate that grows with the number of workers of an elastic job.

    With ``nd.Elastic(batch="scaled")`` the batch grows with the workers. The rate is then
    multiplied by the number of workers, divided by their number at the first start. Otherwise the
    rate does not change.

    Args:
        schedule: a rate, or a schedule.

    >>> ScaledByWorkers(0.5)(10)  # Here workers do not change.
    0.5
    """

    schedule: float | LearningRateSchedule

    def __call__(self, step: Any) -> Any:
        rate = self.schedule(step) if callable(self.schedule) else self.schedule
        return rate * float(get_strategy().batch_scale)


def _plain(rate: Any) -> Any:
    """Return a NumPy number as a Python number; arrays and tensors are returned unchanged."""
    is_number = isinstance(rate, np.generic | np.ndarray) and rate.ndim == 0
    return rate.item() if is_number else rate


NAMED = {
    kind.__name__: kind
    for kind in (*LearningRateSchedule.__subclasses__(), *_Decay.__subclasses__())
    if kind is not _Decay
}
deserialize = deserializing(lambda config: named(NAMED, config, "schedule"))
_export(vars(), "deserialize")
