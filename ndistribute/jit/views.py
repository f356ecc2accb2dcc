"""How an array of a compiled step is a part of another one, so that writes go through.

What is a view and what is a copy depends on the order of the elements in NumPy's memory. So NumPy
decides it, with arrays that have the order and no values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ndistribute.jit.corrections import of_jax
from ndistribute.jit.strided import placed

_SAME_ORDER = frozenset(
    {np.reshape, np.ravel, np.squeeze, np.expand_dims, np.atleast_1d, np.atleast_2d, np.atleast_3d}
)
_OF_AXES = frozenset(
    {np.transpose, np.permute_dims, np.swapaxes, np.moveaxis, np.rollaxis, np.matrix_transpose}
)
_READ_ONLY = frozenset({np.diagonal, np.diag, np.broadcast_to})
VIEWING = _SAME_ORDER | _OF_AXES | _READ_ONLY
VIEWING |= {np.flip, np.fliplr, np.flipud, np.rot90, np.real, np.imag}
"""Functions whose result may be a view of their first argument."""


class SlicedView:
    """The view of the elements at a basic index, which has no arrays."""

    __slots__ = ("_index",)
    is_read_only = False

    def __init__(self, index: Any) -> None:
        self._index = index

    def read(self, value: Any) -> Any:
        return value[self._index]

    def layout(self, base: Any) -> Any:
        """Return the order of the elements in memory, as an array of NumPy."""
        index = self._index if isinstance(self._index, tuple) else (self._index,)
        return base[index if Ellipsis in index else (*index, ...)]

    def write(self, value: Any, new: Any) -> Any:
        return placed(value, self._index, new)


class RearrangedView:
    """The view of the elements in another shape or order, as a function of NumPy returns it."""

    __slots__ = ("_args", "_function", "_kwargs")

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs

    @property
    def is_read_only(self) -> bool:
        return self._function in _READ_ONLY

    def read(self, value: Any) -> Any:
        return of_jax(self._function)(value, *self._args, **self._kwargs)

    def layout(self, base: Any) -> Any:
        """Return the order of the elements in memory; it shares none with its base for a copy."""
        return self._function(base, *self._args, **self._kwargs)

    def write(self, value: Any, new: Any) -> Any:
        function = self._function
        if function is np.real:
            return new + 1j * value.imag if value.dtype.kind == "c" else new
        if function is np.imag:
            return value.real + 1j * new
        if function in _OF_AXES:
            bare = as_strided(np.empty(1, np.int8), (1,) * value.ndim, range(1, value.ndim + 1))
            moved = self.layout(bare).strides
            return new.transpose([moved.index(k) for k in range(1, value.ndim + 1)])
        flat = new.reshape(-1)
        places = np.arange(value.size).reshape(value.shape)
        if function not in _SAME_ORDER or "F" in (*self._args, *self._kwargs.values()):
            flat = flat[np.argsort(self.layout(places).ravel())]
        return flat.reshape(value.shape)
