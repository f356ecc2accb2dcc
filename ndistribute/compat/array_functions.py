"""Functions of TensorFlow's that are a line or two of NumPy, with the names of its arguments.

The tables of names adapt them: the first argument is a tensor, and so is the result.
"""

# ruff: noqa: A002
from __future__ import annotations

import math
from typing import Any

import numpy as np

from ndistribute.compat.signatures import axis_of
from ndistribute.compat.tensors import convert_to_tensor
from ndistribute.graph.shapes import Shape
from ndistribute.tree import flatten, map_leaves, unflatten


def argsort(values: Any, axis: int = -1, direction: str = "ASCENDING", stable: bool = False) -> Any:
    """Return the order of the elements."""
    keys = values if direction == "ASCENDING" else -values
    return np.argsort(keys, axis, kind="stable").astype(np.int32)


def sort(values: Any, axis: int = -1, direction: str = "ASCENDING") -> Any:
    """Return the elements in order."""
    return np.take_along_axis(values, argsort(values, axis, direction), axis)


def top_k(input: Any, k: int = 1, sorted: bool = True) -> Any:
    """Return the greatest elements of the last axis, and their places."""
    places = argsort(input, direction="DESCENDING")[..., :k]
    return np.take_along_axis(input, places, -1), places


def boolean_mask(tensor: Any, mask: Any, axis: int = 0) -> Any:
    """Return the elements, or slices along an axis, where a mask is true."""
    mask = np.asarray(mask)
    merged = (*tensor.shape[:axis], -1, *tensor.shape[axis + mask.ndim :])
    return np.compress(mask.ravel(), np.reshape(tensor, merged), axis)


def gather_nd(params: Any, indices: Any, batch_dims: int = 0) -> Any:
    """Return slices at the places that the last axis of the indices names."""
    indices = np.asarray(indices)
    batch = np.indices(indices.shape[:batch_dims] + (1,) * (indices.ndim - 1 - batch_dims))
    return params[(*batch[:batch_dims], *np.moveaxis(indices, -1, 0))]


def scatter_nd(indices: Any, updates: Any, shape: Any) -> Any:
    """Return zeros with updates added at places."""
    updates = convert_to_tensor(updates)
    return tensor_scatter_nd_add(np.zeros(shape, updates.dtype), indices, updates)


def _scatter(write: Any) -> Any:
    def call(tensor: Any, indices: Any, updates: Any) -> Any:
        result = np.array(tensor)
        write(result, tuple(np.moveaxis(np.asarray(indices), -1, 0)), np.asarray(updates))
        return result

    return call


tensor_scatter_nd_update = _scatter(np.ndarray.__setitem__)
tensor_scatter_nd_add = _scatter(np.add.at)
tensor_scatter_nd_sub = _scatter(np.subtract.at)
tensor_scatter_nd_max = _scatter(np.maximum.at)
tensor_scatter_nd_min = _scatter(np.minimum.at)


def pad(tensor: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0) -> Any:
    """Return the tensor with more elements around it."""
    options = {"constant_values": constant_values} if mode.upper() == "CONSTANT" else {}
    return np.pad(tensor, np.asarray(paddings), mode.lower(), **options)  # type: ignore[call-overload]


def unique(x: Any, out_idx: Any = np.int32) -> Any:
    """Return the different elements in the order of the first of each, and the place of each."""
    values, places, _ = unique_with_counts(x, out_idx)
    return values, places


def unique_with_counts(x: Any, out_idx: Any = np.int32) -> Any:
    """Return what `unique` does, and how often each element occurs."""
    _, first, inverse, counts = np.unique(x, True, True, True)
    order = np.argsort(first)
    rank = np.argsort(order).astype(out_idx)
    return x[first[order]], rank[inverse], counts[order].astype(out_idx)


def meshgrid(*args: Any, indexing: str = "xy") -> Any:
    """Return grids of coordinates."""
    return np.meshgrid(*map(convert_to_tensor, args), indexing=indexing)  # type: ignore[call-overload]


def linspace(start: Any, stop: Any, num: int, axis: int = 0) -> Any:
    """Return numbers at equal distances."""
    first, last = np.asarray(start), np.asarray(stop)
    kind = first.dtype if first.dtype.kind == "f" else np.float64
    return np.linspace(first, last, int(num), axis=axis, dtype=kind)


def repeat(input: Any, repeats: Any, axis: Any = None) -> Any:
    """Return the tensor with each element repeated."""
    return np.repeat(input, repeats, axis)


def reverse(tensor: Any, axis: Any) -> Any:
    """Return the tensor with axes reversed."""
    return np.flip(tensor, axis_of(axis))


def roll(input: Any, shift: Any, axis: Any) -> Any:
    """Return the tensor with its elements moved along axes."""
    return np.roll(input, axis_of(shift), axis_of(axis))


def sequence_mask(lengths: Any, maxlen: Any = None, dtype: Any = np.bool_) -> Any:
    """Return for each length as many ones, and then zeros."""
    count = int(np.max(lengths)) if maxlen is None else int(maxlen)
    return np.less(np.arange(count), np.asarray(lengths)[..., None]).astype(dtype)


def searchsorted(sorted_sequence: Any, values: Any, side: str = "left") -> Any:
    """Return where values belong in a sorted sequence."""
    return np.searchsorted(sorted_sequence, values, side).astype(np.int32)  # type: ignore[call-overload]


def broadcast_to(input: Any, shape: Any) -> Any:
    """Return the tensor with a greater shape."""
    return np.broadcast_to(input, tuple(np.asarray(shape)))


def ensure_shape(x: Any, shape: Any) -> Any:
    """Return the tensor, after a check of its shape."""
    Shape(x.shape).merged(Shape(shape))
    return x


def map_fn(fn: Any, elems: Any, dtype: Any = None, fn_output_signature: Any = None) -> Any:
    """Return the results of a function for the rows of a nest, stacked."""
    columns = map(convert_to_tensor, flatten(elems))
    results = [fn(unflatten(elems, row)) for row in zip(*columns, strict=True)]
    return map_leaves(lambda *leaves: np.stack(list(map(convert_to_tensor, leaves))), *results)


def foldl(fn: Any, elems: Any, initializer: Any = None) -> Any:
    """Return what a function makes of a value and of each row in turn."""
    rows = iter(elems)
    value = next(rows) if initializer is None else convert_to_tensor(initializer)
    for row in rows:
        value = fn(value, row)
    return value


def scan(fn: Any, elems: Any, initializer: Any = None) -> Any:
    """Return all values of `foldl`, stacked."""
    values = [elems[0] if initializer is None else convert_to_tensor(initializer)]
    for row in elems[1:] if initializer is None else elems:
        values.append(fn(values[-1], row))
    return np.stack(values if initializer is None else values[1:])


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None) -> Any:
    """Return the tensor, scaled down if its norm is greater than a bound."""
    norm = np.sqrt(np.sum(np.square(t), axis=axis_of(axes), keepdims=axes is not None))
    return t * (clip_norm / np.maximum(norm, clip_norm)).astype(t.dtype)


def l2_normalize(x: Any, axis: Any = None, epsilon: float = 1e-12) -> Any:
    """Return the tensor divided by its norm."""
    squares = np.sum(np.square(x), axis=axis_of(axis), keepdims=True)
    return x / np.sqrt(np.maximum(squares, epsilon))


def euclidean_norm(input_tensor: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the square root of the sum of the squares."""
    return np.sqrt(np.sum(np.square(input_tensor), axis=axis_of(axis), keepdims=keepdims))


def moments(x: Any, axes: Any, shift: Any = None, keepdims: bool = False) -> Any:
    """Return the mean and the variance."""
    axes = axis_of(axes)
    return np.mean(x, axis=axes, keepdims=keepdims), np.var(x, axis=axes, keepdims=keepdims)


def batch_normalization(
    x: Any, mean: Any, variance: Any, offset: Any, scale: Any, variance_epsilon: float
) -> Any:
    """Return the tensor with a mean and a variance removed, scaled and moved."""
    factor = (1.0 if scale is None else scale) / np.sqrt(variance + variance_epsilon)
    return (x - mean) * factor + (0.0 if offset is None else offset)


def divide_no_nan(x: Any, y: Any) -> Any:
    """Return a quotient that is 0 where the divisor is 0."""
    y = convert_to_tensor(y)
    is_zero = np.equal(y, 0)
    return np.where(is_zero, np.zeros_like(x), x / np.where(is_zero, np.ones_like(y), y))


def squared_difference(x: Any, y: Any) -> Any:
    """Return the square of a difference."""
    return np.square(x - convert_to_tensor(y))


def bincount(arr: Any, weights: Any = None, minlength: Any = None, maxlength: Any = None) -> Any:
    """Return how often each number occurs, or the sums of their weights."""
    counts = np.bincount(np.ravel(arr), weights, minlength or 0)[:maxlength]
    return counts.astype(np.int32 if weights is None else convert_to_tensor(weights).dtype)


def confusion_matrix(
    labels: Any, predictions: Any, num_classes: Any = None, weights: Any = 1, dtype: Any = np.int32
) -> Any:
    """Return how often each class was predicted for each label."""
    predictions = np.asarray(predictions)
    size = num_classes or int(max(np.max(labels), np.max(predictions))) + 1
    table = np.zeros((size, size), dtype)
    np.add.at(table, (labels, predictions), weights)
    return table


def unsorted_segment_sum(data: Any, segment_ids: Any, num_segments: int) -> Any:
    """Return the sums of the rows of each segment."""
    totals = np.zeros((int(num_segments), *data.shape[1:]), data.dtype)
    return tensor_scatter_nd_add(totals, np.asarray(segment_ids)[:, None], data)


def count_nonzero(
    input: Any, axis: Any = None, keepdims: bool = False, dtype: Any = np.int64
) -> Any:
    """Return how many elements are not 0."""
    return np.sum(np.not_equal(input, 0), axis_of(axis), dtype, keepdims=keepdims)


def cumprod(x: Any, axis: int = 0) -> Any:
    """Return the products of all elements up to each."""
    return np.cumprod(x, axis, dtype=x.dtype)


def rsqrt(x: Any) -> Any:
    """Return one divided by the square root."""
    return 1.0 / np.sqrt(x)


def log_sigmoid(x: Any) -> Any:
    """Return the logarithm of the sigmoid function."""
    return -np.logaddexp(0, -x).astype(x.dtype)


def relu6(features: Any) -> Any:
    """Return the elements, limited to 0 and 6."""
    return np.clip(features, 0, 6)


def selu(features: Any) -> Any:
    """Return the scaled exponential linear unit."""
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return np.where(features > 0, scale * features, scale * alpha * np.expm1(features))


def erf(x: Any) -> Any:
    """Return the error function."""
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


def svd(tensor: Any, full_matrices: bool = False, compute_uv: bool = True) -> Any:
    """Return singular values, and the left and right singular vectors in columns."""
    if not compute_uv:
        return np.linalg.svd(tensor, compute_uv=False)
    u, s, v = np.linalg.svd(tensor, full_matrices)
    return s, u, np.swapaxes(v, -1, -2)


def matvec(a: Any, b: Any, transpose_a: bool = False) -> Any:
    """Return products of matrices and vectors."""
    a = np.swapaxes(a, -1, -2) if transpose_a else a
    return np.matmul(a, convert_to_tensor(b)[..., None])[..., 0]


def matrix_transpose(a: Any) -> Any:
    """Return matrices with rows and columns exchanged."""
    return np.swapaxes(a, -1, -2)


def diag(diagonal: Any) -> Any:
    """Return matrices with diagonals."""
    return diagonal[..., None] * np.eye(diagonal.shape[-1], dtype=diagonal.dtype)


def diag_part(input: Any) -> Any:
    """Return the diagonals of matrices."""
    return np.diagonal(input, 0, -2, -1)


def normalize(tensor: Any, ord: Any = "euclidean", axis: Any = None) -> Any:
    """Return the tensor divided by its norm, and the norm."""
    kind = None if ord == "euclidean" else ord
    size = np.linalg.norm(tensor, kind, axis_of(axis), keepdims=True)
    return tensor / size, size


def case(pred_fn_pairs: Any, default: Any = None) -> Any:
    """Return the result of the first function whose condition is true."""
    return next((fn for condition, fn in pred_fn_pairs if condition), default)()


def switch_case(branch_index: Any, branch_fns: Any, default: Any = None) -> Any:
    """Return the result of the function of a number."""
    branches = dict(branch_fns if isinstance(branch_fns, dict) else enumerate(branch_fns))
    return branches.get(int(branch_index), default or [*branches.values()][-1])()


def to_number(input: Any, out_type: Any = np.float32) -> Any:
    """Return the numbers that text has."""
    return np.asarray(input).astype(out_type)


def band_part(input: Any, num_lower: int, num_upper: int) -> Any:
    """Return matrices with zeros but for some diagonals; below 0: all on this side."""
    rows, columns = input.shape[-2:]
    offsets = np.arange(columns) - np.arange(rows)[:, None]
    kept = (num_upper < 0) | (offsets <= num_upper)
    return np.where(kept & ((num_lower < 0) | (-offsets <= num_lower)), input, np.zeros_like(input))


def segment_sum(data: Any, segment_ids: Any) -> Any:
    """Return the sums of the rows of each segment."""
    return unsorted_segment_sum(data, segment_ids, int(np.max(segment_ids)) + 1)


def polyval(coeffs: Any, x: Any) -> Any:
    """Return the value of a polynomial, whose first coefficient is that of the highest power."""
    return np.polyval([np.asarray(each) for each in coeffs], convert_to_tensor(x))


def softsign(features: Any) -> Any:
    """Return the elements divided by one more than their size."""
    return features / (np.abs(features) + 1)


def lstsq(matrix: Any, rhs: Any) -> Any:
    """Return the solutions of least squares."""
    return np.linalg.lstsq(matrix, np.asarray(rhs, matrix.dtype), rcond=None)[0]


def logdet(matrix: Any) -> Any:
    """Return the logarithms of determinants."""
    return np.linalg.slogdet(matrix)[1]
