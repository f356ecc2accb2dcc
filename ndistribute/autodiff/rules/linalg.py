"""Derivatives of `numpy.linalg`: inverses, decompositions, and what is made of them.

The formulas are those of Giles, "Collected matrix derivative results for forward and reverse mode
algorithmic differentiation" (2008). All take stacks of matrices. A degenerate matrix has no
derivative: equal eigenvalues or singular values give infinities where vectors are used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import missing
from ndistribute.autodiff.rules.unbroadcast import unbroadcast
from ndistribute.device import Array, array_namespace, as_array

__all__ = ["COMPOSED", "JOINT_RULES", "RULES", "RULES_BY_PATH"]

Value = Any  # a tracked or plain array, or a number
Vjp = Callable[[Array], Array]
Gradients = Sequence[Array | None]
JointVjp = Callable[[Gradients], list[Array]]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def _t(a: Value) -> Value:
    return np.swapaxes(a, -1, -2)


def _inv(out: Array, a: Array) -> Vjp:
    return lambda g: -_t(out) @ g @ _t(out)


def _det(out: Array, a: Array) -> Vjp:
    return lambda g: (g * out)[..., None, None] * _t(np.linalg.inv(a))


def _slogdet(results: Sequence[Array], args: Args, kwargs: Kwargs) -> JointVjp:
    (a,) = args
    _refuse_complex(a)

    def vjp(gradients: Gradients) -> list[Array]:
        return [_zero_if_none(gradients[1], results[1])[..., None, None] * _t(np.linalg.inv(a))]

    return vjp


def _solve_a(out: Array, a: Array, b: Any) -> Vjp:
    solve_b, vector = _solve_b(out, a, out), out.ndim < a.ndim

    def vjp(g: Array) -> Array:
        change, x = solve_b(g), out
        if vector:
            change, x = change[..., None], x[..., None]
        return unbroadcast(-change @ _t(x), a.shape, a.dtype)

    return vjp


def _solve_b(out: Array, a: Array, b: Array) -> Vjp:
    a, shape, dtype, vector = as_array(a), b.shape, b.dtype, out.ndim < np.ndim(a)

    def vjp(g: Array) -> Array:
        columns = np.linalg.solve(_t(a), g[..., None] if vector else g)
        return unbroadcast(columns[..., 0] if vector else columns, shape, dtype)

    return vjp


def _cholesky(out: Array, a: Array, /, *, upper: bool = False) -> Vjp:
    _refuse_complex(a)
    factor = _t(out) if upper else out

    def vjp(g: Array) -> Array:
        inner = _mirrored(_t(factor) @ (_t(g) if upper else g))
        half = np.linalg.solve(_t(factor), inner)
        both = _t(np.linalg.solve(_t(factor), _t(half)))
        # NumPy reads one triangle alone, which thus gets the gradient of both.
        whole = np.triu(both) + np.triu(both, 1) if upper else np.tril(both) + np.tril(both, -1)
        return whole / 2

    return vjp


def _eigh(results: Sequence[Array], args: Args, kwargs: Kwargs) -> JointVjp:
    values, vectors = results
    lower = (args[1] if len(args) > 1 else kwargs.get("UPLO", "L")).upper() == "L"

    def vjp(gradients: Gradients) -> list[Array]:
        change = _diagonal(_zero_if_none(gradients[0], values)).astype(vectors.dtype)
        if gradients[1] is not None:
            change = change + _inverse_gaps(values) * (_t(vectors) @ gradients[1])
        change = np.conj(vectors) @ change @ _t(vectors)
        # NumPy reads one triangle alone, which thus gets the gradient of both.
        both = change + np.conj(_t(change))
        diagonal = _diagonal(np.diagonal(change, 0, -2, -1).real)
        return [diagonal + (np.tril(both, -1) if lower else np.triu(both, 1))]

    return vjp


def _eig(results: Sequence[Array], args: Args, kwargs: Kwargs) -> JointVjp:
    values, vectors = results
    real = args[0].dtype.kind != "c"

    def vjp(gradients: Gradients) -> list[Array]:
        change = _diagonal(_zero_if_none(gradients[0], values))
        if gradients[1] is not None:
            inner = _t(vectors) @ gradients[1]
            # Vectors keep their length of 1.
            along = np.diagonal(inner.real, 0, -2, -1)[..., None, :]
            inner = inner - (_t(vectors) @ np.conj(vectors)) * along
            change = change + _inverse_gaps(values) * inner
        change = np.linalg.solve(_t(vectors), change @ _t(vectors))
        return [change.real if real else change]

    return vjp


def _svd(results: Sequence[Array], args: Args, kwargs: Kwargs) -> JointVjp:
    u, s, vt = results
    _refuse_complex(u)
    count = s.shape[-1]
    full = u.shape[-1] > count or vt.shape[-2] > count
    beyond = missing(np.linalg.svd, "vectors of full_matrices=True") if full else None

    def vjp(gradients: Gradients) -> list[Array]:
        gu, gs, gvt = gradients
        left, right = u[..., :count], vt[..., :count, :]
        change = left * _zero_if_none(gs, s)[..., None, :] @ right
        if gu is None and gvt is None:
            return [change]
        if beyond is not None:
            beyond(None)
        gaps, rows, columns = _inverse_gaps(np.square(s)), s[..., :, None], s[..., None, :]
        if gu is not None:
            turn = _t(left) @ gu
            change = change + left @ (gaps * (turn - _t(turn)) * columns) @ right
            change = change + (gu - left @ turn) / columns @ right
        if gvt is not None:
            turn = gvt @ _t(right)
            change = change + left @ (rows * gaps * (_t(turn) - turn)) @ right
            change = change + left @ ((gvt - turn @ right) / rows)
        return [change]

    return vjp


def _singular_values(out: Array, path: Any, args: Args, kwargs: Kwargs) -> Vjp:
    a = args[0]

    def vjp(g: Array) -> Array:
        u, _, vt = np.linalg.svd(a, full_matrices=False)
        return np.conj(u) * g[..., None, :] @ np.conj(vt)

    return vjp


def _pinv(out: Array, a: Array, *cutoff: Any, **cutoffs: Any) -> Vjp:
    _refuse_complex(a)
    if cutoff or cutoffs:
        raise NotImplementedError("a cutoff of singular values")

    def vjp(g: Array) -> Array:
        p = out
        change = p @ _t(p) @ g @ (_eye(a, -2) - a @ p)
        change = change + (_eye(a, -1) - p @ a) @ g @ _t(p) @ p
        return _t(change - p @ _t(g) @ p)

    return vjp


def _qr(results: Sequence[Array], args: Args, kwargs: Kwargs) -> JointVjp:
    q, r = results
    _refuse_complex(q)
    if q.shape[-1] != r.shape[-1]:
        raise NotImplementedError("more columns than rows, or mode='complete'")

    def vjp(gradients: Gradients) -> list[Array]:
        gq, gr = _zero_if_none(gradients[0], q), _zero_if_none(gradients[1], r)
        inner = _mirrored(r @ _t(gr) - _t(gq) @ q)
        return [_t(np.linalg.solve(r, _t(gq + q @ inner)))]

    return vjp


def _lstsq(results: Sequence[Array], args: Args, kwargs: Kwargs) -> JointVjp:
    x, a, b = results[0], as_array(args[0]), as_array(args[1])
    _refuse_complex(x)
    if results[2] < a.shape[1]:
        raise NotImplementedError("a matrix whose rank is less than its number of columns")

    def vjp(gradients: Gradients) -> list[Array]:
        gx = _zero_if_none(gradients[0], x)
        r = np.linalg.qr(a)[1]
        weights, left = np.linalg.solve(r, np.linalg.solve(_t(r), gx)), b - a @ x
        change = a @ weights
        if gradients[1] is not None and gradients[1].size:
            change = change + 2 * left * gradients[1]
        pairs = ((left, weights), (-change, x))
        whole = sum(_columns(one) @ _t(_columns(other)) for one, other in pairs)
        if gradients[3] is not None:
            whole = whole + _singular_values(results[3], (0,), (a,), {})(gradients[3])
        return [unbroadcast(whole, a.shape, a.dtype), unbroadcast(change, b.shape, b.dtype)]

    return vjp


def _columns(a: Array) -> Array:
    return a[:, None] if a.ndim == 1 else a


def _refuse_complex(a: Array) -> None:
    if a.dtype.kind == "c":
        raise NotImplementedError("complex arguments")


def _zero_if_none(g: Array | None, result: Array) -> Array:
    return np.zeros_like(result) if g is None else g


def _mirrored(matrix: Array) -> Array:
    """Return the symmetric matrix with the same lower triangle."""
    return np.tril(matrix) + _t(np.tril(matrix, -1))


def _diagonal(values: Array) -> Array:
    """Return matrices with `values` on their diagonals."""
    return values[..., None] * _eye(values, -1)


def _eye(a: Array, axis: int) -> Array:
    return array_namespace(a).eye(a.shape[axis], dtype=a.dtype)


def _inverse_gaps(values: Array) -> Array:
    """Return ``1 / (values[j] - values[i])``, and 0 on the diagonal."""
    eye = _eye(values, -1)
    return (1 - eye) / (values[..., None, :] - values[..., :, None] + eye)


def _norm(x: Value, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Value:
    if axis is None and ord is not None and np.ndim(x) > 2:
        return NotImplemented
    matrix = (axis is None and np.ndim(x) == 2) or (np.ndim(axis) == 1 and len(axis) == 2)
    if ord is None or (ord == 2 and not matrix) or (ord == "fro" and matrix):
        return np.sqrt(np.sum(np.square(np.abs(x)), axis=axis, keepdims=keepdims))
    return (_matrix_norm if matrix else _vector_norm)(x, ord, axis, keepdims)


def _vector_norm(x: Value, ord: Any, axis: Any, keepdims: bool) -> Value:
    size = np.abs(x)
    if ord == 1:
        return np.sum(size, axis=axis, keepdims=keepdims)
    if abs(ord) == math.inf:
        return (np.max if ord > 0 else np.min)(size, axis=axis, keepdims=keepdims)
    return NotImplemented if ord == 0 else np.sum(size**ord, axis, keepdims=keepdims) ** (1 / ord)


def _matrix_norm(x: Value, ord: Any, axis: Any, keepdims: bool) -> Value:
    if keepdims:
        return NotImplemented
    x = x if axis is None else np.moveaxis(x, axis, (-2, -1))
    if ord == "nuc":
        return np.sum(np.linalg.svd(x, compute_uv=False), axis=-1)
    if abs(ord) == 2:
        return np.linalg.svd(x, compute_uv=False)[..., 0 if ord > 0 else -1]
    if abs(ord) not in (1, math.inf):
        return NotImplemented
    sums = np.sum(np.abs(x), axis=-2 if abs(ord) == 1 else -1)
    return (np.max if ord > 0 else np.min)(sums, axis=-1)


def _vector_norm_of_any(
    x: Value, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2
) -> Value:
    if axis is None:
        return NotImplemented if keepdims else np.linalg.norm(np.ravel(x), ord)
    return NotImplemented if isinstance(axis, tuple) else np.linalg.norm(x, ord, axis, keepdims)


def _cond(x: Value, p: Any = None) -> Value:
    if p not in (None, 2):
        return NotImplemented
    s = np.linalg.svd(x, compute_uv=False)
    return s[..., 0] / s[..., -1]


def _matrix_power(a: Value, n: int) -> Value:
    if n == 0:
        return NotImplemented
    base = np.linalg.inv(a) if n < 0 else a
    result, power = None, abs(n)
    while power:
        if power & 1:
            result = base if result is None else np.matmul(result, base)
        power >>= 1
        base = np.matmul(base, base) if power else base
    return result


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.linalg.inv: (_inv,),
    np.linalg.det: (_det,),
    np.linalg.solve: (_solve_a, _solve_b),
    np.linalg.cholesky: (_cholesky,),
    np.linalg.pinv: (_pinv,),
}

RULES_BY_PATH: dict[Any, Callable[..., Vjp]] = {np.linalg.svd: _singular_values}

JOINT_RULES: dict[Any, Callable[[Sequence[Array], Args, Kwargs], JointVjp]] = {
    np.linalg.slogdet: _slogdet,
    np.linalg.eigh: _eigh,
    np.linalg.eig: _eig,
    np.linalg.svd: _svd,
    np.linalg.qr: _qr,
    np.linalg.lstsq: _lstsq,
}

COMPOSED: dict[Any, Callable[..., Value]] = {
    np.linalg.cond: _cond,
    np.linalg.diagonal: lambda x, /, *, offset=0: np.diagonal(x, offset, -2, -1),
    np.linalg.eigvals: lambda a: np.linalg.eig(a)[0],
    np.linalg.eigvalsh: lambda a, *args, **kwargs: np.linalg.eigh(a, *args, **kwargs)[0],
    np.linalg.matrix_norm: lambda x, /, *, keepdims=False, ord="fro": np.linalg.norm(
        x, ord, (-2, -1), keepdims
    ),
    np.linalg.matrix_power: _matrix_power,
    np.linalg.multi_dot: lambda arrays: functools.reduce(np.dot, arrays),
    np.linalg.norm: _norm,
    np.linalg.svdvals: lambda x: np.linalg.svd(x, compute_uv=False),
    np.linalg.trace: lambda x, /, *, offset=0, **kwargs: np.trace(x, offset, -2, -1, **kwargs),
    np.linalg.vector_norm: _vector_norm_of_any,
}
