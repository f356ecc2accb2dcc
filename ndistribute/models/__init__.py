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
from ndistribute.models.model import Model, Sequential

__all__ = [
    "Model",
    "Sequential",
    "activations",
    "callbacks",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "optimizers",
    "regularizers",
]
