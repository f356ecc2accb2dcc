"""Run NumPy and CuPy code on many replicas, with the vocabulary of `tf.distribute`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ndistribute import cluster as cluster
from ndistribute import errors as errors
from ndistribute import models as models
from ndistribute import optimizers as optimizers
from ndistribute import summaries as summary  # noqa: F401
from ndistribute import tracebacks
from ndistribute.autodiff import GradientTape as GradientTape
from ndistribute.autodiff import custom_gradient as custom_gradient
from ndistribute.autodiff import log_softmax as log_softmax
from ndistribute.autodiff import logsumexp as logsumexp
from ndistribute.autodiff import softmax as softmax
from ndistribute.autodiff import stop_gradient as stop_gradient
from ndistribute.cluster import ClusterSpec as ClusterSpec
from ndistribute.cluster import KubernetesClusterResolver as KubernetesClusterResolver
from ndistribute.cluster import MPIClusterResolver as MPIClusterResolver
from ndistribute.cluster import SimpleClusterResolver as SimpleClusterResolver
from ndistribute.cluster import SlurmClusterResolver as SlurmClusterResolver
from ndistribute.cluster import TFConfigClusterResolver as TFConfigClusterResolver
from ndistribute.cluster import TorchrunClusterResolver as TorchrunClusterResolver
from ndistribute.cluster import TPUClusterResolver as TPUClusterResolver
from ndistribute.cluster import UnionResolver as UnionResolver
from ndistribute.collective.communicator import (
    CommunicationImplementation as CommunicationImplementation,
)
from ndistribute.collective.communicator import CommunicationOptions as CommunicationOptions
from ndistribute.collective.membership import Elastic as Elastic
from ndistribute.collective.reduce_op import ReduceOp as ReduceOp
from ndistribute.collective.select import CrossDeviceOps as CrossDeviceOps
from ndistribute.collective.select import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from ndistribute.collective.select import NcclAllReduce as NcclAllReduce
from ndistribute.collective.select import ReductionToOneDevice as ReductionToOneDevice
from ndistribute.collective.select import RingAllReduce as RingAllReduce
from ndistribute.context import ReplicaContext as ReplicaContext
from ndistribute.context import get_replica_context as get_replica_context
from ndistribute.context import get_strategy as get_strategy
from ndistribute.context import has_strategy as has_strategy
from ndistribute.context import in_cross_replica_context as in_cross_replica_context
from ndistribute.context import set_seed as set_seed
from ndistribute.context import set_strategy as set_strategy
from ndistribute.coordinator.closures import PerWorkerValue as PerWorkerValue
from ndistribute.coordinator.closures import RemoteValue as RemoteValue
from ndistribute.coordinator.coordinator import ClusterCoordinator as ClusterCoordinator
from ndistribute.data import AutoShardPolicy as AutoShardPolicy
from ndistribute.data import Dataset as Dataset
from ndistribute.data import DistributedDataset as DistributedDataset
from ndistribute.data import DistributedIterator as DistributedIterator
from ndistribute.data import InputContext as InputContext
from ndistribute.data import InputOptions as InputOptions
from ndistribute.data import InputReplicationMode as InputReplicationMode
from ndistribute.devices import Device as Device
from ndistribute.devices import list_devices as list_devices
from ndistribute.devices import set_logical_cpus as set_logical_cpus
from ndistribute.errors import AuthenticationError as AuthenticationError
from ndistribute.errors import CheckpointCorruptError as CheckpointCorruptError
from ndistribute.errors import CollectiveMismatchError as CollectiveMismatchError
from ndistribute.errors import CollectiveTimeoutError as CollectiveTimeoutError
from ndistribute.errors import DistributeError as DistributeError
from ndistribute.errors import WorkerLostError as WorkerLostError
from ndistribute.exports import export as _export
from ndistribute.indexed_slices import IndexedSlices as IndexedSlices
from ndistribute.jit.branches import cond as cond
from ndistribute.jit.branches import while_loop as while_loop
from ndistribute.jit.function import function as function
from ndistribute.models import Checkpoint as Checkpoint
from ndistribute.models import CheckpointManager as CheckpointManager
from ndistribute.models import Model as Model
from ndistribute.models import Sequential as Sequential
from ndistribute.models import callbacks as callbacks
from ndistribute.models import layers as layers
from ndistribute.models import losses as losses
from ndistribute.models import metrics as metrics
from ndistribute.strategies import CentralStorageStrategy as CentralStorageStrategy
from ndistribute.strategies import MirroredStrategy as MirroredStrategy
from ndistribute.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from ndistribute.strategies import OneDeviceStrategy as OneDeviceStrategy
from ndistribute.strategies import ParameterServerStrategy as ParameterServerStrategy
from ndistribute.strategies import RunOptions as RunOptions
from ndistribute.strategies import Strategy as Strategy
from ndistribute.strategies import TPUStrategy as TPUStrategy
from ndistribute.strategies import initialize_tpu_system as initialize_tpu_system
from ndistribute.task.server import SERVICES as _SERVICES
from ndistribute.task.server import ServedTask as _ServedTask
from ndistribute.task.server import Server as Server
from ndistribute.task.server import TaskService as _TaskService
from ndistribute.values import DistributedValues as DistributedValues
from ndistribute.values import Mirrored as Mirrored
from ndistribute.values import PerReplica as PerReplica
from ndistribute.variables import Variable as Variable
from ndistribute.variables import VariableAggregation as VariableAggregation
from ndistribute.variables import VariableSynchronization as VariableSynchronization
from ndistribute.variables import partitioners as partitioners
from ndistribute.version import __version__ as __version__

if _TYPE_CHECKING:
    from ndistribute import estimator as estimator
    from ndistribute import graph as graph
    from ndistribute.graph import device as device


def __getattr__(name: str) -> _Any:
    """Import graphs and estimators when a program first uses them, as few do."""
    if name in ("estimator", "graph"):
        return _import_module(f"ndistribute.{name}")
    if name == "device":
        return _import_module("ndistribute.graph").device
    raise AttributeError(f"module 'ndistribute' has no attribute {name!r}")


def _serve_graphs(task: _ServedTask) -> _TaskService:
    """Return the service of graphs, which may call functions of estimators too."""
    _import_module("ndistribute.estimator")
    service: _TaskService = _import_module("ndistribute.graph.service").GraphService(task)
    return service


_SERVICES["graph"] = _serve_graphs

# Users expect these names in `cluster`, which their modules import.
vars(cluster).update(ClusterCoordinator=ClusterCoordinator, Server=Server)
_export(vars(cluster))
_export(
    vars(),
    "__version__ callbacks cluster device errors estimator graph layers losses metrics models "
    "optimizers partitioners summary",
)
tracebacks.install()
