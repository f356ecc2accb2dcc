"""The functions of networks for arrays, tracked arrays and tensors of graphs."""

from __future__ import annotations

from typing import Any

from ndistribute import autodiff
from ndistribute.exports import export as _export
from ndistribute.models import activations, operations
from ndistribute.numpy_functions import Results, register


def _conv2d(x: Any, kernel: Any, strides: Any = (1, 1), padding: str = "valid") -> Any:
    return operations.conv2d(
        x, kernel, None, activations.linear, strides=tuple(strides), padding=padding
    )


conv2d = register("nn.conv2d", _conv2d, Results.BY_IMAGE)
max_pool2d = register("nn.max_pool2d", operations.max_pool2d, Results.BY_IMAGE)
average_pool2d = register("nn.average_pool2d", operations.average_pool2d, Results.BY_IMAGE)
softmax_cross_entropy = register("nn.softmax_cross_entropy", operations.softmax_cross_entropy)
sigmoid_cross_entropy = register("nn.sigmoid_cross_entropy", operations.sigmoid_cross_entropy)
softmax = register("nn.softmax", autodiff.softmax)
log_softmax = register("nn.log_softmax", autodiff.log_softmax)
relu = register("nn.relu", activations.relu, Results.ELEMENTWISE)
sigmoid = register("nn.sigmoid", activations.sigmoid, Results.ELEMENTWISE)
silu = register("nn.silu", activations.silu, Results.ELEMENTWISE)
gelu = register("nn.gelu", activations.gelu, Results.ELEMENTWISE)
logsumexp = register("nn.logsumexp", autodiff.logsumexp)


_export(
    vars(),
    "average_pool2d gelu log_softmax logsumexp max_pool2d relu sigmoid silu softmax "
    "softmax_cross_entropy",
)
