"""`tf.keras.mixed_precision`: policies of dtypes, and loss scaling in custom loops."""

from __future__ import annotations

from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import optimizers
from ndistribute.models import layers


class Policy(str):
    """The dtypes of layers, by a name such as ``"mixed_float16"``; see `layers.Layer`."""

    name = property(str.__str__)
    compute_dtype = property(lambda self: self.removeprefix("mixed_"))
    variable_dtype = property(
        lambda self: "float32" if self.startswith("mixed_") else self.compute_dtype
    )

    def __repr__(self) -> str:
        return f"<Policy {str(self)!r}>"


def policy_of(variables: str, computing: str) -> Policy:
    """Return the policy of a layer, from the names of its dtypes."""
    return Policy(computing if variables == computing else f"mixed_{computing}")


def global_policy() -> Policy:
    """Return the policy of layers that are created without a policy."""
    return Policy(layers.Layer.policy)


class LossScaleOptimizer(optimizers.LossScale):
    """An optimizer that scales losses, with methods for custom training loops.

    Args:
        inner_optimizer: the optimizer that makes the steps.
        initial_scale: the first scale.
        dynamic_growth_steps: the number of steps before the scale is doubled.
    """

    def __init__(
        self, inner_optimizer: Any, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
    ) -> None:
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps)
        self._unscaled: set[Any] = set()  # The replicas whose next gradients are not scaled.

    inner_optimizer = property(lambda self: self.inner)
    loss_scale = property(lambda self: np.float32(self.scale))
    get_scaled_loss = optimizers.LossScale.scale_loss

    def get_unscaled_gradients(self, grads: Any) -> list[Any]:
        """Return gradients of the unscaled loss, to be passed to the next `apply_gradients`."""
        self._unscaled.add(nd.get_replica_context())
        return [
            None if each is None else each.astype(np.float32) / self.loss_scale for each in grads
        ]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        """Make a step with gradients of the scaled loss, or with unscaled gradients."""
        pairs = list(grads_and_vars)
        if nd.get_replica_context() in self._unscaled:
            self._unscaled.discard(nd.get_replica_context())
            scale = self.loss_scale
            pairs = [(None if g is None else g * scale, variable) for g, variable in pairs]
        return super().apply_gradients(pairs, *args, **options)
