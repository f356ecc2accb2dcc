"""Derivatives of matrix products, convolutions, Fourier transforms, and factorizations.

Every backward product is a BLAS call if the forward product was one: operands with stride 0 are
copied first, and a stack of matrices times one matrix becomes a single product. The matrix of a
Fourier transform is symmetric, so its derivative is the transform itself. The formulas of
`numpy.linalg` are those of Giles, "Collected matrix derivative results for forward and reverse mode
algorithmic differentiation" (2008). All support stacks of matrices. With equal eigenvalues or
singular values, the gradients through the vectors are infinite.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import missing
from ndistribute.autodiff.rules.placing import as_operand, is_tracked, placed
from ndistribute.autodiff.rules.shape import Args, Kwargs, Path
from ndistribute.autodiff.rules.unbroadcast import Vjp, refuse_complex, unbroadcast
from ndistribute.devices import Array, array_namespace, as_array

Results = Sequence[Array]
Gradients = Sequence[Array | None]
JointVjp = Callable[[Gradients], list[Array]]

# For the norm of a real transform, the norm of the inverse one in its derivative.
INVERSE_NORMS: Any = {None: "forward", "backward": "forward"}
INVERSE_NORMS |= {"ortho": "ortho", "forward": "backward"}


class RightFactor:
    """The rule of the right factor of a product of two matrices, in most models the weights."""

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
    y = as_operand(y)
    shape, dtype = x.shape, x.dtype
    if x.ndim == 0 or y.ndim == 0:
        return lambda g: unbroadcast(g * y, shape, dtype)
    if y.ndim <= 2:
        return _matmul_x(out, x, y)
    flat = _rows(np.moveaxis(y, -2, -1))
    rows = len(_rows(x))
    return lambda g: unbroadcast((g.reshape(rows, len(flat)) @ flat).reshape(shape), shape, dtype)


def _dot_y(out: Array, x: Any, y: Array) -> Vjp:
    x = as_operand(x)
    shape, dtype = y.shape, y.dtype
    if y.ndim == 0 or x.ndim == 0:
        return _dot_x(out, y, x)
    if y.ndim <= 2:
        return _matmul_y(out, x, y)
    x, rest = _rows(x), (*shape[:-2], shape[-1])

    def vjp(g: Array) -> Array:
        flat = x.T @ g.reshape(len(x), math.prod(rest))
        return unbroadcast(np.moveaxis(flat.reshape(-1, *rest), 0, -2), shape, dtype)

    return vjp


def _blas(g: Array) -> Array:
    """Return an operand for BLAS; NumPy multiplies broadcast views in a slow loop."""
    return np.ascontiguousarray(g) if 0 in getattr(g, "strides", ()) else g


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _einsum(out: Array, paths: Sequence[Path], args: Args, kwargs: Kwargs) -> list[Vjp | None]:
    """Return the rules of the operands of an einsum, which are other einsums."""
    if not isinstance(args[0], str):
        return [None]
    formula, arrow, output = _without_ellipsis(args[0].replace(" ", ""), args[1:]).partition("->")
    if not arrow:
        output = "".join(sorted(c for c in set(formula) - {","} if formula.count(c) == 1))
    terms = formula.split(",")
    return [_einsum_operand(path[0] - 1, terms, output, args[1:]) for path in paths]


def _einsum_operand(position: int, terms: Sequence[str], output: str, operands: Args) -> Vjp:
    labels, shape, dtype = terms[position], operands[position].shape, operands[position].dtype
    others = [*terms[:position], *terms[position + 1 :]]
    rest = [*operands[:position], *operands[position + 1 :]]
    distinct = "".join(dict.fromkeys(labels))
    known = "".join(c for c in distinct if c in output or any(c in term for term in others))
    backward = ",".join([output, *others]) + "->" + known

    def vjp(g: Array) -> Array:
        change = np.einsum(backward, g, *rest, optimize=True)
        if known != labels:
            # The gradient is constant along indices that only this operand has, and on the diagonal
            # of repeated ones, which einsum returns as a view.
            where = tuple(slice(None) if c in known else None for c in distinct)
            sides = [shape[labels.index(c)] for c in distinct]
            change = np.copy(np.broadcast_to(change[where], sides))
            if distinct != labels:
                grid = np.ix_(*map(range, sides))
                places = tuple([grid[distinct.index(c)] for c in labels])
                change = placed(change, shape, places, distinct=True)
        return unbroadcast(change, shape, dtype)

    return vjp


def _without_ellipsis(formula: str, operands: Sequence[Any]) -> str:
    """Return the formula of an einsum with letters instead of each ellipsis."""
    if "..." not in formula:
        return formula
    free = "".join(sorted(set(string.ascii_letters) - set(formula)))
    inputs, arrow, output = formula.partition("->")
    terms = inputs.split(",")
    pairs = zip(terms, operands, strict=True)
    counts = [np.ndim(x) - len(term) + 3 if "..." in term else 0 for term, x in pairs]
    # Broadcasting aligns axes from the last one.
    most = max(counts)
    letters = free[:most]
    terms = [t.replace("...", letters[most - n :]) for t, n in zip(terms, counts, strict=True)]
    if not arrow:
        once = sorted(c for c in set(inputs) - {",", "."} if inputs.count(c) == 1)
        output = "..." + "".join(once)
    return ",".join(terms) + "->" + output.replace("...", letters)


def _convolve_a(out: Array, a: Any, v: Any, mode: Any = "full") -> Vjp:
    shape, dtype = np.shape(a), a.dtype
    a, v = np.atleast_1d(a), np.atleast_1d(v)
    shorter, length = min(a.size, v.size), a.size + v.size - 1
    start = {"full": 0, "same": (shorter - 1) // 2, "valid": shorter - 1}[mode]

    def vjp(g: Array) -> Array:
        whole = placed(g, (length,), slice(start, start + g.size), distinct=True)
        return unbroadcast(np.correlate(whole, np.conj(v), "valid").reshape(shape), shape, dtype)

    return vjp


def _bincount(out: Array, paths: Sequence[Path], args: Args, kwargs: Kwargs) -> list[Vjp | None]:
    if paths not in ([(1,)], [("weights",)]):
        return [None]
    places = as_array(args[0]).astype(np.intp)
    dtype = (args[1] if len(args) > 1 else kwargs["weights"]).dtype
    return [lambda g: g[places].astype(dtype)]


def _fft(function: Callable[..., Array]) -> Callable[..., Vjp]:
    """Return the rule of `fft` or `ifft`."""

    def maker(out: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Vjp:
        shape, dtype = a.shape, a.dtype
        return lambda g: unbroadcast(_resized(function(g, None, axis, norm), shape), shape, dtype)

    return maker


def _rfft(out: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Vjp:
    shape, dtype, length = a.shape, a.dtype, a.shape[axis] if n is None else n
    return lambda g: _resized(np.fft.fft(g, length, axis, norm).real, shape).astype(dtype)


def _irfft(out: Array, a: Array, n: Any = None, axis: int = -1, norm: Any = None) -> Vjp:
    shape, dtype, length = a.shape, a.dtype, out.shape[axis]

    def vjp(g: Array) -> Array:
        change = np.conj(np.fft.rfft(g, axis=axis, norm=INVERSE_NORMS[norm]))
        # All but the first, and the middle one of an even length, represent two frequencies.
        counts = array_namespace(g).ones(change.shape[axis], g.dtype)
        counts[1 : (length + 1) // 2] = 2
        change = np.moveaxis(np.moveaxis(change, axis, -1) * counts, -1, axis)
        return unbroadcast(_resized(change, shape), shape, dtype)

    return vjp


def _resized(g: Array, shape: tuple[int, ...]) -> Array:
    """Return an array truncated or padded with zeros at the end of each axis."""
    if g.shape == shape:
        return g
    common = tuple(slice(min(pair)) for pair in zip(g.shape, shape, strict=True))
    return placed(g[common], shape, common, distinct=True)


def _t(a: Array) -> Array:
    return np.swapaxes(a, -1, -2)


def _late(rule: Callable[..., Any], real: bool = False) -> Callable[..., Callable[[Any], Any]]:
    """Return the maker of a rule that keeps the whole call, and may refuse complex arguments."""

    def maker(out: Any, a: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        a = as_operand(a)
        if real:
            refuse_complex(a)
        return lambda g: rule(g, out, a, *args, **kwargs)

    return maker


def _slogdet(gradients: Gradients, results: Results, a: Array) -> list[Array]:
    return [_zero_if_none(gradients[1], results[1])[..., None, None] * _t(np.linalg.inv(a))]


def _solve_a(g: Array, x: Array, a: Array, b: Any) -> Array:
    change = _solve_b(g, x, a, x)
    if x.ndim < a.ndim:
        change, x = change[..., None], x[..., None]
    return unbroadcast(-change @ _t(x), a.shape, a.dtype)


def _solve_b(g: Array, x: Array, a: Array, b: Array) -> Array:
    vector = x.ndim < a.ndim
    columns = np.linalg.solve(_t(a), g[..., None] if vector else g)
    return unbroadcast(columns[..., 0] if vector else columns, b.shape, b.dtype)


def _cholesky(g: Array, out: Array, a: Array, /, *, upper: bool = False) -> Array:
    factor = _t(out) if upper else out
    inner = _mirrored(_t(factor) @ (_t(g) if upper else g))
    half = np.linalg.solve(_t(factor), inner)
    both = _t(np.linalg.solve(_t(factor), _t(half)))
    # NumPy reads only one triangle, which thus has the gradient of both.
    whole = np.triu(both) + np.triu(both, 1) if upper else np.tril(both) + np.tril(both, -1)
    return whole / 2


def _eigh(gradients: Gradients, results: Results, a: Array, UPLO: str = "L") -> list[Array]:  # noqa: N803
    values, vectors = results
    change = _diagonal(_zero_if_none(gradients[0], values)).astype(vectors.dtype)
    if gradients[1] is not None:
        change = change + _inverse_gaps(values) * (_t(vectors) @ gradients[1])
    change = np.conj(vectors) @ change @ _t(vectors)
    # NumPy reads only one triangle, which thus has the gradient of both.
    both = change + np.conj(_t(change))
    diagonal = _diagonal(np.diagonal(change, 0, -2, -1).real)
    return [diagonal + (np.tril(both, -1) if UPLO.upper() == "L" else np.triu(both, 1))]


def _eig(gradients: Gradients, results: Results, a: Array) -> list[Array]:
    values, vectors = results
    change = _diagonal(_zero_if_none(gradients[0], values))
    if gradients[1] is not None:
        inner = _t(vectors) @ gradients[1]
        # The length of the vectors stays 1.
        along = np.diagonal(inner.real, 0, -2, -1)[..., None, :]
        inner = inner - (_t(vectors) @ np.conj(vectors)) * along
        change = change + _inverse_gaps(values) * inner
    change = np.linalg.solve(_t(vectors), change @ _t(vectors))
    return [change if a.dtype.kind == "c" else change.real]


def _svd(results: Results, a: Array, *args: Any, **kwargs: Any) -> JointVjp:
    u, s, vt = results
    refuse_complex(u)
    count = s.shape[-1]
    full = u.shape[-1] > count or vt.shape[-2] > count
    beyond = missing(np.linalg.svd, "vectors of full_matrices=True") if full else None

    def vjp(gradients: Gradients) -> list[Array]:
        gu, gs, gvt = gradients
        left, right = u[..., :count], vt[..., :count, :]
        if full and is_tracked(a):  # The other vectors have no gradient.
            left, _, right = np.linalg.svd(a, full_matrices=False)
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


def _singular_values(g: Array, out: Array, a: Array, *args: Any, **kwargs: Any) -> Array:
    """Return the gradient of ``svd(a, compute_uv=False)``."""
    u, _, vt = np.linalg.svd(a, full_matrices=False)
    return np.conj(u) * g[..., None, :] @ np.conj(vt)


def _pinv(out: Array, a: Array, *cutoff: Any, **cutoffs: Any) -> Vjp:
    refuse_complex(a)
    if cutoff or cutoffs:
        raise NotImplementedError("a cutoff of singular values")

    def vjp(g: Array) -> Array:
        p = out
        change = p @ _t(p) @ g @ (_eye(a, -2) - a @ p)
        change = change + (_eye(a, -1) - p @ a) @ g @ _t(p) @ p
        return _t(change - p @ _t(g) @ p)

    return vjp


def _qr(results: Results, *args: Any, **kwargs: Any) -> JointVjp:
    q, r = results
    refuse_complex(q)
    if q.shape[-1] != r.shape[-1]:
        raise NotImplementedError("more columns than rows, or mode='complete'")

    def vjp(gradients: Gradients) -> list[Array]:
        gq, gr = _zero_if_none(gradients[0], q), _zero_if_none(gradients[1], r)
        inner = _mirrored(r @ _t(gr) - _t(gq) @ q)
        return [_t(np.linalg.solve(r, _t(gq + q @ inner)))]

    return vjp


def _lstsq(results: Results, a: Any, b: Any, rcond: Any = None) -> JointVjp:
    x, a, b = results[0], as_operand(a), as_operand(b)
    refuse_complex(x)
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
        whole = sum(_columns(u) @ _t(_columns(v)) for u, v in pairs)
        if gradients[3] is not None:
            whole = whole + _singular_values(gradients[3], results[3], a)
        return [unbroadcast(whole, a.shape, a.dtype), unbroadcast(change, b.shape, b.dtype)]

    return vjp


def _columns(a: Array) -> Array:
    return a[:, None] if a.ndim == 1 else a


def _zero_if_none(g: Array | None, result: Array) -> Array:
    return np.zeros_like(result) if g is None else g


def _mirrored(matrix: Array) -> Array:
    """Return the symmetric matrix with the same lower triangle."""
    return np.tril(matrix) + _t(np.tril(matrix, -1))


def _diagonal(values: Array) -> Array:
    """Return matrices with `values` on their diagonals, and zeros elsewhere."""
    return values[..., None] * _eye(values, -1)


def _eye(a: Array, axis: int) -> Array:
    return array_namespace(a).eye(a.shape[axis], dtype=a.dtype)


def _inverse_gaps(values: Array) -> Array:
    """Return ``1 / (values[j] - values[i])``, and 0 on the diagonal."""
    eye = _eye(values, -1)
    return (1 - eye) / (values[..., None, :] - values[..., :, None] + eye)


RULES: dict[Any, tuple[Callable[..., Vjp], ...]] = {
    np.matmul: (_matmul_x, _matmul_y),
    np.linalg.matmul: (_matmul_x, _matmul_y),
    np.dot: (_dot_x, _dot_y),
    np.convolve: (_convolve_a, lambda out, a, v, mode="full": _convolve_a(out, v, a, mode)),
    np.fft.fft: (_fft(np.fft.fft),),
    np.fft.ifft: (_fft(np.fft.ifft),),
    np.fft.rfft: (_rfft,),
    np.fft.irfft: (_irfft,),
    np.fft.fftshift: (lambda out, x, axes=None: lambda g: np.fft.ifftshift(g, axes),),
    np.fft.ifftshift: (lambda out, x, axes=None: lambda g: np.fft.fftshift(g, axes),),
    np.linalg.inv: (lambda out, a: lambda g: -_t(out) @ g @ _t(out),),
    np.linalg.det: (lambda out, a: lambda g: (g * out)[..., None, None] * _t(np.linalg.inv(a)),),
    np.linalg.solve: (_late(_solve_a), _late(_solve_b)),
    np.linalg.cholesky: (_late(_cholesky, real=True),),
    np.linalg.pinv: (_pinv,),
    np.linalg.svd: (_late(_singular_values),),
}

RULES_BY_PATH: dict[Any, Callable[[Array, Sequence[Path], Args, Kwargs], list[Vjp | None]]] = {
    np.einsum: _einsum,
    np.bincount: _bincount,
}

JOINT_RULES: dict[Any, Callable[..., JointVjp]] = {
    np.linalg.slogdet: _late(_slogdet, real=True),
    np.linalg.eigh: _late(_eigh),
    np.linalg.eig: _late(_eig),
    np.linalg.svd: _svd,
    np.linalg.qr: _qr,
    np.linalg.lstsq: _lstsq,
}
