"""Derivatives of the functions that move elements about: each moves the gradient back.

Most return a view of the gradient, at no cost; the backward pass knows that it does not own a view
and copies where it has to write. The tracked arguments of functions that join arrays stand inside a
list, so their rules see the whole call and the path of one tracked array in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.unbroadcast import as_axes, unbroadcast, wide, zeros
from ndistribute.autodiff.rules.windows import moved
from ndistribute.device import Array

__all__ = ["JOINT_RULES", "RULES", "RULES_BY_PATH"]

Vjp = Callable[[Array], Array]
Path = tuple[Any, ...]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def _ravel(out: Array, a: Array, order: str = "C") -> Vjp:
    if order not in "CF":
        raise NotImplementedError(f"order={order!r}: use 'C' or 'F'")
    shape = a.shape
    return lambda g: g.reshape(shape, order=order)


def _same_elements(out: Array, a: Array, *args: Any, **kwargs: Any) -> Vjp:
    shape = a.shape
    return lambda g: g.reshape(shape)


def _transpose(out: Array, a: Array, axes: Any = None) -> Vjp:
    if axes is None:
        return np.transpose
    order = as_axes(axes, a.ndim)
    back = tuple(order.index(i) for i in range(a.ndim))
    return lambda g: np.transpose(g, back)


def _moveaxis(out: Array, a: Array, source: Any, destination: Any) -> Vjp:
    return lambda g: np.moveaxis(g, destination, source)


def _broadcast_to(out: Array, array: Array, *args: Any, **kwargs: Any) -> Vjp:
    shape, dtype = array.shape, array.dtype
    return lambda g: unbroadcast(g, shape, dtype)


def _roll(out: Array, a: Array, shift: Any, axis: Any = None) -> Vjp:
    back = tuple(-s for s in shift) if isinstance(shift, Sequence) else -shift
    return lambda g: np.roll(g, back, axis)


def _repeat(out: Array, a: Array, repeats: Any, axis: Any = None) -> Vjp:
    if np.ndim(repeats):
        return moved(np.repeat, a, repeats, axis)
    shape = a.shape
    flat = (a.size,) if axis is None else shape
    along = 0 if axis is None else axis % a.ndim
    unfolded = (*flat[: along + 1], int(repeats), *flat[along + 1 :])

    def vjp(g: Array) -> Array:
        total = g.reshape(unfolded).sum(axis=along + 1, dtype=wide(g.dtype))
        return total.astype(g.dtype, copy=False).reshape(shape)

    return vjp


def _triangle(function: Callable[..., Array]) -> Callable[..., Vjp]:
    def maker(out: Array, m: Array, k: int = 0) -> Vjp:
        shape, dtype = m.shape, m.dtype  # A vector was repeated to a square.
        return lambda g: unbroadcast(function(g, k), shape, dtype)

    return maker


def _diagonal(out: Array, a: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Vjp:
    shape = a.shape

    def vjp(g: Array) -> Array:
        whole = zeros(g, shape)
        matrices = np.moveaxis(whole, (axis1, axis2), (-2, -1))
        rows = np.arange(g.shape[-1]) + max(0, -offset)
        matrices[..., rows, rows + offset] = g
        return whole

    return vjp


def _diag(out: Array, v: Array, k: int = 0) -> Vjp:
    if v.ndim == 2:
        return _diagonal(out, v, k)
    return lambda g: np.diagonal(g, k)


def _trace(
    out: Array, a: Array, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None
) -> Vjp:
    diagonal = _diagonal(out, a, offset, axis1, axis2)
    length, own_dtype = a.diagonal(offset, axis1, axis2).shape[-1], a.dtype
    return lambda g: diagonal(np.repeat(unbroadcast(g, g.shape, own_dtype)[..., None], length, -1))


def _concatenate(out: Array, paths: Sequence[Path], args: Args, kwargs: Kwargs) -> list[Vjp | None]:
    axis = _axis(args, kwargs, 1)
    if any(len(path) != 2 for path in paths):
        return [None]
    # Where each array starts, found once: there may be thousands.
    lengths = [np.size(one) if axis is None else np.shape(one)[axis] for one in args[0]]
    starts = list(itertools.accumulate(lengths, initial=0))

    def rule(position: int) -> Vjp:
        shape, dtype = args[0][position].shape, args[0][position].dtype
        where: Any = slice(starts[position], starts[position + 1])
        if axis is None:
            return lambda g: unbroadcast(g[where].reshape(shape), shape, dtype)
        place = (*(slice(None),) * (axis % len(shape)), where)
        return lambda g: unbroadcast(g[place], shape, dtype)

    return [rule(position) for _, position in paths]


def _stack(out: Array, paths: Sequence[Path], args: Args, kwargs: Kwargs) -> list[Vjp | None]:
    if any(len(path) != 2 for path in paths):
        return [None]
    lead = (slice(None),) * (_axis(args, kwargs, 1) % out.ndim)

    def rule(position: int) -> Vjp:
        shape, dtype = args[0][position].shape, args[0][position].dtype
        return lambda g: unbroadcast(g[(*lead, position)], shape, dtype)

    return [rule(position) for _, position in paths]


def _split(parts: Sequence[Array], args: Args, kwargs: Kwargs) -> Any:
    """Return the rule that joins the gradients of the pieces; None counts as zeros."""
    axis = _axis(args, kwargs, 2)

    def vjp(gradients: Sequence[Array | None]) -> list[Array]:
        pairs = zip(parts, gradients, strict=True)
        return [np.concatenate([np.zeros_like(p) if g is None else g for p, g in pairs], axis)]

    return vjp


def _axis(args: Args, kwargs: Kwargs, position: int) -> Any:
    return args[position] if len(args) > position else kwargs.get("axis", 0)


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.reshape: (lambda out, a, shape=None, order="C", **_: _ravel(out, a, order),),
    np.ravel: (_ravel,),
    np.squeeze: (_same_elements,),
    np.expand_dims: (_same_elements,),
    np.broadcast_to: (_broadcast_to,),
    np.transpose: (_transpose,),
    np.matrix_transpose: (lambda out, x: lambda g: np.swapaxes(g, -1, -2),),
    np.linalg.matrix_transpose: (lambda out, x: lambda g: np.swapaxes(g, -1, -2),),
    np.swapaxes: (lambda out, a, axis1, axis2: lambda g: np.swapaxes(g, axis1, axis2),),
    np.moveaxis: (_moveaxis,),
    np.flip: (lambda out, m, axis=None: lambda g: np.flip(g, axis),),
    np.fliplr: (lambda out, m: np.fliplr,),
    np.flipud: (lambda out, m: np.flipud,),
    np.rot90: (lambda out, m, k=1, axes=(0, 1): lambda g: np.rot90(g, -k, axes),),
    np.roll: (_roll,),
    np.repeat: (_repeat,),
    np.tril: (_triangle(np.tril),),
    np.triu: (_triangle(np.triu),),
    np.diagonal: (_diagonal,),
    np.diag: (_diag,),
    np.trace: (_trace,),
}

RULES_BY_PATH: dict[Any, Callable[[Array, Sequence[Path], Args, Kwargs], list[Vjp | None]]] = {
    np.concatenate: _concatenate,
    np.stack: _stack,
}

JOINT_RULES: dict[Any, Callable[[Sequence[Array], Args, Kwargs], Any]] = {
    np.split: _split,
    np.array_split: _split,
}
