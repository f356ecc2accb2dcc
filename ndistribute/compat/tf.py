"""Names of TensorFlow 2: ``import ndistribute.compat.tf as tf`` runs many of its scripts unchanged.

Arrays are NumPy's and CuPy's, and everything runs at once: `function` returns its function. The
names only lead to this package and to NumPy. One that is missing says which are similar.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import autodiff as _autodiff
from ndistribute import models as _models
from ndistribute.context import current_seed
from ndistribute.device import as_array
from ndistribute.models import activations as _activations
from ndistribute.models import losses as _losses
from ndistribute.models import operations as _operations
from ndistribute.tree import map_leaves
from ndistribute.variables import VariableAggregation, VariableSynchronization

float16, float32, float64 = map(np.dtype, ("float16", "float32", "float64"))
int8, int16, int32, int64 = map(np.dtype, ("int8", "int16", "int32", "int64"))
uint8, bool = np.dtype("uint8"), np.dtype("bool")  # noqa: A001
complex64, complex128 = np.dtype("complex64"), np.dtype("complex128")
newaxis = None


class Names(types.SimpleNamespace):
    """A namespace, which names what is similar to a missing name."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing("tf", name, vars(self)))


def missing(where: str, name: str, known: Any) -> str:
    """Return the message for a name that does not exist."""
    similar = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")])
    hint = f"Similar names: {', '.join(similar)}." if similar else "Write it with NumPy."
    return f"{where}.{name} does not exist in ndistribute.compat.tf. {hint}"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(missing("tf", name, globals()))


class Tensor(np.ndarray[Any, Any]):
    """A NumPy array with the method `numpy`."""

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the array."""
        return np.asarray(self)


def constant(value: Any, dtype: Any = None, shape: Any = None, name: Any = None) -> Any:
    """Return a tensor; floats and integers of Python become float32 and int32."""
    array = tensor_of(value, dtype)
    return array if shape is None else np.broadcast_to(array, shape).reshape(shape)


def convert_to_tensor(value: Any, dtype: Any = None, name: Any = None) -> Any:
    """Return a tensor; tracked arrays are returned as they are."""
    return value if isinstance(value, _autodiff.Tracked) else tensor_of(value, dtype)


def tensor_of(value: Any, dtype: Any = None) -> Any:
    """Return an array with TensorFlow's dtypes for values of Python."""
    known = hasattr(value, "dtype")
    array = as_array(value)
    if dtype is None and not known:
        dtype = {"f": float32, "i": int32}.get(array.dtype.kind)
    array = array if dtype is None else array.astype(dtype)
    return array.view(Tensor) if type(array) is np.ndarray else array


def Variable(  # noqa: N802
    initial_value: Any = None,
    trainable: Any = True,
    validate_shape: Any = True,
    name: str | None = None,
    dtype: Any = None,
    synchronization: Any = VariableSynchronization.AUTO,
    aggregation: Any = VariableAggregation.NONE,
) -> nd.Variable:
    """Return a variable; see `nd.Variable`."""

    def made() -> Any:
        return tensor_of(initial_value() if callable(initial_value) else initial_value, dtype)

    return nd.Variable(made, trainable, name, dtype, synchronization, aggregation)


def function(func: Any = None, **options: Any) -> Any:
    """Return a function unchanged; also as a decorator with options, which are ignored."""
    return func if func is not None else lambda wrapped: wrapped


def cast(x: Any, dtype: Any, name: Any = None) -> Any:
    """Return an array in another dtype."""
    return (x if hasattr(x, "astype") else tensor_of(x)).astype(np.dtype(dtype))


def _reduction(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction with TensorFlow's arguments."""

    @functools.wraps(operation)
    def reduce(input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None) -> Any:
        array = convert_to_tensor(input_tensor)
        axes = tuple(axis) if isinstance(axis, list) else axis
        return operation(array, axis=axes, keepdims=keepdims)

    return reduce


reduce_sum, reduce_mean, reduce_std = _reduction(np.sum), _reduction(np.mean), _reduction(np.std)
reduce_max, reduce_min, reduce_prod = _reduction(np.max), _reduction(np.min), _reduction(np.prod)
reduce_all, reduce_any = _reduction(np.all), _reduction(np.any)


def _elementwise(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation on tensors."""

    @functools.wraps(operation)
    def call(*args: Any, name: Any = None, **kwargs: Any) -> Any:
        return operation(*map(convert_to_tensor, args), **kwargs)

    return call


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "ceil": np.ceil,
    "cos": np.cos,
    "divide": np.divide,
    "equal": np.equal,
    "exp": np.exp,
    "floor": np.floor,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "is_nan": np.isnan,
    "is_finite": np.isfinite,
    "less": np.less,
    "less_equal": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logical_and": np.logical_and,
    "logical_not": np.logical_not,
    "logical_or": np.logical_or,
    "matmul": np.matmul,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negative": np.negative,
    "not_equal": np.not_equal,
    "pow": np.power,
    "round": np.round,
    "sigmoid": _activations.sigmoid,
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "subtract": np.subtract,
    "tanh": _activations.tanh,
    "where": np.where,
}
_operations_of = {name: _elementwise(one) for name, one in _ELEMENTWISE.items()}
globals().update(_operations_of)


def concat(values: Sequence[Any], axis: int, name: Any = None) -> Any:
    """Return arrays joined along an axis."""
    return np.concatenate([convert_to_tensor(one) for one in values], axis)


def stack(values: Sequence[Any], axis: int = 0, name: Any = None) -> Any:
    """Return arrays joined along a new axis."""
    return np.stack([convert_to_tensor(one) for one in values], axis)


def add_n(inputs: Sequence[Any], name: Any = None) -> Any:
    """Return the sum of arrays."""
    return functools.reduce(np.add, inputs)


def argmax(input: Any, axis: int = 0, output_type: Any = int64, name: Any = None) -> Any:  # noqa: A002
    """Return the index of the largest element along an axis."""
    return np.argmax(convert_to_tensor(input), axis).astype(output_type)


def expand_dims(input: Any, axis: int, name: Any = None) -> Any:  # noqa: A002
    """Return an array with a new axis."""
    return np.expand_dims(convert_to_tensor(input), axis)


def squeeze(input: Any, axis: Any = None, name: Any = None) -> Any:  # noqa: A002
    """Return an array without axes of length 1."""
    return np.squeeze(convert_to_tensor(input), axis)


def reshape(tensor: Any, shape: Any, name: Any = None) -> Any:
    """Return an array in another shape."""
    return np.reshape(convert_to_tensor(tensor), tuple(shape))


def transpose(a: Any, perm: Any = None, name: Any = None) -> Any:
    """Return an array with its axes reordered."""
    return np.transpose(convert_to_tensor(a), perm)


def zeros(shape: Any, dtype: Any = float32, name: Any = None) -> Any:
    """Return an array of zeros."""
    return tensor_of(np.zeros(shape, dtype))


def ones(shape: Any, dtype: Any = float32, name: Any = None) -> Any:
    """Return an array of ones."""
    return tensor_of(np.ones(shape, dtype))


def fill(dims: Any, value: Any, name: Any = None) -> Any:
    """Return an array of one value."""
    return tensor_of(np.full(dims, tensor_of(value)))


def zeros_like(input: Any, dtype: Any = None, name: Any = None) -> Any:  # noqa: A002
    """Return zeros in the shape of an array."""
    return np.zeros_like(convert_to_tensor(input), dtype)


def ones_like(input: Any, dtype: Any = None, name: Any = None) -> Any:  # noqa: A002
    """Return ones in the shape of an array."""
    return np.ones_like(convert_to_tensor(input), dtype)


def shape(input: Any, out_type: Any = int32, name: Any = None) -> Any:  # noqa: A002
    """Return the shape of an array, as an array."""
    return tensor_of(np.array(np.shape(input), out_type))


def range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None) -> Any:  # noqa: A001
    """Return numbers at equal distances."""
    first, stop = (0, start) if limit is None else (start, limit)
    return tensor_of(np.arange(first, stop, delta), dtype)


def one_hot(indices: Any, depth: int, dtype: Any = float32) -> Any:
    """Return rows with a 1 at each index."""
    return tensor_of((as_array(indices)[..., None] == np.arange(depth)).astype(dtype))


def identity(input: Any, name: Any = None) -> Any:  # noqa: A002
    """Return an array."""
    return convert_to_tensor(input)


def _compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Return the sum of losses over the number of examples of all replicas."""
    total = np.sum(per_example_loss if sample_weight is None else per_example_loss * sample_weight)
    count = global_batch_size
    return total / (_losses.global_count(per_example_loss.size) if count is None else float(count))


def _scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return a penalty divided by the number of replicas, whose gradients are added."""
    replica = nd.get_replica_context()
    return np.sum(regularization_loss) / (1 if replica is None else replica.num_replicas_in_sync)


def _cross_entropy(labels: Any = None, logits: Any = None, name: Any = None) -> Any:
    """Return the cross-entropy of each example."""
    return _operations.softmax_cross_entropy(logits, labels)


class _Options(nd.InputOptions):
    """Options of a dataset, which can be set."""

    @property
    def experimental_distribute(self) -> Any:
        """What sets the policy of `InputOptions`."""
        options = self

        class Distribute:
            def __setattr__(self, name: str, value: Any) -> None:
                object.__setattr__(options, name, nd.InputOptions(**{name: value}).__dict__[name])

        return Distribute()


class _Dataset(nd.Dataset):
    """A dataset, whose lists are tensors."""

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> nd.Dataset:
        """Return a dataset of the rows of tensors; see `nd.Dataset`."""
        as_tensors = tuple(map(_plain, tensors)) if isinstance(tensors, tuple) else _plain(tensors)
        return super().from_tensor_slices(as_tensors)

    @classmethod
    def from_tensors(cls, tensors: Any) -> nd.Dataset:
        """Return a dataset of one element; see `nd.Dataset`."""
        as_tensors = tuple(map(_plain, tensors)) if isinstance(tensors, tuple) else _plain(tensors)
        return super().from_tensors(as_tensors)


def _plain(value: Any) -> Any:
    """Return arrays for lists of numbers, and for the leaves of dicts."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return map_leaves(lambda leaf: np.asarray(tensor_of(leaf)), np.asarray(tensor_of(value)))


def _list_devices(device_type: str | None = None) -> list[Names]:
    """Return the devices, with `name` and `device_type`."""
    found = nd.list_devices(None if device_type is None else device_type.lower())
    return [Names(name=f"/physical_device:{one}", device_type=one.kind.upper()) for one in found]


def _generator() -> np.random.Generator:
    replica = nd.get_replica_context()
    return np.random.default_rng(current_seed().spawn(1)[0]) if replica is None else replica.rng


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = float32, **_: Any) -> Any:
    """Return normal random numbers of this replica."""
    return tensor_of(_generator().normal(mean, stddev, tuple(shape)), dtype)


def _uniform(
    shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = float32, **_: Any
) -> Any:
    """Return uniform random numbers of this replica."""
    return tensor_of(_generator().uniform(minval, maxval, tuple(shape)), dtype)


_resolvers = Names(
    TFConfigClusterResolver=nd.TFConfigClusterResolver,
    SimpleClusterResolver=nd.SimpleClusterResolver,
    SlurmClusterResolver=nd.SlurmClusterResolver,
)
_strategies = {
    name: getattr(nd, name)
    for name in (
        "CentralStorageStrategy",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ParameterServerStrategy",
    )
}
_coordinator = Names(ClusterCoordinator=nd.ClusterCoordinator)
distribute = Names(
    **_strategies,
    **{
        name: getattr(nd, name)
        for name in (
            "DistributedValues",
            "HierarchicalCopyAllReduce",
            "InputContext",
            "NcclAllReduce",
            "ReduceOp",
            "ReductionToOneDevice",
            "ReplicaContext",
            "Server",
            "Strategy",
            "get_replica_context",
            "get_strategy",
            "has_strategy",
            "in_cross_replica_context",
        )
    },
    cluster_resolver=_resolvers,
    coordinator=_coordinator,
    experimental=Names(
        **_strategies,
        CommunicationImplementation=nd.CommunicationImplementation,
        CommunicationOptions=nd.CommunicationOptions,
        coordinator=_coordinator,
        partitioners=nd.partitioners,
    ),
    InputOptions=nd.InputOptions,
)
data = Names(
    AUTOTUNE=-1,
    Dataset=_Dataset,
    Options=_Options,
    experimental=Names(
        AUTOTUNE=-1,
        AutoShardPolicy=nd.AutoShardPolicy,
    ),
)
nn = Names(
    compute_average_loss=_compute_average_loss,
    elu=_activations.elu,
    gelu=_activations.gelu,
    leaky_relu=_activations.leaky_relu,
    log_softmax=_activations.log_softmax,
    relu=_activations.relu,
    scale_regularization_loss=_scale_regularization_loss,
    sigmoid=_activations.sigmoid,
    silu=_activations.silu,
    softmax=_activations.softmax,
    softmax_cross_entropy_with_logits=_cross_entropy,
    softplus=_activations.softplus,
    sparse_softmax_cross_entropy_with_logits=_cross_entropy,
    tanh=_activations.tanh,
)
math = Names(
    **_operations_of,
    argmax=argmax,
    reduce_max=reduce_max,
    reduce_mean=reduce_mean,
    reduce_min=reduce_min,
    reduce_prod=reduce_prod,
    reduce_std=reduce_std,
    reduce_sum=reduce_sum,
)
random = Names(normal=_normal, uniform=_uniform, set_seed=nd.set_seed)
train = Names(
    Checkpoint=nd.Checkpoint, CheckpointManager=nd.CheckpointManager, ClusterSpec=nd.ClusterSpec
)
config = Names(
    list_logical_devices=_list_devices,
    list_physical_devices=_list_devices,
    experimental=Names(
        list_physical_devices=_list_devices, set_memory_growth=lambda device, enable: None
    ),
)
keras = Names(
    Model=_models.Model,
    Sequential=_models.Sequential,
    activations=_models.activations,
    callbacks=_models.callbacks,
    initializers=_models.initializers,
    layers=_models.layers,
    losses=_models.losses,
    metrics=_models.metrics,
    mixed_precision=Names(
        LossScaleOptimizer=_models.optimizers.LossScale,
        set_global_policy=_models.layers.set_dtype_policy,
    ),
    optimizers=_models.optimizers,
    utils=Names(set_random_seed=nd.set_seed),
)
