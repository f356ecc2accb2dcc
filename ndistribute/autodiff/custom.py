"""Operations with their own derivative: `custom_gradient`, `softmax`, `log_softmax`, `logsumexp`.

Use them for fused operations, which save passes over memory, and for functions without a derivative
rule. The tape records a call as one entry, like a NumPy function, with gradients for tracked
arguments only. SciPy's functions of the same names convert their argument to a plain NumPy array,
so the gradient is lost. The functions of this file accept plain, tracked and GPU arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.diagnostics import user_line
from ndistribute.autodiff.recorder import tracked_pass
from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.autodiff.rules.unbroadcast import kept_shape, wide
from ndistribute.autodiff.tracked import Tracked, is_differentiable, operand, refuse_detached
from ndistribute.context import current_frame, current_trace
from ndistribute.devices import Array, as_array
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.mistakes import count_of

Axis = int | tuple[int, ...] | None


def custom_gradient(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Return a differentiable function, made from a function that returns its own derivative.

    Args:
        function: takes raw arrays by position and any values by keyword, and returns a result and
            its derivative. The result is an array, or a tuple or list of arrays. The derivative is
            a function. It takes the gradient of the result; for several results, it takes a list of
            gradients, with None for each unused result. It returns a sequence with the gradient of
            each positional argument, or None. For a single result, the derivative may also be a
            sequence of such functions, one for each positional argument; only those of tracked
            arguments are called. A gradient must have the shape of its argument; it is cast to the
            argument's dtype. `IndexedSlices` are allowed for a source. A derivative must not write
            to the gradient that it receives.

    Returns:
        A function that accepts variables, tracked arrays and plain arrays.

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
    return _custom(function, None)


def fused(composition: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like `custom_gradient`, for an operation that writes to its buffers.

    The second derivatives come from a composition of NumPy functions. It takes the same arguments,
    and returns the same result, or the first of several.
    """
    return lambda function: _custom(function, composition)


def _custom(function: Any, composition: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph: Any = current_frame().recorder
        raw, wanted, parents = [], [], []
        for k, arg in enumerate(args):
            value, place = (arg, None) if type(arg) is np.ndarray else operand(arg, graph)
            raw.append(value)
            if place is not None:
                wanted.append(k)
                parents.append(place)
            elif value is not arg:
                refuse_detached(function, arg)
        result, derivative = function(*raw, **kwargs)
        if not wanted:
            return result
        several = isinstance(result, tuple | list)
        result = tree.map_leaves(_plain, result) if several else _plain(result)
        rules = _rules(function, derivative, raw, wanted, several)
        if not several and not is_differentiable(result):
            return result
        if graph.nested:
            again = list(raw)
            for k, place in zip(wanted, parents, strict=True):
                again[k] = Tracked(raw[k], graph, place)

            def make() -> Any:
                if composition is None:
                    repeated, tracked = function(*again, **kwargs)
                    _check_repeated(result, repeated)
                    return _rules(function, tracked, again, wanted, several)
                made = functools.partial(composition, *again, **kwargs)
                return functools.partial(_composed, graph, made, parents, several)

            graph.again[len(graph.entries)] = function, make
        record = graph.record_many if several else graph.record
        return record(result, tuple(parents), rules)

    return call


def _check_repeated(result: Any, repeated: Any) -> None:
    """Raise a TypeError if a function's second call returns another result, except for rounding."""
    for first, again in zip(tree.flatten(result), tree.flatten(repeated), strict=True):
        bound = 10 ** (-1.25 * first.real.itemsize)  # Threads of BLAS may add in another order.
        equal = np.allclose(as_array(again), first, bound, bound, equal_nan=True)
        error = functools.partial(
            TypeError,
            "it ran again, and returned a different result: pass everything that may change, such "
            "as the value of a variable or random numbers, as an argument",
        )
        if hasattr(first, "on_device"):
            current_trace().check(equal, error)
        elif not equal:
            raise error()


def _rules(
    function: Callable[..., Any], derivative: Any, raw: Any, wanted: Sequence[int], several: bool
) -> Any:
    """Return the rules of the wanted arguments, which check the gradients."""
    if callable(derivative):
        return _joint(function, derivative, raw, wanted)
    if several:
        raise TypeError(
            f"{function.__qualname__} has several results: its derivative must be one function "
            "of the list of their gradients, not one function for each argument."
        )
    _check_count(function, derivative, len(raw), "derivatives")
    return tuple([_checked(function, derivative[k], raw[k]) for k in wanted])


def _composed(graph: Any, made: Any, parents: Sequence[int], several: bool, g: Any) -> list[Any]:
    """Return the gradients of a composition, whose operations are each recorded."""
    start, nested, graph.nested = len(graph.entries), graph.nested, True
    try:
        result = made()
    finally:
        graph.nested = nested
    results = result if isinstance(result, list) else [result]
    pairs = zip(results, g if several else [g], strict=False)
    seeds = {each.index: change for each, change in pairs if change is not None}
    changes = tracked_pass(graph, seeds, {*parents}, [(start, len(graph.entries))])
    return [changes.get(parent) for parent in parents]


def _plain(result: Any) -> Any:
    """Return a result, Python floats as arrays; raise a TypeError if it is tracked."""
    if isinstance(result, Tracked):
        raise TypeError(
            f"a custom_gradient function, called at {user_line()}, computed with a tracked array "
            "or a variable that is not a positional argument, so the gradient of that would be "
            "lost: pass it by position."
        )
    return np.asarray(result) if type(result) in (float, complex) else result


def _checked(
    function: Callable[..., Any], rule: Callable[[Any], Any], argument: Any
) -> Callable[[Any], Any]:
    """Return the rule of one argument, which checks the gradient that it returns."""
    if hasattr(rule, "into"):  # See `backpropagate`; it makes gradients that fit.
        return rule
    shape, dtype = argument.shape, argument.dtype
    return lambda g: _fitted(function, rule(g), shape, dtype)


def _joint(
    function: Callable[..., Any], derivative: Any, arguments: Sequence[Any], wanted: Sequence[int]
) -> Callable[[Any], list[Any]]:
    """Return the rule of all arguments; it keeps their shapes and dtypes only."""
    expected = [(k, arguments[k].shape, arguments[k].dtype) for k in wanted]
    count = len(arguments)

    def joint(g: Any) -> list[Any]:
        gradients = derivative(g)
        _check_count(function, gradients, count, "gradients")
        return [_fitted(function, gradients[k], shape, dtype) for k, shape, dtype in expected]

    return joint


def _fitted(function: Callable[..., Any], gradient: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if gradient is None or isinstance(gradient, IndexedSlices):
        return gradient
    gradient = as_operand(gradient)
    if gradient.shape != shape:
        raise ValueError(
            f"the derivative of {function.__qualname__} returned shape {gradient.shape} "
            f"for an argument of shape {shape}: they must be the same."
        )
    return gradient if gradient.dtype == dtype else gradient.astype(dtype)


def _check_count(function: Callable[..., Any], answer: Any, count: int, what: str) -> None:
    """Raise an error unless `answer` has one item for each positional argument."""
    name, rule = function.__qualname__, "one for each positional argument, None where not needed"
    if not isinstance(answer, list | tuple):
        raise TypeError(
            f"the derivative of {name} returned a {type(answer).__name__}, not a list of {count} "
            f"{what}, {rule}."
        )
    if len(answer) != count:
        raise ValueError(
            f"{name} was called with {count_of(count, 'positional argument')}, but its derivative "
            f"returned {len(answer)} {what}: it must return {rule}."
        )


def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Return ``log(sum(exp(x)))``, computed without overflow.

    Args:
        x: a plain or tracked array or a variable, of any shape and a real dtype.
        axis: the axes to sum over; None means all axes, as in SciPy.
        keepdims: whether the result keeps the summed axes, with length 1.

    Returns:
        An array of the dtype of `x`, without the summed axes unless `keepdims` is True.

    >>> float(logsumexp(np.array([1000.0, 1000.0])).round(4))
    1000.6931
    """
    return _logsumexp(x, axis=axis, keepdims=keepdims)


def softmax(x: Any, axis: Axis = None) -> Any:
    """Return ``exp(x) / sum(exp(x))``, computed without overflow.

    Args:
        x: a plain or tracked array or a variable, of any shape and a real dtype.
        axis: the axes over which the result sums to 1; None means all axes, as in SciPy. For
            probabilities of classes it is usually -1.

    Returns:
        An array of the shape and dtype of `x`.

    >>> softmax(np.array([[0.0, 0.0], [1000.0, 0.0]]), axis=-1)
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    return _softmax(x, axis=axis)


def log_softmax(x: Any, axis: Axis = None) -> Any:
    """Return the logarithm of `softmax`, precise also if a value of `softmax` is close to 0.

    Args:
        x: a plain or tracked array or a variable, of any shape and a real dtype.
        axis: the axes over which the exponentials of the result sum to 1; None means all axes, as
            in SciPy.

    Returns:
        An array of the shape and dtype of `x`.

    >>> log_softmax(np.array([1000.0, 0.0]))
    array([    0., -1000.])
    """
    return _log_softmax(x, axis=axis)


@custom_gradient
def _logsumexp(x: Any, *, axis: Axis, keepdims: bool) -> Any:
    x = as_operand(x)
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0).astype(top.dtype)
    shares = np.exp(x - top)
    total = shares.sum(axis=axis, keepdims=True, dtype=wide(shares.dtype))
    with np.errstate(divide="ignore"):
        whole = (np.log(total) + top).astype(shares.dtype)
    kept = kept_shape(x.shape, axis)

    def vjp(g: Array) -> Array:
        return shares * (g.reshape(kept) / total).astype(shares.dtype)

    return whole if keepdims else whole.squeeze(axis), [vjp]


@custom_gradient
def _softmax(x: Any, *, axis: Axis) -> Any:
    x = as_operand(x)
    result = np.exp(x - x.max(axis=axis, keepdims=True))
    total = result.sum(axis=axis, keepdims=True, dtype=wide(result.dtype))
    if total.dtype == result.dtype:
        result /= total
    else:  # The sum may be infinite in float16.
        result = (result / total).astype(result.dtype)

    def vjp(g: Array) -> Array:
        change = g * result
        change -= result * change.sum(axis=axis, keepdims=True)
        return change

    return result, [vjp]


@custom_gradient
def _log_softmax(x: Any, *, axis: Axis) -> Any:
    x = as_operand(x)
    result = x - x.max(axis=axis, keepdims=True)
    exponentials = np.exp(result)
    total = exponentials.sum(axis=axis, keepdims=True, dtype=wide(exponentials.dtype))
    result = result - np.log(total).astype(exponentials.dtype)
    del exponentials, total

    def vjp(g: Array) -> Array:
        return g - np.exp(result) * g.sum(axis=axis, keepdims=True)

    return result, [vjp]
