"""Derivatives of the ufuncs of `scipy.special`.

The keys are names, so that this file does not import SciPy unless the user does. For CuPy arrays,
SciPy's ufuncs call those of `cupyx.scipy.special`, also in the rules.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import missing
from ndistribute.autodiff.rules import elementwise
from ndistribute.autodiff.rules.unbroadcast import unbroadcast
from ndistribute.device import Array

__all__ = ["PARTIALS", "special_rules"]

# Computes the derivative by one argument from the result and all arguments; None without a rule.
Partial = Callable[..., Array] | None

_ROOT_PI, _ROOT_2PI = math.sqrt(math.pi), math.sqrt(2 * math.pi)


@functools.lru_cache(maxsize=256)
def special_rules(ufunc: Any) -> tuple[Callable[..., Any], ...] | None:
    """Return the rules of a ufunc of `scipy.special`; None for other functions."""
    name = getattr(ufunc, "__name__", "")
    special = sys.modules.get("scipy.special")
    if special is None or getattr(special, name, None) is not ufunc:
        return None
    if name in PARTIALS:
        return tuple(_maker(ufunc, k, partial) for k, partial in enumerate(PARTIALS[name]))
    # SciPy has its own versions of expm1, log1p, exp2 and cbrt.
    return elementwise.RULES.get(getattr(np, name, None))


def _maker(ufunc: Any, position: int, partial: Partial) -> Callable[..., Callable[[Array], Array]]:
    def maker(out: Array, *args: Any) -> Callable[[Array], Array]:
        if partial is None:
            return missing(ufunc, f"argument {position + 1} tracked")
        shape, dtype = args[position].shape, args[position].dtype
        return lambda g: unbroadcast(g * partial(out, *args), shape, dtype)

    return maker


def _special() -> Any:
    """Return the imported module `scipy.special`."""
    return sys.modules["scipy.special"]


def _psi(x: Any) -> Any:
    return _special().psi(x)


def _positive(x: Any, y: Any) -> Any:
    """Return `y`, or 1 where both are 0, which ``x * log(y)`` allows."""
    return np.where(np.logical_or(x, y), y, 1)


def _over(out: Any, x: Any) -> Any:
    """Return ``out / x``, or its limit 1/2 at 0 for Bessel functions of order 1."""
    return np.where(x, out / np.where(x, x, 1), 0.5)


def _density_beta(a: Any, b: Any, x: Any) -> Any:
    special = _special()
    return np.exp(special.xlogy(a - 1, x) + special.xlog1py(b - 1, -x) - special.betaln(a, b))


def _density_gamma(a: Any, x: Any) -> Any:
    # The largest float32 gives 0 as infinity does, whose logarithm minus itself would be NaN.
    x = np.minimum(x, np.finfo(np.float32).max)
    return np.exp(_special().xlogy(a - 1, x) - x - _special().gammaln(a))


def _spence_slope(x: Any) -> Any:
    one = np.equal(x, 1)
    return np.where(one, -1, np.log(np.where(one, 2, x)) / np.where(one, 1, 1 - x))


def _stretch(delta: Any, r: Any) -> Any:
    return np.hypot(1, r / delta)


PARTIALS: dict[str, tuple[Partial, ...]] = {
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
    "xlogy": (
        lambda out, x, y: np.log(_positive(x, y)),
        lambda out, x, y: x / _positive(x, y),
    ),
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
    "psi": (lambda out, x: _special().zeta(2, x),),
    "beta": (
        lambda out, a, b: out * (_psi(a) - _psi(a + b)),
        lambda out, a, b: out * (_psi(b) - _psi(a + b)),
    ),
    "betaln": (
        lambda out, a, b: _psi(a) - _psi(a + b),
        lambda out, a, b: _psi(b) - _psi(a + b),
    ),
    "gammainc": (None, lambda out, a, x: _density_gamma(a, x)),
    "gammaincc": (None, lambda out, a, x: -_density_gamma(a, x)),
    "betainc": (None, None, lambda out, a, b, x: _density_beta(a, b, x)),
    # Integrals and Bessel functions.
    "expi": (lambda out, x: np.exp(x) / x,),
    "exp1": (lambda out, x: -np.exp(-x) / x,),
    "spence": (lambda out, x: _spence_slope(x),),
    "i0": (lambda out, x: _special().i1(x),),
    "i0e": (lambda out, x: _special().i1e(x) - np.sign(x) * out,),
    "i1": (lambda out, x: _special().i0(x) - _over(out, x),),
    "i1e": (lambda out, x: _special().i0e(x) - _over(out, x) - np.sign(x) * out,),
    "j0": (lambda out, x: -_special().j1(x),),
    "j1": (lambda out, x: _special().j0(x) - _over(out, x),),
    "k0": (lambda out, x: -_special().k1(x),),
    "k1": (lambda out, x: -_special().k0(x) - out / x,),
    "iv": (None, lambda out, v, x: (_special().iv(v - 1, x) + _special().iv(v + 1, x)) / 2),
    "jv": (None, lambda out, v, x: (_special().jv(v - 1, x) - _special().jv(v + 1, x)) / 2),
}
