"""Models: layers, losses, metrics and callbacks, and the loops that train them."""

from ndistribute import optimizers as optimizers
from ndistribute.exports import export as _export
from ndistribute.models import activations as activations
from ndistribute.models import callbacks as callbacks
from ndistribute.models import initializers as initializers
from ndistribute.models import layers as layers
from ndistribute.models import losses as losses
from ndistribute.models import metrics as metrics
from ndistribute.models import nn as nn
from ndistribute.models import regularizers as regularizers
from ndistribute.models.callbacks import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from ndistribute.models.callbacks import TerminationConfig as TerminationConfig
from ndistribute.models.checkpoint import Checkpoint as Checkpoint
from ndistribute.models.checkpoint import latest_checkpoint as latest_checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager as CheckpointManager
from ndistribute.models.checkpoint_reader import list_variables as list_variables
from ndistribute.models.checkpoint_reader import load_checkpoint as load_checkpoint
from ndistribute.models.checkpoint_reader import load_variable as load_variable
from ndistribute.models.export import load as load
from ndistribute.models.export import model_from_json as model_from_json
from ndistribute.models.layers.inputs import Input as Input
from ndistribute.models.model import Model as Model
from ndistribute.models.model import Sequential as Sequential
from ndistribute.models.model import clone_model as clone_model
from ndistribute.models.sidecar import SidecarEvaluator as SidecarEvaluator
from ndistribute.names import custom_object_scope as custom_object_scope
from ndistribute.names import get_custom_objects as get_custom_objects
from ndistribute.names import register_keras_serializable as register_keras_serializable
from ndistribute.names import serialize as serialize

_export(
    vars(), "activations callbacks initializers layers losses metrics nn optimizers regularizers"
)
