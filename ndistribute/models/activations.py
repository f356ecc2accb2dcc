"""Activations, functions of plain or tracked arrays, and their names.

The tape records each activation as one entry. A layer applies an activation of `IN_PLACE` to its
own result, without a second array, because the derivative needs only the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ndistribute import autodiff
from ndistribute.autodiff import custom_gradient
from ndistribute.autodiff.custom import fused
from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.devices import Array, as_array
from ndistribute.exports import export as _export
from ndistribute.models.symbolic import recordable
from ndistribute.names import named, table_of

Activation = Callable[[Any], Any]
# For long rows, NumPy's loop for a row of zeros takes half the time of its loop for the number 0.
_LONG = 128


class InPlace(NamedTuple):
    """An activation that replaces an array, and its derivative from the result's gradient."""

    apply: Callable[[Array], Any]
    before: Callable[..., Array]  # Takes the gradient, the result, and an output array or None.
    plain: Callable[[Any], Any]  # The same, made of NumPy functions, for second derivatives.


@recordable
def relu(x: Any) -> Any:
    """Return ``max(x, 0)``.

    >>> relu(np.array([-1.0, 2.0]))
    array([0., 2.])
    """
    return _in_place(x, rule=IN_PLACE[relu])


@recordable
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent."""
    return _in_place(x, rule=IN_PLACE[tanh])


@recordable
def sigmoid(x: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``, computed without overflow.

    >>> sigmoid(np.array([-1000.0, 0.0]))
    array([0. , 0.5])
    """
    return _in_place(x, rule=IN_PLACE[sigmoid])


def linear(x: Any) -> Any:
    """Return the argument."""
    return x


@recordable
def softmax(x: Any) -> Any:
    """Return ``exp(x) / sum(exp(x))`` along the last axis."""
    return autodiff.softmax(x, axis=-1)


@recordable
def log_softmax(x: Any) -> Any:
    """Return the logarithm of `softmax` along the last axis."""
    return autodiff.log_softmax(x, axis=-1)


def softplus(x: Any) -> Any:
    """Return ``log(1 + exp(x))``, computed without overflow."""
    return np.logaddexp(x, 0)


def silu(x: Any) -> Any:
    """Return ``x * sigmoid(x)``, also called swish."""
    return x * sigmoid(x)


@recordable
@custom_gradient
def gelu(x: Any) -> Any:
    """Return ``x`` times the normal distribution function, approximated with `tanh`.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.

    >>> gelu(np.array([0.0, 1.0])).round(4)
    array([0.    , 0.8412])
    """
    x, scale = as_operand(x), math.sqrt(2 / math.pi)
    bend = np.tanh(scale * (x + 0.044715 * x * x * x))
    half = 0.5 * (1 + bend)

    def vjp(g: Array) -> Array:
        slope = scale * (1 + 3 * 0.044715 * x * x)
        return g * (half + 0.5 * x * (1 - bend * bend) * slope)

    return x * half, [vjp]


def leaky_relu(x: Any, negative_slope: float = 0.2) -> Any:
    """Return `x` where it is positive, elsewhere `x` times a slope."""
    return np.where(x > 0, x, negative_slope * x)


def elu(x: Any, alpha: float = 1.0) -> Any:
    """Return `x` where it is positive, elsewhere ``alpha * (exp(x) - 1)``."""
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


@fused(lambda x, *, rule: rule.plain(x))
def _in_place(x: Any, *, rule: InPlace) -> Any:
    y = as_array(x)
    y = y.astype(np.float64) if y.dtype.kind in "iub" else y.copy()
    rule.apply(y)
    return y, [lambda g: rule.before(g, y)]


def _relu_to(y: Array) -> None:
    is_long = type(y) is np.ndarray and y.ndim > 1 and y.shape[-1] >= _LONG
    zero: Any = np.zeros(y.shape[-1], y.dtype) if is_long else 0
    np.maximum(y, zero, out=y)


def _times(change: Array, g: Array, out: Array | None) -> Array:
    """Return a product, in `out` or in place of its first factor."""
    if out is not None:
        return np.multiply(change, g, out=out)
    change *= g
    return change


def _relu_before(g: Array, y: Array, out: Array | None = None) -> Array:
    change = (y > 0).astype(g.dtype)  # NumPy multiplies by booleans in a slower loop.
    return _times(change, g, out)


def _tanh_before(g: Array, y: Array, out: Array | None = None) -> Array:
    change = y * y
    np.subtract(1, change, out=change)
    return _times(change, g, out)


def _sigmoid_to(y: Array) -> None:
    y *= 0.5
    np.tanh(y, out=y)
    y += 1
    y *= 0.5


def _sigmoid_before(g: Array, y: Array, out: Array | None = None) -> Array:
    change = 1 - y
    change *= y
    return _times(change, g, out)


IN_PLACE: dict[Activation, InPlace] = {
    relu: InPlace(_relu_to, _relu_before, lambda x: np.where(x > 0, x, 0)),
    sigmoid: InPlace(_sigmoid_to, _sigmoid_before, lambda x: 0.5 + 0.5 * np.tanh(0.5 * x)),
    tanh: InPlace(lambda y: np.tanh(y, out=y), _tanh_before, np.tanh),
}

NAMED: dict[str, Activation] = table_of(
    *(elu, gelu, leaky_relu, linear, log_softmax, relu, sigmoid, silu, softmax, softplus, tanh),
    swish=silu,
)


def get(activation: str | Activation | None) -> Activation:
    """Return an activation for its name; None means `linear`, a callable is returned unchanged.

    Raises:
        ValueError: the name is unknown.

    >>> get("relu") is relu
    True
    """
    return named(NAMED, activation or "linear", "activation")  # type: ignore[no-any-return]


_export(vars(), but="InPlace")
