"""Batch and layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.context import get_replica_context, get_strategy
from ndistribute.devices import as_array
from ndistribute.exports import export as _export
from ndistribute.models import operations
from ndistribute.models.chief import schedules_steps
from ndistribute.models.layers.arguments import as_floats, positive
from ndistribute.models.layers.layer import Layer


class LayerNormalization(Layer):
    """A layer that normalises the features of each example.

    Source: Ba et al., "Layer Normalization", 2016.

    Args:
        axis: the axis of the features, which must be the last one.
        epsilon: added to the variance.
        center: whether to add a learned number to each feature, `beta`.
        scale: whether to multiply each feature by a learned factor, `gamma`.
        options: `beta_initializer`, `gamma_initializer`, `beta_regularizer`, `gamma_regularizer`,
            `name`, `trainable` and `dtype`, see `Layer`.

    >>> import numpy as np
    >>> LayerNormalization()(np.array([[1.0, 3.0]])).round(2)
    array([[-1.,  1.]], dtype=float32)
    """

    fixes_last_axis = True
    supports_masking = True
    weights_of_kind: ClassVar = {"gamma": "ones", "beta": "zeros"}

    def __init__(
        self,
        axis: int = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.axis, self.epsilon, self.center, self.scale = axis, float(epsilon), center, scale
        self.gamma: Any = None
        self.beta: Any = None

    def build(self, input_shape: Sequence[int]) -> None:
        """Create gamma and beta."""
        if len(input_shape) < 2 or self.axis not in (-1, len(input_shape) - 1):
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}, and axis={self.axis}: "
                f"{type(self).__name__} needs a batch axis, and the features on the last one."
            )
        self.gamma = self.add_weight("gamma", input_shape[-1:]) if self.scale else None
        self.beta = self.add_weight("beta", input_shape[-1:]) if self.center else None

    def call(self, inputs: Any) -> Any:
        """Return the normalised input."""
        x = as_floats(inputs, self.beta if self.gamma is None else self.gamma)
        return operations.layer_normalization(x, self.gamma, self.beta, epsilon=self.epsilon)


class BatchNormalization(LayerNormalization):
    """A layer that normalises each feature by the mean and variance of the batch.

    In training it uses the statistics of the batch and updates moving averages. Outside of
    training, and if `trainable` is False, it uses the moving averages. Each replica has its own
    averages; a checkpoint contains their mean. Source: Ioffe and Szegedy, "Batch Normalization",
    2015.

    Args:
        axis: the axis of the features, which must be the last one.
        momentum: each step keeps this share of a moving average.
        epsilon: added to the variance.
        synchronized: whether to compute the statistics over the examples of all replicas. Results
            then do not depend on the number of replicas, and a step waits for the other replicas.
        options: as for `LayerNormalization`; and `moving_mean_initializer` and
            `moving_variance_initializer`.

    >>> import numpy as np
    >>> layer = BatchNormalization()
    >>> layer(np.array([[1.0], [3.0]]), training=True).round(2).ravel()
    array([-1.,  1.], dtype=float32)
    >>> layer.moving_mean.numpy()
    array([0.02], dtype=float32)
    """

    weights_of_kind: ClassVar = {
        **LayerNormalization.weights_of_kind,
        "moving_mean": "zeros",
        "moving_variance": "ones",
    }

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        *,
        synchronized: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(axis, epsilon, **options)
        if not 0 <= momentum <= 1:
            raise ValueError(f"BatchNormalization: momentum must be in [0, 1], got {momentum}.")
        self.momentum = float(momentum)
        self.synchronized = bool(synchronized)
        self.moving_mean: Any = None
        self.moving_variance: Any = None

    def build(self, input_shape: Sequence[int]) -> None:
        """Create gamma, beta and the moving averages."""
        super().build(input_shape)
        # The workers of a chief make a step whenever they are free, so all add to one value.
        kind = "on_write" if schedules_steps(get_strategy()) else "on_read"
        options: Any = {"trainable": False, "synchronization": kind, "aggregation": "mean"}
        self.moving_mean = self.add_weight("moving_mean", input_shape[-1:], **options)
        self.moving_variance = self.add_weight("moving_variance", input_shape[-1:], **options)

    def call(self, inputs: Any, training: bool = False, mask: Any = None) -> Any:
        """Return the normalised input; the statistics leave out masked elements."""
        inputs = as_floats(inputs, self.moving_mean)
        options: Any = {"epsilon": self.epsilon}
        if not training or not self.trainable:
            options |= {"mean": self.moving_mean, "variance": self.moving_variance}
            return operations.normalized_by(inputs, self.gamma, self.beta, **options)
        total = self._total() if self.synchronized else None
        operation: Any = operations.batch_normalization
        if mask is not None:
            operation, options["mask"] = operations.masked_normalization, mask
        y, mean, variance = operation(inputs, self.gamma, self.beta, total=total, **options)
        if total is not None or untrack(inputs).size:  # An empty piece has no statistics.
            for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
                change = (batch - as_array(moving)) * (1 - self.momentum)
                moving.assign_add(change.astype(moving.dtype, copy=False))
        return y

    def _total(self) -> Callable[[Any], Any] | None:
        """Return the function that adds up a vector over the replicas; None for one replica."""
        replica = get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return None
        communicator = replica.communicator  # Not recorded: the rule does it.
        return lambda vector: communicator.all_reduce("sum", vector)


class GroupNormalization(LayerNormalization):
    """A layer that normalises groups of channels of each example.

    Source: Wu and He, "Group Normalization", 2018.

    Args:
        groups: the number of groups; -1: one for each channel.
        axis: the axis of the channels, which must be the last one.
        epsilon: added to the variance.
        options: as for `LayerNormalization`.

    >>> import numpy as np
    >>> GroupNormalization(2)(np.array([[1.0, 3.0, 2.0, 2.0]])).round(2)
    array([[-1.,  1.,  0.,  0.]], dtype=float32)
    """

    def __init__(
        self, groups: int = 32, axis: int = -1, epsilon: float = 1e-3, **options: Any
    ) -> None:
        super().__init__(axis, epsilon, **options)
        self.groups = groups if groups == -1 else positive(groups, "GroupNormalization: groups")

    def build(self, input_shape: Sequence[int]) -> None:
        """Create gamma and beta."""
        super().build(input_shape)
        if input_shape[-1] % self.groups:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}, whose channels are not a "
                f"multiple of groups={self.groups}."
            )

    def call(self, inputs: Any) -> Any:
        """Return the normalised input."""
        x = as_floats(inputs, self.beta if self.gamma is None else self.gamma)
        groups = x.shape[-1] if self.groups == -1 else self.groups
        inner, channels = math.prod(x.shape[1:-1]), x.shape[-1] // groups
        parts = np.swapaxes(x.reshape(x.shape[0], inner, groups, channels), 1, 2)
        flat = parts.reshape(x.shape[0], groups, inner * channels)
        flat = operations.layer_normalization(flat, None, None, epsilon=self.epsilon)
        y = np.swapaxes(flat.reshape(parts.shape), 1, 2).reshape(x.shape)
        y = y if self.gamma is None else y * as_operand(self.gamma).astype(y.dtype)
        return y if self.beta is None else y + as_operand(self.beta).astype(y.dtype)


_export(vars())
