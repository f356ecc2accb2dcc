"""What stands between names of TensorFlow and this package where arguments or results differ.

Lists and numbers become float32 and int32 tensors, which are NumPy arrays with a method `numpy`;
tracked arrays stay tracked. `tf.py` and `names.py` refer to the names here.
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
from ndistribute.devices import array_namespace, as_array
from ndistribute.graph.graph import Symbolic
from ndistribute.models import activations, layers, nn
from ndistribute.tree import map_leaves


def adapted(function: Any, *ignored: str, operands: int = 0, **renamed: str) -> Any:
    """Return a function with TensorFlow's keywords, whose operands and result are tensors.

    If the keyword ``name`` is among the ignored ones, it names the result in a graph.
    """

    @functools.wraps(function, ["__name__"])
    def call(*args: Any, **kwargs: Any) -> Any:
        own = {renamed.get(key, key): kwargs[key] for key in kwargs if key not in ignored}
        if operands and not args:
            args = (own.pop(next(iter(own))),)
        tensors = map(convert_to_tensor, args[:operands])
        found = tensor_if_array(function(*tensors, *args[operands:], **own))
        if "name" in ignored and kwargs.get("name") and isinstance(found, Symbolic):
            return graph.identity(found, kwargs["name"])
        return found

    return call


def unary(operation: Any, operands: int = 1, **renamed: str) -> Any:
    """Return an operation on tensors, which may be given a name."""
    return adapted(operation, "name", operands=operands, **renamed)


def subclass(kind: Any, *ignored: str, **attributes: Any) -> Any:
    """Return a subclass with more attributes, whose constructor ignores some keywords."""
    init = {"__init__": adapted(kind.__init__, *ignored)} if ignored else {}
    return type(kind.__name__, (kind,), {**init, **attributes})


def _is_whole(*values: Any) -> bool:
    return all(one.dtype is not None and np.dtype(one.dtype).kind in "iu" for one in values)


class Tensor(np.ndarray[Any, Any]):
    """A NumPy array with the method `numpy`."""

    numpy = np.ndarray.__array__


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
    array = as_array(value)
    if dtype is None and not hasattr(value, "dtype"):
        dtype = {"f": np.float32, "i": np.int32}.get(array.dtype.kind)
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
        return {key: tensors(one) for key, one in nest.items()}
    return convert_to_tensor(nest)


def eager_constant(value: Any, dtype: Any = None, shape: Any = None, name: Any = None) -> Any:
    """Return a tensor, of one value if a shape is given for a number."""
    array = convert_to_tensor(value, dtype)
    if shape is None:
        return array
    return array.reshape(shape) if array.size > 1 else np.full(shape, array).view(Tensor)


def eager_variable(
    initial_value: Any, *args: Any, dtype: Any = None, **options: Any
) -> nd.Variable:
    """Return a variable; see `nd.Variable`."""

    def made() -> Any:
        value = initial_value() if callable(initial_value) else initial_value
        return convert_to_tensor(value, dtype)

    return nd.Variable(made, *args, **options)


def reduction(operation: Any) -> Any:
    """Return a reduction that takes axes as a list, and keeps the dtype of integers."""

    def reduce(tensor: Any, axis: Any = None, keepdims: Any = False) -> Any:
        axes = tuple(axis) if isinstance(axis, list) else axis
        found = operation(tensor, axis=axes, keepdims=keepdims)
        whole = not isinstance(found, Symbolic) and found.dtype.kind in "iu"
        return found.astype(tensor.dtype) if whole else found

    return unary(reduce, reduction_indices="axis", keep_dims="keepdims")


def joining(operation: Any) -> Any:
    """Return a function that joins tensors; before TensorFlow 1.0 the axis came first."""

    def join(values: Any, axis: Any = 0) -> Any:
        values, axis = (axis, values) if isinstance(values, int) else (values, axis)
        return operation([*map(convert_to_tensor, values)], axis)

    return unary(join, 0, concat_dim="axis")


def _split(value: Any, n: Any, axis: Any = 0) -> Any:
    value, axis = (axis, value) if isinstance(value, int) else (value, axis)
    return np.split(convert_to_tensor(value), np.cumsum(n)[:-1] if np.ndim(n) else n, axis)


def cross_entropy(loss: Any) -> Any:
    """Return a loss that takes labels first, or logits in graphs: before TensorFlow 1.0."""

    def call(*args: Any, **kwargs: Any) -> Any:
        order = ("logits", "labels") if graphs.uses_graphs() else ("labels", "logits")
        given = dict(zip(order, args, strict=False)) | kwargs
        return loss(given["logits"], given["labels"])

    return unary(call, 0, targets="labels")


def random(draw: str) -> Any:
    """Return a function that draws from the generator of the replica."""

    def drawn(shape: Any, low: Any = 0.0, high: Any = 1.0, dtype: Any = np.float32) -> Any:
        replica = nd.get_replica_context()
        own = np.random.default_rng(current_seed().spawn(1)[0]) if replica is None else replica.rng
        return getattr(own, draw)(low, high, shape).astype(dtype)

    return unary(drawn, 0, mean="low", minval="low", stddev="high", maxval="high")


class Dataset(nd.Dataset):
    """A dataset whose lists are tensors, with TensorFlow's names of arguments."""

    batch = adapted(nd.Dataset.batch, "num_parallel_calls", "deterministic", batch_size="n")
    map = adapted(nd.Dataset.map, "deterministic", map_func="fn")
    prefetch = adapted(nd.Dataset.prefetch, buffer_size="n")

    as_numpy_iterator = nd.Dataset.__iter__

    def make_one_shot_iterator(self) -> Any:
        """Return an iterator whose `get_next` gives tensors of a graph."""
        return graphs.only_in_graphs(graph.DatasetIterator)(self)

    make_initializable_iterator = make_one_shot_iterator

    def __iter__(self) -> Any:
        return map(functools.partial(map_leaves, tensor_if_array), super().__iter__())

    @classmethod
    def from_tensor_slices(cls, nest: Any, name: Any = None) -> nd.Dataset:
        return super().from_tensor_slices(tensors(nest))

    @classmethod
    def from_tensors(cls, nest: Any, name: Any = None) -> nd.Dataset:
        return super().from_tensors(tensors(nest))


class Checkpoint(nd.Checkpoint):
    """A checkpoint whose `restore` returns what TensorFlow's does, and accepts None."""

    def __init__(self, root: Any = None, **objects: Any) -> None:
        super().__init__(**({} if root is None else {"root": root}), **objects)

    def restore(self, path: Any, options: Any = None) -> Any:
        if path is not None:
            super().restore(path)
        methods = "assert_consumed assert_existing_objects_matched expect_partial".split()
        return SimpleNamespace(**dict.fromkeys(methods, nothing))

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
    predict = adapted(models.Model.predict, "verbose")
    save = adapted(models.Model.export, "overwrite", "save_format", filepath="path")
    weights = property(lambda self: self.variables)
    trainable_weights = property(lambda self: self.trainable_variables)

    def summary(self, *args: Any, **kwargs: Any) -> str:
        sys.stdout.write(f"{super().summary()}\n")
        return super().summary()


class Sequential(Model, models.Sequential):
    """A model of one layer after another, with the methods of Keras."""


# Other programs load the native classes; `load_model` loads ours.
layers.Layer.known.update(Model=models.Model, Sequential=models.Sequential)


def get_optimizer(identifier: Any) -> Any:
    """Return an optimizer for a name; one that is given is returned unchanged."""
    found = models.optimizers.get(identifier)
    kinds = import_module("ndistribute.compat.tf.keras.optimizers")
    return getattr(kinds, type(found).__name__)() if isinstance(identifier, str) else found


rate = property(
    adapted(lambda self: vars(self)["learning_rate"]),
    lambda self, rate: vars(self).update(learning_rate=rate if callable(rate) else float(rate)),
)
ADAPTERS: dict[str, Any] = {
    "graph": graphs.only_in_graphs,
    "activation": lambda name: functools.partial(layers.Activation, name),
    "binary": lambda operation: unary(operation, 2),
    "callback": lambda kind: subclass(kind, "verbose", "write_graph", "profile_batch"),
    "counted": lambda count: unary(
        lambda x, out_type=np.int32: (
            count(x) if isinstance(x, Symbolic) else np.array(count(x), out_type)
        )
    ),
    "dtype": np.dtype,
    "filled": lambda fill: unary(lambda shape, dtype=np.float32: fill(shape, dtype=dtype), 0),
    "index": lambda find: unary(
        lambda x, axis=0, output_type=np.int64: find(x, axis).astype(output_type),
        dimension="axis",
    ),
    "initializer": lambda kind: subclass(kind, "dtype"),
    "joining": joining,
    "last_axis": lambda operation: unary(lambda logits, axis=-1: operation(logits, axis)),
    "loss": lambda kind: (
        subclass(kind, __call__=adapted(kind.__call__)) if isinstance(kind, type) else adapted(kind)
    ),
    "metric": lambda kind: subclass(kind, "dtype", result=adapted(kind.result)),
    "operation": lambda function: unary(function, 0),
    "optimizer": lambda kind: subclass(kind, learning_rate=rate, lr=rate),
    "random": random,
    "reduction": reduction,
    "resolver": lambda kind: subclass(kind, "rpc_layer", rpc_layer="grpc"),
    "server": lambda kind: subclass(kind, "protocol", "config"),
    "strategy": lambda kind: subclass(
        kind, reduce=lambda *args, **own: map_leaves(tensor_if_array, kind.reduce(*args, **own))
    ),
    "ternary": lambda operation: unary(operation, 3),
    "unary": unary,
    "writer": lambda kind: subclass(graphs.only_in_graphs(kind), add_run_metadata=nothing),
}
Input = adapted(layers.Input, "batch_size", "dtype", input_shape="shape")
Options = subclass(
    nd.InputOptions,
    __setattr__=object.__setattr__,
    experimental_distribute=property(lambda self: self),
    threading=property(lambda self: self),
)
PreemptionCheckpointHandler = adapted(
    lambda cluster_resolver, manager: models.PreemptionCheckpointHandler(manager),
    checkpoint_or_checkpoint_manager="manager",
)
SyncBatchNormalization = functools.partial(layers.BatchNormalization, synchronized=True)
TensorSpec = unary(lambda shape, dtype=np.float32: SimpleNamespace(shape=shape, dtype=dtype), 0)
Variable = graphs.either(
    adapted(graph.Variable, "validate_shape", "caching_device", "shape"),
    adapted(eager_variable, "validate_shape", "caching_device", "shape"),
)
add_n = unary(lambda inputs: functools.reduce(np.add, inputs), 0)
cast = unary(lambda tensor, dtype: tensor.astype(graphs.dtype_of(dtype)))
clip_by_value = unary(np.clip, clip_value_min="a_min", clip_value_max="a_max")
constant = graphs.either(graph.constant, eager_constant)
cumsum = unary(lambda x, axis=0: np.cumsum(x, axis))
div = unary(lambda x, y: np.floor_divide(x, y) if _is_whole(x, y) else np.divide(x, y), 2)
executing_eagerly = adapted(lambda: not graphs.uses_graphs())
eye = unary(
    lambda num_rows, num_columns=None, dtype=np.float32: np.eye(num_rows, num_columns, dtype=dtype),
    0,
)
fill = unary(lambda dims, value: eager_constant(value, shape=dims), 0)
function = adapted(lambda func=None, **_: func or (lambda wrapped: wrapped))
gather = unary(
    lambda params, indices, axis=0: (
        params[indices]
        if isinstance(params, Symbolic) and not axis
        else np.take(params, convert_to_tensor(indices), axis)
    ),
    ids="indices",
)
identity = unary(lambda x: graph.identity(x) if isinstance(x, Symbolic) else x)
l2_loss = unary(lambda tensor: np.sum(np.square(tensor)) / 2)
leaky_relu = unary(activations.leaky_relu, alpha="negative_slope")
list_devices = adapted(
    lambda device_type=None: [
        SimpleNamespace(name=f"/physical_device:{str(one).upper()}", device_type=one.kind.upper())
        for one in nd.list_devices(device_type and device_type.lower())
    ]
)
load_model = adapted(
    lambda filepath, custom_objects=None: models.load(
        filepath, {"Sequential": Sequential, **(custom_objects or {})}
    ),
    "compile",
)
matmul = unary(
    lambda a, b, transpose_a=False, transpose_b=False: np.matmul(
        np.swapaxes(a, -1, -2) if transpose_a else a, np.swapaxes(b, -1, -2) if transpose_b else b
    ),
    2,
)
nothing: Any = adapted(lambda *args, **options: None)
makedirs = functools.partial(os.makedirs, exist_ok=True)
numbers = unary(
    lambda start, limit=None, delta=1, dtype=None: convert_to_tensor(
        np.arange(start, limit, delta).tolist(), dtype
    ),
    0,
)
one_hot = unary(
    lambda indices, depth, dtype=np.float32: np.equal(
        indices[..., None], array_namespace(indices).arange(depth)
    ).astype(dtype)
)
# Only the chief writes, so other workers may remove what does not exist.
rmtree = functools.partial(shutil.rmtree, ignore_errors=True)
save_model = Model.save
sigmoid_loss = cross_entropy(nn.sigmoid_cross_entropy)
softmax_loss = cross_entropy(nn.softmax_cross_entropy)
slice_ = unary(
    lambda x, begin, size: x[
        tuple(slice(b, None if n == -1 else b + n) for b, n in zip(begin, size, strict=True))
    ],
    input_="x",
)
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
