"""Derivatives of elementwise functions, those of `scipy.special` among them.

A maker takes the raw result and arguments of a call, and returns the rule of one argument: a
function from the result's gradient to the argument's. A rule keeps only the arrays that it needs,
so that large intermediate results are freed during the forward pass. Functions of SciPy are found
by name, so this file never imports it; for CuPy arrays they call `cupyx.scipy.special`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import missing, refuse_polyval
from ndistribute.autodiff.rules.placing import is_tracked
from ndistribute.autodiff.rules.unbroadcast import Vjp, identity, unbroadcast, unbroadcasting
from ndistribute.devices import Array
from ndistribute.numpy_functions import cast

Makers = tuple[Callable[..., Vjp], ...]
# Computes the derivative by one argument from the result and all arguments; None without a rule.
Partial = Callable[..., Array] | None

_ZERO = 0  # There is one object for this number, which `polyval` multiplies by.
_SINC = -math.pi * math.pi / 3  # The second derivative at 0.
_LOG_2, _LOG_10 = math.log(2), math.log(10)
_ROOT_PI, _ROOT_2PI = math.sqrt(math.pi), math.sqrt(2 * math.pi)


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


def _choosing(of_x: Callable[..., Array], of_y: Callable[..., Array]) -> Makers:
    """Return the rules of a ufunc that chooses an argument, given the masks of both."""
    return (
        lambda out, x, y: _masked(out, of_x(x, y), x),
        lambda out, x, y: _masked(out, of_y(x, y), y),
    )


def _partials(*partials: Partial, ufunc: Any = None) -> Makers:
    """Return the rules of a ufunc, given its derivative by each argument."""
    return tuple([_partial(position, partial, ufunc) for position, partial in enumerate(partials)])


def _partial(position: int, partial: Partial, ufunc: Any = None) -> Callable[..., Vjp]:
    def maker(out: Array, *args: Any) -> Vjp:
        if partial is None:
            # Only the gradient of this argument is missing, so this must not refuse the call.
            return missing(ufunc, f"argument {position + 1} tracked")
        shape, dtype = args[position].shape, args[position].dtype
        return lambda g: unbroadcast(g * partial(out, *args), shape, dtype)

    return maker


def _broadcast_x(out: Array, x: Array, *args: Any, **kwargs: Any) -> Vjp:
    return unbroadcasting(x, out)


def _none(*args: Any) -> Callable[[Array], None]:
    return lambda g: None


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
        below = y - 1 if is_tracked(y) else below
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
        change = np.subtract(1, change, out=change) if type(change) is np.ndarray else 1 - change
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


# The result is the argument that is not NaN, so compare with the result.
_FMAX: Makers = (
    lambda out, x, y: _masked(out, np.equal(x, out), x),
    lambda out, x, y: _masked(out, np.not_equal(x, out), y),
)

RULES: dict[Any, Makers] = {
    np.maximum: _choosing(np.greater_equal, np.less),
    np.minimum: _choosing(np.less_equal, np.greater),
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
    np.multiply: (_multiply_x, lambda out, x, y: _onto(y, out, lambda g: g * x)),
    np.divide: (lambda out, x, y: _onto(x, out, lambda g: g / y), _divide_y),
    np.power: (_power_x, _power_y),
    np.float_power: (_power_x, _power_y),
    np.logaddexp: (
        lambda out, x, y: _onto(x, out, lambda g: g * np.exp(x - out)),
        lambda out, x, y: _onto(y, out, lambda g: g * np.exp(y - out)),
    ),
    np.logaddexp2: _partials(
        lambda out, x, y: np.exp2(x - out),
        lambda out, x, y: np.exp2(y - out),
    ),
    np.arctan2: _partials(
        lambda out, y, x: x / (x * x + y * y),
        lambda out, y, x: -y / (x * x + y * y),
    ),
    np.hypot: _partials(lambda out, x, y: x / out, lambda out, x, y: y / out),
    np.remainder: (_broadcast_x, _partial(1, lambda out, x, y: -np.floor(x / y))),
    np.fmod: (_broadcast_x, _partial(1, lambda out, x, y: -np.trunc(x / y))),
    np.copysign: (_partial(0, lambda out, x, y: np.sign(x) * np.sign(out)), _none),
    np.ldexp: (lambda out, x, exponent: _onto(x, out, lambda g: np.ldexp(g, exponent)),),
    np.absolute: (_absolute,),
    np.fabs: (_absolute,),
    np.square: (_square,),
    np.sqrt: (_sqrt,),
    np.tanh: (_tanh,),
    **dict.fromkeys((cast, np.astype, np.real, np.real_if_close), (_broadcast_x,)),
    **dict.fromkeys((np.positive, np.copy, np.unwrap), (lambda *_, **__: identity,)),
    np.nan_to_num: (lambda out, x, *_, **__: lambda g: g * np.isfinite(x),),
    np.imag: (lambda out, x: lambda g: unbroadcast(np.multiply(g, -1j), x.shape, x.dtype),),
    np.angle: (_angle,),
    # The quotient tends to 0 with x, as this line does.
    np.sinc: _partials(
        lambda out, x: np.where(x, (np.cos(math.pi * x) - out) / np.where(x, x, 1), _SINC * x)
    ),
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
for _linear in (np.conjugate, np.negative, np.rad2deg, np.degrees, np.deg2rad, np.radians):
    RULES[_linear] = (lambda out, x, linear=_linear: linear,)


@functools.lru_cache(maxsize=256)
def special_rules(ufunc: Any) -> Makers | None:
    """Return the rules of a ufunc of `scipy.special`; None for other functions."""
    name = getattr(ufunc, "__name__", "")
    special = sys.modules.get("scipy.special")
    if special is None or getattr(special, name, None) is not ufunc:
        return None
    if name in SPECIAL:
        return _partials(*SPECIAL[name], ufunc=ufunc)
    # SciPy has its own versions of expm1, log1p, exp2 and cbrt.
    return RULES.get(getattr(np, name, None))


def _call(name: str, *args: Any) -> Any:
    """Return the value of a function of the module `scipy.special`, which the user has imported."""
    return getattr(sys.modules["scipy.special"], name)(*args)


def _psi(x: Any) -> Any:
    return _call("psi", x)


def _positive(x: Any, y: Any) -> Any:
    """Return `y`, or 1 where both are 0, which ``x * log(y)`` allows."""
    return np.where(np.logical_or(x, y), y, 1)


def _over(out: Any, x: Any) -> Any:
    """Return ``out / x``, or its limit 1/2 at 0 for Bessel functions of order 1."""
    return np.where(x, out / np.where(x, x, 1), 0.5)


def _density_beta(out: Any, a: Any, b: Any, x: Any) -> Any:
    logarithm = _call("xlogy", a - 1, x) + _call("xlog1py", b - 1, -x)
    return np.exp(logarithm - _call("betaln", a, b))


def _density_gamma(out: Any, a: Any, x: Any) -> Any:
    # The largest float32 gives 0 as infinity does, whose logarithm minus itself would be NaN.
    x = np.minimum(x, np.finfo(np.float32).max)
    return np.exp(_call("xlogy", a - 1, x) - x - _call("gammaln", a))


def _spence(out: Any, x: Any) -> Any:
    unit = np.equal(x, 1)
    return np.where(unit, (x - 3) / 2, np.log(np.where(unit, 2, x)) / np.where(unit, 1, 1 - x))


def _stretch(delta: Any, r: Any) -> Any:
    return np.hypot(1, r / delta)


SPECIAL: dict[str, tuple[Partial, ...]] = {
    # Sigmoids, normal distribution.
    "expit": (lambda out, x: out * (1 - out),),
    "log_expit": (lambda out, x: -np.expm1(out),),
    "logit": (lambda out, x: 1 / (x * (1 - x)),),
    "erf": (lambda out, x: 2 / _ROOT_PI * np.exp(-x * x),),
    "erfc": (lambda out, x: -2 / _ROOT_PI * np.exp(-x * x),),
    "erfcx": (lambda out, x: 2 * x * out - 2 / _ROOT_PI,),
    "erfi": (lambda out, x: 2 / _ROOT_PI * np.exp(x * x),),
    "erfinv": (lambda out, x: _ROOT_PI / 2 * np.exp(out * out),),
    "erfcinv": (lambda out, x: -_ROOT_PI / 2 * np.exp(out * out),),
    "dawsn": (lambda out, x: 1 - 2 * x * out,),
    "ndtr": (lambda out, x: np.exp(-x * x / 2) / _ROOT_2PI,),
    "log_ndtr": (lambda out, x: np.exp(-x * x / 2 - out) / _ROOT_2PI,),
    "ndtri": (lambda out, x: _ROOT_2PI * np.exp(out * out / 2),),
    # Entropies.
    "entr": (lambda out, x: -np.log(x) - 1,),
    "rel_entr": (lambda out, x, y: np.log(x / y) + 1, lambda out, x, y: -x / y),
    "kl_div": (lambda out, x, y: np.log(x / y), lambda out, x, y: 1 - x / y),
    "xlogy": (lambda out, x, y: np.log(_positive(x, y)), lambda out, x, y: x / _positive(x, y)),
    "xlog1py": (lambda out, x, y: np.log1p(y), lambda out, x, y: x / (1 + y)),
    # Losses.
    "huber": (
        lambda out, delta, r: np.maximum(np.abs(r) - delta, 0),
        lambda out, delta, r: np.clip(r, -delta, delta),
    ),
    "pseudo_huber": (
        lambda out, delta, r: (2 * out - r * r / _stretch(delta, r)) / delta,
        lambda out, delta, r: r / _stretch(delta, r),
    ),
    "exp10": (lambda out, x: math.log(10) * out,),
    # The gamma function and its relatives.
    "gammaln": (lambda out, x: _psi(x),),
    "loggamma": (lambda out, x: _psi(x),),
    "gamma": (lambda out, x: out * _psi(x),),
    "rgamma": (lambda out, x: -out * _psi(x),),
    "psi": (lambda out, x: _call("zeta", 2, x),),
    "beta": (
        lambda out, a, b: out * (_psi(a) - _psi(a + b)),
        lambda out, a, b: out * (_psi(b) - _psi(a + b)),
    ),
    "betaln": (lambda out, a, b: _psi(a) - _psi(a + b), lambda out, a, b: _psi(b) - _psi(a + b)),
    "gammainc": (None, _density_gamma),
    "gammaincc": (None, lambda out, a, x: -_density_gamma(out, a, x)),
    "betainc": (None, None, _density_beta),
    # Integrals and Bessel functions.
    "expi": (lambda out, x: np.exp(x) / x,),
    "exp1": (lambda out, x: -np.exp(-x) / x,),
    "spence": (_spence,),
    "i0": (lambda out, x: _call("i1", x),),
    "i0e": (lambda out, x: _call("i1e", x) - np.sign(x) * out,),
    "i1": (lambda out, x: _call("i0", x) - _over(out, x),),
    "i1e": (lambda out, x: _call("i0e", x) - _over(out, x) - np.sign(x) * out,),
    "j0": (lambda out, x: -_call("j1", x),),
    "j1": (lambda out, x: _call("j0", x) - _over(out, x),),
    "k0": (lambda out, x: -_call("k1", x),),
    "k1": (lambda out, x: -_call("k0", x) - out / x,),
    "iv": (None, lambda out, v, x: (_call("iv", v - 1, x) + _call("iv", v + 1, x)) / 2),
    "jv": (None, lambda out, v, x: (_call("jv", v - 1, x) - _call("jv", v + 1, x)) / 2),
}
