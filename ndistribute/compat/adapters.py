"""What stands between names of TensorFlow and this package where arguments or results differ.

Lists and numbers become float32 and int32 tensors, which are NumPy arrays with a method `numpy`;
tracked arrays stay tracked. `tf.py` and `namespaces.py` refer to the names here.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph, models
from ndistribute.autodiff import Tracked
from ndistribute.compat import graphs
from ndistribute.context import current_seed
from ndistribute.data.iterator import ElementIterator
from ndistribute.devices import array_namespace, as_array
from ndistribute.graph.graph import Symbolic
from ndistribute.graph.shapes import Shape, narrowed
from ndistribute.models import activations, layers, nn
from ndistribute.tree import map_leaves


def adapted(function: Any, *ignored: str, operands: int = 0, **renamed: str) -> Any:
    """Return a function with TensorFlow's keywords, whose operands and result are tensors.

    If the keyword ``name`` is among the ignored ones, it names the result in a graph.
    """

    @functools.wraps(function, ["__name__"])
    def call(*args: Any, **kwargs: Any) -> Any:
        options = {renamed.get(key, key): kwargs[key] for key in kwargs if key not in ignored}
        if operands and not args:
            args = (options.pop(next(iter(options))),)
        tensors = map(convert_to_tensor, args[:operands])
        result = tensor_if_array(function(*tensors, *args[operands:], **options))
        if "name" in ignored and kwargs.get("name") and isinstance(result, Symbolic):
            return graph.identity(result, kwargs["name"])
        return result

    return call


def unary(operation: Any, operands: int = 1, **renamed: str) -> Any:
    """Return an operation on tensors, which may be given a name."""
    return adapted(operation, "name", operands=operands, **renamed)


def subclass(kind: Any, *ignored: str, **attributes: Any) -> Any:
    """Return a subclass with more attributes, whose constructor ignores some keywords."""
    init = {"__init__": adapted(kind.__init__, *ignored)} if ignored else {}
    return type(kind.__name__, (kind,), {**init, **attributes})


def _is_whole(*values: Any) -> bool:
    return all(value.dtype is not None and np.dtype(value.dtype).kind in "iu" for value in values)


class Tensor(np.ndarray[Any, Any]):
    """A NumPy array with the method `numpy`."""

    numpy = np.ndarray.__array__

    def get_shape(self) -> Shape:
        """Return the shape."""
        return Shape(self.shape)


class Scalar(float):
    """A number with the method `numpy`."""

    def numpy(self) -> Any:
        return np.float64(self)


def convert_to_tensor(value: Any, dtype: Any = None, name: Any = None) -> Any:
    """Return a tensor; floats and integers of Python become float32 and int32."""
    if isinstance(value, Symbolic):
        return value if dtype is None else value.astype(dtype)
    if isinstance(value, Tracked | nd.Variable):
        value = value if isinstance(value, Tracked) else value.tracked_value()
        return value if dtype is None else value.astype(dtype)
    array = as_array(narrowed(value) if dtype is None else value)
    array = array if dtype is None else array.astype(dtype)
    return array.view(Tensor) if type(array) is np.ndarray else array


def tensor_if_array(value: Any) -> Any:
    """Return arrays, and numbers with a fraction, with the method `numpy`; others unchanged."""
    if isinstance(value, np.generic | np.ndarray):
        return convert_to_tensor(value)
    return Scalar(value) if isinstance(value, float) else value


def tensors(nest: Any) -> Any:
    """Return tensors for numbers and lists of numbers, in tuples and dicts."""
    if isinstance(nest, tuple):
        return tuple(map(tensors, nest))
    if isinstance(nest, dict):
        return {key: tensors(value) for key, value in nest.items()}
    return convert_to_tensor(nest)


def eager_constant(value: Any, dtype: Any = None, shape: Any = None, name: Any = None) -> Any:
    """Return a tensor, of one value if a shape is given for a number."""
    array = convert_to_tensor(value, dtype)
    if shape is None:
        return array
    return array.reshape(shape) if array.size > 1 else np.full(shape, array).view(Tensor)


def eager_variable(initial_value: Any, *args: Any, dtype: Any = None, **options: Any) -> Any:
    """Return a variable; see `nd.Variable`."""

    def made() -> Any:
        value = initial_value() if callable(initial_value) else initial_value
        return convert_to_tensor(value, dtype)

    return nd.Variable(made, *args, **options)


def axis_of(axis: Any) -> Any:
    """Return an axis, or a tuple of several."""
    several = isinstance(axis, list | range) or (isinstance(axis, np.ndarray) and axis.ndim)
    return tuple(int(number) for number in axis) if several else axis


def reduction(operation: Any) -> Any:
    """Return a reduction that takes axes as a list, and keeps the dtype of integers."""

    def reduce(tensor: Any, axis: Any = None, keepdims: Any = False) -> Any:
        axes = axis_of(axis)
        result = operation(tensor, axis=axes, keepdims=keepdims)
        whole = tensor.dtype is not None and np.dtype(tensor.dtype).kind in "iu"
        return result.astype(tensor.dtype) if whole and result.dtype != tensor.dtype else result

    return unary(reduce, reduction_indices="axis", keep_dims="keepdims")


def binary(operation: Any) -> Any:
    """Return an operation on two tensors, which may be given by name."""

    def call(*args: Any, **options: Any) -> Any:
        names = [name for name in ("x", "y", "a", "b", "matrix", "rhs") if name in options]
        x, y, *more = [*args, *(options.pop(name) for name in names)]
        return operation(_like(x, y), _like(y, x), *more, **options)

    return call


def _like(value: Any, other: Any) -> Any:
    """Return a tensor; numbers and arrays beside a tensor of a graph get its dtype if they fit."""
    if isinstance(value, Symbolic | Tracked | nd.Variable) or not isinstance(other, Symbolic):
        return convert_to_tensor(value)
    kinds = np.asarray(value).dtype.kind, None if other.dtype is None else other.dtype.kind
    fits = kinds[0] in "fiu" and (kinds[1] == "f" or (kinds[0] != "f" and kinds[1] in ("i", "u")))
    return convert_to_tensor(value, other.dtype if fits else None)


def joining(operation: Any) -> Any:
    """Return a function that joins tensors; before TensorFlow 1.0 the axis came first."""

    def join(values: Any, axis: Any = 0) -> Any:
        values, axis = (axis, values) if isinstance(values, int) else (values, axis)
        return operation([*map(convert_to_tensor, values)], axis)

    return unary(join, 0, concat_dim="axis")


def _split(value: Any, n: Any, axis: Any = 0) -> Any:
    value, axis = (axis, value) if isinstance(value, int) else (value, axis)
    return np.split(convert_to_tensor(value), np.cumsum(n)[:-1] if np.ndim(n) else n, axis)


def cross_entropy(loss: Any, constant_labels: bool = False) -> Any:
    """Return a loss that takes labels first, or logits in graphs: before TensorFlow 1.0."""

    def call(*args: Any, **kwargs: Any) -> Any:
        order = ("logits", "labels") if graphs.uses_graphs() else ("labels", "logits")
        options = dict(zip(order, args, strict=False)) | kwargs
        logits, labels = options["logits"], options["labels"]
        axis = options.get("axis", options.get("dim", -1))
        if axis not in (None, -1):
            logits, labels = (np.moveaxis(array, axis, -1) for array in (logits, labels))
        if constant_labels and isinstance(labels, Symbolic):
            labels = labels.stop_gradient()
        return loss(logits, labels)

    return unary(call, 0, targets="labels")


def random(draw: str) -> Any:
    """Return a function that draws from the generator of the replica."""

    def drawn(shape: Any, low: Any = 0.0, high: Any = 1.0, dtype: Any = np.float32) -> Any:
        replica = nd.get_replica_context()
        rng = np.random.default_rng(current_seed().spawn(1)[0]) if replica is None else replica.rng
        return getattr(rng, draw)(low, high, shape).astype(dtype)

    return unary(drawn, 0, mean="low", minval="low", stddev="high", maxval="high")


class TensorDataset(nd.Dataset):
    """A dataset whose lists are tensors, with TensorFlow's names of arguments."""

    batch = adapted(nd.Dataset.batch, "num_parallel_calls", "deterministic", batch_size="n")
    map = adapted(nd.Dataset.map, "deterministic", map_func="fn")
    prefetch = adapted(nd.Dataset.prefetch, buffer_size="n")
    cardinality = unary(lambda self: np.int64(nd.Dataset.cardinality(self)), 0)
    reduce = unary(nd.Dataset.reduce, 0)

    _convert = staticmethod(functools.partial(map_leaves, tensor_if_array))
    as_numpy_iterator = lambda self: ElementIterator(self._node)  # noqa: E731

    def make_one_shot_iterator(self) -> Any:
        """Return an iterator whose `get_next` gives tensors of a graph."""
        return graphs.only_in_graphs(graph.DatasetIterator)(self)

    make_initializable_iterator = make_one_shot_iterator

    @classmethod
    def from_tensor_slices(cls, nest: Any, name: Any = None) -> nd.Dataset:
        return super().from_tensor_slices(tensors(nest))

    @classmethod
    def from_tensors(cls, nest: Any, name: Any = None) -> nd.Dataset:
        return super().from_tensors(tensors(nest))


TextLineDataset = functools.partial(nd.data.text_lines, kind=TensorDataset)
make_csv_dataset = functools.partial(nd.data.make_csv_dataset, kind=TensorDataset)


class Restored(SimpleNamespace):
    """What `Checkpoint.restore` returns; it knows what the file has besides, or None of no file."""

    def assert_consumed(self) -> Restored:
        """Raise an `AssertionError` if nothing was restored, or not all of the checkpoint."""
        if self.others:
            raise AssertionError(f"not restored: {', '.join(sorted(self.others))}.")
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Restored:
        """Raise an `AssertionError` if nothing was restored; `restore` compares all objects."""
        if self.others is None:
            raise AssertionError("restore(None) has restored nothing.")
        return self

    def expect_partial(self) -> Restored:
        """Return this; `restore` does not warn."""
        return self


class Checkpoint(nd.Checkpoint):
    """A checkpoint whose `restore` returns what TensorFlow's does, and accepts None."""

    def __init__(self, root: Any = None, **objects: Any) -> None:
        super().__init__(**({} if root is None else {"root": root}), **objects)

    def restore(self, path: Any, options: Any = None) -> Any:
        if path is not None:
            super().restore(path)
        return Restored(others=None if path is None else vars(self)["_others"])

    read = restore


class Model(models.Model):
    """A model with the methods of Keras."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Model and (args or kwargs.keys() & {"inputs", "outputs"}):
            raise TypeError("Model(inputs, outputs): Write a tf.keras.Sequential, or a subclass.")
        return super().__new__(cls, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return map_leaves(tensor_if_array, super().__call__(*args, **kwargs))

    def _compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        with self.strategy.scope():
            super().compile(get_optimizer(optimizer), *args, **kwargs)

    compile = adapted(_compile, "run_eagerly", "steps_per_execution", "jit_compile")

    def save(self, filepath: Any, overwrite: bool = True, save_format: str = "tf") -> None:
        if (overwrite, save_format) != (True, "tf"):
            raise ValueError("save: a model replaces the one there, in one format: give no other.")
        self.export(filepath)

    weights = property(lambda self: self.variables)
    trainable_weights = property(lambda self: self.trainable_variables)

    def summary(self, line_length: Any = None, positions: Any = None, print_fn: Any = None) -> str:
        (print_fn or (lambda text: sys.stdout.write(f"{text}\n")))(super().summary())
        return super().summary()


class Sequential(Model, models.Sequential):
    """A model of one layer after another, with the methods of Keras."""


# Other programs load the native classes; `load_model` loads ours.
layers.Layer.known.update(Model=models.Model, Sequential=models.Sequential)


def get_optimizer(identifier: Any) -> Any:
    """Return an optimizer for a name; one that is given is returned unchanged."""
    optimizer = models.optimizers.get(identifier)
    kinds = import_module("ndistribute.compat.tf.keras.optimizers")
    return getattr(kinds, type(optimizer).__name__)() if isinstance(identifier, str) else optimizer


def _holder(optimizer: Any) -> Any:
    """Return the optimizer that has a rate of its own: this one, or the one that it is around."""
    return _holder(optimizer.inner) if "inner" in vars(optimizer) else optimizer


def _only_grpc(init: Any) -> Any:
    """Return the constructor of a server, which has one protocol and no options for sessions."""

    def call(self: Any, *args: Any, protocol: Any = None, config: Any = None, **named: Any) -> None:
        if protocol not in (None, "grpc") or config is not None:
            raise ValueError("Server: protocol is 'grpc', and config None: pass it to Session.")
        init(self, *args, **named)

    return call


rate = property(
    adapted(lambda self: vars(_holder(self))["learning_rate"]),
    lambda self, rate: vars(_holder(self)).update(
        learning_rate=rate if callable(rate) else float(rate)
    ),
)
ADAPTERS: dict[str, Any] = {
    "graph": graphs.only_in_graphs,
    "activation": lambda name: functools.partial(layers.Activation, name),
    "binary": lambda operation: unary(binary(operation)),
    "callback": lambda kind: subclass(kind, "verbose", "write_graph", "profile_batch"),
    "counted": lambda count: unary(
        lambda x, out_type=np.int32: (
            count(x) if isinstance(x, Symbolic) else np.array(count(x), out_type)
        )
    ),
    "dtype": np.dtype,
    "index": lambda find: unary(
        lambda x, axis=0, output_type=np.int64: find(x, axis).astype(output_type), dimension="axis"
    ),
    "initializer": lambda kind: subclass(kind, "dtype"),
    "joining": joining,
    "last_axis": lambda operation: unary(
        lambda logits, axis=-1: operation(logits, -1 if axis is None else axis), dim="axis"
    ),
    "loss": lambda kind: (
        subclass(kind, __call__=adapted(kind.__call__)) if isinstance(kind, type) else adapted(kind)
    ),
    "metric": lambda kind: subclass(kind, "dtype", result=adapted(kind.result)),
    "operation": lambda function: unary(function, 0),
    "optimizer": lambda kind: subclass(kind, learning_rate=rate, lr=rate),
    "random": random,
    "reduction": reduction,
    "resolver": lambda kind: subclass(kind, "rpc_layer", rpc_layer="grpc"),
    "server": lambda kind: subclass(kind, __init__=_only_grpc(kind.__init__)),
    "strategy": lambda kind: subclass(
        kind,
        reduce=lambda *args, **options: map_leaves(tensor_if_array, kind.reduce(*args, **options)),
    ),
    "unary": unary,
    "writer": lambda kind: subclass(graphs.only_in_graphs(kind), add_run_metadata=nothing),
}
Input = adapted(layers.Input, "batch_size", "dtype", input_shape="shape")


_HARMLESS = {"deterministic", "experimental_deterministic", "private_threadpool_size"}
"""Options of datasets that concern speed alone: the elements always come in order."""


def _set_option(options: Any, name: str, value: Any) -> None:
    """Set an option, or one that changes no result."""
    if name not in vars(options) and name not in _HARMLESS:
        raise TypeError(f"Options: {name} has no effect here, so leave it out.")
    object.__setattr__(options, name, value)
    options.__post_init__()


_itself = property(lambda self: self)
Options = subclass(
    nd.InputOptions, __setattr__=_set_option, experimental_distribute=_itself, threading=_itself
)
SyncBatchNormalization = functools.partial(layers.BatchNormalization, synchronized=True)
TensorSpec = unary(lambda shape, dtype=np.float32: SimpleNamespace(shape=shape, dtype=dtype), 0)
_HINTS = "validate_shape", "caching_device", "shape"
Variable = graphs.either(adapted(graph.Variable, *_HINTS), adapted(eager_variable, *_HINTS))
add_n = unary(lambda inputs: functools.reduce(np.add, inputs), 0)
cast = unary(lambda tensor, dtype: tensor.astype(graphs.dtype_of(dtype)))
cond = graphs.either(
    adapted(graph.cond, pred="condition", fn1="true_fn", fn2="false_fn"),
    lambda pred, true_fn, false_fn, name=None: (true_fn if pred else false_fn)(),
)
clip_by_value = unary(np.clip, clip_value_min="a_min", clip_value_max="a_max")
constant = graphs.either(graph.constant, eager_constant)


def _cumsum(x: Any, axis: Any = 0, exclusive: Any = False, reverse: Any = False) -> Any:
    x = np.flip(x, axis) if reverse else x
    sums = np.cumsum(x, axis) - x if exclusive else np.cumsum(x, axis)
    return np.flip(sums, axis) if reverse else sums


cumsum = unary(_cumsum)
div = unary(binary(lambda x, y: (np.floor_divide if _is_whole(x, y) else np.divide)(x, y)))
executing_eagerly = adapted(lambda: not graphs.uses_graphs())
bias_add = unary(lambda value, bias, data_format=None: np.add(value, bias), 2)
eye = unary(functools.partial(np.eye, dtype=np.float32), 0, num_rows="N", num_columns="M")


def is_symbolic(*values: Any) -> bool:
    """Return True if a tensor of a graph is among values, or in a list among them."""
    lists = [value if isinstance(value, list | tuple) else [value] for value in values]
    return any(isinstance(value, Symbolic) for several in lists for value in several)


def _fill(dims: Any, value: Any) -> Any:
    if is_symbolic(dims, value):
        value = graph.as_tensor(convert_to_tensor(value))
        return np.broadcast_to(value, dims)
    return eager_constant(value, shape=dims)


def filled(number: int) -> Any:
    """Return a function of a shape, whose lengths may be tensors, that returns one number."""
    return unary(
        lambda shape, dtype=np.float32: _fill(shape, graphs.dtype_of(dtype).type(number)), 0
    )


fill, zeros, ones = unary(_fill, 0), filled(0), filled(1)
_COMPILING = (
    "autograph experimental_autograph_options experimental_relax_shapes input_signature "
    "reduce_retracing"
)
function = adapted(graphs.function, *_COMPILING.split(), experimental_compile="jit_compile")
gather = unary(
    lambda params, indices, axis=0: (
        params[indices]
        if isinstance(params, Symbolic) and not axis
        else np.take(params, convert_to_tensor(indices), axis)
    ),
    ids="indices",
)


def _embedding_lookup(params: Any, ids: Any, partition_strategy: str = "mod") -> Any:
    """Return rows of a table, which is in one part, so that both strategies find the same."""
    tables = params if isinstance(params, list | tuple) else [params]
    if len(tables) != 1:
        raise ValueError(f"embedding_lookup needs one table, got {len(tables)}: concat them.")
    if partition_strategy not in ("mod", "div"):
        raise ValueError(f"partition_strategy must be 'mod' or 'div', got {partition_strategy!r}.")
    return gather(tables[0], ids)


embedding_lookup = adapted(_embedding_lookup, "name", "validate_indices")


expand_dims = unary(np.expand_dims, input="a", dim="axis")
identity = unary(lambda x: graph.identity(x) if isinstance(x, Symbolic) else x)
l2_loss = unary(lambda tensor: np.sum(np.square(tensor)) / 2)
leaky_relu = unary(activations.leaky_relu, alpha="negative_slope")
list_devices = adapted(
    lambda device_type=None: [
        SimpleNamespace(
            name=f"/physical_device:{str(device).upper()}", device_type=device.kind.upper()
        )
        for device in nd.list_devices(device_type and device_type.lower())
    ]
)
load_model = adapted(
    lambda filepath, custom_objects=None: models.load(
        filepath, {"Sequential": Sequential, **(custom_objects or {})}
    ),
    "compile",
)
matmul = unary(
    lambda a, b, transpose_a=False, transpose_b=False, a_is_sparse=False, b_is_sparse=False: (
        np.matmul(
            np.swapaxes(a, -1, -2) if transpose_a else a,
            np.swapaxes(b, -1, -2) if transpose_b else b,
        )
    ),
    2,
)
_SETTINGS = "coord device enable enabled global_step run_eagerly run_metadata sess tag"
nothing: Any = adapted(lambda *args: None, *_SETTINGS.split())
makedirs = functools.partial(os.makedirs, exist_ok=True)


def _numbers(start: Any = 0, limit: Any = None, delta: Any = 1, dtype: Any = None) -> Any:
    start, limit = (0, start) if limit is None else (start, limit)
    if not is_symbolic(start, limit, delta):
        return convert_to_tensor(np.arange(start, limit, delta).tolist(), dtype)
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
    if isinstance(on_value, type | np.dtype):  # As before: the dtype comes third.
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
# Only the chief writes, so other workers may remove what does not exist.
rmtree = functools.partial(shutil.rmtree, ignore_errors=True)
save_model = Model.save
sigmoid_loss = cross_entropy(nn.sigmoid_cross_entropy)
softmax_loss = cross_entropy(nn.softmax_cross_entropy)
softmax_loss_v1 = cross_entropy(nn.softmax_cross_entropy, constant_labels=True)


def _norm(tensor: Any, ord: Any = "euclidean", axis: Any = None, keepdims: Any = False) -> Any:
    axes, kind = axis_of(axis), None if ord == "euclidean" else ord
    if axes is None and kind is not None:  # Of all elements in one row.
        shape = (1,) * len(tensor.shape) if keepdims else ()
        return np.reshape(np.linalg.norm(np.reshape(tensor, (-1,)), kind), shape)
    return np.linalg.norm(tensor, kind, axes, keepdims)


norm = unary(_norm, keep_dims="keepdims")


def _slice(x: Any, begin: Any, size: Any) -> Any:
    def end(length: Any, first: Any, count: Any) -> Any:
        if isinstance(count, Symbolic):
            return np.where(np.equal(count, -1), length, first + count)
        return None if count == -1 else first + count

    lengths = np.shape(x)
    return x[
        tuple(
            slice(b, end(lengths[k], b, n))
            for k, (b, n) in enumerate(zip(begin, size, strict=True))
        )
    ]


slice_ = unary(_slice, input_="x")
squeeze = unary(
    lambda input_, axis=None: np.squeeze(input_, tuple(axis) if isinstance(axis, list) else axis),
    squeeze_dims="axis",
)
split = unary(_split, 0, num_or_size_splits="n", num_split="n", split_dim="axis")
tile = unary(np.tile, multiples="reps")
to_categorical = adapted(lambda x, num_classes=None: one_hot(x, num_classes or int(np.max(x)) + 1))
unstack = unary(
    lambda value, num=None, axis=0: [
        np.take(value, k, axis) for k in range(num or value.shape[axis])
    ]
)
transpose = unary(np.transpose, perm="axes")


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None and y is None:
        return np.argwhere(condition)
    x, y = convert_to_tensor(x), convert_to_tensor(y)
    axes = [len(getattr(array, "shape", None) or ()) for array in (condition, x)]
    if graphs.uses_graphs() and axes[0] == 1 < axes[1]:  # It chooses rows.
        condition = np.reshape(condition, (-1, *(1,) * (axes[1] - 1)))
    return np.where(condition, x, y)


where = unary(_where)
