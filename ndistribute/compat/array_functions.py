"""Functions of TensorFlow that take a line or two of NumPy, with TensorFlow's argument names.

The tables of names adapt them: the first argument is a tensor, and so is the result.
"""

# ruff: noqa: A002
from __future__ import annotations

import functools
import math
import re
from collections import namedtuple
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute.autodiff import Tracked
from ndistribute.autodiff.rules.placing import placed
from ndistribute.compat.scatters import inside
from ndistribute.compat.signatures import axis_of
from ndistribute.compat.tensors import convert_to_tensor
from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.graph import Symbolic
from ndistribute.graph.shapes import Shape
from ndistribute.mistakes import accepting
from ndistribute.models import nn
from ndistribute.tree import flatten, map_leaves, unflatten


def argsort(values: Any, axis: int = -1, direction: str = "ASCENDING", stable: bool = False) -> Any:
    """Return the indices that sort the elements; equal elements keep their order."""
    if direction not in ("ASCENDING", "DESCENDING"):
        raise ValueError(f"direction must be 'ASCENDING' or 'DESCENDING', got {direction!r}.")
    if direction == "ASCENDING":
        return np.argsort(values, axis, kind="stable").astype(np.int32)
    last = np.argsort(np.flip(values, axis), axis, kind="stable")
    return (values.shape[axis] - 1 - np.flip(last, axis)).astype(np.int32)


def sort(values: Any, axis: int = -1, direction: str = "ASCENDING") -> Any:
    """Return the elements in order."""
    return np.take_along_axis(values, argsort(values, axis, direction), axis)


TopK = namedtuple("TopK", "values indices")
Unique = namedtuple("Unique", "y idx")
UniqueWithCounts = namedtuple("UniqueWithCounts", "y idx count")


def top_k(input: Any, k: int = 1, sorted: bool = True) -> TopK:
    """Return the largest elements along the last axis, and their indices."""
    first = argsort(input, direction="DESCENDING")[..., :k]
    return TopK(np.take_along_axis(input, first, -1), first)


def as_text(bytes_or_text: Any, encoding: str = "utf-8") -> str:
    """Return bytes or text as text."""
    return bytes_or_text.decode(encoding) if isinstance(bytes_or_text, bytes) else bytes_or_text


def as_bytes(bytes_or_text: Any, encoding: str = "utf-8") -> bytes:
    """Return bytes or text as bytes."""
    return as_text(bytes_or_text, encoding).encode(encoding)


def boolean_mask(tensor: Any, mask: Any, axis: int = 0) -> Any:
    """Return the elements, or slices along an axis, where a mask is true."""
    mask = np.asarray(mask)
    merged = (*tensor.shape[:axis], -1, *tensor.shape[axis + mask.ndim :])
    return np.compress(mask.ravel(), np.reshape(tensor, merged), axis)


def gather_nd(params: Any, indices: Any, batch_dims: int = 0) -> Any:
    """Return the slices at the positions in the last axis of the indices."""
    indices = np.asarray(indices)
    batch = np.indices(indices.shape[:batch_dims] + (1,) * (indices.ndim - 1 - batch_dims))
    return params[(*batch[:batch_dims], *places(indices, params.shape[batch_dims:]))]


def places(indices: Any, shape: Any) -> tuple[Any, ...]:
    """Return a tuple of the indices for each axis, from the last axis of an array.

    Raises:
        InvalidArgumentError: an index is below 0, or not below the length of its axis.
    """
    columns = tuple(np.moveaxis(np.asarray(indices), -1, 0))
    for column, length in zip(columns, shape, strict=False):
        inside(column, length)
    return columns


def scatter_nd(indices: Any, updates: Any, shape: Any) -> Any:
    """Return zeros with updates added at some positions."""
    updates = convert_to_tensor(updates)
    return tensor_scatter_nd_add(np.zeros(axis_of(shape), updates.dtype), indices, updates)


def _scatter(write: Any, combine: Any = None) -> Any:
    """Return a function that writes to a copy, or that combines tracked arrays."""

    def call(tensor: Any, indices: Any, updates: Any) -> Any:
        index, values = places(indices, tensor.shape), convert_to_tensor(updates, tensor.dtype)
        if combine is not None and (isinstance(tensor, Tracked) or isinstance(values, Tracked)):
            return combine(tensor, placed(values, tensor.shape, index, combine is _replaced), index)
        result = np.array(tensor)
        write(result, index, np.asarray(values))
        return result

    return call


def _replaced(tensor: Any, updates: Any, index: Any) -> Any:
    written = np.zeros(tensor.shape, np.bool_)
    written[index] = True
    return np.where(written, updates, tensor)


tensor_scatter_nd_update = _scatter(np.ndarray.__setitem__, _replaced)
tensor_scatter_nd_add = _scatter(np.add.at, lambda tensor, updates, _: tensor + updates)
tensor_scatter_nd_sub = _scatter(np.subtract.at, lambda tensor, updates, _: tensor - updates)
tensor_scatter_nd_max = _scatter(np.maximum.at)
tensor_scatter_nd_min = _scatter(np.minimum.at)


def pad(tensor: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0) -> Any:
    """Return the tensor, padded with elements around it."""
    options = {"constant_values": constant_values} if mode.upper() == "CONSTANT" else {}
    return np.pad(tensor, np.asarray(paddings), mode.lower(), **options)  # type: ignore[call-overload]


def unique(x: Any, out_idx: Any = np.int32) -> Unique:
    """Return the distinct elements in order of first occurrence, and each element's index there."""
    return Unique(*unique_with_counts(x, out_idx)[:2])


def unique_with_counts(x: Any, out_idx: Any = np.int32) -> Any:
    """Return what `unique` does, and how often each element occurs."""
    if np.ndim(x) != 1:
        raise InvalidArgumentError(f"unique: expected one axis, got shape {np.shape(x)}.")
    _, first, inverse, counts = np.unique(x, True, True, True)
    order = np.argsort(first)
    rank = np.argsort(order).astype(out_idx)
    return UniqueWithCounts(x[first[order]], rank[inverse], counts[order].astype(out_idx))


def meshgrid(*args: Any, indexing: str = "xy") -> Any:
    """Return grids of coordinates."""
    return np.meshgrid(*map(convert_to_tensor, args), indexing=indexing)  # type: ignore[call-overload]


def linspace(start: Any, stop: Any, num: int, axis: int = 0) -> Any:
    """Return evenly spaced numbers."""
    first, last = np.asarray(start), np.asarray(stop)
    kind = first.dtype if first.dtype.kind == "f" else np.float64
    return np.linspace(first, last, int(num), axis=axis, dtype=kind)


def sequence_mask(lengths: Any, maxlen: Any = None, dtype: Any = np.bool_) -> Any:
    """Return for each length that many ones, followed by zeros."""
    count = int(np.max(lengths)) if maxlen is None else int(maxlen)
    return np.less(np.arange(count), np.asarray(lengths)[..., None]).astype(dtype)


def broadcast_to(input: Any, shape: Any) -> Any:
    """Return the tensor, broadcast to a shape."""
    return np.broadcast_to(input, tuple(np.asarray(shape)))


def ensure_shape(x: Any, shape: Any) -> Any:
    """Return the tensor, after a check of its shape."""
    Shape(x.shape).merged(Shape(shape))
    return x


@accepting("back_prop", "infer_shape", "parallel_iterations", "swap_memory")
def map_fn(fn: Any, elems: Any, dtype: Any = None, fn_output_signature: Any = None) -> Any:
    """Return the results of a function for the rows of a nest, stacked."""
    columns = map(convert_to_tensor, flatten(elems))
    results = [fn(unflatten(elems, row)) for row in zip(*columns, strict=True)]
    return map_leaves(lambda *leaves: np.stack(list(map(convert_to_tensor, leaves))), *results)


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None) -> Any:
    """Return the tensor, scaled down if its norm exceeds a bound."""
    squares = np.sum(np.square(t), axis=axis_of(axes), keepdims=axes is not None)
    some = np.greater(squares, 0)  # The square root has no derivative at 0.
    norm = np.where(some, np.sqrt(np.where(some, squares, np.ones_like(squares))), squares)
    return t * (clip_norm / np.maximum(norm, clip_norm)).astype(t.dtype)


def l2_normalize(x: Any, axis: Any = None, epsilon: float = 1e-12) -> Any:
    """Return the tensor divided by its norm."""
    squares = np.sum(np.square(x), axis=axis_of(axis), keepdims=True)
    return x / np.sqrt(np.maximum(squares, epsilon))


def moments(x: Any, axes: Any, shift: Any = None, keepdims: bool = False) -> Any:
    """Return the mean and the variance."""
    axes = axis_of(axes)
    return np.mean(x, axis=axes, keepdims=keepdims), np.var(x, axis=axes, keepdims=keepdims)


def batch_normalization(
    x: Any, mean: Any, variance: Any, offset: Any, scale: Any, variance_epsilon: float
) -> Any:
    """Return the tensor, normalised with a mean and a variance, then scaled and shifted."""
    factor = (1.0 if scale is None else scale) / np.sqrt(variance + variance_epsilon)
    return (x - mean) * factor + (0.0 if offset is None else offset)


def divide_no_nan(x: Any, y: Any) -> Any:
    """Return a quotient that is 0 where the divisor is 0."""
    y = convert_to_tensor(y)
    is_zero = np.equal(y, 0)
    return np.where(is_zero, np.zeros_like(x), x / np.where(is_zero, np.ones_like(y), y))


def saturate_cast(value: Any, dtype: Any) -> Any:
    """Return the elements in another dtype, limited to what it can hold."""
    old, new = np.dtype(value.dtype), np.dtype(dtype)
    if new.kind not in "iu":
        return value.astype(new)
    least, greatest = int(np.iinfo(new).min), int(np.iinfo(new).max)
    if old.kind == "f":  # A float may not be able to hold the largest integer exactly.
        top = old.type(greatest)
        greatest = int(top if int(top) <= greatest else np.nextafter(top, old.type(0)))
    else:
        least, greatest = max(least, int(np.iinfo(old).min)), min(greatest, int(np.iinfo(old).max))
    return np.clip(value, least, greatest).astype(new)


def squared_difference(x: Any, y: Any) -> Any:
    """Return the square of a difference."""
    return np.square(x - convert_to_tensor(y))


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
    rows = np.asarray(segment_ids)
    kept = rows >= 0  # TensorFlow drops rows with other numbers.
    return tensor_scatter_nd_add(totals, rows[kept][:, None], data[kept])


def count_nonzero(
    input: Any, axis: Any = None, keepdims: bool = False, dtype: Any = np.int64
) -> Any:
    """Return the number of elements that are not 0."""
    return np.sum(np.not_equal(input, 0), axis_of(axis), dtype, keepdims=keepdims)


def _cumulative(operation: Any, start: int) -> Any:
    """Return a function that combines, for each element, all elements up to it."""

    def call(x: Any, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Any:
        x = np.flip(x, axis) if reverse else x
        results = operation(x, axis, dtype=x.dtype)
        if exclusive:
            first = np.take(results, [0], axis) * 0 + start
            last = np.take(results, np.arange(x.shape[axis] - 1), axis)
            results = np.concatenate([first.astype(x.dtype), last], axis)
        return np.flip(results, axis) if reverse else results

    return call


cumsum, cumprod = _cumulative(np.cumsum, 0), _cumulative(np.cumprod, 1)


def rsqrt(x: Any) -> Any:
    """Return one divided by the square root."""
    return 1.0 / np.sqrt(x)


def log_sigmoid(x: Any) -> Any:
    """Return the logarithm of the sigmoid function."""
    return -np.logaddexp(np.zeros_like(x), -x)


def relu(features: Any) -> Any:
    """Return the elements, with 0 in place of negative ones."""
    return np.maximum(features, 0) if np.dtype(features.dtype).kind in "iu" else nn.relu(features)


def relu6(features: Any) -> Any:
    """Return the elements, limited to the range from 0 to 6."""
    return np.where(np.less(features, 6), relu(features), np.ones_like(features) * 6)


def selu(features: Any) -> Any:
    """Return the scaled exponential linear unit."""
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return np.where(features >= 0, scale * features, scale * alpha * np.expm1(features))


@nd.custom_gradient
def erf(x: Any) -> Any:
    """Return the error function."""
    value = np.vectorize(math.erf, otypes=[x.dtype])(x)
    return value, [lambda g: g * (2 / math.sqrt(math.pi) * np.exp(-x * x)).astype(x.dtype)]


def gelu(features: Any, approximate: bool = False) -> Any:
    """Return the elements times the normal distribution function, or an approximation of it."""
    if approximate:
        return nn.gelu(features)
    if isinstance(features, Symbolic):
        raise NotImplementedError(
            "tf.nn.gelu of a tensor of a graph is available only as an approximation: pass "
            "approximate=True."
        )
    return features * (0.5 * (1 + erf(features / math.sqrt(2))))


def svd(tensor: Any, full_matrices: bool = False, compute_uv: bool = True) -> Any:
    """Return singular values, and the left and right singular vectors in columns."""
    if not compute_uv:
        return np.linalg.svd(tensor, compute_uv=False)
    u, s, v = np.linalg.svd(tensor, full_matrices)
    return s, u, np.swapaxes(v, -1, -2)


def matrix_transpose(a: Any) -> Any:
    """Return matrices with rows and columns exchanged."""
    return np.swapaxes(a, -1, -2)


def diag(diagonal: Any) -> Any:
    """Return matrices with these diagonals."""
    return diagonal[..., None] * np.eye(diagonal.shape[-1], dtype=diagonal.dtype)


def diag_part(input: Any) -> Any:
    """Return the diagonals of matrices."""
    return np.diagonal(input, 0, -2, -1)


def to_number(input: Any, out_type: Any = np.float32) -> Any:
    """Return the numbers that texts contain."""
    return np.asarray(input).astype(out_type)


def text_length(input: Any, unit: str = "BYTE") -> Any:
    """Return the number of bytes, or of characters, of texts."""
    if unit not in ("BYTE", "UTF8_CHAR"):
        raise ValueError(f"unit must be 'BYTE' or 'UTF8_CHAR', got {unit!r}.")
    text = np.asarray(input)
    return np.strings.str_len(np.char.encode(text) if unit == "BYTE" else text).astype(np.int32)


def text_split(input: Any, sep: str | None = None, maxsplit: int = -1) -> Any:
    """Return the words of a single text; several texts would have different numbers of words."""
    if np.ndim(input):
        raise NotImplementedError(
            "tf.strings.split of several texts would return rows of different lengths: split each "
            "text."
        )
    return np.array(str(input).split(sep or None, maxsplit))


def text_join(inputs: Any, separator: str = "") -> Any:
    """Return texts, joined element by element."""
    texts = [np.asarray(convert_to_tensor(each)) for each in inputs]
    return functools.reduce(lambda a, b: np.strings.add(np.strings.add(a, separator), b), texts)


def regex_replace(input: Any, pattern: str, rewrite: str, replace_global: bool = True) -> Any:
    """Return text in which the matches of a regular expression are replaced."""
    replaced = functools.partial(re.sub, pattern, rewrite, count=0 if replace_global else 1)
    return np.vectorize(replaced, otypes=[str])(input)


def lower(input: Any, encoding: str = "") -> Any:
    """Return text in lower case: ASCII letters only, unless the encoding is UTF-8."""
    if encoding not in ("", "utf-8"):
        raise ValueError(f"encoding must be '' or 'utf-8', got {encoding!r}.")
    if encoding:
        return np.strings.lower(input)
    return np.char.decode(np.strings.lower(np.char.encode(np.asarray(input), "utf-8")), "utf-8")


def band_part(input: Any, num_lower: int, num_upper: int) -> Any:
    """Return matrices that are zero outside a band; a number below 0 keeps the whole side."""
    rows, columns = input.shape[-2:]
    offsets = np.arange(columns) - np.arange(rows)[:, None]
    kept = (num_upper < 0) | (offsets <= num_upper)
    return np.where(kept & ((num_lower < 0) | (-offsets <= num_lower)), input, np.zeros_like(input))


def segment_sum(data: Any, segment_ids: Any) -> Any:
    """Return the sums of the rows of each segment."""
    return unsorted_segment_sum(data, segment_ids, int(np.max(segment_ids)) + 1)


def softsign(features: Any) -> Any:
    """Return the elements divided by one plus their absolute values."""
    return features / (np.abs(features) + 1)


def to_categorical(x: Any, num_classes: int | None = None) -> Any:
    """Return labels as one-hot rows; a last axis of length 1 is dropped."""
    labels = np.asarray(x).astype(np.int64)
    if labels.ndim > 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    return np.eye(num_classes or int(labels.max()) + 1, dtype=np.float32)[labels]


def pad_sequences(
    sequences: Any,
    maxlen: int | None = None,
    dtype: Any = "int32",
    padding: str = "pre",
    truncating: str = "pre",
    value: Any = 0.0,
) -> Any:
    """Return an array of sequences, truncated and padded at one end to the same length."""
    for name, end in (("padding", padding), ("truncating", truncating)):
        if end not in ("pre", "post"):
            raise ValueError(f"pad_sequences: {name} must be 'pre' or 'post', got {end!r}.")
    arrays = [np.asarray(sequence) for sequence in sequences]
    length = max(map(len, arrays), default=0) if maxlen is None else maxlen
    inner = next((array.shape[1:] for array in arrays if len(array)), ())
    rows = np.full((len(arrays), length, *inner), value, dtype)
    for row, array in zip(rows, arrays, strict=True):
        cut = array[max(len(array) - length, 0) :] if truncating == "pre" else array[:length]
        start = length - len(cut) if padding == "pre" else 0
        row[start : start + len(cut)] = cut
    return rows
