"""Layers: functions of arrays with variables of their own."""

from ndistribute.models.layers.attention import MultiHeadAttention
from ndistribute.models.layers.convolution import (
    AveragePool2D,
    Conv2D,
    GlobalAveragePool2D,
    MaxPool2D,
)
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
from ndistribute.models.layers.normalization import BatchNormalization, LayerNormalization
from ndistribute.models.layers.parallel import ColumnParallelDense, RowParallelDense

__all__ = [
    "Activation",
    "AveragePool2D",
    "BatchNormalization",
    "ColumnParallelDense",
    "Conv2D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAveragePool2D",
    "Input",
    "Layer",
    "LayerNormalization",
    "MaxPool2D",
    "MultiHeadAttention",
    "Reshape",
    "RowParallelDense",
    "set_dtype_policy",
]
