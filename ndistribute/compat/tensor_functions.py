"""Functions of tensors that differ from NumPy's.

A pair has two meanings of a name: where operations of graphs are made, and for arrays.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph, models
from ndistribute.autodiff import Tracked
from ndistribute.compat import graphs
from ndistribute.compat.array_functions import clip_by_norm
from ndistribute.compat.programs import StandIn
from ndistribute.compat.random_numbers import generator
from ndistribute.compat.scatters import inside
from ndistribute.compat.signatures import (
    adapted,
    axis_of,
    binary,
    floating,
    is_symbolic,
    like,
    nothing,
    tensor_if_array,
    unary,
)
from ndistribute.compat.tensors import Tensor, as_tensor, convert_to_tensor, eager_variable
from ndistribute.devices import array_namespace
from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.graph import Symbolic
from ndistribute.indexed_slices import map_values
from ndistribute.models import activations, initializers, nn


def _is_whole(*values: Any) -> bool:
    return all(value.dtype is not None and np.dtype(value.dtype).kind in "iu" for value in values)


def eager_constant(value: Any, dtype: Any = None, shape: Any = None, name: Any = None) -> Any:
    """Return a tensor; a number with a shape fills the shape."""
    # This makes a copy, which does not change.
    array = np.array(convert_to_tensor(value, dtype)).view(Tensor)
    array.flags.writeable = False
    if shape is None:
        return array
    return array.reshape(shape) if array.size > 1 else np.full(shape, array).view(Tensor)


def _split(value: Any, n: Any, axis: Any = 0, num: Any = None) -> Any:
    value, axis = (axis, value) if isinstance(value, int) else (value, axis)
    value = convert_to_tensor(value)
    if not np.ndim(n):
        return np.split(value, n, axis)
    sizes = [int(size) for size in n]
    if -1 in sizes:
        sizes[sizes.index(-1)] = value.shape[axis] - sum(sizes) - 1
    if min(sizes) < 0 or sum(sizes) != value.shape[axis]:
        raise InvalidArgumentError(
            f"split: the sizes {[*n]} must be 0 or more, and add up to the length of the axis, "
            f"{value.shape[axis]}."
        )
    return np.split(value, np.cumsum(sizes)[:-1], axis)


def cross_entropy(loss: Any, *order: str, constant_labels: bool = False) -> Any:
    """Return a loss of labels and logits; before TensorFlow 1.0, logits came first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        options = dict(zip(order, args, strict=False)) | kwargs
        logits, labels = map(convert_to_tensor, (options["logits"], options["labels"]))
        if isinstance(labels, Tensor) and labels.dtype.kind in "bf":
            labels = labels.astype(logits.dtype or labels.dtype)
        axis = options.get("axis", options.get("dim", -1))
        if axis not in (None, -1):
            logits, labels = (np.moveaxis(array, axis, -1) for array in (logits, labels))
        if constant_labels and isinstance(labels, Symbolic):
            labels = labels.stop_gradient()
        return loss(logits, labels)

    return unary(call, 0, targets="labels")


class MovingAverages:
    """`tf.train.ExponentialMovingAverage` of variables: see that of `ndistribute.graph`."""

    def __init__(self, decay: float, num_updates: Any = None, *, name: str = "") -> None:
        self._decay, self._updates, self._averages = decay, num_updates, dict[int, Any]()
        self.name = name or "ExponentialMovingAverage"

    def apply(self, var_list: Any) -> None:
        """Move the averages towards the values; an average starts at the first value."""
        count = self._updates
        decay = self._decay if count is None else min(self._decay, (1 + count) / (10 + count))
        for variable in var_list:
            average = self.average(variable)
            if average is None:
                label = f"{variable.name.removesuffix(':0')}/{self.name}"
                average = eager_variable(variable.numpy(), False, label, aggregation="mean")
                self._averages[id(variable)] = variable, average
            average.assign_sub((average - variable) * np.asarray(1 - decay, variable.dtype))

    def average(self, var: Any) -> Any:
        """Return the average of a variable; None if there is none."""
        return self._averages.get(id(var), (var, None))[1]


ExponentialMovingAverage = graph.ExponentialMovingAverage, MovingAverages
TensorSpec = unary(lambda shape, dtype=np.float32: SimpleNamespace(shape=shape, dtype=dtype), 0)
_HINTS = "validate_shape", "caching_device"
Variable = (
    adapted(graph.Variable, *_HINTS, "shape", "synchronization", "aggregation"),
    adapted(eager_variable, *_HINTS),
)
add_n = unary(lambda inputs: functools.reduce(np.add, inputs), 0)
cast = unary(lambda tensor, dtype: tensor.astype(graphs.dtype_of(dtype)))
cond = (
    adapted(graph.cond, pred="condition", fn1="true_fn", fn2="false_fn"),
    lambda pred, true_fn, false_fn, name=None: (true_fn if pred else false_fn)(),
)
clip_by_value = unary(np.clip, clip_value_min="a_min", clip_value_max="a_max")
constant = graph.constant, eager_constant


div = unary(binary(lambda x, y: (np.floor_divide if _is_whole(x, y) else np.divide)(x, y)), 0)
bias_add = unary(lambda value, bias, data_format=None: np.add(value, like(bias, value)))


def _eye(num_rows: Any, num_columns: Any = None, batch_shape: Any = (), dtype: Any = None) -> Any:
    matrix = np.eye(num_rows, num_columns, dtype=dtype or np.float32)
    return np.tile(matrix, (*axis_of(batch_shape), 1, 1)) if len(batch_shape) else matrix


eye = unary(_eye, 0)


def _fill(dims: Any, value: Any) -> Any:
    if is_symbolic(dims, value):
        value = graph.as_tensor(convert_to_tensor(value))
        return np.broadcast_to(value, dims)
    return eager_constant(value, shape=dims)


def filled(number: int) -> Any:
    """Return a function that fills a shape, whose lengths may be tensors, with one number."""
    return unary(
        lambda shape, dtype=np.float32: _fill(shape, graphs.dtype_of(dtype).type(number)), 0
    )


fill, zeros, ones = unary(_fill, 0), filled(0), filled(1)


def _global_norm(t_list: Any) -> Any:
    parts = [getattr(part, "values", part) for part in t_list if part is not None]
    return tensor_if_array(np.sqrt(sum(np.sum(np.square(convert_to_tensor(p))) for p in parts)))


def _clip_by_global_norm(t_list: Any, clip_norm: Any, use_norm: Any = None) -> Any:
    if is_symbolic(*t_list):
        return graph.clip_by_global_norm(t_list, clip_norm, use_norm)
    t_list = [convert_to_tensor(part) if isinstance(part, list) else part for part in t_list]
    norm = _global_norm(t_list) if use_norm is None else use_norm
    scale = np.where(np.isfinite(norm), clip_norm / np.maximum(norm, clip_norm), np.nan)

    def scaled(array: Any) -> Any:
        array = convert_to_tensor(array)
        return array * scale.astype(array.dtype)

    return [None if part is None else map_values(scaled, part) for part in t_list], norm


clip_by_global_norm = adapted(_clip_by_global_norm, "name")
global_norm = adapted(
    lambda t_list: (graph.global_norm if is_symbolic(*t_list) else _global_norm)(t_list), "name"
)


def _called(convert: Any) -> Any:
    """Return a function that calls another one with tensors, and returns tensors of dtypes."""

    def call(
        func: Any = None,
        inp: Any = None,
        Tout: Any = None,  # noqa: N803
        stateful: bool = True,
    ) -> Any:
        if func is None:  # Here it decorates a function.
            return lambda func: lambda *inp: call(func, inp, Tout)
        result = func(*map(convert, inp))
        if isinstance(Tout, list | tuple):
            results = result if isinstance(result, list | tuple) else [result] * len(Tout[:1])
            return [convert_to_tensor(*pair) for pair in zip(results, Tout, strict=True)]
        return None if Tout is None or result is None else convert_to_tensor(result, Tout)

    return call


def _tensor_function(func: Any, inp: Any, *args: Any, **options: Any) -> Any:
    return graphs.py_func(lambda *args: func(*map(convert_to_tensor, args)), inp, *args, **options)


numpy_function = py_func = graphs.py_func, unary(_called(np.asarray), 0)
py_function = _tensor_function, unary(_called(convert_to_tensor), 0)


def _gather(params: Any, indices: Any, axis: Any = None, batch_dims: int = 0) -> Any:
    axis = batch_dims if axis is None else axis
    if isinstance(params, Symbolic) and not axis:
        return params[indices]
    if not batch_dims:
        indices = convert_to_tensor(indices)
        if isinstance(indices, Tensor):
            inside(indices, params.shape[axis])
        return np.take(params, indices, axis)
    pairs = zip(params, convert_to_tensor(indices), strict=True)
    return np.stack([_gather(x, i, axis - (axis > 0), batch_dims - 1) for x, i in pairs])


gather = unary(_gather, ids="indices")


def _embedding_lookup(
    params: Any, ids: Any, partition_strategy: str = "mod", max_norm: Any = None
) -> Any:
    """Return rows of a table in one part, so that both partition strategies agree."""
    tables = params if isinstance(params, list | tuple) else [params]
    if len(tables) != 1:
        raise ValueError(f"embedding_lookup needs one table, got {len(tables)}: concat them.")
    if partition_strategy not in ("mod", "div"):
        raise ValueError(f"partition_strategy must be 'mod' or 'div', got {partition_strategy!r}.")
    rows = gather(tables[0], ids)
    axes = range(1 - len(tables[0].shape), 0) if max_norm is not None else ()
    return clip_by_norm(rows, max_norm, axes) if axes else rows


embedding_lookup = adapted(_embedding_lookup, "name", "validate_indices")
expand_dims = unary(np.expand_dims, input="a", dim="axis")
identity = unary(lambda x: graph.identity(x) if isinstance(x, Symbolic) else x)


def _l2_loss(t: Any) -> Any:
    return np.sum(np.square(t)) / 2


l2_loss = unary(floating(_l2_loss))
leaky_relu = unary(activations.leaky_relu, alpha="negative_slope")


def _matmul(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    left, right = like(a, b), like(b, a)
    if not is_symbolic(left, right) and min(left.ndim, right.ndim) < 2:
        axes = f"{left.ndim} and {right.ndim}"
        raise InvalidArgumentError(f"matmul: the operands have {axes} axes: they need 2 or more.")
    left = np.swapaxes(left, -1, -2) if transpose_a else left
    return np.matmul(left, np.swapaxes(right, -1, -2) if transpose_b else right)


matmul = unary(_matmul, 0)
control_dependencies = graphs.control_dependencies, lambda control_inputs: nullcontext()
global_variables_initializer = graph.global_variables_initializer, nothing
group = graph.group, lambda *inputs, name=None: None
latest_checkpoint = graph.latest_checkpoint, models.latest_checkpoint
local_variables_initializer = graphs.local_variables_initializer, nothing
no_op = graphs.no_op, lambda name=None: None
glorot_uniform_initializer = graphs.glorot_uniform_initializer, initializers.GlorotUniform
random_normal_initializer = graphs.random_normal_initializer, initializers.RandomNormal
random_uniform_initializer = graphs.random_uniform_initializer, initializers.RandomUniform
truncated_normal_initializer = graphs.truncated_normal_initializer, initializers.TruncatedNormal


def _numbers(start: Any = 0, limit: Any = None, delta: Any = 1, dtype: Any = None) -> Any:
    start, limit = (0, start) if limit is None else (start, limit)
    if not is_symbolic(start, limit, delta):
        parts = [convert_to_tensor(part, dtype) for part in (start, limit, delta)]
        kind = max((part.dtype for part in parts), key=lambda x: (x.kind == "f", x.itemsize))
        return np.arange(*(part.item() for part in parts)).astype(kind)
    count = np.maximum(np.ceil((limit - start) / delta), 0).astype(np.int64)
    unit: Any = graph.as_tensor(np.int32(1))
    values = start + (np.cumsum(np.broadcast_to(unit, [count])).astype(np.int32) - 1) * delta
    return values if dtype is None else values.astype(dtype)


numbers = unary(_numbers, 0)


def _one_hot(
    indices: Any,
    depth: Any,
    on_value: Any = None,
    off_value: Any = None,
    axis: Any = -1,
    dtype: Any = None,
) -> Any:
    if isinstance(on_value, type | np.dtype):  # As in earlier versions, the dtype comes third.
        on_value, dtype = None, on_value
    marks = [value for value in (on_value, off_value) if value is not None]
    if dtype is None:
        dtype = getattr(convert_to_tensor(marks[0]), "dtype", None) if marks else np.float32
    rows = np.equal(indices[..., None], array_namespace(indices).arange(depth)).astype(dtype)
    if marks:
        low = 0 if off_value is None else off_value
        rows = (rows * ((1 if on_value is None else on_value) - low) + low).astype(dtype)
    return rows if axis in (None, -1) else np.moveaxis(rows, -1, axis)


one_hot = unary(_one_hot)
_LABELS_FIRST, _LOGITS_FIRST = ("labels", "logits"), ("logits", "labels")
sigmoid_loss = cross_entropy(nn.sigmoid_cross_entropy, *_LABELS_FIRST)
softmax_loss = cross_entropy(nn.softmax_cross_entropy, *_LABELS_FIRST)
sigmoid_loss_v1 = cross_entropy(nn.sigmoid_cross_entropy, *_LOGITS_FIRST)
sparse_softmax_loss_v1 = cross_entropy(nn.softmax_cross_entropy, *_LOGITS_FIRST)
softmax_loss_v1 = cross_entropy(nn.softmax_cross_entropy, *_LOGITS_FIRST, constant_labels=True)


def _norm(tensor: Any, ord: Any = "euclidean", axis: Any = None, keepdims: Any = False) -> Any:
    axes, kind = axis_of(axis), None if ord == "euclidean" else ord
    if axes is None and kind is not None:  # The norm of all elements as a vector.
        shape = (1,) * len(tensor.shape) if keepdims else ()
        return np.reshape(np.linalg.norm(np.reshape(tensor, (-1,)), kind), shape)
    return np.linalg.norm(tensor, kind, axes, keepdims)


norm = unary(floating(_norm), keep_dims="keepdims")


def _slice(x: Any, begin: Any, size: Any) -> Any:
    def end(length: Any, first: Any, count: Any) -> Any:
        if isinstance(count, Symbolic):
            return np.where(np.equal(count, -1), length, first + count)
        return None if count == -1 else first + count

    lengths, parts = np.shape(x), enumerate(zip(begin, size, strict=True))
    return x[tuple(slice(first, end(lengths[k], first, count)) for k, (first, count) in parts)]


slice_ = unary(_slice, input_="x")
squeeze = unary(
    lambda input_, axis=None: np.squeeze(input_, tuple(axis) if isinstance(axis, list) else axis),
    squeeze_dims="axis",
)
split = unary(_split, 0, num_or_size_splits="n", num_split="n", split_dim="axis")
tile = unary(np.tile, multiples="reps")
unstack = unary(
    lambda value, num=None, axis=0: [
        np.take(value, k, axis) for k in range(num or value.shape[axis])
    ]
)
transpose = unary(
    lambda a, axes=None, conjugate=False: np.transpose(np.conj(a) if conjugate else a, axes),
    perm="axes",
)


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None and y is None:
        return np.argwhere(condition)
    x, y = like(x, y), like(y, x)
    axes = [len(getattr(array, "shape", None) or ()) for array in (condition, x)]
    if is_symbolic(condition, x, y) and axes[0] == 1 < axes[1]:  # Here it chooses rows.
        condition = np.reshape(condition, (-1, *(1,) * (axes[1] - 1)))
    return np.where(condition, x, y)


where = unary(_where)


def _dropout(x: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
    if is_symbolic(x, rate):
        return graphs.dropout(x, None, noise_shape, seed, rate)
    drawn = generator(seed).random(x.shape if noise_shape is None else noise_shape)
    return np.where(drawn < rate, np.zeros_like(x), x / np.asarray(1 - rate, x.dtype))


def _dropout_v1(
    x: Any, keep_prob: Any = None, noise_shape: Any = None, seed: Any = None, rate: Any = None
) -> Any:
    return _dropout(x, 1 - keep_prob if rate is None else rate, noise_shape, seed)


dropout_v1 = unary(graphs.dropout, 0), unary(_dropout_v1)
dropout = unary(_dropout)
complex_number = unary(lambda real, imag: np.add(real, 1j * like(imag, real)))
in_top_k = unary(lambda targets, predictions, k: graphs.in_top_k(predictions, targets, k), 2)


def is_tensor(x: Any) -> bool:
    """Return whether a value is a tensor or a variable."""
    return isinstance(x, Tensor | Tracked | Symbolic | nd.Variable)


def asserting(compare: Any) -> Any:
    """Return a function that raises `InvalidArgumentError` unless a comparison holds everywhere."""

    def check(x: Any, y: Any = 0, *args: Any, message: Any = None, **options: Any) -> None:
        if compare is np.isclose and not args:
            dtype = getattr(convert_to_tensor(x), "dtype", np.dtype(np.float32))
            close = 10 * float(np.finfo(dtype).eps)
            options = {"rtol": close, "atol": close} | options
        if not np.all(compare(np.asarray(x), np.asarray(y), *args, **options)):
            why = f"{compare.__name__} is false for {x!r} and {y!r}"
            raise InvalidArgumentError(why if message is None else f"{message}: {why}")

    return adapted(check, "name", "summarize", "data")


def check_true(condition: Any, data: Any = (), summarize: Any = None, name: Any = None) -> None:
    """Raise `InvalidArgumentError` with some data unless a condition holds everywhere."""
    if not np.all(condition):
        raise InvalidArgumentError(f"assertion failed: {list(map(str, data))}")


def check_numerics(tensor: Any, message: str = "") -> Any:
    """Return a tensor, after checking that all its numbers are finite."""
    if not np.all(np.isfinite(tensor)):
        raise InvalidArgumentError(f"{message} : the tensor has infinite values, or NaN.")
    return tensor


def custom_gradient(f: Any) -> Any:
    """Return a function that defines its own derivative; see `nd.custom_gradient`."""

    @functools.wraps(f)
    def call(*args: Any, **options: Any) -> Any:
        result, grad = f(*map(as_tensor, args), **options)

        def gradients(*upstream: Any) -> Any:
            results = grad(*map(as_tensor, upstream))
            return list(results) if isinstance(results, list | tuple) else [results]

        return result, gradients

    return nd.custom_gradient(call)


def _slices(cls: type, values: Any, indices: Any, dense_shape: Any = None) -> Any:
    """Return rows of an array; its shape need not be known."""
    values, rows = (np.asarray(convert_to_tensor(each)) for each in (values, indices))
    return nd.IndexedSlices(values, rows, dense_shape)


IndexedSlices = StandIn("IndexedSlices", (), {"__new__": _slices, "native": nd.IndexedSlices})


def set_value(x: Any, value: Any) -> None:
    """Set the value of a variable, or of an optimizer's rate."""
    x.assign(value)


def get_value(x: Any) -> Any:
    """Return the value of a variable or tensor as a NumPy array; a number unchanged."""
    return x.numpy() if hasattr(x, "numpy") else x


def _get_variable(
    name: str,
    shape: Any = None,
    dtype: Any = np.float32,
    initializer: Any = None,
    trainable: bool | None = None,
    **options: Any,
) -> Any:
    """Return a new variable: variables with the same name are not shared."""
    start = initializers.get("glorot_uniform" if initializer is None else initializer)
    if callable(start):
        start = (start() if isinstance(start, type) else start)(tuple(axis_of(shape)), dtype)
    return eager_variable(start, trainable, name, **options)


get_variable = graph.get_variable, _get_variable


def _global_step() -> Any:
    """Return the variable that counts steps outside of graphs, one for each default graph."""
    owner = graph.get_default_graph()
    if not owner.get_collection("step_of_arrays"):
        step = eager_variable(np.int64(0), False, "global_step")
        owner.add_to_collection("step_of_arrays", step)
    return owner.get_collection("step_of_arrays")[0]


global_step = graph.get_or_create_global_step, _global_step


class TensorArray:
    """A list of tensors by index, which `stack` joins."""

    def __init__(self, dtype: Any, size: Any = 0, dynamic_size: bool = False, **hints: Any) -> None:
        self._dtype = dtype
        self._items: list[Any] = [None] * int(size)

    def write(self, index: Any, value: Any) -> TensorArray:
        """Set a tensor, and return the array."""
        missing = int(index) + 1 - len(self._items)
        self._items += [None] * missing
        self._items[int(index)] = convert_to_tensor(value, self._dtype)
        return self

    def unstack(self, value: Any) -> TensorArray:
        """Set the rows of a tensor, and return the array."""
        self._items = list(convert_to_tensor(value, self._dtype))
        return self

    def read(self, index: Any) -> Any:
        """Return a tensor."""
        return self._items[int(index)]

    def size(self) -> int:
        """Return the number of tensors."""
        return len(self._items)

    def stack(self) -> Any:
        """Return all tensors, stacked into one."""
        return np.stack(self._whole())

    def concat(self) -> Any:
        """Return the rows of all tensors, joined into one."""
        return np.concatenate(self._whole())

    def _whole(self) -> list[Any]:
        """Return the items; items that were not written are zeros of the same shape."""
        known = next((item for item in self._items if item is not None), None)
        if known is None:
            raise InvalidArgumentError("TensorArray: no item has been written.")
        return [np.zeros_like(known) if item is None else item for item in self._items]
