"""Graph programs: operations on the tasks of a cluster, and sessions that run them."""

from ndistribute.exports import export as _export
from ndistribute.graph import streaming_metrics
from ndistribute.graph import summary as summary
from ndistribute.graph.device_functions import *
from ndistribute.graph.gradients import clip_by_global_norm as clip_by_global_norm
from ndistribute.graph.gradients import global_norm as global_norm
from ndistribute.graph.gradients import gradients as gradients
from ndistribute.graph.graph import Graph as Graph
from ndistribute.graph.graph import Operation as Operation
from ndistribute.graph.graph import Tensor as Tensor
from ndistribute.graph.graph import as_tensor as as_tensor
from ndistribute.graph.graph import get_default_graph as get_default_graph
from ndistribute.graph.graph import reset_default_graph as reset_default_graph
from ndistribute.graph.hooks import *
from ndistribute.graph.iterators import DatasetIterator as DatasetIterator
from ndistribute.graph.model_calls import call_in_graph as call_in_graph
from ndistribute.graph.monitored import Coordinator as Coordinator
from ndistribute.graph.monitored import MonitoredTrainingSession as MonitoredTrainingSession
from ndistribute.graph.monitored import Scaffold as Scaffold
from ndistribute.graph.moving_averages import ExponentialMovingAverage as ExponentialMovingAverage
from ndistribute.graph.operations import *
from ndistribute.graph.optimizers import *
from ndistribute.graph.optimizers import GraphOptimizer as Optimizer  # noqa: F401
from ndistribute.graph.saver import Saver as Saver
from ndistribute.graph.saver import get_checkpoint_state as get_checkpoint_state
from ndistribute.graph.saver import init_from_checkpoint as init_from_checkpoint
from ndistribute.graph.saver import latest_checkpoint as latest_checkpoint
from ndistribute.graph.scopes import AUTO_REUSE as AUTO_REUSE
from ndistribute.graph.scopes import get_variable as get_variable
from ndistribute.graph.scopes import get_variable_scope as get_variable_scope
from ndistribute.graph.scopes import variable_scope as variable_scope
from ndistribute.graph.session import ConfigProto as ConfigProto
from ndistribute.graph.session import RunOptions as RunOptions
from ndistribute.graph.session import Session as Session
from ndistribute.graph.sync_replicas import SyncReplicasOptimizer as SyncReplicasOptimizer
from ndistribute.graph.variables import *
from ndistribute.graph.variables import GraphVariable as GraphVariable
from ndistribute.numpy_functions import register as register

metrics = streaming_metrics
Variable = GraphVariable
_export(vars(), "metrics summary", but="GraphVariable call_in_graph")
