"""Graph programs: operations on the tasks of a cluster, and sessions that run them."""

import typing as _typing

from ndistribute.exports import export as _export
from ndistribute.graph import streaming_metrics
from ndistribute.graph import summary as summary
from ndistribute.graph.device_functions import (
    GreedyLoadBalancingStrategy as GreedyLoadBalancingStrategy,
)
from ndistribute.graph.device_functions import byte_size_load_fn as byte_size_load_fn
from ndistribute.graph.device_functions import device as device
from ndistribute.graph.device_functions import replica_device_setter as replica_device_setter
from ndistribute.graph.gradients import clip_by_global_norm as clip_by_global_norm
from ndistribute.graph.gradients import global_norm as global_norm
from ndistribute.graph.gradients import gradients as gradients
from ndistribute.graph.graph import Graph as Graph
from ndistribute.graph.graph import Operation as Operation
from ndistribute.graph.graph import Tensor as Tensor
from ndistribute.graph.graph import as_tensor as as_tensor
from ndistribute.graph.graph import get_default_graph as get_default_graph
from ndistribute.graph.graph import reset_default_graph as reset_default_graph
from ndistribute.graph.hooks import CheckpointSaverHook as CheckpointSaverHook
from ndistribute.graph.hooks import CheckpointSaverListener as CheckpointSaverListener
from ndistribute.graph.hooks import FeedFnHook as FeedFnHook
from ndistribute.graph.hooks import FinalOpsHook as FinalOpsHook
from ndistribute.graph.hooks import GlobalStepWaiterHook as GlobalStepWaiterHook
from ndistribute.graph.hooks import LoggingTensorHook as LoggingTensorHook
from ndistribute.graph.hooks import NanLossDuringTrainingError as NanLossDuringTrainingError
from ndistribute.graph.hooks import NanTensorHook as NanTensorHook
from ndistribute.graph.hooks import SessionRunArgs as SessionRunArgs
from ndistribute.graph.hooks import SessionRunContext as SessionRunContext
from ndistribute.graph.hooks import SessionRunHook as SessionRunHook
from ndistribute.graph.hooks import SessionRunValues as SessionRunValues
from ndistribute.graph.hooks import StepCounterHook as StepCounterHook
from ndistribute.graph.hooks import StopAtStepHook as StopAtStepHook
from ndistribute.graph.hooks import SummarySaverHook as SummarySaverHook
from ndistribute.graph.iterators import DatasetIterator as DatasetIterator
from ndistribute.graph.model_calls import call_in_graph as call_in_graph
from ndistribute.graph.monitored import Coordinator as Coordinator
from ndistribute.graph.monitored import MonitoredTrainingSession as MonitoredTrainingSession
from ndistribute.graph.monitored import Scaffold as Scaffold
from ndistribute.graph.moving_averages import ExponentialMovingAverage as ExponentialMovingAverage
from ndistribute.graph.operations import cond as cond
from ndistribute.graph.operations import constant as constant
from ndistribute.graph.operations import group as group
from ndistribute.graph.operations import identity as identity
from ndistribute.graph.operations import placeholder as placeholder
from ndistribute.graph.operations import py_function as py_function
from ndistribute.graph.operations import random_normal as random_normal
from ndistribute.graph.operations import random_uniform as random_uniform
from ndistribute.graph.operations import stop_gradient as stop_gradient
from ndistribute.graph.operations import truncated_normal as truncated_normal
from ndistribute.graph.operations import while_loop as while_loop
from ndistribute.graph.optimizers import AdagradOptimizer as AdagradOptimizer
from ndistribute.graph.optimizers import AdamOptimizer as AdamOptimizer
from ndistribute.graph.optimizers import GradientDescentOptimizer as GradientDescentOptimizer
from ndistribute.graph.optimizers import GraphOptimizer as Optimizer  # noqa: F401
from ndistribute.graph.optimizers import MomentumOptimizer as MomentumOptimizer
from ndistribute.graph.optimizers import RMSPropOptimizer as RMSPropOptimizer
from ndistribute.graph.optimizers import exponential_decay as exponential_decay
from ndistribute.graph.optimizers import piecewise_constant as piecewise_constant
from ndistribute.graph.optimizers import polynomial_decay as polynomial_decay
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
from ndistribute.graph.variables import GraphVariable as GraphVariable
from ndistribute.graph.variables import get_or_create_global_step as get_or_create_global_step
from ndistribute.graph.variables import global_variables as global_variables
from ndistribute.graph.variables import global_variables_initializer as global_variables_initializer
from ndistribute.graph.variables import local_variables as local_variables
from ndistribute.graph.variables import (
    report_uninitialized_variables as report_uninitialized_variables,
)
from ndistribute.graph.variables import trainable_variables as trainable_variables
from ndistribute.graph.variables import variables_initializer as variables_initializer
from ndistribute.numpy_functions import register as register

metrics = streaming_metrics
Variable = GraphVariable
_export(vars(), "metrics summary", but="GraphVariable call_in_graph")
if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        """Say where to find what is not here any more."""
        hint = ": it is ndistribute.compat.tf1.train.Supervisor" if name == "Supervisor" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
