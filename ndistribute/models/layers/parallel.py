"""Dense layers that are divided among the replicas: each replica stores and computes a part.

The replicas have different parts of the batch. A layer gathers the inputs of the whole batch, each
replica computes its part of the layer for all of them, and the results go back to the replicas of
the examples. That costs less than the all-reduce of a gradient where a layer has many more weights
than a batch has activations: the rest of a model, such as convolutions, stays data-parallel.

References:
    A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism", 2019, for the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.context import get_replica_context
from ndistribute.models import activations, initializers
from ndistribute.models.layers.core import Dense
from ndistribute.models.operations import dense
from ndistribute.variables.sharded import sharded_variable


class _ParallelDense(Dense):
    """A dense layer with weights in shards."""

    _axis: ClassVar[int]
    """The axis of the kernel that is divided."""
    _features: int

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernel and the bias, which is divided with the units."""
        of_kernel, of_bias = self._initializers
        self._features = int(input_shape[-1])
        self.kernel = self._sharded("kernel", (self._features, self.units), of_kernel, self._axis)
        if self._use_bias:
            make = self._sharded if self._axis else self.add_weight
            self.bias = make("bias", (self.units,), of_bias)

    def _whole_batch(self, inputs: Any, context: Any) -> tuple[Any, slice | None]:
        """Return the examples of all replicas, and which are this one's; None if it is alone."""
        if inputs.ndim != 2:
            raise ValueError(
                f"{self.name}: a parallel dense layer needs an input of two axes, got shape "
                f"{inputs.shape}: put a Flatten before it."
            )
        inputs = self.checked(inputs, self._features, "features")
        if context is None or context.num_replicas_in_sync == 1:
            return inputs, None
        lengths = context.all_gather(np.array([len(inputs)]), axis=0)
        start = int(lengths[: context.replica_id_in_sync_group].sum())
        return context.all_gather(inputs, axis=0), slice(start, start + len(inputs))

    def _sharded(self, name: str, shape: Sequence[int], initializer: Any, axis: int = 0) -> Any:
        if self.kernel_regularizer or self.bias_regularizer:
            raise ValueError(
                f"{self.name}: a parallel dense layer cannot be regularized, as each replica would "
                "penalize a part of the weights."
            )
        make = initializers.get(initializer)
        return sharded_variable(
            lambda: make(tuple(shape), self.dtype),
            axis,
            name=f"{self.name}/{name}",
            dtype=self.dtype,
        )


class ColumnParallelDense(_ParallelDense):
    """A dense layer of whose units each replica stores and computes a part: columns of the kernel.

    Its result is that of `Dense`, and so are the gradients. Optimizers update each part where it
    is. It takes and returns the examples of its replica, with all features.

    Args:
        units: the length of the output's last axis, at least the number of replicas.
        activation: as for `Dense`.
        use_bias: as for `Dense`.
        options: as for `Dense`, but for regularizers.

    >>> ColumnParallelDense(4)(np.ones((2, 3), np.float32)).shape
    (2, 4)
    """

    _axis = 1

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(batch, units)``."""
        context: Any = get_replica_context()
        whole, rows = self._whole_batch(inputs, context)
        part = dense(whole, self.kernel, self.bias, activations.get(None))
        if rows is not None:
            part = context.all_gather(part, axis=1)[rows]
        return self.activation(part)


class RowParallelDense(_ParallelDense):
    """A dense layer of whose inputs each replica uses a part: rows of the kernel.

    Its result is that of `Dense`, and so are the gradients; see `ColumnParallelDense`. It fits a
    layer with more inputs than units.

    Args:
        units: the length of the output's last axis.
        activation: as for `Dense`.
        use_bias: as for `Dense`.
        options: as for `Dense`, but for regularizers.

    >>> RowParallelDense(2)(np.ones((2, 3), np.float32)).shape
    (2, 2)
    """

    _axis = 0

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(batch, units)``."""
        context: Any = get_replica_context()
        whole, rows = self._whole_batch(inputs, context)
        if rows is None:
            total = whole @ self.kernel
        else:
            part, *_ = self.kernel.cut(context.replica_id_in_sync_group)
            total = context.all_reduce("sum", whole[:, part] @ self.kernel)[rows]
        return self.activation(total if self.bias is None else total + self.bias)
