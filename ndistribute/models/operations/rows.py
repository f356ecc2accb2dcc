"""Operations on rows: dense products, normalisation, attention, the cross-entropy of a softmax.

The bias and the activation change the product in place, so a layer makes one array. Its gradient is
computed once for all arguments of the layer. The products of attention read the heads where they
are in the input, so nothing is transposed or copied. Attention keeps only one large array, the
probabilities. A normalisation keeps the normalised array and few numbers. Narrow rows are joined,
because NumPy has a cost for each row.

Sources: Ioffe and Szegedy, "Batch Normalization", 2015; Ba et al., "Layer Normalization", 2016;
Vaswani et al., "Attention Is All You Need", 2017.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff import custom_gradient, untrack
from ndistribute.autodiff.custom import fused, log_softmax
from ndistribute.autodiff.rules.placing import as_operand, is_tracked
from ndistribute.context import current_trace
from ndistribute.devices import Array, array_namespace, as_array
from ndistribute.dtypes import computing_dtype
from ndistribute.exports import export as _export
from ndistribute.models.activations import IN_PLACE, InPlace, linear

Memory = Callable[[Any, tuple[int, ...]], Array | None]

# Rows are joined up to so many elements, because NumPy has a cost for each row: a sum with a vector
# took 0.42 ns an element for rows of 32, 0.2 for 512 to 4096, 0.14 for 8192.
_ROW = 8192


def wide(array: Array) -> Array:
    """Return an array; 16-bit floats on the host are converted to float32.

    >>> wide(np.ones(2, np.float16))
    array([1., 1.], dtype=float32)
    """
    if array.dtype.itemsize > 2 or not isinstance(array, np.ndarray):
        return array
    return array.astype(computing_dtype(array.dtype), copy=False)


def operands(x: Array, kernel: Array) -> tuple[Any, Array, Array]:
    """Return the dtype of a product, and the factors as they are multiplied.

    The dtype is that of `x`, or of the kernel if `x` has integers.
    """
    dtype = kernel.dtype if x.dtype.kind in "iub" else x.dtype
    x = wide(x.astype(dtype, copy=False))
    return dtype, x, wide(kernel).astype(x.dtype, copy=False)


def column_sums(rows: Array) -> Array:
    """Return the sums of the columns of a contiguous matrix.

    A product with ones takes a sixth of the time of `sum` for narrow matrices; in a compiled step
    it takes up to ten times as long.
    """
    if rows.dtype.char in "fd" and not hasattr(rows, "on_device"):
        return array_namespace(rows).ones(len(rows), rows.dtype) @ rows
    return rows.sum(axis=0)


def joined_rows(rows: Array, *vectors: Array) -> list[Array]:
    """Return a contiguous matrix with several rows joined to one, and vectors repeated to fit.

    >>> joined_rows(np.zeros((6, 4096)), np.zeros(4096))[0].shape
    (3, 8192)
    """
    length, width = rows.shape
    count = _largest_factor(length, max(1, _ROW // max(1, width)))
    if count == 1:
        return [rows, *vectors]
    tile = array_namespace(rows).tile
    return [rows.reshape(-1, count * width), *(tile(vector, count) for vector in vectors)]


@functools.lru_cache(maxsize=256)
def _largest_factor(number: int, limit: int) -> int:
    """Return the largest factor of a number up to a limit; 1 for the number 0."""
    return max(k for k in range(1, limit + 1) if number % k == 0) if number else 1


def in_place(activation: Callable[[Any], Any]) -> tuple[InPlace | None, Callable[[Any], Any]]:
    """Return the rule that an `Epilogue` applies in place, and the function to call afterwards."""
    for known, rule in IN_PLACE.items():  # A user's function may have no hash.
        if known is activation:
            return rule, linear
    return None, activation


class Epilogue:
    """The bias and the activation of a product, applied in place, and their derivatives.

    Args:
        rows: the product, a contiguous matrix, which becomes the result.
        bias: a vector that is added to each row, or None.
        rule: the activation, or None.
    """

    def __init__(self, rows: Array, bias: Array | None, rule: InPlace | None) -> None:
        self._rows, self._bias, self._rule = rows, bias, rule
        self._known: tuple[Any, Any] = (None, None)
        self._sums: tuple[Any, Any] = (None, None)

    @staticmethod
    def plain(y: Any, bias: Any, rule: InPlace | None) -> Any:
        """Return the result for a product, computed by NumPy functions, for second derivatives."""
        y = y if bias is None else y + bias
        return y if rule is None else rule.plain(y)

    def finish(self, rows: Array) -> None:
        """Add the bias to some rows of the product, and apply the activation."""
        joined, *added = joined_rows(rows, *(() if self._bias is None else (self._bias,)))
        for vector in added:
            joined += vector
        if self._rule is not None:
            self._rule.apply(joined)

    def before(self, g: Array) -> Array:
        """Return the gradient of the product, a contiguous matrix, from that of the result."""
        last, before = self._known
        if last is not g:
            rows = array_namespace(g).ascontiguousarray(wide(g).reshape(self._rows.shape))
            before = rows if self._rule is None else self._rule.before(rows, self._rows)
            self._known = g, before
        return before

    def part(self, g: Array, rows: slice) -> Array:
        """Return some rows of `before`, from the first to the last in turn, without the others.

        So their reader finds them in the cache. This also sums the gradient of the bias.
        """
        last, before = self._known
        if last is g or not g.flags.c_contiguous:
            return self.before(g)[rows]
        before = wide(g.reshape(self._rows.shape)[rows])
        if self._rule is not None:
            before = self._rule.before(before, self._rows[rows])
        sums = column_sums(before)
        self._sums = g, sums + self._sums[1] if rows.start else sums
        return before

    def of_bias(self, g: Array) -> Array:
        """Return the gradient of the bias."""
        last, sums = self._sums
        return sums if last is g else column_sums(self.before(g))


def check_range(indices: Array, length: int, what: str, advice: str) -> None:
    """Raise a `ValueError` unless indices are in ``[0, length)``; in a compiled step after it."""

    def error(low: int, high: int) -> ValueError:
        return ValueError(f"{what}, got {int(low)} to {int(high)}. {advice}")

    if not indices.size:
        return
    if hasattr(indices, "on_device"):
        current_trace().check_range(indices, 0, length, error)
        indices.is_checked = True
        return
    low, high = indices.min(), indices.max()
    if not 0 <= low <= high < length:
        raise error(low, high)


Product = Callable[[Array, Array | None], Array]


class KernelRule:
    """The rule of a kernel, which writes the gradient to the memory of an all-reduce.

    The product takes the gradient of the result, and an array for that of the kernel or None; it
    has the dtype of `used`, the kernel as it was multiplied.
    """

    __slots__ = ("_dtype", "_product", "_shape", "_used")

    def __init__(self, product: Product, kernel: Array, used: Array) -> None:
        self._product, self._shape = product, used.shape
        self._dtype, self._used = as_array(kernel).dtype, used.dtype

    def __call__(self, g: Array) -> Array:
        return self._product(g, None).astype(self._dtype, copy=False)

    def into(self, g: Array, memory: Memory) -> Array:
        """Return the gradient, in an array from `memory` unless that returns None."""
        if type(g) is not np.ndarray or self._dtype != self._used:
            return self(g)
        return self._product(g, memory(self._dtype, self._shape))


def dense(x: Any, kernel: Any, bias: Any, activation: Callable[[Any], Any]) -> Any:
    """Return ``activation(x @ kernel + bias)``; activations of `IN_PLACE` need no second array."""
    rule, after = in_place(activation)
    return after(_dense(x, kernel, bias, rule=rule))


def _plain_dense(x: Any, kernel: Any, bias: Any, *, rule: InPlace | None) -> Any:
    dtype = kernel.dtype if x.dtype.kind in "iub" else x.dtype
    return Epilogue.plain(x.astype(dtype) @ kernel.astype(dtype), bias, rule)


@fused(_plain_dense)
def _dense(x: Any, kernel: Any, bias: Any, *, rule: InPlace | None) -> Any:
    x = as_array(x)
    dtype, values, matrix = operands(x, as_array(kernel))
    rows = values.reshape(-1, x.shape[-1])
    y = rows @ matrix
    after = Epilogue(y, bias, rule)
    after.finish(y)

    def of_kernel(g: Array, out: Array | None) -> Array:
        return array_namespace(g).matmul(rows.T, after.before(g), out=out)

    def of_x(g: Array) -> Array:
        g = after.before(g)
        if len(g) * 4 <= len(matrix):  # OpenBLAS took 2/3 of the time for 64 rows and 512 or 4096.
            return (matrix @ g.T).T.reshape(x.shape)
        return (g @ matrix.T).reshape(x.shape)

    y = y.astype(dtype, copy=False).reshape(*x.shape[:-1], y.shape[-1])
    return y, [of_x, KernelRule(of_kernel, kernel, matrix), after.of_bias]


def _plain_cross_entropy(logits: Any, labels: Any) -> Any:
    logs = log_softmax(logits, axis=-1)
    if np.ndim(labels) < np.ndim(logits):
        return -np.take_along_axis(logs, labels[..., None].astype(np.int64), -1)[..., 0]
    return -np.sum(logs * labels, axis=-1)


@fused(_plain_cross_entropy)
def softmax_cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the cross-entropy of each example, from logits of shape ``(..., classes)``.

    The labels are integers of shape ``(...)``, or probabilities of the shape of `logits`.

    >>> softmax_cross_entropy(np.array([[0.0, 0.0]]), np.array([1])).round(4)
    array([0.6931])
    """
    logits, labels = as_array(logits), as_array(labels)
    xp, dtype = array_namespace(logits), logits.dtype
    shifted = wide(logits)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    exponentials = xp.exp(shifted)
    total = exponentials.sum(axis=-1, keepdims=True)
    logs = xp.log(total)
    is_index, classes = labels.ndim < logits.ndim, logits.shape[-1]
    if is_index:
        where = xp.arange(labels.size), labels.reshape(-1).astype(np.int64)
        losses = logs[..., 0] - shifted.reshape(-1, classes)[where].reshape(labels.shape)
    else:
        losses = ((logs - shifted) * labels).sum(axis=-1)

    def vjp(g: Array) -> Array:
        change = xp.ascontiguousarray(exponentials / total)
        if is_index:
            change.reshape(-1, classes)[where] -= 1
        else:
            change *= labels.sum(axis=-1, keepdims=True)
            change -= labels
        change *= g[..., None]
        return change

    def vjp_of_labels(g: Array) -> Array:
        return (logs - shifted) * g[..., None]

    return losses.astype(dtype, copy=False), [vjp, None if is_index else vjp_of_labels]


def sigmoid_cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the cross-entropy of two classes for each element, from logits."""
    # This avoids max(x, 0), whose derivative at 0 would be wrong.
    size = np.abs(logits)
    return logits * (0.5 - labels) + 0.5 * size + np.log1p(np.exp(-size))


@custom_gradient
def attention(
    query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False, kept: Any = None
) -> Any:
    """Return for each query the mean of the values, weighted by ``softmax(query . key / sqrt(d))``.

    Args:
        query: an array of shape ``(batch, queries, heads, d)``.
        key: an array of shape ``(batch, keys, heads, d)``.
        value: an array of shape ``(batch, keys, heads, width)``.
        mask: booleans that broadcast to ``(batch, heads, queries, keys)``, True where a query
            attends to a key; None for everywhere. The result of a query without keys is zeros.
        is_causal: whether queries ignore later keys.
        kept: factors of the probabilities for dropout, or None.

    >>> attention(np.zeros((1, 1, 1, 2)), np.zeros((1, 2, 1, 2)), np.eye(2).reshape(1, 2, 1, 2))
    array([[[[0.5, 0.5]]]])
    """
    dtype = query.dtype
    q, k, v = (wide(as_operand(array)).swapaxes(1, 2) for array in (query, key, value))
    xp, scale = array_namespace(q), 1 / math.sqrt(max(1, q.shape[-1]))
    weights = q @ k.swapaxes(-1, -2)
    weights *= scale
    for allowed in (mask, causal_mask(untrack(weights)) if is_causal else None):
        if allowed is not None:
            weights += xp.where(allowed, 0, -np.inf).astype(weights.dtype)
    limits = np.finfo(weights.dtype)
    if weights.shape[-1]:
        weights -= xp.maximum(weights.max(axis=-1, keepdims=True), limits.min)
    weights = xp.exp(weights, out=None if is_tracked(weights) else weights)
    weights /= xp.maximum(weights.sum(axis=-1, keepdims=True), limits.tiny)
    used = weights if kept is None else weights * kept
    y = _heads_last(xp, used, v)

    def joint(g: Array) -> Any:
        upstream = wide(g).swapaxes(1, 2)
        of_value = _heads_last(xp, used.swapaxes(-1, -2), upstream)
        change = upstream @ v.swapaxes(-1, -2)
        if kept is not None:
            change *= kept
        # The sum over keys of gradient times probability: the width has fewer terms.
        along = xp.einsum("bqhd,bqhd->bhq", wide(g), y)
        change -= along[..., None]
        change *= weights
        change *= scale
        of_query = _heads_last(xp, change, k)
        of_key = _heads_last(xp, change.swapaxes(-1, -2), q)
        return [of_query, of_key, of_value]

    return y.astype(dtype, copy=False), joint


def causal_mask(weights: Array) -> Array:
    """Return for each query whether it may attend to each key."""
    xp, shape = array_namespace(weights), weights.shape
    return xp.arange(shape[-1]) <= xp.arange(shape[-2])[:, None]


def _heads_last(xp: Any, matrices: Array, others: Array) -> Array:
    """Return products of shape ``(batch, heads, n, m)``, stored as ``(batch, n, heads, m)``."""
    if is_tracked(matrices) or is_tracked(others):
        return np.swapaxes(matrices @ others, 1, 2)
    batch, heads, length, _ = matrices.shape
    result = xp.empty((batch, length, heads, others.shape[-1]), matrices.dtype)
    xp.matmul(matrices, others, out=result.swapaxes(1, 2))
    return result


Total = Callable[[Array], Array]


def batch_normalization(
    x: Any, gamma: Any, beta: Any, *, epsilon: float, total: Total | None = None
) -> tuple[Any, Any, Any]:
    """Return an array normalised over all axes but the last, and its mean and variance.

    `total` adds up a vector over all replicas; with it, the statistics are those of all examples. A
    factor `gamma` or a summand `beta` of None is left out.

    >>> y, mean, variance = batch_normalization(np.array([[1.0], [3.0]]), None, None, epsilon=0.0)
    >>> y.ravel(), mean, variance
    (array([-1.,  1.]), array([2.]), array([1.]))
    """
    y, mean, variance = _batch_normalized(x, gamma, beta, epsilon=epsilon, total=total)
    return y, as_array(mean), as_array(variance)


def _plain_normalized(
    x: Any, gamma: Any, beta: Any, *, epsilon: float, total: Any = None, axes: Any = None, **of: Any
) -> Any:
    if total is not None:
        raise NotImplementedError("the statistics are those of all replicas")
    axes = tuple(range(x.ndim - 1)) if axes is None else axes
    mean = of["mean"] if of else np.mean(x, axes, keepdims=True)
    variance = of["variance"] if of else np.var(x, axes, keepdims=True)
    mean, variance = (as_operand(moment).astype(x.dtype) for moment in (mean, variance))
    y = (x - mean) / np.sqrt(variance + epsilon)
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


@fused(_plain_normalized)
def _batch_normalized(x: Any, gamma: Any, beta: Any, *, epsilon: float, total: Total | None) -> Any:
    x = as_array(x)
    rows = _rows(x)
    xp = array_namespace(rows)
    local = column_sums(rows) / max(1, len(rows))
    normalized = _affine(rows, None, -local)
    mean, variance, count = _moments(local, normalized, total)
    factor = 1 / xp.sqrt(variance + epsilon)
    (values, factors, shifts) = joined_rows(normalized, factor, (local - mean) * factor)
    values *= factors
    if total is not None:
        values += shifts
    y = _affine(normalized, gamma, beta).astype(x.dtype, copy=False).reshape(x.shape)

    def joint(gradients: Any) -> Any:
        g = _rows(gradients[0])
        product = g * normalized
        of_gamma, of_beta = column_sums(product), column_sums(g)
        sums = xp.concatenate([of_gamma, of_beta])
        if total is not None:
            sums = total(sums)
        scale = factor if gamma is None else factor * wide(gamma)
        of_normalized, of_mean = (-scale / count * part for part in xp.split(sums, 2))
        # The sum of three terms, in the buffer of the product.
        change, *vectors = joined_rows(product, of_normalized, of_mean, scale)
        xp.multiply(normalized.reshape(change.shape), vectors[0], out=change)
        change += vectors[1]
        change += g.reshape(change.shape) * vectors[2]
        return [product.reshape(x.shape), of_gamma, of_beta]

    return (y, mean, variance), joint


def masked_normalization(
    x: Any, gamma: Any, beta: Any, *, mask: Any, epsilon: float, total: Total | None = None
) -> tuple[Any, Any, Any]:
    """Return the result of `batch_normalization`, with statistics that leave out masked elements.

    The mask has the axes of `x` but the last.
    """
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"a mask of shape {mask.shape} does not fit an array of {x.shape}.")
    if total is not None:
        raise ValueError(
            "batch normalization with statistics of all replicas cannot leave out masked elements: "
            "remove the mask."
        )
    weights, axes = mask[..., None].astype(x.dtype), tuple(range(x.ndim - 1))
    count = np.maximum(weights.sum(), 1)
    mean = np.sum(x * weights, axes) / count
    variance = np.sum(np.square(x - mean) * weights, axes) / count
    y = _plain_normalized(x, gamma, beta, epsilon=epsilon, mean=mean, variance=variance)
    return y, untrack(mean), untrack(variance)


@fused(_plain_normalized)
def normalized_by(
    x: Any, gamma: Any, beta: Any, *, mean: Any, variance: Any, epsilon: float
) -> Any:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, with constant statistics."""
    x = as_array(x)
    rows = _rows(x)
    mean, variance = (as_array(each).astype(rows.dtype, copy=False) for each in (mean, variance))
    factor = 1 / np.sqrt(variance + epsilon)
    scale = factor if gamma is None else factor * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    y = _affine(rows, scale, shift).astype(x.dtype, copy=False).reshape(x.shape)
    return y, [
        lambda g: _affine(_rows(g), scale, None).reshape(x.shape),
        lambda g: column_sums(_rows(g) * _affine(rows, factor, -mean * factor)),
        lambda g: column_sums(_rows(g)),
    ]


@fused(functools.partial(_plain_normalized, axes=-1))
def layer_normalization(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Return an array normalised over its last axis, times `gamma`, plus `beta`.

    >>> layer_normalization(np.array([[1.0, 3.0]]), None, None, epsilon=0.0)
    array([[-1.,  1.]])
    """
    x = as_array(x)
    xp, rows = array_namespace(x), _rows(x)
    width = max(1, rows.shape[1])
    share = xp.full(rows.shape[1], 1 / width, rows.dtype)
    normalized = rows - (rows @ share)[:, None]
    variance = xp.einsum("ij,ij->i", normalized, normalized) / width
    factor = (1 / xp.sqrt(variance + epsilon))[:, None]
    normalized *= factor
    y = _affine(normalized, gamma, beta).astype(x.dtype, copy=False).reshape(x.shape)

    def of_x(g: Array) -> Array:
        change = _rows(g).copy() if gamma is None else _affine(_rows(g), gamma, None)
        along = xp.einsum("ij,ij->i", change, normalized) / width
        change -= (change @ share)[:, None]
        change -= normalized * along[:, None]
        change *= factor
        return change.reshape(x.shape)

    return y, [of_x, lambda g: column_sums(_rows(g) * normalized), lambda g: column_sums(_rows(g))]


def _moments(mean: Array, centred: Array, total: Total | None) -> tuple[Array, Array, Any]:
    """Return mean and variance of each column, and the number of rows, at least 1, of all."""
    count, squares = float(len(centred)), column_sums(centred * centred)
    if total is None:
        return mean, squares / max(1.0, count), max(1.0, count)
    # In float64, in which squares of a large mean do not cancel.
    xp, local = array_namespace(mean), mean.astype(np.float64)
    parts = [xp.full(1, count), count * local, squares + count * local * local]
    sums = total(xp.concatenate(parts))
    everyone = np.maximum(sums[0], 1)
    whole, second = xp.split(sums[1:] / everyone, 2)
    variance = xp.maximum(second - whole * whole, 0)
    return whole.astype(mean.dtype), variance.astype(mean.dtype), everyone.astype(mean.dtype)


def _rows(x: Array) -> Array:
    """Return a contiguous matrix of a floating dtype, with the last axis of an array."""
    x = wide(x)
    if x.dtype.kind in "iub":
        x = x.astype(np.float64)
    return array_namespace(x).ascontiguousarray(x.reshape(-1, x.shape[-1]))


def _affine(rows: Array, scale: Array | None, shift: Array | None) -> Array:
    """Return ``rows * scale + shift``, in a new array unless both are None, for 1 and 0."""
    vectors = [wide(vector) for vector in (scale, shift) if vector is not None]
    result, *vectors = joined_rows(rows, *vectors)
    if scale is not None:
        result = result * vectors[0]
    if shift is not None:
        result = np.add(result, vectors[-1], out=None if scale is None else result)
    return result.reshape(rows.shape)


_export(vars(), but="Epilogue KernelRule column_sums in_place joined_rows operands wide")
