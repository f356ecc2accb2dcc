"""The table of optimizers: each with the formula of its paper, written out in plain NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Nadam,
    Optimizer,
    RMSprop,
)
from ndistribute.optimizers.algorithms import MomentumRule

RNG = np.random.default_rng(1)
START = RNG.normal(size=(6, 3))
GRADIENTS = RNG.normal(size=(4, 6, 3))


def followed(change: Callable[..., tuple[Any, ...]], *slots: float) -> Any:
    """Return where a formula leads, which returns the change and the slots from slots and value."""
    value, state = START, [np.full_like(START, start) for start in slots]
    for number, gradient in enumerate(GRADIENTS, start=1):
        step, *state = change(number, gradient, *state, value=value)
        value = value + step
    return value


def sgd(momentum: float, nesterov: bool = False) -> Callable[..., tuple[Any, ...]]:
    def change(k: int, g: Any, velocity: Any, value: Any) -> tuple[Any, ...]:
        velocity = momentum * velocity - 0.1 * g
        return (momentum * velocity - 0.1 * g if nesterov else velocity), velocity

    return change


def gradient_sum(nesterov: bool) -> Callable[..., tuple[Any, ...]]:
    def change(k: int, g: Any, total: Any, value: Any) -> tuple[Any, ...]:
        total = 0.9 * total + g
        return -0.1 / k * (0.9 * total + g if nesterov else total), total

    return change


def adagrad(k: int, g: Any, total: Any, value: Any) -> tuple[Any, ...]:
    total = total + g**2
    return -0.1 * g / np.sqrt(total + 1e-7), total


def adadelta(k: int, g: Any, square: Any, change: Any, value: Any) -> tuple[Any, ...]:
    square = 0.9 * square + 0.1 * g**2
    step = np.sqrt(change + 1e-7) / np.sqrt(square + 1e-7) * g
    return -0.1 * step, square, 0.9 * change + 0.1 * step**2


def adam(k: int, g: Any, mean: Any, square: Any, value: Any) -> tuple[Any, ...]:
    mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
    rate = 0.1 * np.sqrt(1 - 0.999**k) / (1 - 0.9**k)
    return -rate * mean / (np.sqrt(square) + 1e-7), mean, square


def adamw(k: int, g: Any, mean: Any, square: Any, value: Any) -> tuple[Any, ...]:
    mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
    # The constant is added to the root before its correction, as in Adam.
    root = (np.sqrt(square) + 1e-7) / np.sqrt(1 - 0.999**k)
    return -0.1 * 0.2 * value - 0.1 * mean / (1 - 0.9**k) / root, mean, square


def amsgrad(k: int, g: Any, mean: Any, square: Any, most: Any, value: Any) -> tuple[Any, ...]:
    mean, square = 0.9 * mean + 0.1 * g, 0.5 * square + 0.5 * g**2
    most = np.maximum(most, square)
    rate = 0.1 * np.sqrt(1 - 0.5**k) / (1 - 0.9**k)
    return -0.1 * 0.2 * value - rate * mean / (np.sqrt(most) + 1e-7), mean, square, most


def nadam(k: int, g: Any, mean: Any, square: Any, value: Any) -> tuple[Any, ...]:
    mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
    shares = [0.9 * (1 - 0.5 * 0.96**j) for j in range(1, k + 2)]
    corrected = shares[-1] * mean / (1 - np.prod(shares))
    corrected += (1 - shares[-2]) * g / (1 - np.prod(shares[:-1]))
    return -0.1 * corrected / (np.sqrt(square / (1 - 0.999**k)) + 1e-7), mean, square


def ftrl(k: int, g: Any, total: Any, linear: Any, value: Any) -> tuple[Any, ...]:
    after = total + g**2
    linear = linear + g + 2 * 0.2 * value - (np.sqrt(after) - np.sqrt(total)) / 0.1 * value
    curve = (np.sqrt(after) + 0.3) / 0.1 + 2 * 0.1
    kept = np.abs(linear) > 0.05
    new = np.where(kept, (np.sign(linear) * 0.05 - linear) / curve, 0)
    return new - value, after, linear


def averaged(k: int, g: Any, average: Any, value: Any) -> tuple[Any, ...]:
    moved = value - 0.1 * g
    average = moved if k == 1 else 0.7 * average + 0.3 * moved
    return (moved if k % 3 else average) - value, average


def rmsprop(momentum: float, centered: bool) -> Callable[..., tuple[Any, ...]]:
    def change(k: int, g: Any, square: Any, mean: Any, velocity: Any, value: Any) -> Any:
        square, mean = 0.9 * square + 0.1 * g**2, 0.9 * mean + 0.1 * g
        variance = square - mean**2 if centered else square
        velocity = momentum * velocity + 0.1 * g / np.sqrt(variance + 1e-7)
        return -velocity, square, mean, velocity

    return change


def summing(nesterov: bool) -> Optimizer:
    return Optimizer(MomentumRule(0.9, nesterov), lambda step: 0.1 / (1 + step))


# How to make an optimizer, its formula, and where the slots of the formula begin.
FORMULAS: dict[str, tuple[Callable[[], Optimizer], Callable[..., Any], tuple[float, ...]]] = {
    "adamw": (lambda: AdamW(0.1, weight_decay=0.2), adamw, (0, 0)),
    "rmsprop": (lambda: RMSprop(0.1), rmsprop(0.0, False), (0, 0, 0)),
    "centered": (lambda: RMSprop(0.1, momentum=0.5, centered=True), rmsprop(0.5, True), (0, 0, 0)),
    "sgd": (lambda: SGD(0.1), sgd(0.0), (0,)),
    "momentum": (lambda: SGD(0.1, 0.9), sgd(0.9), (0,)),
    "nesterov": (lambda: SGD(0.1, 0.9, nesterov=True), sgd(0.9, True), (0,)),
    "sum": (lambda: summing(False), gradient_sum(False), (0,)),
    "sum of nesterov": (lambda: summing(True), gradient_sum(True), (0,)),
    "adagrad": (lambda: Adagrad(0.1), adagrad, (0.1,)),
    "adadelta": (lambda: Adadelta(0.1, 0.9), adadelta, (0, 0)),
    "adam": (lambda: Adam(0.1), adam, (0, 0)),
    "amsgrad": (
        lambda: Adam(0.1, beta_2=0.5, amsgrad=True, weight_decay=0.2),
        *(amsgrad, (0, 0, 0)),
    ),
    "nadam": (lambda: Nadam(0.1), nadam, (0, 0)),
    "ftrl": (lambda: Ftrl(0.1, -0.5, 0.1, 0.05, 0.1, 0.2, 0.3), ftrl, (0.1, 0)),
    "averages": (
        lambda: SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3),
        *(averaged, (0,)),
    ),
}
MAKERS = {name: make for name, (make, *_) in FORMULAS.items()}
