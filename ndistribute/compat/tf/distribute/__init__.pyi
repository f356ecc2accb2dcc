# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.distribute import cluster_resolver as cluster_resolver
from ndistribute.compat.tf.distribute import coordinator as coordinator
from ndistribute.compat.tf.distribute import experimental as experimental
from ndistribute.strategies.local import CentralStorageStrategy as _CentralStorageStrategy
CentralStorageStrategy = _CentralStorageStrategy
from ndistribute.collective.select import CrossDeviceOps as _CrossDeviceOps
CrossDeviceOps = _CrossDeviceOps
from ndistribute.data.distributed import DistributedDataset as _DistributedDataset
DistributedDataset = _DistributedDataset
from ndistribute.data.distributed import DistributedIterator as _DistributedIterator
DistributedIterator = _DistributedIterator
from ndistribute.values import DistributedValues as _DistributedValues
DistributedValues = _DistributedValues
from ndistribute.collective.select import HierarchicalCopyAllReduce as _HierarchicalCopyAllReduce
HierarchicalCopyAllReduce = _HierarchicalCopyAllReduce
from ndistribute.data.options import InputContext as _InputContext
InputContext = _InputContext
from ndistribute.data.options import InputOptions as _InputOptions
InputOptions = _InputOptions
from ndistribute.data.options import InputReplicationMode as _InputReplicationMode
InputReplicationMode = _InputReplicationMode
from ndistribute.strategies.local import MirroredStrategy as _MirroredStrategy
MirroredStrategy = _MirroredStrategy
from ndistribute.strategies.local import MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy
MultiWorkerMirroredStrategy = _MultiWorkerMirroredStrategy
from ndistribute.collective.select import NcclAllReduce as _NcclAllReduce
NcclAllReduce = _NcclAllReduce
from ndistribute.strategies.local import OneDeviceStrategy as _OneDeviceStrategy
OneDeviceStrategy = _OneDeviceStrategy
from ndistribute.strategies.parameter_server import ParameterServerStrategy as _ParameterServerStrategy
ParameterServerStrategy = _ParameterServerStrategy
from ndistribute.collective.reduce_op import ReduceOp as _ReduceOp
ReduceOp = _ReduceOp
from ndistribute.collective.select import ReductionToOneDevice as _ReductionToOneDevice
ReductionToOneDevice = _ReductionToOneDevice
from ndistribute.context import ReplicaContext as _ReplicaContext
ReplicaContext = _ReplicaContext
from ndistribute.strategies.base import RunOptions as _RunOptions
RunOptions = _RunOptions
from ndistribute.task.server import Server as _Server
Server = _Server
from ndistribute.strategies.base import Strategy as _Strategy
Strategy = _Strategy
from ndistribute.compat.strategies import StrategyExtended as _StrategyExtended
StrategyExtended = _StrategyExtended
from ndistribute.strategies.tpu import TPUStrategy as _TPUStrategy
TPUStrategy = _TPUStrategy
experimental_set_strategy: Any
get_replica_context: Any
get_strategy: Any
has_strategy: Any
in_cross_replica_context: Any
