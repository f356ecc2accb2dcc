"""Models: layers, losses, metrics and callbacks, and the loops that train them."""

from ndistribute.models import (
    activations,
    callbacks,
    initializers,
    layers,
    losses,
    metrics,
    optimizers,
    regularizers,
)
from ndistribute.models.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from ndistribute.models.export import load
from ndistribute.models.model import Model, Sequential

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Model",
    "Sequential",
    "activations",
    "callbacks",
    "initializers",
    "latest_checkpoint",
    "layers",
    "load",
    "losses",
    "metrics",
    "optimizers",
    "regularizers",
]
