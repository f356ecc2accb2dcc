"""The rules of the `autograd` package, for functions that have none of ours.

The package is imported here and nowhere else, and only when a gradient needs it. Its rules may
compute in float64 and may hand back what they keep, so what they return is fitted and never
trusted to be ours. The same file says what a function without any rule says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ndistribute.autodiff.rules.fit import fit
from ndistribute.device import Array, as_array
from ndistribute.errors import MissingDependencyError

__all__ = ["joint_rule", "missing", "name_of"]

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

    def vjp(g: Any) -> list[Array]:
        maker = _autograd_rules().get(function)
        if maker is None:
            missing(function)(g)
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
            raise TypeError(_no_rule(function, f"with these arguments ({error})")) from error

    return vjp


def missing(function: Any, why: str = "") -> Callable[[Any], NoReturn]:
    """Return a rule that raises a `TypeError` naming the function when the gradient is asked."""

    def vjp(g: Any) -> NoReturn:
        raise TypeError(_no_rule(function, f"with these arguments ({why})" if why else ""))

    return vjp


def name_of(function: Any) -> str:
    """Return a function's name as users write it.

    >>> name_of(np.exp), name_of(np.linalg.inv), name_of(np.add.reduceat)
    ('np.exp', 'np.linalg.inv', 'np.add.reduceat')
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, np.ufunc):
        return f"np.{owner.__name__}.{function.__name__}"
    module = getattr(function, "__module__", None) or "numpy"
    name = getattr(function, "__name__", repr(function))
    if isinstance(function, np.ufunc) or module.partition(".")[0] == "numpy":
        parts = [part for part in module.split(".")[1:] if not part.startswith("_")]
        return ".".join(["np", *parts, name])
    return f"{module}.{name}"


def _no_rule(function: Any, arguments: str) -> str:
    name = " ".join(filter(None, [name_of(function), arguments]))
    return (
        f"{name} has no derivative rule. Write it in terms of functions that have one, give it one "
        "with nd.custom_gradient, or compute it outside the tape."
    )


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
