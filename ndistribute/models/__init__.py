"""Models: layers, losses, metrics and callbacks, and the loops that train them."""

from ndistribute import optimizers
from ndistribute.models import (
    activations,
    callbacks,
    initializers,
    layers,
    losses,
    metrics,
    nn,
    regularizers,
)
from ndistribute.models.callbacks.preemption import PreemptionCheckpointHandler
from ndistribute.models.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from ndistribute.models.export import load
from ndistribute.models.model import Model, Sequential
from ndistribute.models.sidecar import SidecarEvaluator

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Model",
    "PreemptionCheckpointHandler",
    "Sequential",
    "SidecarEvaluator",
    "activations",
    "callbacks",
    "initializers",
    "latest_checkpoint",
    "layers",
    "load",
    "losses",
    "metrics",
    "nn",
    "optimizers",
    "regularizers",
]
