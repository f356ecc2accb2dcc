"""Run NumPy and CuPy code on many replicas, with the vocabulary of `tf.distribute`."""

import functools
import sys
import types

from ndistribute import cluster, errors, estimator, graph, models, optimizers, tracebacks
from ndistribute.autodiff import (
    GradientTape,
    custom_gradient,
    log_softmax,
    logsumexp,
    softmax,
    stop_gradient,
)
from ndistribute.cluster import (
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from ndistribute.collective.communicator import CommunicationImplementation, CommunicationOptions
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.select import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from ndistribute.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_seed,
    set_strategy,
)
from ndistribute.coordinator.coordinator import ClusterCoordinator
from ndistribute.coordinator.server import Server
from ndistribute.data import (
    AutoShardPolicy,
    Dataset,
    DistributedDataset,
    InputContext,
    InputOptions,
)
from ndistribute.devices import Device, list_devices
from ndistribute.errors import (
    AuthenticationError,
    CheckpointCorruptError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from ndistribute.graph import device
from ndistribute.models import (
    Checkpoint,
    CheckpointManager,
    Model,
    Sequential,
    callbacks,
    layers,
    losses,
    metrics,
)
from ndistribute.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    Strategy,
)
from ndistribute.values import DistributedValues, Mirrored, PerReplica
from ndistribute.variables import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    partitioners,
)
from ndistribute.version import __version__

# Users expect these names in `cluster`, which their modules import.
cluster.ClusterCoordinator, cluster.Server = ClusterCoordinator, Server  # type: ignore[attr-defined]
cluster.__all__ += ["ClusterCoordinator", "Server"]

__all__ = [
    "AuthenticationError",
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointManager",
    "ClusterCoordinator",
    "ClusterSpec",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "Dataset",
    "Device",
    "DistributeError",
    "DistributedDataset",
    "DistributedValues",
    "GradientTape",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "MPIClusterResolver",
    "Mirrored",
    "MirroredStrategy",
    "Model",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "Sequential",
    "Server",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "Strategy",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "WorkerLostError",
    "__version__",
    "callbacks",
    "cluster",
    "custom_gradient",
    "device",
    "errors",
    "estimator",
    "get_replica_context",
    "get_strategy",
    "graph",
    "has_strategy",
    "in_cross_replica_context",
    "layers",
    "list_devices",
    "log_softmax",
    "logsumexp",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "partitioners",
    "set_seed",
    "set_strategy",
    "softmax",
    "stop_gradient",
]

# Completion shows the public names alone, without the modules' helpers and imports.
for _module in (
    sys.modules[__name__],
    *(found for name in __all__ if isinstance(found := globals()[name], types.ModuleType)),
):
    _module.__dir__ = functools.partial(list, _module.__all__)  # type: ignore[method-assign]

tracebacks.install()
