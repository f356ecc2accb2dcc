"""The optimizers, and the update rule of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ndistribute.devices import Array, array_namespace
from ndistribute.exports import export as _export
from ndistribute.mistakes import constructor
from ndistribute.names import deserializing, named
from ndistribute.optimizers import schedules
from ndistribute.optimizers.optimizer import LearningRate, Optimizer
from ndistribute.update_rules import Rule


class ByRule(Optimizer):
    """The base class of optimizers that take a learning rate and the parameters of their rule.

    A subclass names its rule. It may give defaults for the learning rate and for the options of the
    rule.
    """

    if TYPE_CHECKING:

        def __init__(
            self, learning_rate: LearningRate = ..., *parameters: Any, **options: Any
        ) -> None: ...

    def __init_subclass__(cls, rule: type[Rule] | None = None, **defaults: Any) -> None:
        if rule is not None:
            parameters = {
                each.name: each.default for each in fields(rule) if each.init and not each.kw_only
            }

            def init(self: Optimizer, learning_rate: LearningRate, **options: Any) -> None:
                made = rule(**{name: options.pop(name) for name in parameters})
                Optimizer.__init__(self, made, learning_rate, **options)

            taken = {"learning_rate": 0.001, **defaults, **parameters}
            cls.__init__ = constructor(taken, init)  # type: ignore[method-assign]
        super().__init_subclass__()


@dataclass(frozen=True)
class SGDRule(Rule):
    """The update rule of `SGD`."""

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
        return ("momentum",) if self.momentum else ()

    @property
    def rows_alone(self) -> bool:
        return not self.momentum  # The velocity moves every row in every step.

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
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


@dataclass(frozen=True)
class MomentumRule(SGDRule):
    """The update rule of `ndistribute.graph.MomentumOptimizer`, which sums plain gradients.

    The rate of a step scales the whole sum. So the steps differ from those of `SGDRule` when the
    rate changes.
    """

    name = "momentum"
    slot_names = ("momentum",)
    rows_alone = False

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        (total,) = slots
        total *= self.momentum
        total += gradient
        if self.nesterov:
            gradient += self.momentum * total
        else:
            gradient[...] = total
        gradient *= rate
        variable -= gradient


class SGD(ByRule, rule=SGDRule, learning_rate=0.01):
    """Stochastic gradient descent, with or without momentum.

    Without momentum, the step is ``-rate * g``. With momentum m, the velocity becomes
    ``v = m * v - rate * g``, and the step is v, or ``m * v - rate * g`` if `nesterov` (Sutskever et
    al., "On the importance of initialization and momentum in deep learning", 2013).

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        momentum: m, in ``[0, 1]``; 0 turns momentum off.
        nesterov: whether to use Nesterov's correction, which needs momentum.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    Raises:
        ValueError: `momentum` is out of range, or `nesterov` is True without momentum.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0, 2.0])
    >>> SGD(0.5).apply_gradients([([1.0, 1.0], v)])
    >>> v.numpy()
    array([0.5, 1.5])
    """


@dataclass(frozen=True)
class AdagradRule(Rule):
    """The update rule of `Adagrad`."""

    name = "adagrad"
    slot_names = ("accumulator",)
    rows_alone = True
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        start = self.initial_accumulator_value
        if start < 0:
            raise ValueError(f"initial_accumulator_value must be 0 or more, got {start}.")

    def initial_slot(self, name: str) -> float:
        return self.initial_accumulator_value

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        (accumulator,) = slots
        xp = array_namespace(gradient)
        scratch = xp.square(gradient)
        accumulator += scratch
        xp.add(accumulator, self.epsilon, out=scratch)
        xp.sqrt(scratch, out=scratch)
        gradient /= scratch
        gradient *= rate
        variable -= gradient


class Adagrad(ByRule, rule=AdagradRule):
    """Adagrad, which divides each step by the root of the sum of squared gradients so far.

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", 2011.

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        initial_accumulator_value: the initial value of the sum of squares, 0 or more.
        epsilon: a constant that is added to the sum before the root.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Adagrad(0.5, initial_accumulator_value=0.0, epsilon=0.0).apply_gradients([([4.0], v)])
    >>> v.numpy()
    array([0.5])
    """


@dataclass(frozen=True)
class AdadeltaRule(Rule):
    """The update rule of `Adadelta`."""

    name = "adadelta"
    slot_names = ("squares", "changes")
    rho: float = 0.95
    epsilon: float = 1e-7

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        squares, changes = slots
        xp = array_namespace(gradient)
        squares *= self.rho
        squares += (1 - self.rho) * xp.square(gradient)
        gradient *= xp.sqrt((changes + self.epsilon) / (squares + self.epsilon))
        changes *= self.rho
        changes += (1 - self.rho) * xp.square(gradient)
        variable -= rate * gradient


class Adadelta(ByRule, rule=AdadeltaRule):
    """Adadelta, which scales each step by moving averages of squared gradients and squared steps.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012, whose learning rate is 1.

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        rho: the decay rate of both averages.
        epsilon: a constant that is added to the averages.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Adadelta(1.0, rho=0.0, epsilon=1.0).apply_gradients([([0.0], v)])
    >>> v.numpy()
    array([1.])
    """


@dataclass(frozen=True)
class AdamRule(Rule):
    """The update rule of `Adam`."""

    name = "adam"
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("m", "v", "v_max") if self.amsgrad else ("m", "v")

    def __post_init__(self) -> None:
        _check_below_one(beta_1=self.beta_1, beta_2=self.beta_2)

    def rate(self, step: int, learning_rate: float) -> Any:
        # The factor corrects the bias of means that start at zero.
        return learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        mean, square, *largest = slots
        xp = array_namespace(gradient)
        mean *= self.beta_1
        mean += gradient * (1 - self.beta_1)
        gradient *= gradient
        gradient *= 1 - self.beta_2
        square *= self.beta_2
        square += gradient
        for most in largest:
            xp.maximum(most, square, out=most)
            square = most
        xp.sqrt(square, out=gradient)
        gradient += self.epsilon
        xp.divide(mean, gradient, out=gradient)
        gradient *= rate
        variable -= gradient


class Adam(ByRule, rule=AdamRule):
    """Adam, which divides the mean gradient by the root of the mean squared gradient.

    Both means are moving averages. Source: Kingma and Ba, "Adam: A Method for Stochastic
    Optimization", 2015, in the form at the end of section 2, which puts the bias correction into
    the rate.

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        beta_1: the decay rate of the mean, in ``[0, 1)``.
        beta_2: the decay rate of the mean of squares, in ``[0, 1)``.
        epsilon: a constant that is added to the root.
        amsgrad: whether to divide by the root of the largest mean of squares so far.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    Raises:
        ValueError: `beta_1` or `beta_2` is out of range.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Adam(0.5, epsilon=0.0).apply_gradients([([4.0], v)])
    >>> round(float(v[0]), 6)
    0.5
    """


class AdamW(ByRule, rule=AdamRule, weight_decay=0.004):
    """Adam with decoupled weight decay, which the moving averages do not include.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        weight_decay: each step subtracts this share of the variable, times the rate.
        beta_1: the decay rate of the mean, in ``[0, 1)``.
        beta_2: the decay rate of the mean of squares, in ``[0, 1)``.
        epsilon: a constant that is added to the root.
        amsgrad: whether to divide by the root of the largest mean of squares so far.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> AdamW(0.5, weight_decay=0.1).apply_gradients([([0.0], v)])
    >>> v.numpy()
    array([0.95])
    """


@dataclass(frozen=True)
class NadamRule(AdamRule):
    """The update rule of `Nadam`."""

    name = "nadam"
    amsgrad: bool = field(default=False, init=False, repr=False)

    def rate(self, step: int, learning_rate: float) -> tuple[float, float, float]:
        """Return the factors of the mean and of the gradient, and that of the mean square."""
        # The product of the momentums so far, which soon becomes too small to matter.
        steps = np.arange(1, min(step, _PRODUCT_STEPS) + 1)
        now, after = (self.beta_1 * (1 - 0.5 * 0.96**k) for k in (step, step + 1))
        product = float(np.prod(self.beta_1 * (1 - 0.5 * 0.96**steps)))
        of_mean = learning_rate * after / (1 - product * after)
        return of_mean, learning_rate * (1 - now) / (1 - product), 1 / (1 - self.beta_2**step)

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: Any) -> None:
        """Update the means, and subtract the corrected ratio, in place."""
        (mean, square), (of_mean, of_gradient, of_square) = slots, rate
        xp = array_namespace(gradient)
        mean += (1 - self.beta_1) * (gradient - mean)
        square += (1 - self.beta_2) * (gradient * gradient - square)
        step = of_mean * mean + of_gradient * gradient
        variable -= step / (xp.sqrt(square * of_square) + self.epsilon)


class Nadam(ByRule, rule=NadamRule):
    """Adam with Nesterov momentum, which increases during the first steps.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016.

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        beta_1: the decay rate of the mean, in ``[0, 1)``.
        beta_2: the decay rate of the mean of squares, in ``[0, 1)``.
        epsilon: a constant that is added to the root.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Nadam(0.5, epsilon=0.0).apply_gradients([([4.0], v)])
    >>> v.numpy().round(3)
    array([0.469])
    """


@dataclass(frozen=True)
class FtrlRule(Rule):
    """The update rule of `Ftrl`."""

    name = "ftrl"
    slot_names = ("accumulator", "linear")
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        wrong = [name for name, value in vars(self).items() if value < 0]
        if self.learning_rate_power > 0 or set(wrong) - {"learning_rate_power"}:
            raise ValueError(
                "Ftrl: learning_rate_power must be 0 or less, and the other numbers 0 or more, got "
                f"{self!r}."
            )

    def initial_slot(self, name: str) -> float:
        return self.initial_accumulator_value if name == "accumulator" else 0.0

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        """Update the sums, and set the variable to the minimum that they give, in place."""
        accumulator, linear = slots
        bound = self.l1_regularization_strength
        before = accumulator**-self.learning_rate_power
        accumulator += gradient * gradient
        after = accumulator**-self.learning_rate_power
        linear += gradient + 2 * self.l2_shrinkage_regularization_strength * variable
        linear -= (after - before) / rate * variable
        curve = after / rate + 2 * self.l2_regularization_strength + self.beta / rate
        variable[...] = (linear.clip(-bound, bound) - linear) / curve


class Ftrl(ByRule, rule=FtrlRule):
    """Follow the regularized leader: an optimizer for linear models with many features.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013.

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        learning_rate_power: the exponent of the sum of squared gradients in the rate, 0 or less.
        initial_accumulator_value: the initial value of that sum.
        l1_regularization_strength: the penalty on absolute values, which sets small weights to 0.
        l2_regularization_strength: the penalty on squares.
        l2_shrinkage_regularization_strength: a penalty on squares that is added to the gradient
            only.
        beta: a constant that is added to the root of the sum, as in the source.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> Ftrl(0.5, initial_accumulator_value=0.0).apply_gradients([([4.0], v)])
    >>> v.numpy()
    array([0.5])
    """


@dataclass(frozen=True)
class RMSpropRule(Rule):
    """The update rule of `RMSprop`."""

    name = "rmsprop"
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    def __post_init__(self) -> None:
        _check_below_one(rho=self.rho, momentum=self.momentum)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the means, and of the velocity with momentum."""
        kept = {"square": True, "mean": self.centered, "momentum": self.momentum}
        return tuple(name for name, is_kept in kept.items() if is_kept)

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: float) -> None:
        """Update the means and subtract the scaled ratio, in place."""
        square, *others = slots
        xp = array_namespace(gradient)
        scratch = xp.square(gradient)
        scratch -= square
        scratch *= 1 - self.rho
        square += scratch
        xp.add(square, self.epsilon, out=scratch)
        if self.centered:
            mean = others[0]
            mean += (1 - self.rho) * (gradient - mean)
            scratch -= xp.square(mean)
        xp.sqrt(scratch, out=scratch)
        gradient /= scratch
        gradient *= rate
        if self.momentum:
            velocity = others[-1]
            velocity *= self.momentum
            velocity += gradient
            gradient = velocity
        variable -= gradient


class RMSprop(ByRule, rule=RMSpropRule):
    """RMSprop, which divides the gradient by the root of a moving average of its square.

    Source: Tieleman and Hinton, "Lecture 6.5 - rmsprop", 2012; `centered` as in Graves,
    "Generating Sequences With Recurrent Neural Networks", 2013.

    Args:
        learning_rate: a number, or a function that maps the number of steps made to a number.
        rho: the decay rate of the average, in ``[0, 1)``.
        momentum: the decay rate of the velocity, in ``[0, 1)``; 0 turns momentum off.
        epsilon: a constant that is added to the average before the root.
        centered: whether to subtract the square of the average gradient from the average square.
        options: other arguments of `Optimizer`, such as `clipnorm`, `weight_decay` and `name`.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> RMSprop(0.1, rho=0.0).apply_gradients([([4.0], v)])
    >>> v.numpy().round(6)
    array([0.9])
    """


def _check_below_one(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}.")


# After this many steps, the product of the momentums of `Nadam` no longer changes the rate.
_PRODUCT_STEPS = 1000
_ALL = (Adadelta, Adagrad, Adam, AdamW, Ftrl, Nadam, RMSprop, SGD)
NAMED: dict[str, type[Optimizer]] = {kind.__name__.lower(): kind for kind in _ALL}
_PARTS: dict[str, Any] = NAMED | schedules.NAMED  # What its configuration may have.


def get(optimizer: str | Optimizer) -> Optimizer:
    """Return an optimizer for a name or a result of `serialize`; return an `Optimizer` unchanged.

    Raises:
        ValueError: the name is unknown.

    >>> get("sgd").rule
    SGDRule(momentum=0.0, nesterov=False)
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    made = named(NAMED if isinstance(optimizer, str) else _PARTS, optimizer, "optimizer")
    if not isinstance(made, Optimizer):
        raise ValueError(f"expected an optimizer or its name, got {optimizer!r}.")
    return made


deserialize = deserializing(get)
_RULES = "AdadeltaRule AdagradRule AdamRule FtrlRule MomentumRule NadamRule RMSpropRule SGDRule"
_export(vars(), "deserialize", f"ByRule {_RULES}")
