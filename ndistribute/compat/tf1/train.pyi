# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.graph.optimizers import AdagradOptimizer as _AdagradOptimizer
AdagradOptimizer = _AdagradOptimizer
from ndistribute.graph.optimizers import AdamOptimizer as _AdamOptimizer
AdamOptimizer = _AdamOptimizer
from ndistribute.compat.adapters import Checkpoint as _Checkpoint
Checkpoint = _Checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager as _CheckpointManager
CheckpointManager = _CheckpointManager
from ndistribute.compat.configuration import FileOptions as _CheckpointOptions
CheckpointOptions = _CheckpointOptions
from ndistribute.graph.hooks import CheckpointSaverHook as _CheckpointSaverHook
CheckpointSaverHook = _CheckpointSaverHook
from ndistribute.graph.hooks import CheckpointSaverListener as _CheckpointSaverListener
CheckpointSaverListener = _CheckpointSaverListener
ChiefSessionCreator: Any
from ndistribute.cluster.spec import ClusterSpec as _ClusterSpec
ClusterSpec = _ClusterSpec
from ndistribute.graph.monitored import Coordinator as _Coordinator
Coordinator = _Coordinator
ExponentialMovingAverage: Any
from ndistribute.graph.hooks import FeedFnHook as _FeedFnHook
FeedFnHook = _FeedFnHook
from ndistribute.graph.hooks import FinalOpsHook as _FinalOpsHook
FinalOpsHook = _FinalOpsHook
from ndistribute.graph.hooks import GlobalStepWaiterHook as _GlobalStepWaiterHook
GlobalStepWaiterHook = _GlobalStepWaiterHook
from ndistribute.graph.optimizers import GradientDescentOptimizer as _GradientDescentOptimizer
GradientDescentOptimizer = _GradientDescentOptimizer
from ndistribute.graph.hooks import LoggingTensorHook as _LoggingTensorHook
LoggingTensorHook = _LoggingTensorHook
from ndistribute.graph.optimizers import MomentumOptimizer as _MomentumOptimizer
MomentumOptimizer = _MomentumOptimizer
from ndistribute.compat.graph_sessions import MonitoredSession as _MonitoredSession
MonitoredSession = _MonitoredSession
from ndistribute.compat.graphs import MonitoredBytesSession as _MonitoredTrainingSession
MonitoredTrainingSession = _MonitoredTrainingSession
from ndistribute.graph.hooks import NanLossDuringTrainingError as _NanLossDuringTrainingError
NanLossDuringTrainingError = _NanLossDuringTrainingError
from ndistribute.graph.hooks import NanTensorHook as _NanTensorHook
NanTensorHook = _NanTensorHook
from ndistribute.graph.optimizers import GraphOptimizer as _Optimizer
Optimizer = _Optimizer
from ndistribute.graph.optimizers import RMSPropOptimizer as _RMSPropOptimizer
RMSPropOptimizer = _RMSPropOptimizer
from ndistribute.graph.saver import Saver as _Saver
Saver = _Saver
from ndistribute.graph.monitored import Scaffold as _Scaffold
Scaffold = _Scaffold
from ndistribute.compat.graph_sessions import SecondOrStepTimer as _SecondOrStepTimer
SecondOrStepTimer = _SecondOrStepTimer
from ndistribute.task.server import Server as _Server
Server = _Server
from ndistribute.compat.graph_sessions import SessionManager as _SessionManager
SessionManager = _SessionManager
from ndistribute.graph.hooks import SessionRunArgs as _SessionRunArgs
SessionRunArgs = _SessionRunArgs
from ndistribute.graph.hooks import SessionRunContext as _SessionRunContext
SessionRunContext = _SessionRunContext
from ndistribute.graph.hooks import SessionRunHook as _SessionRunHook
SessionRunHook = _SessionRunHook
from ndistribute.graph.hooks import SessionRunValues as _SessionRunValues
SessionRunValues = _SessionRunValues
from ndistribute.compat.graph_sessions import SingularMonitoredSession as _SingularMonitoredSession
SingularMonitoredSession = _SingularMonitoredSession
from ndistribute.graph.hooks import StepCounterHook as _StepCounterHook
StepCounterHook = _StepCounterHook
from ndistribute.graph.hooks import StopAtStepHook as _StopAtStepHook
StopAtStepHook = _StopAtStepHook
from ndistribute.graph.hooks import SummarySaverHook as _SummarySaverHook
SummarySaverHook = _SummarySaverHook
from ndistribute.graph.summary import FileWriter as _SummaryWriter
SummaryWriter = _SummaryWriter
from ndistribute.compat.graph_supervisor import Supervisor as _Supervisor
Supervisor = _Supervisor
from ndistribute.graph.sync_replicas import SyncReplicasOptimizer as _SyncReplicasOptimizer
SyncReplicasOptimizer = _SyncReplicasOptimizer
WorkerSessionCreator: Any
create_global_step: Any
exponential_decay: Any
get_checkpoint_state: Any
get_global_step: Any
get_or_create_global_step: Any
global_step: Any
init_from_checkpoint: Any
latest_checkpoint: Any
list_variables: Any
load_checkpoint: Any
load_variable: Any
piecewise_constant: Any
polynomial_decay: Any
replica_device_setter: Any
start_queue_runners: Any
warm_start: Any
