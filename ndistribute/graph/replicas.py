"""Graphs that all replicas of a strategy run at the same time, each its own copy of one graph.

Where optimizers apply gradients, the copies meet: `mean_over_replicas` calls the collective of the
replica whose thread runs the step, so such a step runs on this thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndistribute.context import get_replica_context
from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.kernels import kernel
from ndistribute.graph.step import Node, Step

__all__ = ["mean_over_replicas"]


def mean_over_replicas(tensors: Sequence[Any]) -> list[Any]:
    """Return the means of gradients over the replicas, if the graph is replicated.

    So the step of all replicas follows the gradient of the mean of their losses, whatever the
    number of examples of each.

    Args:
        tensors: gradients of one graph, the same on each replica.

    Returns:
        The gradients themselves if the graph is not replicated.
    """
    graph = tensors[0].graph if tensors else None
    if graph is None or not graph.replicated:
        return list(tensors)
    means = graph.add("all_reduce", tensors, outputs=len(tensors)).outputs
    for mean, tensor in zip(means, tensors, strict=True):
        mean.dtype, mean.shape = tensor.dtype, tensor.shape
    return list(means)


@kernel("all_reduce")
def _all_reduce(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    replica = get_replica_context()
    if replica is None:
        raise InvalidArgumentError(
            f"{node.name!r} reduces over replicas, and is run by none: run the session in the "
            "function that strategy.run executes."
        )
    means = replica.all_reduce("mean", list(inputs))
    return means[0] if node.outputs == 1 else means
