"""Layers: functions of arrays with variables of their own."""

from ndistribute.models.layers.core import (
    Activation,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    Input,
    Reshape,
)
from ndistribute.models.layers.layer import Layer, set_dtype_policy

__all__ = [
    "Activation",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "Input",
    "Layer",
    "Reshape",
    "set_dtype_policy",
]
