"""Views: arrays of a compiled step that are parts of other arrays, to which writes go.

Whether a part is a view or a copy depends on the order of the elements in NumPy's memory. So NumPy
decides, with arrays that have this order but no values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ndistribute.devices import jax_module
from ndistribute.jit.corrections import of_jax

READ_ONLY = frozenset({np.diagonal, np.diag, np.broadcast_to})
"""Functions whose result is a view that NumPy does not let anybody write to."""
VIEWING = READ_ONLY | {
    getattr(np, name)
    for name in (
        "atleast_1d atleast_2d atleast_3d expand_dims flip fliplr flipud imag matrix_transpose "
        "moveaxis permute_dims ravel real reshape rollaxis rot90 squeeze swapaxes transpose"
    ).split()
}
"""Functions whose result may be a view of their first argument."""


class View(NamedTuple):
    """A part of an array that a NumPy function or `operator.getitem` returns."""

    function: Any
    args: Any
    kwargs: Any

    def read(self, value: Any) -> Any:
        """Return this part of a JAX value."""
        return of_jax(self.function)(value, *self.args, **self.kwargs)

    def layout(self, base: Any) -> Any:
        """Return the order of the elements in memory; it shares none with its base for a copy."""
        return self.function(base, *self.args, **self.kwargs)

    def write(self, value: Any, new: Any) -> Any:
        """Return a JAX value in which this part has other values."""
        if self.function is operator.getitem:
            return placed(value, self.args[0], new)
        if self.function is np.imag:
            return value.real + 1j * new
        if self.function is np.real:
            return new + 1j * value.imag if value.dtype.kind == "c" else new
        if self.function in (np.reshape, np.ravel) and "F" not in (
            *self.args,
            *self.kwargs.values(),
        ):
            # This does the same as below, but is traced in less time.
            return new.reshape(value.shape)
        return _put_back(self.read, value, new)


def sliced(index: Any) -> View:
    """Return the view of the elements at a basic index."""
    parts = index if isinstance(index, tuple) else (index,)
    return View(operator.getitem, (parts if Ellipsis in parts else (*parts, ...),), {})


def placed(value: Any, index: Any, new: Any) -> Any:
    """Return a JAX value with new elements at an index."""
    parts = index if isinstance(index, tuple) else (index,)
    steps = [part.step or 1 for part in parts if isinstance(part, slice)]
    if all(step == 1 for step in steps) or any(np.ndim(part) for part in parts):
        return value.at[index].set(new)
    # XLA scatters elements with a step between them one by one; a choice is one parallel loop.
    shape = np.broadcast_to(np.int8(0), value.shape)[index].shape
    new = jax_module().numpy.broadcast_to(new, shape)
    return _put_back(lambda v: v[index], value, new)


def _put_back(read: Callable[[Any], Any], value: Any, new: Any) -> Any:
    """Return a JAX value in which the elements that a function reads have other values."""
    jax = jax_module()

    def back(part: Any) -> Any:
        like = jax.ShapeDtypeStruct(value.shape, part.dtype)
        return jax.linear_transpose(read, like)(part)[0]

    bare = new.astype(np.int8) if new.dtype == bool else new
    whole = back(bare).astype(value.dtype)
    if new.size == value.size:
        return whole
    return jax.numpy.where(back(jax.numpy.ones(new.shape, np.int8)) != 0, whole, value)
