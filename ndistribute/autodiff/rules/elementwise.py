"""Derivatives of elementwise functions.

A maker takes the raw result and arguments of a call, and returns the rule of one argument: a
function from the result's gradient to the argument's. A rule keeps only the arrays that it needs,
so that large intermediate results are freed during the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import missing, refuse_polyval
from ndistribute.autodiff.rules.unbroadcast import identity, unbroadcast, unbroadcasting
from ndistribute.device import Array

__all__ = ["RULES", "cast"]

Vjp = Callable[[Array], Array]


def cast(x: Array, dtype: Any, **kwargs: Any) -> Array:
    """Return an array cast to a dtype, as the method `astype` does."""
    return x.astype(dtype, **kwargs)


def _onto(x: Array, out: Array, change: Vjp) -> Vjp:
    """Return the rule of a possibly broadcast argument; `change` returns the full shape."""
    if x.shape == out.shape and x.dtype == out.dtype:
        return change
    shape, dtype = x.shape, x.dtype
    return lambda g: unbroadcast(change(g), shape, dtype)


def _masked(out: Array, mask: Array, x: Array) -> Vjp:
    """Return the rule of an argument that the result copies where `mask` is true.

    The rule keeps the mask, a quarter of the memory of a float32 argument. The product took a ninth
    of the time of `np.where` for the random masks of a ReLU.
    """
    return _onto(x, out, lambda g: g * mask)


def _broadcast_x(out: Array, x: Array, *args: Any, **kwargs: Any) -> Vjp:
    return unbroadcasting(x, out)


def _multiply_x(out: Array, x: Array, y: Any) -> Vjp:
    if y is _ZERO and x.ndim:
        refuse_polyval()
    return _onto(x, out, lambda g: g * y)


def _divide_y(out: Array, x: Array, y: Array) -> Vjp:
    def change(g: Array) -> Array:
        slope = g * out
        slope /= y
        slope *= -1
        return slope

    return _onto(y, out, change)


def _power_x(out: Array, x: Array, y: Any) -> Vjp:
    def change(g: Array) -> Array:
        # For an exponent of 0 the derivative is 0, also at x = 0.
        below = (y - 1 if y else 1) if np.ndim(y) == 0 else np.where(y, y - 1, 1)
        return g * (y * x**below)

    return _onto(x, out, change)


def _power_y(out: Array, x: Any, y: Array) -> Vjp:
    def change(g: Array) -> Array:
        # 0 where the logarithm is not real (for complex results: infinite), as in TensorFlow.
        known = np.not_equal(x, 0) if out.dtype.kind == "c" else np.greater(x, 0)
        return g * out * np.log(np.where(known, x, 1).astype(out.dtype))

    return _onto(y, out, change)


def _clip(out: Array, a: Array, a_min: Any = None, a_max: Any = None, **bounds: Any) -> Vjp:
    low, high = bounds.get("min", a_min), bounds.get("max", a_max)
    inside = np.ones_like(a, dtype=bool) if low is None else np.greater_equal(a, low)
    if high is not None:
        inside = inside & np.less_equal(a, high)
    return _masked(out, inside, a)


def _clip_low(out: Array, a: Any, a_min: Array, a_max: Any = None) -> Vjp:
    below = np.less(a, a_min)
    return _masked(out, below if a_max is None else below & np.less_equal(a_min, a_max), a_min)


def _clip_high(out: Array, a: Any, a_min: Any, a_max: Array) -> Vjp:
    # The upper bound applies where it is below the lower one.
    return _masked(out, np.greater(a if a_min is None else np.maximum(a, a_min), a_max), a_max)


def _absolute(out: Array, x: Array) -> Vjp:
    if x.dtype.kind == "c":
        return lambda g: g * np.conj(x) / np.where(out, out, 1)
    return lambda g: g * np.sign(x)


def _square(out: Array, x: Array) -> Vjp:
    def vjp(g: Array) -> Array:
        change = g * x
        change *= 2
        return change

    return vjp


def _sqrt(out: Array, x: Array) -> Vjp:
    def vjp(g: Array) -> Array:
        change = g / out
        change *= 0.5
        return change

    return vjp


def _tanh(out: Array, x: Array) -> Vjp:
    def vjp(g: Array) -> Array:
        change = np.square(out)
        change = np.subtract(1, change, out=change) if change.ndim else 1 - change
        change *= g
        return change

    return vjp


def _angle(out: Array, z: Array, deg: bool = False) -> Vjp:
    scale = -180j / math.pi if deg else -1j
    return lambda g: unbroadcast(np.multiply(g, scale) / z, z.shape, z.dtype)


def _sign(out: Array, x: Array) -> Vjp:
    if x.dtype.kind == "c":
        return missing(np.sign, "complex arguments")
    return np.zeros_like


def _none(*args: Any) -> Callable[[Array], None]:
    return lambda g: None


_ZERO = 0  # There is one object for this number, which `polyval` multiplies by.
_LOG_2, _LOG_10 = math.log(2), math.log(10)

# The result is the argument that is not NaN, so compare with the result.
_FMAX: tuple[Callable[..., Vjp], ...] = (
    lambda out, x, y: _masked(out, np.equal(x, out), x),
    lambda out, x, y: _masked(out, np.not_equal(x, out), y),
)

RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.maximum: (
        lambda out, x, y: _masked(out, np.greater_equal(x, y), x),
        lambda out, x, y: _masked(out, np.less(x, y), y),
    ),
    np.minimum: (
        lambda out, x, y: _masked(out, np.less_equal(x, y), x),
        lambda out, x, y: _masked(out, np.greater(x, y), y),
    ),
    np.fmax: _FMAX,
    np.fmin: _FMAX,
    np.where: (
        _none,
        lambda out, condition, x, y: _masked(out, np.not_equal(condition, 0), x),
        lambda out, condition, x, y: _masked(out, np.equal(condition, 0), y),
    ),
    np.clip: (_clip, _clip_low, _clip_high),
    np.add: (_broadcast_x, lambda out, x, y: unbroadcasting(y, out)),
    np.subtract: (_broadcast_x, lambda out, x, y: _onto(y, out, np.negative)),
    np.multiply: (
        _multiply_x,
        lambda out, x, y: _onto(y, out, lambda g: g * x),
    ),
    np.divide: (lambda out, x, y: _onto(x, out, lambda g: g / y), _divide_y),
    np.power: (_power_x, _power_y),
    np.float_power: (_power_x, _power_y),
    np.logaddexp: (
        lambda out, x, y: _onto(x, out, lambda g: g * np.exp(x - out)),
        lambda out, x, y: _onto(y, out, lambda g: g * np.exp(y - out)),
    ),
    np.logaddexp2: (
        lambda out, x, y: _onto(x, out, lambda g: g * np.exp2(x - out)),
        lambda out, x, y: _onto(y, out, lambda g: g * np.exp2(y - out)),
    ),
    np.arctan2: (
        lambda out, y, x: _onto(y, out, lambda g: g * x / (x * x + y * y)),
        lambda out, y, x: _onto(x, out, lambda g: -g * y / (x * x + y * y)),
    ),
    np.hypot: (
        lambda out, x, y: _onto(x, out, lambda g: g * x / out),
        lambda out, x, y: _onto(y, out, lambda g: g * y / out),
    ),
    np.remainder: (_broadcast_x, lambda out, x, y: _onto(y, out, lambda g: -g * np.floor(x / y))),
    np.fmod: (_broadcast_x, lambda out, x, y: _onto(y, out, lambda g: -g * np.trunc(x / y))),
    np.copysign: (lambda out, x, y: _onto(x, out, lambda g: g * np.sign(x) * np.sign(out)), _none),
    np.ldexp: (lambda out, x, exponent: _onto(x, out, lambda g: np.ldexp(g, exponent)),),
    np.absolute: (_absolute,),
    np.fabs: (_absolute,),
    np.square: (_square,),
    np.sqrt: (_sqrt,),
    np.tanh: (_tanh,),
    cast: (_broadcast_x,),
    np.astype: (_broadcast_x,),
    np.positive: (lambda out, x: identity,),
    np.copy: (lambda out, x, *_, **__: identity,),
    np.unwrap: (lambda out, p, *_, **__: identity,),
    np.nan_to_num: (lambda out, x, *_, **__: lambda g: g * np.isfinite(x),),
    np.real: (_broadcast_x,),
    np.real_if_close: (_broadcast_x,),
    np.imag: (lambda out, x: lambda g: unbroadcast(np.multiply(g, -1j), x.shape, x.dtype),),
    np.conjugate: (lambda out, x: np.conjugate,),
    np.angle: (_angle,),
    np.rad2deg: (lambda out, x: np.rad2deg,),
    np.degrees: (lambda out, x: np.degrees,),
    np.deg2rad: (lambda out, x: np.deg2rad,),
    np.radians: (lambda out, x: np.radians,),
    # The quotient tends to 0 with x.
    np.sinc: (lambda out, x: lambda g: g * (np.cos(math.pi * x) - out) / np.where(x, x, 1),),
    np.negative: (lambda out, x: np.negative,),
    np.sign: (_sign,),
    np.reciprocal: (lambda out, x: lambda g: -g * np.square(out),),
    np.cbrt: (lambda out, x: lambda g: g / (3 * np.square(out)),),
    np.exp: (lambda out, x: lambda g: g * out,),
    np.exp2: (lambda out, x: lambda g: g * out * _LOG_2,),
    np.expm1: (lambda out, x: lambda g: g * (out + 1),),
    np.log: (lambda out, x: lambda g: g / x,),
    np.log2: (lambda out, x: lambda g: g / (x * _LOG_2),),
    np.log10: (lambda out, x: lambda g: g / (x * _LOG_10),),
    np.log1p: (lambda out, x: lambda g: g / (x + 1),),
    np.sin: (lambda out, x: lambda g: g * np.cos(x),),
    np.cos: (lambda out, x: lambda g: -g * np.sin(x),),
    np.tan: (lambda out, x: lambda g: g * (1 + np.square(out)),),
    np.arcsin: (lambda out, x: lambda g: g / np.sqrt(1 - np.square(x)),),
    np.arccos: (lambda out, x: lambda g: -g / np.sqrt(1 - np.square(x)),),
    np.arctan: (lambda out, x: lambda g: g / (1 + np.square(x)),),
    np.sinh: (lambda out, x: lambda g: g * np.cosh(x),),
    np.cosh: (lambda out, x: lambda g: g * np.sinh(x),),
    np.arcsinh: (lambda out, x: lambda g: g / np.sqrt(np.square(x) + 1),),
    np.arccosh: (lambda out, x: lambda g: g / (np.sqrt(x - 1) * np.sqrt(x + 1)),),
    np.arctanh: (lambda out, x: lambda g: g / (1 - np.square(x)),),
}
