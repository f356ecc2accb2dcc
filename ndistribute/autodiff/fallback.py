"""The rules of the `autograd` package, for functions that have none of ours.

The package is imported here and nowhere else, and only when a gradient needs it. Its rules may
compute in float64 and may hand back what they keep, so what they return is fitted and never
trusted to be ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import no_rule, user_line
from ndistribute.autodiff.rules.fit import fit
from ndistribute.device import Array, as_array
from ndistribute.errors import MissingDependencyError

__all__ = ["joint_rule"]

JointVjp = Callable[[Any], Sequence[Array]]


def joint_rule(
    function: Any,
    result: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    positions: Sequence[int],
) -> JointVjp:
    """Return a rule that looks for the derivative when the gradient is asked.

    Args:
        function: a NumPy function.
        result: what it returned: an array, or a tuple or list of arrays.
        args: its raw positional arguments.
        kwargs: its raw keyword arguments.
        positions: the arguments whose gradients are wanted.
    """
    line = user_line()

    def vjp(g: Any) -> list[Array]:
        maker = _autograd_rules().get(function)
        if maker is None:
            raise TypeError(no_rule(function, "", line))
        if isinstance(result, list | tuple):
            g = tuple(
                np.zeros_like(one) if part is None else part
                for one, part in zip(result, g, strict=True)
            )
        try:
            gradients = list(maker(tuple(positions), result, tuple(args), dict(kwargs))(g))
            return [
                fit(as_array(gradient), args[k].shape, args[k].dtype)
                for gradient, k in zip(gradients, positions, strict=True)
            ]
        except (NotImplementedError, AssertionError, KeyError, TypeError, ValueError) as error:
            raise TypeError(no_rule(function, str(error), line)) from error

    return vjp


@functools.cache
def _autograd_rules() -> dict[Any, Callable[..., Any]]:
    """Return autograd's rules under NumPy's functions; the package files them under its own."""
    try:
        import autograd.numpy as wrapped
        from autograd.core import primitive_vjps
        from autograd.numpy import fft, linalg
    except ImportError as error:
        raise MissingDependencyError(
            "this gradient needs a rule of the autograd package: pip install autograd."
        ) from error
    rules = {}
    for namespace, wrappers in ((np, wrapped), (np.linalg, linalg), (np.fft, fft)):
        for name, function in vars(namespace).items():
            for wrapper_name in (name, f"_primitive_{name}"):
                wrapper = getattr(wrappers, wrapper_name, None)
                if callable(function) and callable(wrapper) and wrapper in primitive_vjps:
                    rules[function] = primitive_vjps[wrapper]
    return rules
