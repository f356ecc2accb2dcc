# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.adapters import Checkpoint as _Checkpoint
Checkpoint = _Checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager as _CheckpointManager
CheckpointManager = _CheckpointManager
from ndistribute.compat.adapters import FileOptions as _CheckpointOptions
CheckpointOptions = _CheckpointOptions
from ndistribute.cluster.spec import ClusterSpec as _ClusterSpec
ClusterSpec = _ClusterSpec
from ndistribute.graph.monitored import Coordinator as _Coordinator
Coordinator = _Coordinator
ExponentialMovingAverage: Any
get_checkpoint_state: Any
latest_checkpoint: Any
list_variables: Any
load_checkpoint: Any
load_variable: Any
