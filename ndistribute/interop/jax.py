"""JAX's functions with variables of this package, in steps of replicas and in gradient tapes.

JAX compiles each function; on CPUs, arrays go in and out without a copy. Once this file is
imported, JAX's own functions accept variables too, also in nests: a call reads their values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient
from ndistribute.autodiff.tracked import Tracked
from ndistribute.context import current_frame
from ndistribute.devices import is_device_array, jax_module, to_host
from ndistribute.dtypes import kind_of
from ndistribute.interop import like
from ndistribute.variables.variable import ArrayLike, Variable


def value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a compiled function that computes the value and the gradients of a JAX function.

    On a replica it computes with the variables' values there, and does not communicate. Optimizers
    add up the gradients that replicas apply, so divide the loss by the size of the global batch.

    Args:
        function: a function of nests of arrays that returns a number; with `has_aux`, a number and
            a nest.
        argnums: the index of the argument, or the indices of the arguments, for which to compute
            gradients.
        has_aux: whether the function returns a nest after the number.

    Returns:
        A function of variables and arrays, or nests of them. It returns the same as
        ``jax.value_and_grad(function)``, in arrays that optimizers accept.

    >>> import jax.numpy as jnp
    >>> import ndistribute as nd
    >>> weights = nd.Variable(np.ones(2, np.float32))
    >>> value_and_grad(lambda w, x: jnp.sum(w * x))(weights, np.float32([1, 2]))
    (array(3., dtype=float32), array([1., 2.], dtype=float32))
    """
    jax = jax_module()
    compute = jax.jit(jax.value_and_grad(function, argnums, has_aux))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = _flat((args, kwargs))
        args, kwargs = jax.tree.unflatten(structure, map(_of, leaves))
        return jax.tree.map(like(leaves), compute(*args, **kwargs))

    return call


def differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function for a JAX function; a `GradientTape` can differentiate it.

    Variables and tracked arrays of floats get gradients, wherever they are in the nests of
    arguments; other arrays are constants. The result is a nest of arrays.

    Args:
        function: a pure function that takes and returns nests of arrays.

    >>> import jax.numpy as jnp
    >>> import ndistribute as nd
    >>> with nd.GradientTape() as tape:
    ...     x = tape.watch(np.float32(2.0))
    ...     y = differentiable(jnp.square)(x) * 3
    >>> tape.gradient(y, x)
    array(12., dtype=float32)
    """
    jax = jax_module()
    backward = jax.jit(lambda pull, seeds: pull(seeds)[0])

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def forward(structure: Any, places: tuple[int, ...], leaves: Any, sources: Any) -> Any:
        def compute(sources: Any) -> Any:
            replaced = dict(zip(places, sources, strict=True))
            filled = [replaced.get(k, leaf) for k, leaf in enumerate(leaves)]
            outputs = function(*jax.tree.unflatten(structure, filled))
            return [y for y in jax.tree.leaves(outputs) if _is_float(y)], outputs

        return jax.vjp(compute, sources, has_aux=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        leaves, structure = _flat(args)
        places, shape = _sources(leaves), []

        @custom_gradient
        def run(*sources: Any) -> Any:
            if any(isinstance(source, Tracked) for source in sources):
                raise TypeError(
                    f"{function!r}: a tape has only first derivatives of a JAX function: compute "
                    "second derivatives inside the function, with jax.grad."
                )
            for source in sources:
                _check_width(source.dtype, f"an argument of {function!r}")
            back = like((*leaves, *sources))
            fixed = [None if k in places else _of(leaf) for k, leaf in enumerate(leaves)]
            _, pull, outputs = forward(structure, places, fixed, [*map(_of, sources)])
            flat, made = jax.tree.flatten(outputs)
            shape.append(made)

            def gradients(g: Sequence[Any]) -> list[Any]:
                pairs = [(y, dy) for y, dy in zip(flat, g, strict=True) if _is_float(y)]
                seeds = [jax.numpy.zeros_like(y) if dy is None else _of(dy) for y, dy in pairs]
                return [back(change) for change in backward(pull, seeds)]

            return [back(y) for y in flat], gradients

        results = run(*(leaves[k] for k in places))
        return jax.tree.unflatten(shape[0], results)

    return call


def _flat(nest: Any) -> Any:
    return jax_module().tree.flatten(nest, is_leaf=lambda part: isinstance(part, ArrayLike))


def _is_float(value: Any) -> bool:
    return kind_of(np.dtype(value.dtype)) in "fc"


def _sources(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the leaves that may have gradients; none if no tape records."""
    if current_frame().recorder is None:
        return ()
    kinds = (ArrayLike, Tracked)
    return tuple(k for k, x in enumerate(leaves) if isinstance(x, kinds) and _is_float(x))


def _of(value: Any) -> Any:
    """Return JAX's value for an argument; raise if JAX would not keep a variable's dtype."""
    array = value.tracked_value() if isinstance(value, ArrayLike) else value
    if hasattr(array, "on_device"):  # In a compiled step.
        return array.value
    array = np.asarray(array) if isinstance(array, Tracked) else array  # This raises in its tape.
    if isinstance(value, ArrayLike):
        _check_width(array.dtype, f"variable {getattr(value, 'name', '')!r}")
    return to_host(array) if is_device_array(array) else array


def _check_width(dtype: Any, what: str) -> None:
    """Raise a `TypeError` if JAX would compute in a narrower dtype of floats."""
    narrow = jax_module().dtypes.canonicalize_dtype(dtype)
    if kind_of(dtype) in "fc" and narrow != dtype:
        raise TypeError(
            f"{what} is of {dtype}, which JAX would convert to {narrow}: create it as {narrow}, or "
            "call jax.config.update('jax_enable_x64', True) at the start."
        )


def _value_of(variable: Any) -> Any:
    """Return the value of a variable that is passed to one of JAX's own functions."""
    jax = jax_module()
    if isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        raise TypeError(
            f"variable {variable.name!r} is used in a function that JAX traces, where it would "
            "keep its present value in all later calls: pass it as an argument."
        )
    return jax.numpy.asarray(_of(variable))


def _register(kind: Any) -> None:
    """Let JAX's own functions take variables of a kind, and of the kinds derived from it."""
    nodes = jax_module().tree_util
    nodes.register_pytree_node(kind, lambda v: ((_value_of(v),), None), lambda _, parts: parts[0])
    for derived in kind.__subclasses__():
        _register(derived)


_register(Variable)
Variable.__jax_array__ = _value_of  # type: ignore[attr-defined]
