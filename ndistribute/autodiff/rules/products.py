"""Derivatives of matrix products and of einsum.

Every backward product is a BLAS call if the forward product was one: operands with stride 0 are
copied first, and a stack of matrices times one matrix becomes a single product.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import unbroadcast, zeros
from ndistribute.device import Array, as_array

__all__ = ["RULES", "RULES_BY_PATH", "RightFactor"]

Vjp = Callable[[Array], Array]
Path = tuple[Any, ...]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class RightFactor:
    """The rule of the right factor of a product of two matrices, in most models the weights.

    Args:
        x: the left factor.
    """

    __slots__ = ("_x",)

    def __init__(self, x: Array) -> None:
        self._x = x

    def __call__(self, g: Array) -> Array:
        return self._x.T @ _blas(g)

    def into(self, g: Array, memory: Callable[[Any, tuple[int, ...]], Array | None]) -> Array:
        """Return the gradient, in an array from `memory` unless that returns None."""
        here = type(g) is np.ndarray
        out = memory(g.dtype, (self._x.shape[1], g.shape[1])) if here else None
        return np.matmul(self._x.T, _blas(g), out=out)


def _matmul_x(out: Array, x: Array, y: Array) -> Vjp:
    shape, dtype = x.shape, x.dtype
    if x.ndim == 2 == y.ndim and dtype == out.dtype:
        return lambda g: _blas(g) @ y.T
    if y.ndim == 1:
        if x.ndim == 1:
            return lambda g: unbroadcast(g * y, shape, dtype)
        return lambda g: unbroadcast(g[..., None] * y, shape, dtype)
    if x.ndim == 1:
        return lambda g: unbroadcast(np.matmul(y, _blas(g)[..., None])[..., 0], shape, dtype)
    return lambda g: unbroadcast(np.matmul(_blas(g), np.swapaxes(y, -1, -2)), shape, dtype)


def _matmul_y(out: Array, x: Array, y: Array) -> Vjp:
    shape, dtype = y.shape, y.dtype
    if x.ndim == 2 == y.ndim and dtype == out.dtype:
        return RightFactor(x)
    if x.ndim == 1:
        if y.ndim == 1:
            return lambda g: unbroadcast(g * x, shape, dtype)
        return lambda g: unbroadcast(x[:, None] * g[..., None, :], shape, dtype)
    if y.ndim == 1:
        return lambda g: unbroadcast(_rows(x).T @ g.reshape(-1), shape, dtype)
    if y.ndim == 2:
        return lambda g: unbroadcast(_rows(x).T @ _rows(_blas(g)), shape, dtype)
    return lambda g: unbroadcast(np.matmul(np.swapaxes(x, -1, -2), _blas(g)), shape, dtype)


def _dot_x(out: Array, x: Array, y: Any) -> Vjp:
    y = as_array(y)
    shape, dtype, y_ndim = x.shape, x.dtype, y.ndim
    if x.ndim == 0 or y_ndim == 0:
        return lambda g: unbroadcast(g * y, shape, dtype)
    if y_ndim <= 2:
        return _matmul_x(out, x, y)

    def vjp(g: Array) -> Array:
        first = np.moveaxis(y, -2, 0)
        free = range(len(shape) - 1, g.ndim)
        return unbroadcast(
            np.tensordot(g, first, (list(free), list(range(1, y_ndim)))), shape, dtype
        )

    return vjp


def _dot_y(out: Array, x: Any, y: Array) -> Vjp:
    x = as_array(x)
    shape, dtype, x_ndim = y.shape, y.dtype, x.ndim
    if y.ndim == 0 or x_ndim == 0:
        return _dot_x(out, y, x)
    if y.ndim <= 2:
        return _matmul_y(out, x, y)

    def vjp(g: Array) -> Array:
        lead = list(range(x_ndim - 1))
        return unbroadcast(np.moveaxis(np.tensordot(x, g, (lead, lead)), 0, -2), shape, dtype)

    return vjp


def _blas(g: Array) -> Array:
    """Return an operand for BLAS; NumPy multiplies broadcast views in a slow loop."""
    return np.ascontiguousarray(g) if 0 in g.strides else g


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _einsum(out: Array, path: Path, args: Args, kwargs: Kwargs) -> Vjp | None:
    """Return the rule of one operand of an einsum, which is another einsum."""
    if not isinstance(args[0], str):
        return None
    inputs, arrow, output = _without_ellipsis(args[0].replace(" ", ""), args[1:]).partition("->")
    terms = inputs.split(",")
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    own = terms[path[0] - 1]
    others = [
        (t, x) for k, (t, x) in enumerate(zip(terms, args[1:], strict=True), 1) if k != path[0]
    ]
    distinct = "".join(dict.fromkeys(own))
    known = "".join(c for c in distinct if c in output or any(c in term for term, _ in others))
    backward = ",".join([output, *(term for term, _ in others)]) + "->" + known
    operand, rest = args[path[0]], [x for _, x in others]
    shape, dtype = operand.shape, operand.dtype

    def vjp(g: Array) -> Array:
        change = np.einsum(backward, g, *rest, optimize=True)
        if known != own:
            # The gradient is constant along indices that only this operand has, and on the diagonal
            # of repeated ones, which einsum returns as a view.
            whole = zeros(change, shape)
            diagonal = np.einsum(f"{own}->{distinct}", whole)
            where = tuple(slice(None) if c in known else None for c in distinct)
            diagonal[...] = change[where]
            change = whole
        return unbroadcast(change, shape, dtype)

    return vjp


def _without_ellipsis(formula: str, operands: Sequence[Any]) -> str:
    """Return the formula of an einsum with letters instead of each ellipsis."""
    if "..." not in formula:
        return formula
    free = "".join(sorted(set(string.ascii_letters) - set(formula)))
    inputs, arrow, output = formula.partition("->")
    terms = inputs.split(",")
    counts = [
        np.ndim(x) - len(term) + 3 if "..." in term else 0
        for term, x in zip(terms, operands, strict=True)
    ]
    # Broadcasting aligns axes from the last one.
    most = max(counts)
    letters = free[:most]
    terms = [t.replace("...", letters[most - n :]) for t, n in zip(terms, counts, strict=True)]
    if not arrow:
        output = "..." + "".join(
            sorted(c for c in set(inputs) - {",", "."} if inputs.count(c) == 1)
        )
    return ",".join(terms) + "->" + output.replace("...", letters)


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.matmul: (_matmul_x, _matmul_y),
    np.linalg.matmul: (_matmul_x, _matmul_y),
    np.dot: (_dot_x, _dot_y),
}

RULES_BY_PATH: dict[Any, Callable[[Array, Path, Args, Kwargs], Vjp | None]] = {np.einsum: _einsum}
