"""Operations whose derivative their author writes.

For fused operations, which save passes over memory, and for functions that have no rule. They are
recorded like NumPy's own: one entry, and gradients only for the arguments that need one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.autodiff.dispatch import is_differentiable, operand
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.context import current_frame
from ndistribute.device import as_array

__all__ = ["custom_gradient"]


def custom_gradient(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Let a function bring its own derivative.

    Args:
        function: takes raw arrays by position, and anything by keyword, and returns the result and
            its derivative. The result is an array, or a tuple or list of arrays. The derivative is
            a function from the result's gradient (a list of gradients, None where unused, for
            several results) to a sequence with the gradient of each positional argument, None for
            an argument without one; or, for a single result, a sequence of functions, one for each
            positional argument, of which only those are called whose gradient is needed. Gradients
            have the shape and dtype of their argument; `IndexedSlices` will do for a source. A
            derivative must not write into the gradient that it is given.

    Returns:
        A function that accepts variables, tracked and plain arrays alike.

    >>> import numpy as np
    >>> from ndistribute.autodiff import GradientTape
    >>> @custom_gradient
    ... def cube(x):
    ...     return x**3, lambda g: [3 * x**2 * g]
    >>> with GradientTape() as tape:
    ...     x = tape.watch(2.0)
    ...     y = cube(x)
    >>> tape.gradient(y, x)
    array(12.)
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph: Any = current_frame().recorder
        raw, places = [], []
        for arg in args:
            value, place = operand(arg, graph)
            raw.append(value)
            places.append(place)
        result, derivative = function(*raw, **kwargs)
        parents = tuple(place for place in places if place is not None)
        if not parents:
            return result
        wanted = [k for k, place in enumerate(places) if place is not None]
        check = _Check(function, [raw[k] for k in wanted])
        if isinstance(result, tuple | list):
            return graph.record_many(result, parents, _joint(check, derivative, wanted))
        if not is_differentiable(result):
            return result
        if callable(derivative):
            return graph.record(result, parents, _joint(check, derivative, wanted))
        rules = tuple(_single(check, derivative[k], n) for n, k in enumerate(wanted))
        return graph.record(result, parents, rules)

    return call


class _Check:
    """Hold what the gradients of a call must look like; the arguments themselves are not kept."""

    __slots__ = ("expected", "function")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.function = function
        self.expected = [(argument.shape, argument.dtype) for argument in arguments]

    def __call__(self, gradient: Any, position: int) -> Any:
        if gradient is None or isinstance(gradient, IndexedSlices):
            return gradient
        gradient = as_array(gradient)
        shape, dtype = self.expected[position]
        if gradient.shape != shape:
            raise ValueError(
                f"the derivative of {self.function.__qualname__} gave a gradient of shape "
                f"{gradient.shape} for an argument of shape {shape}: they must be the same."
            )
        return gradient if gradient.dtype == dtype else gradient.astype(dtype)


def _single(check: _Check, rule: Callable[[Any], Any], position: int) -> Callable[[Any], Any]:
    return lambda g: check(rule(g), position)


def _joint(
    check: _Check, derivative: Callable[[Any], Sequence[Any]], wanted: Sequence[int]
) -> Callable[[Any], list[Any]]:
    def rule(g: Any) -> list[Any]:
        gradients = derivative(g)
        return [check(gradients[k], n) for n, k in enumerate(wanted)]

    return rule
