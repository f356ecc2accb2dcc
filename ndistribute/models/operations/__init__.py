"""Fused operations of layers and losses: one entry of the tape each, with buffers reused.

They accept plain and tracked arrays and variables. Host arrays of 16-bit floats are computed in
float32, because NumPy has no fast products for them.
"""

from ndistribute.models.operations.attention import attention
from ndistribute.models.operations.convolution import conv2d
from ndistribute.models.operations.normalization import (
    batch_normalization,
    layer_normalization,
    normalized_by,
)
from ndistribute.models.operations.pooling import average_pool2d, max_pool2d
from ndistribute.models.operations.products import dense, softmax_cross_entropy

__all__ = [
    "attention",
    "average_pool2d",
    "batch_normalization",
    "conv2d",
    "dense",
    "layer_normalization",
    "max_pool2d",
    "normalized_by",
    "softmax_cross_entropy",
]
