"""Batch and layer normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.autodiff import untrack
from ndistribute.context import get_replica_context, get_strategy
from ndistribute.devices import as_array
from ndistribute.models import operations
from ndistribute.models.chief import schedules_steps
from ndistribute.models.layers.core import as_floats
from ndistribute.models.layers.layer import Layer

Initializer = str | Callable[..., Any]


class LayerNormalization(Layer):
    """A layer that normalises the features of each example.

    Source: Ba et al., "Layer Normalization", 2016.

    Args:
        axis: the axis of the features, which must be the last one.
        epsilon: added to the variance.
        center: whether to add a summand for each feature, `beta`.
        scale: whether to multiply by a factor for each feature, `gamma`.
        beta_initializer: the initializer of `beta`.
        gamma_initializer: the initializer of `gamma`.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> import numpy as np
    >>> LayerNormalization()(np.array([[1.0, 3.0]])).round(2)
    array([[-1.,  1.]], dtype=float32)
    """

    supports_masking = True

    def __init__(
        self,
        axis: int = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Initializer = "zeros",
        gamma_initializer: Initializer = "ones",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.axis, self.epsilon = axis, float(epsilon)
        self._starts = {"gamma": gamma_initializer} if scale else {}
        self._starts |= {"beta": beta_initializer} if center else {}
        self.gamma: Any = None
        self.beta: Any = None

    def build(self, input_shape: Sequence[int]) -> None:
        """Create gamma and beta."""
        if len(input_shape) < 2 or self.axis not in (-1, len(input_shape) - 1):
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}, and axis={self.axis}: "
                f"{type(self).__name__} needs a batch axis, and the features on the last one."
            )
        for name, start in self._starts.items():
            setattr(self, name, self.add_weight(name, input_shape[-1:], start))

    def call(self, inputs: Any) -> Any:
        """Return the normalised input."""
        known = self.gamma if self.gamma is not None else self.beta
        inputs = inputs if known is None else as_floats(inputs, known)
        return operations.layer_normalization(inputs, self.gamma, self.beta, epsilon=self.epsilon)


class BatchNormalization(LayerNormalization):
    """A layer that normalises each feature by the mean and variance of the batch.

    In training it uses the statistics of the batch, and updates moving averages; otherwise, and if
    `trainable` is False, it uses the moving averages. Each replica has averages of its own; a
    checkpoint has their mean. Source: Ioffe and Szegedy, "Batch Normalization", 2015.

    Args:
        axis: the axis of the features, which must be the last one.
        momentum: the share of a moving average that a step keeps.
        epsilon: added to the variance.
        moving_mean_initializer: the initializer of the moving mean.
        moving_variance_initializer: the initializer of the moving variance.
        synchronized: whether the statistics are those of all replicas' examples, so that results do
            not depend on the number of replicas. A step then waits for the other replicas.
        options: as for `LayerNormalization`.

    >>> import numpy as np
    >>> layer = BatchNormalization()
    >>> layer(np.array([[1.0], [3.0]]), training=True).round(2).ravel()
    array([-1.,  1.], dtype=float32)
    >>> layer.moving_mean.numpy()
    array([0.02], dtype=float32)
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        *,
        moving_mean_initializer: Initializer = "zeros",
        moving_variance_initializer: Initializer = "ones",
        synchronized: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(axis, epsilon, **options)
        if not 0 <= momentum <= 1:
            raise ValueError(f"BatchNormalization: momentum must be in [0, 1], got {momentum}.")
        self.momentum = float(momentum)
        self.synchronized = bool(synchronized)
        self._moving_initializers = moving_mean_initializer, moving_variance_initializer
        self.moving_mean: Any = None
        self.moving_variance: Any = None

    def build(self, input_shape: Sequence[int]) -> None:
        """Create gamma, beta and the moving averages."""
        super().build(input_shape)
        # A chief's workers, which make a step whenever they are free, all add to one value.
        kind = "on_write" if schedules_steps(get_strategy()) else "on_read"
        names = "moving_mean", "moving_variance"
        options: Any = {"trainable": False, "synchronization": kind, "aggregation": "mean"}
        for name, start in zip(names, self._moving_initializers, strict=True):
            setattr(self, name, self.add_weight(name, input_shape[-1:], start, **options))

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the normalised input."""
        inputs = as_floats(inputs, self.moving_mean)
        if not training or not self.trainable:
            moving = {"mean": self.moving_mean, "variance": self.moving_variance}
            return operations.normalized_by(
                inputs, self.gamma, self.beta, **moving, epsilon=self.epsilon
            )
        total = self._total() if self.synchronized else None
        y, mean, variance = operations.batch_normalization(
            inputs, self.gamma, self.beta, epsilon=self.epsilon, total=total
        )
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
        communicator = replica.communicator  # Not through the tape: the operation has the rule.
        return lambda vector: communicator.all_reduce("sum", vector)
