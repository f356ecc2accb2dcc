"""The layers of `tf.keras`: those of `ndistribute.models`, which return tensors.

A kind of layer is adapted when its name is first used. Native layers stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

from ndistribute.compat.signatures import tensor_if_array
from ndistribute.models import layers
from ndistribute.models.masks import attach_mask, mask_of
from ndistribute.tree import map_leaves


def _tensor_with_mask(array: Any) -> Any:
    tensor = tensor_if_array(array)
    if tensor is not array:
        attach_mask(tensor, mask_of(array))
    return tensor


class TensorLayer(layers.Layer):
    """A layer that returns tensors, also for arrays of NumPy; the base of those of `tf.keras`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return map_leaves(_tensor_with_mask, super().__call__(*args, **kwargs))

    def add_weight(self, *args: Any, **options: Any) -> Any:
        """Return a new variable; Keras 2 has the name first, and Keras 3 the shape."""
        if args and not isinstance(args[0], str | None):
            args, options = args[1:], {"shape": args[0]} | options
            options |= dict(zip(("initializer", "dtype", "trainable"), args, strict=False))
            args = ()
        if len(args) < 2 and options.get("shape") is None:
            options["shape"] = ()
        return super().add_weight(*args, **options)


@functools.cache
def tensor_layer(kind: Any) -> Any:
    """Return a kind of layer that returns tensors; other programs load the native one."""
    if not isinstance(kind, type) or kind is layers.Layer:
        return TensorLayer if kind is layers.Layer else kind
    made = type(kind.__name__, (TensorLayer, kind), {"__doc__": kind.__doc__})
    layers.Layer.known[kind.__name__] = kind
    return made
