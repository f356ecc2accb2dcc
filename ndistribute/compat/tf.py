"""Names of TensorFlow 2: ``import ndistribute.compat.tf as tf`` runs many of its scripts unchanged.

Arrays are NumPy's and CuPy's, and everything runs at once: `function` returns its function. The
names only lead to this package and to NumPy. One that is missing says which are similar.
"""

from __future__ import annotations

import contextlib as _contextlib
import os as _os
import shutil as _shutil
import types as _types
from typing import Any as _Any

import numpy as _np

import ndistribute as _nd
from ndistribute import models as _models
from ndistribute.compat import tensors as _tensors
from ndistribute.compat.keras import KERAS as _KERAS
from ndistribute.compat.names import Names as _Names
from ndistribute.compat.names import derived as _derived
from ndistribute.compat.names import missing as _missing
from ndistribute.compat.names import public as _public
from ndistribute.models import activations as _activations
from ndistribute.models import operations as _operations
from ndistribute.tree import map_leaves as _map_leaves


def __getattr__(name: str) -> _Any:
    raise _missing("tf", name, __all__)


def __dir__() -> list[str]:
    return __all__


class _Options(_nd.InputOptions):
    """Options of a dataset, which can be set."""

    @property
    def experimental_distribute(self) -> _Any:
        """What sets the policy of `InputOptions`."""
        options = self

        class Distribute:
            def __setattr__(self, name: str, value: _Any) -> None:
                object.__setattr__(options, name, _nd.InputOptions(**{name: value}).__dict__[name])

        return Distribute()


class _Dataset(_nd.Dataset):
    """A dataset, whose lists are tensors."""

    @classmethod
    def from_tensor_slices(cls, tensors: _Any, name: _Any = None) -> _nd.Dataset:
        """Return a dataset of the rows of tensors; see `nd.Dataset`."""
        return super().from_tensor_slices(_plain(tensors))

    @classmethod
    def from_tensors(cls, tensors: _Any, name: _Any = None) -> _nd.Dataset:
        """Return a dataset of one element; see `nd.Dataset`."""
        return super().from_tensors(_plain(tensors))

    # TensorFlow's names of the arguments, which scripts pass by keyword.

    def map(  # type: ignore[override]
        self, map_func: _Any, num_parallel_calls: int | None = None, **_: _Any
    ) -> _nd.Dataset:
        """Return a dataset of ``map_func(element)``; see `nd.Dataset`."""
        return super().map(map_func, num_parallel_calls)

    def batch(  # type: ignore[override]
        self, batch_size: int, drop_remainder: bool = False, **_: _Any
    ) -> _nd.Dataset:
        """Return a dataset of batches; see `nd.Dataset`."""
        return super().batch(batch_size, drop_remainder)

    def prefetch(self, buffer_size: int, **_: _Any) -> _nd.Dataset:  # type: ignore[override]
        """Return a dataset of which a thread prepares elements ahead; see `nd.Dataset`."""
        return super().prefetch(buffer_size)


def _plain(value: _Any) -> _Any:
    """Return arrays for lists of numbers, in tuples and dicts."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return _tensors.plain(_tensors.convert_to_tensor(value))


def _list_devices(device_type: str | None = None) -> list[_types.SimpleNamespace]:
    """Return the devices, with `name` and `device_type`."""
    found = _nd.list_devices(None if device_type is None else device_type.lower())
    kinds = [(one.kind.upper(), one.index) for one in found]
    return [
        _types.SimpleNamespace(name=f"/physical_device:{kind}:{index}", device_type=kind)
        for kind, index in kinds
    ]


def _strategy(name: str) -> _Any:
    """Return a strategy whose `reduce` returns tensors."""
    kind: _Any = getattr(_nd, name)

    def reduce(self: _Any, reduce_op: _Any, value: _Any, axis: _Any = None) -> _Any:
        return _map_leaves(_tensors.tensor_if_array, kind.reduce(self, reduce_op, value, axis))

    return _derived("distribute", kind, reduce=reduce)


class _Checkpoint(_nd.Checkpoint):
    """A checkpoint whose `restore` returns what TensorFlow's does, and accepts None."""

    def __init__(self, root: _Any = None, **objects: _Any) -> None:
        super().__init__(**({} if root is None else {"root": root}), **objects)

    def restore(self, path: _Any, options: _Any = None) -> _Any:
        """Set the state to what was saved; see `nd.Checkpoint`."""
        if path is not None:
            super().restore(path)
        methods = "assert_consumed assert_existing_objects_matched expect_partial".split()
        return _types.SimpleNamespace(**dict.fromkeys(methods, lambda: None))

    read = restore


def _softmax_cross_entropy(labels: _Any, logits: _Any, name: _Any = None) -> _Any:
    """Return the cross-entropy of each example."""
    return _operations.softmax_cross_entropy(logits, labels)


def _sigmoid_cross_entropy(labels: _Any, logits: _Any, name: _Any = None) -> _Any:
    """Return the cross-entropy of two classes for each element."""
    return _np.maximum(logits, 0) - logits * labels + _np.log1p(_np.exp(-_np.abs(logits)))


_STRATEGIES = {
    name: _strategy(name)
    for name in (
        "CentralStorageStrategy MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy "
        "ParameterServerStrategy"
    ).split()
}
_RESOLVERS = {
    name: _derived("distribute.cluster_resolver", getattr(_nd, name), rpc_layer="grpc")
    for name in "SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver".split()
}
_COORDINATOR = _Names("distribute.coordinator", {"ClusterCoordinator": _nd.ClusterCoordinator})
_EXPERIMENTAL = {
    **_STRATEGIES,
    "CommunicationImplementation": _nd.CommunicationImplementation,
    "CommunicationOptions": _nd.CommunicationOptions,
    "coordinator": _COORDINATOR,
    "partitioners": _Names("distribute.experimental.partitioners", _public(_nd.partitioners)),
}
_DISTRIBUTE = (
    "DistributedDataset DistributedValues HierarchicalCopyAllReduce InputContext InputOptions "
    "NcclAllReduce ReduceOp ReductionToOneDevice ReplicaContext Strategy get_replica_context "
    "get_strategy has_strategy in_cross_replica_context"
)
_DEVICES = {"list_logical_devices": _list_devices, "list_physical_devices": _list_devices}
_FILES = {
    "exists": _os.path.exists,
    "isdir": _os.path.isdir,
    "listdir": _os.listdir,
    "makedirs": lambda path: _os.makedirs(path, exist_ok=True),
    # Only the chief writes, so other workers may remove what does not exist.
    "rmtree": lambda path: _shutil.rmtree(path, ignore_errors=True),
}
_NN = {
    **{
        name: _tensors.on_tensors(getattr(_activations, name))
        for name in "elu gelu relu sigmoid silu softplus tanh".split()
    },
    "compute_average_loss": _models.losses.compute_average_loss,
    "l2_loss": _tensors.on_tensors(lambda t: _np.sum(_np.square(t)) / 2),
    "leaky_relu": _tensors.on_tensors(_activations.leaky_relu, alpha="negative_slope"),
    "log_softmax": _tensors.on_tensors(lambda logits, axis=-1: _nd.log_softmax(logits, axis)),
    "scale_regularization_loss": _models.losses.scale_regularization_loss,
    "sigmoid_cross_entropy_with_logits": _sigmoid_cross_entropy,
    "softmax": _tensors.on_tensors(lambda logits, axis=-1: _nd.softmax(logits, axis)),
    "softmax_cross_entropy_with_logits": _softmax_cross_entropy,
    "sparse_softmax_cross_entropy_with_logits": _softmax_cross_entropy,
}
_OWN = (
    "GradientTape IndexedSlices VariableAggregation VariableSynchronization custom_gradient "
    "stop_gradient"
)
_TENSORS = "Tensor TensorSpec Variable constant convert_to_tensor function"
# What `tf` has of `tf.math`.
_MATH = (
    "abs add add_n argmax argmin cos cosh divide equal exp floor greater greater_equal less "
    "less_equal logical_and logical_not logical_or matmul maximum minimum multiply negative "
    "not_equal pow reduce_all reduce_any reduce_logsumexp reduce_max reduce_mean reduce_min "
    "reduce_prod reduce_sum round sigmoid sign sin sinh sqrt square subtract tan tanh"
)
_NAMES: dict[str, _Any] = {
    **_tensors.DTYPES,
    **_tensors.ARRAYS,
    **{name: _tensors.MATH[name] for name in _MATH.split()},
    **{name: getattr(_tensors, name) for name in _TENSORS.split()},
    **{name: getattr(_nd, name) for name in _OWN.split()},
    **dict.fromkeys(("device", "init_scope", "name_scope"), _contextlib.nullcontext),
    "config": _Names(
        "config",
        {
            **_DEVICES,
            "experimental": _Names(
                "config.experimental",
                {**_DEVICES, "set_memory_growth": lambda device, enable: None},
            ),
            "set_soft_device_placement": lambda enabled: None,
        },
    ),
    "data": _Names(
        "data",
        {
            "AUTOTUNE": -1,
            "Dataset": _Dataset,
            "Options": _Options,
            "experimental": _Names(
                "data.experimental", {"AUTOTUNE": -1, "AutoShardPolicy": _nd.AutoShardPolicy}
            ),
        },
    ),
    "distribute": _Names(
        "distribute",
        {
            **_STRATEGIES,
            **{name: getattr(_nd, name) for name in _DISTRIBUTE.split()},
            "Server": _derived("distribute", _nd.Server, "protocol", "config"),
            "cluster_resolver": _Names("distribute.cluster_resolver", _RESOLVERS),
            "coordinator": _COORDINATOR,
            "experimental": _Names("distribute.experimental", _EXPERIMENTAL),
        },
    ),
    "dtypes": _Names("dtypes", _tensors.DTYPES),
    "errors": _Names(
        "errors", {"OutOfRangeError": StopIteration, "UnavailableError": _nd.WorkerLostError}
    ),
    "executing_eagerly": lambda: True,
    "io": _Names("io", {"gfile": _Names("io.gfile", _FILES)}),
    "keras": _KERAS,
    "math": _Names("math", _tensors.MATH),
    "newaxis": None,
    "nn": _Names("nn", _NN),
    "random": _Names("random", _tensors.RANDOM),
    "train": _Names(
        "train",
        {
            "Checkpoint": _Checkpoint,
            "CheckpointManager": _nd.CheckpointManager,
            "ClusterSpec": _nd.ClusterSpec,
            "latest_checkpoint": _models.latest_checkpoint,
        },
    ),
}
__version__ = _nd.__version__
__all__ = sorted(_NAMES)  # noqa: PLE0605
globals().update(_NAMES)
